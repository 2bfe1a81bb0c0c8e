"""Parameters before and beside an engine: GatheredParameters, for code that reads raw pointers, for inspection and initialisation; and
Init, for a model's construction."""
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tessera import _engine, arguments, comm, module_state
from tessera.errors import Error

_engines = weakref.WeakValueDictionary()  # by number, which is ascending: what is collective goes in this order, the same on all ranks
_engine_numbers = itertools.count()
_places = weakref.WeakKeyDictionary()  # by engine, of its parameters by identity: (number, name)
_numbers = itertools.count()
_gathered = weakref.WeakValueDictionary()  # by identity, those GatheredParameters that are open
_here = threading.local()


def group_of_next_engine() -> tuple[int, _engine.Communicator]:
    """The number of the engine that `initialize` makes now, the same on all ranks, and the group with the number in its labels: ranks that
    are in calls of two engines find out that they differ."""
    number, group = next(_engine_numbers), comm.group()
    return number, group.labelled(f" of engine {number}") if number > 0 and group.size > 1 else group


def register(engine: Any, number: int) -> None:
    """Make an engine known to GatheredParameters, until it is gone. Numbers its parameters, in the order of registration."""
    _places[engine] = {key: (next(_numbers), name) for key, name in module_state.first_names(engine.named_tensors).items()}
    _engines[number] = engine


def forget(engine: Any) -> None:
    """The engine owns no parameters any more."""
    for number, one in list(_engines.items()):
        if one is engine:
            del _engines[number]


def engines() -> list[Any]:
    """The engines of this process, in the order of `initialize`, which is the same on all ranks."""
    return list(_engines.values())


def owner_of(parameter: torch.Tensor) -> tuple[Any, int, str] | None:
    """The engine of a parameter, its number among those of all engines of this process, and its name; None without one."""
    for engine in engines():
        place = _places[engine].get(id(parameter))
        if place is not None:
            return engine, *place
    return None


def is_held(parameter: torch.Tensor) -> bool:
    """Whether a parameter is in a GatheredParameters that is open."""
    return any(id(parameter) in gathered._held for gathered in list(_gathered.values()))


def end_reading(parameters: Iterable[torch.Tensor]) -> None:
    """Leave now, the latest first, what gathers these parameters, and no others, only to read them; the end of its `with` does nothing then.
    Collective."""
    wanted = {id(parameter) for parameter in parameters}
    for gathered in reversed(list(_gathered.values())):
        if gathered._modifier_rank is None and gathered._held and wanted.issuperset(gathered._held):
            gathered._close(abandons=False)


@contextmanager
def making() -> Iterator[None]:
    """While `initialize` calls a function that makes the model: this thread makes no collective calls, because the ranks do not compute
    the same values. `initialize` takes rank 0's."""
    before, _here.is_making = getattr(_here, "is_making", False), True
    try:
        yield
    finally:
        _here.is_making = before


def share_values(named: Iterable[tuple[str, torch.Tensor]], root: int = 0, what: str = "the model") -> None:
    """Give every rank rank `root`'s values of tensors that no engine owns. Collective, but for what `making` says.

    Ranks compare hashes, and only what differs is sent. Tensors without memory (on the meta device) are left out.

    Raises
    ------
    Error
        The ranks have different tensors; all of them raise it.
    """
    if getattr(_here, "is_making", False) or comm.group().size == 1:
        return
    owned = {id(parameter) for engine in engines() for _, parameter in engine.named_tensors}
    tensors = {}
    for name, tensor in named:
        if id(tensor) not in owned and _has_memory(tensor):
            tensors.setdefault(id(tensor), (name, tensor))
    layout = [f"{name} ({str(tensor.dtype).removeprefix('torch.')}, {list(tensor.shape)})" for name, tensor in tensors.values()]
    if len(set(comm.all_gather("\n".join(layout), f"tensors of {what}"))) > 1:
        _raise_difference(layout, what)
    hashes = comm.all_gather([f"{_engine.hash_of(tensor.detach().cpu()):x}" for _, tensor in tensors.values()], f"values of {what}")
    for i, (name, tensor) in enumerate(tensors.values()):
        if any(mine[i] != hashes[root][i] for mine in hashes):
            _broadcast(tensor, root, name)


def _has_memory(tensor):
    is_lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    return not is_lazy and tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _raise_difference(layout, what):
    ranks = comm.all_gather(layout, f"names of {what}")
    for rank, other in enumerate(ranks):
        for i in range(max(len(other), len(ranks[0]))):
            found, expected = (other[i:i + 1] or ["nothing"])[0], (ranks[0][i:i + 1] or ["nothing"])[0]
            if found != expected:
                raise Error(f"ranks differ in {what}: tensor {i} is {found} on rank {rank}, and {expected} on rank 0; expected the same "
                            "tensors in the same order on all ranks")


