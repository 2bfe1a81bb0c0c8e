"""`deepspeed.runtime.zero.utils`."""
from tessera.deepspeed.runtime.zero.partition_parameters import is_zero_param

__all__ = ["is_zero_param"]
