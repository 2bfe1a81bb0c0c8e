"""`deepspeed.runtime.zero.utils`."""
from tessera.deepspeed.runtime.zero.partition_parameters import is_zero_param
from tessera.errors import Error

__all__ = ["ZeRORuntimeException", "is_zero_param"]
ZeRORuntimeException = Error
