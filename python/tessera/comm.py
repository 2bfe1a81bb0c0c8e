"""The group of ranks of this process, and collectives for a training script's own numbers.

A process belongs to one group, which it joins once: by `tessera.initialize`, or before it by `init_distributed`. The place in the
group comes from the environment: torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR ...), which `tessera launch`, Ray and others
set too, or those of mpirun, srun, Horovod and PyTorchJob (docs/launching.md). A process without them is a group of one rank.
"""
import atexit
import itertools
import json
import multiprocessing.util
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tessera import _engine, arguments, errors, failures, json_values
from tessera.errors import CommError

_BACKENDS = ("auto", "nccl", "staged", "shm", "hybrid", "gloo")
_DEVICES = ("auto", "cuda", "cpu")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MAX_SECONDS = 1e9  # 31 years: clocks count nanoseconds in 64 bits

_group = None
_joined_with = {}  # the arguments of init_distributed
_lock = threading.Lock()
_ports = itertools.count()  # asked for in the store of torch.distributed, by all ranks in one order


def init_distributed(backend: str = "auto", device: str = "auto", timeout_s: float = 1800.0,
                     rendezvous_timeout_s: float = 300.0, verify: bool = False) -> _engine.Communicator:
    """Join the group of ranks. Collective. A process that has joined stays in its group.

    Parameters
    ----------
    backend : {"auto", "nccl", "staged", "shm", "hybrid", "gloo"}
        What moves the data: for CUDA tensors NCCL, or staged: they pass through the host's memory; for CPU tensors shared memory,
        shared memory within hosts and Gloo between them, or Gloo.
    device : {"auto", "cuda", "cpu"}
        Where models live; "cuda" is this rank's device, which LOCAL_RANK decides.
    timeout_s : float
        Of a collective, in seconds; the same on all ranks.
    rendezvous_timeout_s : float
        How long to wait for the other ranks to arrive.
    verify : bool
        Compare digests of what ranks send each other over Gloo with what arrives; the same on all ranks.

    Returns
    -------
    Communicator
        With `rank`, `size`, `backend` and `device`.

    Raises
    ------
    CommError
        Ranks are missing, differ in these arguments, or cannot connect; or this process has joined with other ones.
    ValueError
        An argument is none of the above, or no number of seconds above 0.
    """
    return _join(backend, device, timeout_s, rendezvous_timeout_s, verify)


