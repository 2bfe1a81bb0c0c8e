"""`deepspeed.utils.groups`: all ranks are one group of data parallelism; every other kind has one rank."""
from tessera.comm import get_rank, get_world_size
from tessera.deepspeed.comm import get_world_group


def _get_model_parallel_world_size() -> int:
    """1: each rank has all of the model."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """0: a sequence is on one rank."""
    return 0


def _get_sequence_parallel_group() -> None:
    """None: a sequence is on one rank."""


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group = get_world_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size = get_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank = get_rank
_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank = _get_sequence_parallel_rank
