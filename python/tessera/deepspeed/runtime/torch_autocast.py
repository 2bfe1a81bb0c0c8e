"""`deepspeed.runtime.torch_autocast`."""
import torch

from tessera import whole_model, zero


def is_autocast_initialized() -> bool:
    """Whether an engine of this process runs its module under autocast."""
    return any(engine.config["torch_autocast"]["enabled"] for engine in zero.engines())


def get_autocast_dtype() -> torch.dtype | None:
    """In which its operators run; None without one."""
    return next((whole_model.DTYPES[engine.config["torch_autocast"]["dtype"]]
                 for engine in zero.engines() if engine.config["torch_autocast"]["enabled"]), None)