def _broadcast(tensor, root, name):
    """In place, of any dtype, device and strides."""
    whole = tensor.detach().contiguous()
    sent = whole.reshape(-1).view(torch.uint8).to(comm.group().device)
    comm.broadcast(sent, root, f"values of {name}")
    if sent.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.detach().copy_(sent.to(tensor.device).view(tensor.dtype).view(tensor.shape))


class GatheredParameters:
    """Whole parameters inside of a `with`. Collective: all ranks enter and leave it with the same parameters.

    Operators gather the parameters they read by themselves. This is for what reads memory in another way, such as `numpy()` or
    `torch.save`, and for writing. Parameters that no engine owns are whole on every rank anyhow; with `modifier_rank` they get that
    rank's values on leaving, as others do.

    Parameters
    ----------
    params : Parameter, iterable of them in the same order on all ranks, or Module
        An entry that is None is left out.
    modifier_rank : int, optional
        What this rank writes becomes every rank's value on leaving, also by `p.data = value` of p's shape and dtype. Without it
        writes to an engine's parameters are refused, and others keep what each rank has written.
    fwd_module : Module, optional
        Not needed; DeepSpeed's argument.
    enabled : bool
        False: does nothing.

    Raises
    ------
    CommError
        Ranks gather different parameters.
    Error
        `modifier_rank` is no rank; what is given is no parameter; the ranks give different parameters that no engine owns. On leaving, on all
        ranks: one has put a tensor of another shape or dtype, or another Parameter, in the place of a parameter.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor | None] | torch.nn.Module, modifier_rank: int | None = None,
                 fwd_module: torch.nn.Module | None = None, enabled: bool = True) -> None:
        self._params = _tensors_of(params) if arguments.flag(enabled, "GatheredParameters(): enabled") else []
        self._has_order = not isinstance(params, (set, frozenset))
        if modifier_rank is not None:
            modifier_rank = arguments.integer(modifier_rank, "GatheredParameters(): modifier_rank", -(2**31), 2**31 - 1)
        self._modifier_rank = modifier_rank
        self._open, self._without_engine = [], []
        self._memory: list[tuple[Any, str, torch.Tensor, torch.Tensor]] = []  # of parameters to write: engine, name, it, and the engine's memory
        self._held: set[int] = set()  # identities of parameters, while it is open

    def __enter__(self) -> "GatheredParameters":
        wanted = {id(parameter): parameter for parameter in self._params}
        names_by_engine, owned = [], set()
        for engine in engines() if wanted else ():
            names = module_state.first_names((name, parameter) for name, parameter in engine.named_tensors if id(parameter) in wanted)
            if names:
                names_by_engine.append((engine, list(names.values()), list(names)))
                owned.update(names)
        self._without_engine = [parameter for key, parameter in wanted.items() if key not in owned]
        if self._modifier_rank is not None and self._without_engine and not getattr(_here, "is_making", False):
            size = comm.group().size
            if not 0 <= self._modifier_rank < size:
                raise Error(f"GatheredParameters: modifier_rank {self._modifier_rank!r} is not a rank of 0 … {size - 1}")
            if not self._has_order and size > 1 and len(self._without_engine) > 1:
                raise Error("GatheredParameters: params is a set, which each rank has in another order; expected a list")
        try:
            for engine, names, ids in names_by_engine:
                self._open.append(_engine.GatheredParameters(engine._engine, names, self._modifier_rank))
                self._held.update(ids)
                if self._modifier_rank is not None:
                    self._memory += [(engine, name, wanted[key], wanted[key].detach()) for key, name in zip(ids, names)]
        except BaseException:
            self._close(abandons=True)
            raise
        self._held.update(map(id, self._without_engine))
        if self._held:
            _gathered[id(self)] = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        wrong = self._take_over()
        if kind is None and self._modifier_rank is not None and self._open:
            by_rank = comm.all_gather(wrong, "end of GatheredParameters") if comm.group().size > 1 else [wrong]
            rank = next((rank for rank, one in enumerate(by_rank) if one), None)
            if rank is not None:
                self._close(abandons=True)
                raise Error(f"GatheredParameters: on rank {rank} {by_rank[rank]}; expected it written in place, as by p.data.copy_(x)")
        self._close(abandons=kind is not None)
        if kind is None and self._modifier_rank is not None and self._without_engine:
            share_values(((f"parameter {i}", parameter) for i, parameter in enumerate(self._without_engine)), self._modifier_rank,
                         "GatheredParameters")

    def _take_over(self):
        """Parameters have the engine's memory again, with the values of what was put in its place. Returns what cannot be taken, or ""."""
        wrong = ""
        for engine, name, parameter, memory in self._memory:
            parent, _, attribute = name.rpartition(".")
            if getattr(engine.module.get_submodule(parent), attribute, None) is not parameter:
                wrong = wrong or f"another Parameter is in the place of {name}"
            if parameter.dtype == memory.dtype and parameter.is_set_to(memory):
                continue
            value = parameter.detach().clone()
            parameter.data = memory
            if (value.shape, value.dtype) == (memory.shape, memory.dtype):
                with torch.no_grad():
                    memory.copy_(value)
            else:
                wrong = wrong or f"{name} is a {value.dtype} of {list(value.shape)} now, and was a {memory.dtype} of {list(memory.shape)}"
        return wrong

    def _close(self, abandons):
        _gathered.pop(id(self), None)
        self._held, self._memory = set(), []
        while self._open:
            gathered = self._open.pop(0)
            try:
                gathered.abandon() if abandons else gathered.close()
            except BaseException:
                self._close(abandons=True)
                raise


