"""The group of ranks of this process, and collectives for a training script's own numbers.

A process belongs to one group, which it joins once: by `tessera.initialize`, or before it by `init_distributed`. The place in the
group comes from the environment: torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR ...), which `tessera launch`, Ray and others
set too, or those of mpirun, srun, Horovod and PyTorchJob (docs/launching.md). A process without them is a group of one rank.
"""
import atexit
import itertools
import json
import os
import socket
import threading
from contextlib import contextmanager
from typing import Any

import torch

from tessera import _engine
from tessera.errors import CommError

_group = None
_lock = threading.Lock()
_ports = itertools.count()  # asked for in the store of torch.distributed, by all ranks in one order


def init_distributed(backend: str = "auto", device: str = "auto", timeout_s: float = 1800.0,
                     rendezvous_timeout_s: float = 300.0) -> _engine.Communicator:
    """Join the group of ranks. Collective. A process that has joined stays in its group.

    Parameters
    ----------
    backend : {"auto", "nccl", "p2p", "shm", "hybrid", "gloo"}
        What moves the data: for CUDA tensors NCCL, or device memory that the ranks of one host map; for CPU tensors shared memory,
        shared memory within hosts and Gloo between them, or Gloo.
    device : {"auto", "cuda", "cpu"}
        Where models live; "cuda" is this rank's device, which LOCAL_RANK decides.
    timeout_s : float
        Of a collective, in seconds; the same on all ranks.
    rendezvous_timeout_s : float
        How long to wait for the other ranks to arrive.

    Returns
    -------
    Communicator
        With `rank`, `size`, `backend` and `device`.

    Raises
    ------
    CommError
        Ranks are missing, differ in these arguments, or cannot connect.
    """
    global _group
    with _lock:
        if _group is None:
            with _port_beside_torch():
                _group = _engine.join(backend, device, timeout_s, rendezvous_timeout_s, True)
            atexit.register(destroy)
        elif backend not in ("auto", _group.backend) and _group.size > 1:
            raise CommError(f"this process has joined its group over {_group.backend}; it cannot join again over {backend}")
        return _group


@contextmanager
def _port_beside_torch():
    """Where a script has made torch.distributed's group before: its store is served at MASTER_PORT, so ours gets another port inside of
    the `with`. torchrun serves a store for both."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        yield
        return
    num_ranks = int(_engine.environment()["WORLD_SIZE"])
    if num_ranks != distributed.get_world_size():
        raise CommError(f"torch.distributed has {distributed.get_world_size()} ranks, but WORLD_SIZE is "
                        f"{os.environ.get('WORLD_SIZE', 'not set')}; expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them")
    before = os.environ.get("MASTER_PORT")
    if num_ranks == 1 or before is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield
        return
    store = distributed.distributed_c10d._get_default_store()
    key = f"tessera/port{next(_ports)}"
    if distributed.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(key, str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = store.get(key).decode()
    try:
        yield
    finally:
        os.environ["MASTER_PORT"] = before


def group() -> _engine.Communicator:
    """The group of this process. It is joined, with the defaults of `init_distributed`, unless that was done."""
    return _group or init_distributed()


def is_initialized() -> bool:
    """Whether this process has joined its group."""
    return _group is not None


def destroy() -> None:
    """Leave the group. Engines must be gone, or not be used any more."""
    global _group
    _group = None


def get_rank() -> int:
    """This process's number in the group: 0 to `get_world_size()` - 1. Reads the environment before the group is joined."""
    return _group.rank if _group else int(_engine.environment()["RANK"])


def get_world_size() -> int:
    """The number of ranks."""
    return _group.size if _group else int(_engine.environment()["WORLD_SIZE"])


def get_local_rank() -> int:
    """This process's number among those of its host."""
    return int(_engine.environment()["LOCAL_RANK"])


def barrier(label: str = "barrier") -> None:
    """Return when all ranks have called it. Collective.

    Parameters
    ----------
    label : str
        Names the place in errors; the same on all ranks.

    Raises
    ------
    CommError
        Ranks are gone, or have called something else.
    """
    group().barrier(label)


def all_gather(value: Any, label: str = "all_gather") -> list[Any]:
    """Give every rank the values of all. Collective.

    Parameters
    ----------
    value : anything that JSON has: numbers, strings, None, and lists and dicts of them
    label : str
        Names the values in errors; the same on all ranks.

    Returns
    -------
    list
        By rank: `get_world_size()` values.

    Raises
    ------
    CommError
        Ranks are gone, or have called something else.
    TypeError
        The value is not what JSON has.
    """
    return [json.loads(text) for text in group().exchange(json.dumps(value), label)]


def all_reduce(tensor: torch.Tensor | float, op: str = "mean", label: str = "all_reduce") -> torch.Tensor | float:
    """Replace a tensor by its mean or sum over the ranks, in place. Collective.

    Parameters
    ----------
    tensor : Tensor or number
        Of any shape and the same shape and dtype on all ranks, contiguous, on the group's device. A number becomes an fp64 one.
    op : {"mean", "sum"}
    label : str
        Names the tensor in errors; the same on all ranks.

    Returns
    -------
    Tensor or float
        The tensor itself; a float for a number.

    Raises
    ------
    CommError
        Ranks are gone, or have called something else.
    ValueError
        `op` is another one.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; expected 'mean' or 'sum'")
    is_number = not isinstance(tensor, torch.Tensor)
    value = torch.tensor(float(tensor), dtype=torch.float64, device=group().device) if is_number else tensor
    group().all_reduce(value, label, 1.0 / group().size if op == "mean" else 1.0)
    return value.item() if is_number else value


def broadcast(tensor: torch.Tensor, root: int = 0, label: str = "broadcast") -> torch.Tensor:
    """Replace a tensor by the one of rank `root`, in place. Collective.

    Parameters
    ----------
    tensor : Tensor
        Of any shape and the same shape and dtype on all ranks, contiguous, on the group's device.
    root : int
        The rank whose values all get.
    label : str
        Names the tensor in errors; the same on all ranks.

    Returns
    -------
    Tensor
        The tensor itself.

    Raises
    ------
    CommError
        Ranks are gone, or have called something else.
    """
    group().broadcast(tensor, root, label)
    return tensor
