"""`deepspeed.comm`: torch.distributed's collectives, and `init_distributed`, which makes its group beside Tessera's.

Names that are not defined here are torch.distributed's, and so are their arguments.
"""
import atexit
import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.nn.functional
import torch.distributed.optim  # these three: [Note: the group's end]
from torch.distributed import all_reduce, get_process_group_ranks, reduce_scatter_tensor

from tessera import _engine
from tessera import comm as _comm
from tessera.comm import get_local_rank  # noqa: F401  DeepSpeed's name
from tessera.deepspeed import stand_in
from tessera.errors import CommError, Error

_groups = itertools.count()
group = torch.distributed.group  # with `group.WORLD`
inference_all_reduce = all_reduce
reduce_scatter_base = reduce_scatter_fn = reduce_scatter_tensor
get_all_ranks_from_group = get_process_group_ranks


def __getattr__(name: str) -> Any:
    stand_in.refuse(f"comm.{name}")
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.distributed, name)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """torch.distributed's; a tensor without dimensions is sent as one of one element, which Gloo needs."""
    return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor.reshape(-1) if input_tensor.ndim == 0 else input_tensor, group,
                                                    async_op)


all_gather_base = allgather_fn = all_gather_into_tensor


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=None, verbose=True, timeout=None, init_method=None,
                     dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Join Tessera's group, and make torch.distributed's over the same store, for the libraries that use that. Collective.

    `dist_backend` is torch.distributed's, and `config` is None. `rank` and `world_size` have to be those of the environment, or -1. With
    `init_method` "tcp://HOST:PORT", `rank` and `world_size` they say the place in the group where the environment says none. "file://…" is
    how torch.distributed's group meets; Tessera's ranks meet at MASTER_ADDR and MASTER_PORT.
    """
    for name, value, kind in (("init_method", init_method, str), ("timeout", timeout, timedelta)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"init_distributed({name}={value!r}): expected a {kind.__name__} or None")
    _place_from(init_method, rank, world_size)
    _check_place(auto_mpi_discovery, init_method, dist_init_required, config, rank, world_size)
    if distributed_port is not None and not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(distributed_port)
    os.environ.update(_engine.environment())  # for those that read torchrun's names, whatever launcher it is
    if _comm.is_initialized():  # DeepSpeed says so, and goes on
        if verbose and timeout is not None and _comm.get_rank() == 0:
            _engine.log_info(f"init_distributed(timeout={timeout}): the group has been joined before, and keeps its timeout")
        ours = _comm.group()
    else:
        ours = _comm._join("auto", "auto", timeout.total_seconds() if timeout is not None else 1800.0, 300.0, log=verbose)
    timeout = timedelta(minutes=30) if timeout is None else timeout
    if torch.distributed.is_initialized():
        return
    made = {"backend": dist_backend or ("nccl" if ours.device.type == "cuda" else "gloo"), "rank": ours.rank, "world_size": ours.size,
            "timeout": timeout}
    if init_method is not None and init_method.startswith("file://"):
        _make_torch_group(init_method=init_method, **made)
        return
    if ours.size == 1:
        store = torch.distributed.HashStore()
    else:
        store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    prefix = f"torch{next(_groups)}"  # a group that was made and destroyed before has left keys in the store
    _make_torch_group(store=torch.distributed.PrefixStore(prefix, store), **made)


def _make_torch_group(**made):
    # [Note: the group's end] Gloo's threads let go of tensors, which takes the GIL, and a thread that asks for it after the interpreter is gone
    # ends the process (SIGABRT, "terminate called without an active exception"). The group's destructor joins them, so it has to run before.
    # Nothing of torch may keep the group then: some modules, which torch._dynamo and so any optimizer would import later, have functions whose
    # default argument is the group at the time of their import. They are imported at the top of this module, before this group is made.
    torch.distributed.init_process_group(**made)
    if made["backend"] == "gloo":
        atexit.register(_destroy_torch_group)


def _place_from(init_method, rank, world_size):
    """Puts what `init_method` "tcp://HOST:PORT", `rank` and `world_size` say into the environment, where no launcher has."""
    if init_method is None or not init_method.startswith("tcp://"):
        return
    host, _, port = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"init_distributed(init_method={init_method!r}): expected tcp://HOST:PORT")
    if not os.environ.get("RANK") and rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)


def _check_place(auto_mpi_discovery, init_method, dist_init_required, config, rank, world_size):
    place = _engine.environment()
    for name, given, variable in (("rank", rank, "RANK"), ("world_size", world_size, "WORLD_SIZE")):
        if given not in (-1, int(place[variable])):
            raise ValueError(f"init_distributed({name}={given}): the environment says {variable}={place[variable]}; expected that, or -1")
    if init_method is not None and not init_method.startswith(("env://", "file://", "tcp://")):
        raise ValueError(f"init_distributed(init_method={init_method!r}): expected env://, tcp://HOST:PORT, file://PATH or None")
    if init_method is not None and init_method.startswith("tcp://"):
        meets = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if init_method.removeprefix("tcp://").partition("?")[0] != meets:
            raise ValueError(f"init_distributed(init_method={init_method!r}): ranks meet at {meets}, as MASTER_ADDR and MASTER_PORT say; expected that, None, or "
                             "rank= and world_size= beside it where no launcher has set them")
    if config is not None:
        raise NotImplementedError("init_distributed(config=): it would configure DeepSpeed's log of collectives, which is not here; expected None")
    if dist_init_required is False and not _comm.is_initialized() and not torch.distributed.is_initialized():
        raise CommError("init_distributed(dist_init_required=False), and this process has joined no group; expected True or None")
    if not auto_mpi_discovery and int(place["WORLD_SIZE"]) > 1 and not os.environ.get("RANK"):
        raise Error("init_distributed(auto_mpi_discovery=False), and RANK is not set: the place in the group would come from the launcher's own "
                    "variables; expected True, or a launcher that sets torchrun's variables")


def _destroy_torch_group():
    """See [Note: the group's end]."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def get_rank(group: Any = None) -> int:
    """This process's number among all ranks, or in a group of torch.distributed; -1 outside of that group."""
    return _comm.get_rank() if group is None else torch.distributed.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """The number of all ranks, or of those of a group of torch.distributed."""
    return _comm.get_world_size() if group is None else torch.distributed.get_world_size(group)


def get_world_group() -> Any:
    """torch.distributed's group of all ranks."""
    return torch.distributed.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """True: torch.distributed has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor
