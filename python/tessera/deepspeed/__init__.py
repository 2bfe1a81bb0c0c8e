"""`deepspeed`, for scripts and libraries that were written for it. One line, before Accelerate or transformers are imported:

    import tessera.deepspeed

From then on `import deepspeed` gives this package in this process, whether DeepSpeed is installed or not, so that the Hugging Face
Trainer (`deepspeed="ds_config.json"`) and Accelerate's DeepSpeedPlugin train with Tessera. Its modules have the names of DeepSpeed's
(https://github.com/deepspeedai/DeepSpeed), whose interface this is; none of its code is here. What a module has not is an
AttributeError; what Tessera does not do at all, such as pipelines, is an ImportError that says so.
"""
import argparse
from types import SimpleNamespace
from typing import Any

import torch

from tessera import _engine
from tessera import comm as _comm
from tessera import initialize as _initialize
from tessera.deepspeed import stand_in
from tessera.deepspeed.accelerator import get_accelerator
from tessera.deepspeed.comm import init_distributed
from tessera.deepspeed.runtime import config_keys
from tessera.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from tessera.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from tessera.deepspeed.runtime.engine import DeepSpeedEngine, EngineWithoutOptimizer, end_engines_of
from tessera.deepspeed.runtime.optimizer import DeepSpeedOptimizer
from tessera.deepspeed.utils import OnDevice, log_dist, logger
from tessera.initialize import given_config

__all__ = [
    "HAS_TRITON", "DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedDataLoader", "DeepSpeedEngine", "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable", "OnDevice", "add_config_arguments", "get_accelerator",
    "init_distributed", "initialize", "is_compile_supported", "log_dist", "logger"]
__version__ = "0.19.8"  # whose interface this is
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None
HAS_TRITON = False
DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = Any
"""Types of what `initialize` takes: callable(parameters) that makes an optimizer, callable(optimizer) that makes a scheduler."""


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, distributed_port=None,
               mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None, config_params=None):
    """As `tessera.initialize`; the engine is a `DeepSpeedEngine`. Collective.

    Where the configuration does not name gradient_clipping, it is 1.0, as in DeepSpeed since 0.19.3.

    Joins the group, and makes torch.distributed's, as `init_distributed` does. An engine that the model has from an earlier call is ended,
    once the configuration has been read: its `destroy()` is called. Without an optimizer, `model_parameters` and a section
    "optimizer" the model is evaluated only: it takes no memory for training, and `step()` is an Error. A key of the configuration may be
    written with dots at the top ("zero_optimization.reduce_bucket_size"), as TRL does: it counts as the key of that section.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    log_dist(f"DeepSpeed info: version={__version__}, git-hash={__git_hash__}, git-branch={__git_branch__}; Tessera stands in for it", ranks=[0])
    config = config_keys.readable(given_config(args, config, config_params))
    given = config_keys.given(config)
    if isinstance(model_parameters, (list, tuple)) and not model_parameters and optimizer is None and not config_keys.names_optimizer(given):
        model_parameters = None  # as Lightning says that a model is evaluated only
    is_trained = optimizer is not None or model_parameters is not None or config_keys.names_optimizer(given)
    defaults = config_keys.defaults(given) if is_trained else []
    by_objects = ["optimizer={}"] if optimizer is not None else []
    if lr_scheduler is not None or config_keys.has_lists_of_schedule(given):  # a value for each param group, which are not known yet
        by_objects.append("scheduler={}")
    config_keys.parsed(config, defaults + by_objects)  # what is wrong with it leaves the engine that the model has as it is
    end_engines_of(model, "initialize()")
    if defaults and _comm.get_rank() == 0:
        _engine.log_info("gradient_clipping is not in the configuration: 1.0, as in DeepSpeed since 0.19.3; 0 clips nothing")
    place = SimpleNamespace(local_rank=getattr(args, "local_rank", None))
    return _initialize(place, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu, dist_init_required,
                       collate_fn, config, mesh_param, engine_class=DeepSpeedEngine if is_trained else EngineWithoutOptimizer, overrides=defaults)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to an argparse parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Enable DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    return parser


def is_compile_supported() -> bool:
    """Whether `engine.compile()` works here."""
    return hasattr(torch, "compile")


__getattr__ = stand_in.getattr_of("deepspeed")
stand_in.install()
