"""`deepspeed.runtime.zero.offload_config`: the sections "offload_param" and "offload_optimizer" as objects."""
import enum
import json
from typing import Any

from tessera import _engine
from tessera.initialize import json_of


class OffloadDeviceEnum(str, enum.Enum):  # noqa: UP042  formats as DeepSpeed's
    """Where state lies that is offloaded."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):  # noqa: UP042  formats as DeepSpeed's
    """Which state: of `engine.offload_states(include=)`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def resolved(section: dict[str, Any]) -> dict[str, Any]:
    """The section "zero_optimization" with its defaults. "auto" is what it is for one rank."""
    text = json_of({"train_micro_batch_size_per_gpu": 1, "zero_optimization": section})
    return json.loads(_engine.read_config(text, False, 1, [])[0].resolved)["zero_optimization"]


class _OffloadConfig:
    """The keys of the section, with their defaults, as attributes. Raises ConfigError for a key or a value that it cannot have."""

    _section = ""

    def __init__(self, **data: Any) -> None:
        given = {key: value.value if isinstance(value, enum.Enum) else str(value) if key == "nvme_path" and value is not None else value
                 for key, value in data.items()}
        section = resolved({"stage": 3, "offload_optimizer": {"device": "cpu"}, self._section: given})[self._section]
        for key, value in {**given, **section}.items():
            setattr(self, key, value)
        self.device = OffloadDeviceEnum(self.device)


class DeepSpeedZeroOffloadParamConfig(_OffloadConfig):
    """Of "offload_param"."""

    _section = "offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(_OffloadConfig):
    """Of "offload_optimizer"."""

    _section = "offload_optimizer"

    @property
    def pipeline(self) -> bool:
        """Whether `pipeline_read` or `pipeline_write` was given as true."""
        return bool(getattr(self, "pipeline_read", False) or getattr(self, "pipeline_write", False))
