"""`deepspeed.zero`."""
from tessera.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from tessera.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from tessera.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = ["GatheredParameters", "Init", "MiCS_Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType",
           "register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation"]
