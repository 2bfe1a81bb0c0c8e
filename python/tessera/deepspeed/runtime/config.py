"""`deepspeed.runtime.config`: a configuration as an object, read by the parser that `initialize` uses."""
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tessera import _engine, arguments, comm
from tessera.deepspeed.runtime import config_keys
from tessera.deepspeed.runtime.zero.config import get_zero_config
from tessera.errors import ConfigError

DeepSpeedConfigError = ConfigError
# Values of "optimizer.type", in small letters.
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "lamb", "lion", "adagrad"
MUON_OPTIMIZER = "muon"


class DeepSpeedConfig:
    """A configuration with all defaults, checked. Its keys are attributes, sections too: `config.fp16.enabled`.

    Beside them are DeepSpeed's names `zero_config`, `zero_enabled`, `zero_optimization_stage`, `float16_config`, `bfloat16_config`,
    `optimizer_name`, `optimizer_params`, `scheduler_name`, `scheduler_params`, `loss_scale`, `initial_dynamic_scale` and `world_size`.
    Changes of it have no effect on an engine.

    Parameters
    ----------
    config : dict, str or Path
        What a ds_config.json holds, or the file.
    mpu, mesh_device : None
        DeepSpeed's; anything else is refused.

    Raises
    ------
    ConfigError
        It cannot be used, by the number of ranks that there is.
    """

    def __init__(self, config: dict[str, Any] | str | Path, mpu: None = None, mesh_device: None = None) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise ConfigError(f"DeepSpeedConfig({name}=): Tessera has data parallelism alone; expected None")
        if not isinstance(config, (dict, str, Path)):
            raise ConfigError(f"config is {arguments.shown(config)}; expected a dict or the path of a ds_config.json")
        config = config_keys.readable(config)
        self.world_size = comm.get_world_size()
        self._param_dict = config_keys.given(config)
        parsed, warnings = config_keys.parsed(config, config_keys.defaults(self._param_dict))
        for line in warnings:
            _engine.log_warning(line)
        self.monitor_config = parsed  # for MonitorMaster
        self._resolved = json.loads(parsed.resolved)
        for key, value in self._resolved.items():
            setattr(self, key, _namespace(value))
        self.zero_config = get_zero_config(self._param_dict)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = self.fp16, self.bf16
        self.loss_scale, self.initial_dynamic_scale = self.fp16.loss_scale, 2**self.fp16.initial_scale_power
        optimizer, scheduler = self._resolved.get("optimizer", {}), self._resolved.get("scheduler", {})
        self.optimizer_name = ((self._param_dict.get("optimizer") or {}).get("type") or "").lower() or None
        self.optimizer_params = optimizer.get("params") if self.optimizer_name else None
        self.scheduler_name, self.scheduler_params = scheduler.get("type"), scheduler.get("params")

    def print_user_config(self) -> None:
        """Log what was given."""
        _engine.log_info(json.dumps(self._param_dict, sort_keys=True))

    def print(self, name: str) -> None:
        """Log what it means, with all defaults."""
        _engine.log_info(f"{name}: {json.dumps(self._resolved)}")


def _namespace(value):
    return SimpleNamespace(**{key: _namespace(inner) for key, inner in value.items()}) if isinstance(value, dict) else value