def _join(backend, device, timeout_s, rendezvous_timeout_s, verify=False, log=True):
    global _group
    for name, value, known in (("backend", backend, _BACKENDS), ("device", device, _DEVICES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    for name, value in (("timeout_s", timeout_s), ("rendezvous_timeout_s", rendezvous_timeout_s)):
        if not 0.001 <= arguments.number(value, name) <= _MAX_SECONDS:  # NaN, too
            raise ValueError(f"{name} is {value!r}; expected seconds from 0.001 to 1e9")
    verify = arguments.flag(verify, "verify")
    given = {"backend": backend, "device": device, "timeout_s": timeout_s, "verify": verify}
    with _lock:
        if _group is None:
            failures.this_process_is_the_rank()
            with _port_beside_torch() as has_own_port:
                _group = _engine.join(backend, device, timeout_s, rendezvous_timeout_s, verify, log)
            if not has_own_port and _group.size > 1:
                _offer_store_to_torch()
            _joined_with.update(given)
            atexit.register(_end)
            if multiprocessing.parent_process() is not None:  # it ends without atexit's functions
                multiprocessing.util.Finalize(None, _end_child, exitpriority=0)
        else:
            _check_joined_alike(given)
        return _group


def _check_joined_alike(given):
    """A second call may repeat what the first one said, or what came of it. Its defaults ask for nothing."""
    defaults = {"backend": "auto", "device": "auto", "timeout_s": 1800.0, "verify": False}
    real = {"backend": _group.backend, "device": _group.device.type, "timeout_s": _joined_with["timeout_s"],
            "verify": _joined_with["verify"]}
    compared = real if _group.size > 1 else ("device",)  # one rank sends nothing, and nothing times out
    for name, value in given.items():
        if name in compared and value not in (defaults[name], real[name]):
            raise CommError(f"init_distributed({name}={value!r}): this process has joined its group with {name}={real[name]!r}, which stays; give "
                            "it to the first call")


@contextmanager
def _port_beside_torch():
    """Where a script has made torch.distributed's group before: its store is served at MASTER_PORT, so ours gets another port inside of
    the `with`, which gives True then. torchrun serves a store for both."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        yield False
        return
    num_ranks = int(_engine.environment()["WORLD_SIZE"])
    if num_ranks != distributed.get_world_size():
        raise CommError(f"torch.distributed has {distributed.get_world_size()} ranks, but WORLD_SIZE is "
                        f"{os.environ.get('WORLD_SIZE') or 'not set'}; expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them")
    before = os.environ.get("MASTER_PORT")
    if num_ranks == 1 or not before or os.environ.get(_AGENT_STORE) == "True":
        yield False
        return
    store = distributed.distributed_c10d._get_default_store()
    key = f"tessera/port{next(_ports)}"
    if distributed.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(key, str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = store.get(key).decode()
    try:
        yield True
    finally:
        os.environ["MASTER_PORT"] = before


def _offer_store_to_torch():
    """Rank 0 serves the group's store at MASTER_PORT, where `init_process_group` would serve another one (EADDRINUSE). This variable, which
    torchrun sets too, makes it a client. Until `destroy`, which may end the server."""
    if os.environ.get(_AGENT_STORE) != "True" and os.environ.get("MASTER_PORT") == _engine.environment()["MASTER_PORT"]:
        os.environ[_AGENT_STORE] = "True"
        _joined_with["offered_store"] = True


def group() -> _engine.Communicator:
    """The group of this process. It is joined, with the defaults of `init_distributed`, unless that was done."""
    return _group or init_distributed()


def is_initialized() -> bool:
    """Whether this process has joined its group."""
    return _group is not None


def _end():
    failures.at_exit()
    destroy()


def _end_child():
    _end()
    _engine.await_other_ranks()


def destroy() -> None:
    """Leave the group. Engines must be gone, or not be used any more."""
    global _group
    error = sys.exc_info()[1]
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):  # called in a `finally`
        failures.tell_ranks(f"it raised {failures.describe(error)}")
    _group = None
    if _joined_with.pop("offered_store", False):
        os.environ.pop(_AGENT_STORE, None)


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
    group().barrier(arguments.text(label, "barrier(): label"))


def all_gather(value: Any, label: str = "all_gather") -> list[Any]:
    """Give every rank the values of all. Collective.

    Parameters
    ----------
    value : numbers, strings, None, and lists, tuples and dicts of them
        Or another value that `Engine.save_checkpoint` takes as client state. It comes back with its types.
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
        The value of a rank is of another kind. The same on all ranks.
    """
    label = arguments.text(label, "all_gather(): label")
    try:
        mine = {"value": json_values.encode(value, "value")}
    except json_values.Unsupported as error:
        mine = {"error": str(error)}
    parts = [json.loads(text) for text in group().exchange(json.dumps(mine, allow_nan=False), label)]
    for rank, part in enumerate(parts):
        if "error" in part:
            raise json_values.Unsupported(f"all_gather(): rank {rank}'s {part['error']}")
    return [json_values.decode(part["value"]) for part in parts]


def agreed(call: str, prepare: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
    """What `prepare` returns first, if it succeeds on all ranks and what it returns second is equal on them. Collective.

    For arguments of a collective call: what one rank refuses is an error on all of them, before anything is done.

    Parameters
    ----------
    call : str
        Begins the message of an error.
    prepare : callable
        Returns a result, and the arguments that have to be the same on all ranks, by name.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, Error
        What `prepare` has raised on the first rank on which it did; ranks have other arguments. An exception of another type, such as a
        KeyError in a method of the caller's, is raised as it is on its rank, and as an Error that says so on the others.
    """
    result, same, error = None, {}, None
    try:
        result, same = prepare()
    except Exception as raised:
        error = raised
    if group().size == 1 and error is None:
        return result
    kind = _kind_of(error)
    mine = {"error": [kind, str(error) if kind else failures.describe(error)] if error else None, "same": {name: repr(value) for name, value in same.items()}}
    parts = [json.loads(text) for text in group().exchange(json.dumps(mine), f"arguments of {call}")]
    if error is not None and kind is None:
        raise error
    for rank, part in enumerate(parts):
        if part["error"]:
            kind, text = part["error"]
            alone = "" if all(other["error"] for other in parts) else f"rank {rank}: "
            raise _KINDS.get(kind, errors.Error)(f"{call}: {alone}{text}") from error
        for name, value in part["same"].items():
            if value != parts[0]["same"].get(name):
                raise errors.Error(f"{call}: {name} is {value} on rank {rank}, but {parts[0]['same'].get(name)} on rank 0")
    return result


def check_usable(engine: Any, call: str) -> None:
    """Raise Error on all ranks where the engine of one cannot be used: the others would wait for it. Collective."""
    agreed(call, lambda: (engine.check_usable(), {}))


_KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError, json_values.Unsupported, errors.ConfigError,
                                           errors.CommError, errors.CheckpointError, errors.DataError, errors.Error)}


def _kind_of(error):
    """The name of the first of _KINDS that it is; None: of none."""
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind) and (kind not in (ValueError, TypeError) or
                                                                                       not isinstance(error, errors.Error))), None)


def all_reduce(tensor: torch.Tensor | float, op: str = "mean", label: str = "all_reduce") -> torch.Tensor | float:
    """Replace a tensor by its mean or sum over the ranks, in place. Collective.

    Parameters
    ----------
    tensor : Tensor or number
        Of any shape and the same shape and dtype on all ranks, contiguous, on the group's device. A number becomes an fp64 one. The mean
        is of floating ones. It counts as changed in place, so that autograd refuses a backward pass that needs what it was.
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
    TypeError
        A tensor of another kind, before anything is sent.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; expected 'mean' or 'sum'")
    label = arguments.text(label, "all_reduce(): label")
    is_number = not isinstance(tensor, torch.Tensor)
    if is_number:
        value = torch.tensor(arguments.number(tensor, "all_reduce(): tensor"), dtype=torch.float64, device=group().device)
    else:
        value = _sendable(tensor, "all_reduce()")
        if op == "mean" and not value.is_floating_point():
            raise TypeError(f"all_reduce(op='mean'): the tensor is {value.dtype}, whose mean would be rounded; expected a floating one: give "
                            "tensor.float(), or op='sum'")
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
    ValueError
        `root` is no rank.
    TypeError
        A tensor of another kind, before anything is sent.
    """
    root = arguments.integer(root, "broadcast(): root", 0, group().size - 1)
    group().broadcast(_sendable(tensor, "broadcast()"), root, arguments.text(label, "broadcast(): label"))
    return tensor


_SENDABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _sendable(tensor, call):
    arguments.tensor(tensor, f"{call}: tensor")
    if tensor.dtype not in _SENDABLE:
        raise TypeError(f"{call}: the tensor is {tensor.dtype}; expected one of {', '.join(str(dtype).removeprefix('torch.') for dtype in _SENDABLE)}")
    if tensor.device != group().device or not tensor.is_contiguous():
        raise TypeError(f"{call}: the tensor is on {tensor.device}, with strides {tensor.stride()}; expected a contiguous one on {group().device}, "
                        "which is changed in place")
    return tensor
