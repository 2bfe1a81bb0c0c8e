"""`deepspeed.runtime.zero.config`: the section "zero_optimization" as an object, read by the parser that `initialize` uses."""
import enum
import sys
from typing import Any

# OffloadDeviceEnum is a name of this module in DeepSpeed.
from tessera.deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig, OffloadDeviceEnum, resolved  # noqa: F401

ZERO_OPTIMIZATION = "zero_optimization"
# Keys that have no effect in Tessera (docs/configuration.md says why), with DeepSpeed's defaults.
_WITHOUT_EFFECT = {
    "contiguous_gradients": True, "reduce_scatter": True, "use_multi_rank_bucket_allreduce": True, "allgather_partitions": True,
    "load_from_fp32_weights": True, "elastic_checkpoint": False, "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_max_reuse_distance": 10**9, "stage3_gather_16bit_weights_on_model_save": False, "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False, "stage3_allgather_sequential": False, "ignore_unused_parameters": True,
    "legacy_stage1": False, "round_robin_gradients": False, "memory_efficient_linear": True, "pipeline_loading_checkpoint": False,
    "override_module_apply": True, "log_trace_cache_warnings": False, "enable_sanity_checks": False, "grad_hooks": True}


class ZeroStageEnum(enum.IntEnum):
    """Names of the stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig:
    """The keys of "zero_optimization", with their defaults, as attributes: those of stage 3 by both their names, such as
    `prefetch_bucket_size` and `stage3_prefetch_bucket_size`. `offload_param` and `offload_optimizer` are None where they are not given.

    Raises ConfigError for a key or a value that the section cannot have.
    """

    def __init__(self, **data: Any) -> None:
        section = resolved(data)
        for key, value in {**_WITHOUT_EFFECT, **data, **section}.items():
            setattr(self, key, value)
            if key.startswith("stage3_"):
                setattr(self, key.removeprefix("stage3_").replace("fp16", "16bit"), value)
        for name, kind in (("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig), ("offload_param", DeepSpeedZeroOffloadParamConfig)):
            given = data.get(name)
            if given is None and section[name]["device"] != "none":  # by its old form, cpu_offload
                given = {"device": section[name]["device"]}
            setattr(self, name, None if given is None else kind(**given))


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """Of a whole configuration. The old form of the section, true or false, is stage 1 or 0."""
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section or {}))
