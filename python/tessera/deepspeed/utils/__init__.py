"""`deepspeed.utils`."""
from tessera.deepspeed import stand_in
from tessera.deepspeed.runtime.dataloader import RepeatingLoader
from tessera.deepspeed.utils import parameters
from tessera.deepspeed.utils.init_on_device import OnDevice
from tessera.deepspeed.utils.logging import log_dist, logger, set_log_level_from_string
from tessera.deepspeed.utils.nvtx import instrument_w_nvtx
from tessera.deepspeed.utils.parameters import *  # noqa: F403
from tessera.deepspeed.utils.z3_leaf_module import *  # noqa: F403
from tessera.deepspeed.utils.z3_leaf_module import __all__ as _of_leaf_modules

__all__ = ["OnDevice", "RepeatingLoader", "instrument_w_nvtx", "log_dist", "logger", "set_log_level_from_string", *parameters.__all__, *_of_leaf_modules]
__getattr__ = stand_in.getattr_of("deepspeed.utils")
