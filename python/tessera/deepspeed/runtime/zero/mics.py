"""`deepspeed.runtime.zero.mics`: the size of a group of ranks is `zero_optimization.mics_shard_size`."""
from tessera.deepspeed.runtime.zero.partition_parameters import Init


class MiCS_Init(Init):  # noqa: N801  DeepSpeed's name
    """As `zero.Init`. Which ranks share a copy is said by the configuration that `initialize` gets."""