def _tensors_of(params):
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, torch.nn.Module):
        return list(params.parameters())
    if params is None or isinstance(params, (str, bytes, dict)):
        raise Error(f"GatheredParameters: params is a {type(params).__name__}; expected a Parameter, an iterable of them, or a Module")
    given = [one for one in params if one is not None]
    for one in given:
        if not isinstance(one, torch.Tensor):
            raise Error(f"GatheredParameters: params has an entry that is a {type(one).__name__}; expected Parameters")
    return given


class Init:
    """Around a model's construction: on leaving, every rank has rank 0's values of the parameters and buffers of all modules that were
    made inside. Collective.

    Each rank makes, and keeps until `initialize`, the whole model: no memory is saved here. `initialize(model=function)` makes a model
    whose whole is in no rank's memory.

    Parameters
    ----------
    module : Module, optional
        That was made already: gets rank 0's values at once.
    config_dict_or_path, config, remote_device, pin_memory, mem_efficient_linear
        DeepSpeed's; without effect. What a configuration says of precision and offloading counts from `initialize` on.
    enabled : bool
        False: does nothing.
    dtype : torch.dtype, optional
        Of the floating parameters. Without it they keep the dtype that they are made with, whatever the configuration says.
    data_parallel_group, sequence_data_parallel_group, zero_param_parallel_group : optional
        A group of all ranks, or None.
    mpu, param_swapper, zero_quantized_weights, zero_quantized_nontrainable_weights
        DeepSpeed's; None and False are expected.

    Raises
    ------
    Error
        The ranks make different modules; an argument asks for what Tessera does not do.
    """

    def __init__(self, module: torch.nn.Module | None = None, data_parallel_group: Any = None, sequence_data_parallel_group: Any = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: Any = None, config: Any = None, enabled: bool = True, dtype: torch.dtype | None = None,
                 mpu: None = None, zero_param_parallel_group: Any = None, zero_quantized_weights: bool = False,
                 zero_quantized_nontrainable_weights: bool = False, param_swapper: None = None) -> None:
        self._enabled, self._dtype = enabled, dtype
        self._modules, self._hooks = {}, []
        if not enabled:
            return
        self._join()
        for name, value in (("mpu", mpu), ("param_swapper", param_swapper), ("zero_quantized_weights", zero_quantized_weights),
                            ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights)):
            if value:
                raise Error(f"zero.Init: {name} is {value!r}, which is not supported; expected None or False")
        for name, group in (("data_parallel_group", data_parallel_group), ("sequence_data_parallel_group", sequence_data_parallel_group),
                            ("zero_param_parallel_group", zero_param_parallel_group)):
            size = comm.group().size if group is None else torch.distributed.get_world_size(group)
            if size != comm.group().size:
                raise Error(f"zero.Init: {name} has {size} ranks; expected all {comm.group().size}, or None")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise Error(f"zero.Init: dtype is {dtype!r}; expected a floating one of torch")
        if module is not None:
            self._share(module.modules())

    def _join(self):
        comm.group()

    def __enter__(self) -> "Init":
        if self._enabled:
            thread = threading.get_ident()

            def keep(module, _name, _value):
                if threading.get_ident() == thread:
                    self._modules.setdefault(id(module), module)

            self._modules = {}
            self._hooks = [torch_module.register_module_parameter_registration_hook(keep),
                           torch_module.register_module_buffer_registration_hook(keep)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        modules, self._modules, self._hooks = self._modules, {}, []
        if kind is None:
            self._share(modules.values())

    def _share(self, modules):
        named = []
        for number, module in enumerate(modules):
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None:
                    named.append((f"{type(module).__name__}.{name} of module {number}", value))
        if self._dtype is not None:
            for _, value in named:
                if isinstance(value, torch.nn.Parameter) and value.is_floating_point():
                    value.data = value.data.to(self._dtype)
        if self._enabled:
            share_values(named, what="the modules of zero.Init")
