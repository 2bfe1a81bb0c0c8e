"""An optimizer of torch that has no formula here runs as it is, on whole parameters: each has one owner, a rank, which keeps its states.

`zero/optimizer/whole_optimizer.h` says what the engine does around it. An update of a parameter has to depend on that parameter alone,
which `depends_on_others` tries out on small ones; where it does not, rank 0 owns all parameters, so that the numbers are right in any case.
"""
import copy
import inspect
import random
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tessera import comm, json_values
from tessera.errors import ConfigError, Error

_MAX_SIZE = 8  # of the small parameters that the trial is made with, in each dimension
_TRIAL_STEPS = 4  # some statistics over all parameters count later than from the first update on


class WholeOptimizer:
    """Runs `client` on the parameters that this rank owns, between what the engine brings together and takes back.

    Parameters
    ----------
    client : torch.optim.Optimizer
        Any that updates in place from `p.grad`. States that it has already are kept by the owners.
    named_parameters : list of (str, Parameter)
        The model's.
    world_size : int
        The number of ranks.

    Attributes
    ----------
    name : str
        Module and class.
    on_one_rank : bool
        Whether rank 0 owns all parameters.
    why : str
        Why it does.

    Raises
    ------
    ConfigError
        It can only be called with a closure, or its states and groups are another optimizer's.
    """

    def __init__(self, client: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        self.name = f"{type(client).__module__}.{type(client).__qualname__}"
        if needs_closure(client):
            raise ConfigError(f"{self.name} calls a closure, which computes the loss anew inside of step(), and here gradients are reduced before "
                              "it; expected an optimizer whose step() needs none")
        for attribute in ("state", "param_groups"):
            if isinstance(getattr(type(client), attribute, None), property):
                raise ConfigError(f"{self.name}.{attribute} is a property, as of an optimizer around another one, and its states cannot be told by "
                                  "parameter here; expected an optimizer that keeps them itself")
        self._client = client
        self._step = vars(client).get("step") or types.MethodType(type(client).step, client)  # a scheduler may have put one there
        self._tensors = dict(reversed(named_parameters))
        self._names: dict[int, str] = {}
        for name, parameter in named_parameters:  # a tied one: the first name
            self._names.setdefault(id(parameter), name)
        self._owned: set[str] = set()
        self.why = depends_on_others(client) if world_size > 1 else ""
        self.on_one_rank = bool(self.why)
        self.began_with = {self._names[id(key)] for key in client.state if id(key) in self._names}  # had states; equal on all ranks
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict, client.state)

    def agree(self) -> None:
        """Rank 0 owns all parameters where some rank's trial says so. Collective."""
        self.why = next((why for why in comm.all_gather(self.why, "trial of the optimizer") if why), "")
        self.on_one_rank = bool(self.why)

    # -------------------------------------------------------------------- for the engine, which calls these members by name

    def own(self, names: Iterable[str]) -> None:
        """The names of the parameters that this rank owns. States of others are let go."""
        self._owned = set(names)
        for key in list(self._state):
            name = self._names.get(id(key))
            if name is not None and name not in self._owned:
                del self._state[key]
            elif name is not None:
                self._state[key] = self._placed(key, self._state[key])

    def step(self) -> None:
        """Call the optimizer's step() with the parameters in its groups that this rank owns."""
        self.call(self._step)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the optimizer with the parameters in its groups that this rank owns; not on a rank that owns none. Rank 0 owns
        the largest."""
        if not self._owned:
            return None
        client, groups = self._client, self._client.param_groups
        shown, members = client.state, [group["params"] for group in groups]
        client.state = self._state
        for group, all_of_them in zip(groups, members):
            group["params"] = [parameter for parameter in all_of_them if self._names[id(parameter)] in self._owned]
        try:
            return function(*arguments)
        finally:
            self._state, client.state = client.state, shown
            for group, all_of_them in zip(groups, members):
                group["params"] = all_of_them

    def bytes(self) -> int:
        """Of the tensors that this rank keeps, each counted once."""
        found: dict[int, int] = {}

        def count(value):
            if isinstance(value, torch.Tensor):
                found[id(value)] = value.nbytes
            elif isinstance(value, dict):
                for item in value.values():
                    count(item)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    count(item)

        count(self._state)
        return sum(found.values())

    def state_bytes(self) -> torch.Tensor:
        """What a checkpoint keeps of this rank's states: (n) uint8."""
        if problem := self._other_states():
            raise Error(problem)
        return json_values.to_bytes({"state": {self._names[id(key)]: state for key, state in self._state.items() if id(key) in self._names},
                                     "other": {key: state for key, state in self._state.items() if not isinstance(key, torch.Tensor)}})

    def set_state_bytes(self, saved: list[torch.Tensor]) -> None:
        """Take this rank's states out of what all ranks have saved."""
        found, other = {}, {}
        for i, data in enumerate(saved):
            values = json_values.from_bytes(data)
            found.update({name: state for name, state in values["state"].items() if name in self._owned})
            other = values["other"] if i == 0 else other
        self._state = defaultdict(dict, other)
        for name, state in found.items():
            self.set_state(name, state)

    # ---------------------------------------------------------------------------------------------- for optimizer.state

    def gathered(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The states of these parameters, as copies on the CPU, for all ranks. Collective."""
        if problem := next((text for text in comm.all_gather(self._other_states(), "the optimizer's states") if text), ""):
            raise Error(problem)
        mine = {name: self._state[self._tensors[name]] for name in names if name in self._owned and self._tensors[name] in self._state}
        data = json_values.to_bytes({"state": mine})
        sizes = comm.all_gather(data.numel(), "sizes of the optimizer's states")
        found = {}
        for rank, size in enumerate(sizes):
            theirs = data if rank == comm.get_rank() else torch.empty(size, dtype=torch.uint8)
            theirs = comm.broadcast(theirs.to(comm.group().device), rank, "the optimizer's states").cpu()
            found.update(json_values.from_bytes(theirs)["state"])
        return found

    def set_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the states of a parameter, on the rank that owns it. None: it has none."""
        if name not in self._owned:
            return
        parameter = self._tensors[name]
        self._state.pop(parameter, None)
        if state:
            self._state[parameter] = self._placed(parameter, state)

    def _other_states(self):
        """Why what is in `state` is not all, or "". An optimizer inside of this one that shares its states has the ones of `call`."""
        for name, inner in vars(self._client).items():
            if isinstance(inner, torch.optim.Optimizer) and inner.state and inner.state is not self._state:
                return (f"{self.name}.{name} is an optimizer with states of its own, which nobody saves; expected it to share those of the outer "
                        f"one, self.{name}.state = self.state, at the beginning of step()")
        return ""

    def _placed(self, parameter, state):
        """As torch.optim's load_state_dict: on the parameter's device, and in fp32 as the masters are, without `step`."""
        def place(key, value):
            if isinstance(value, torch.Tensor):
                if key == "step":
                    return value.clone()
                return value.to(parameter.device, torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            if isinstance(value, dict):
                return type(value)((inner, place(inner, one)) for inner, one in value.items())
            return type(value)(place(key, one) for one in value) if type(value) in (list, tuple) else value

        return {key: place(key, value) for key, value in state.items()}


def needs_closure(client: torch.optim.Optimizer) -> bool:
    """Whether step() has an argument that has to be given."""
    try:
        arguments = inspect.signature(type(client).step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in list(arguments)[1:])


def depends_on_others(client: torch.optim.Optimizer) -> str:
    """Whether an update of a parameter depends on the others, or on their number: why, or "".

    Copies of the optimizer update small parameters of the same kinds, all at once and each alone, and the results have to be equal to the
    bit, those that it keeps as numbers in its groups or attributes too. Optimizers with statistics over all parameters (prodigy's, a norm
    that clips, noise from one generator) are found so, and so is one that the trial cannot be made with.
    """
    originals = [parameter for group in client.param_groups for parameter in _of_two_shapes(group["params"])]
    if sum(len(group["params"]) for group in client.param_groups) < 2:
        return ""
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            together, numbers = _trial(client, originals, range(len(originals)))
            for i, original in enumerate(originals):
                alone, numbers_alone = _trial(client, originals, [i])
                group = next(g for g, group in enumerate(client.param_groups) if any(p is original for p in group["params"]))
                if not torch.equal(alone[i], together[i]) or any(numbers_alone[g] != numbers[g] for g in (group, -1)):
                    return "the update of a parameter depends on the other parameters"
    except Exception as error:
        return f"a trial on small parameters failed ({type(error).__name__}: {error})".splitlines()[0][:300]
    finally:
        random.setstate(python)
        if numpy is not None and of_numpy is not None:
            numpy.set_state(of_numpy)
    return ""


def _of_two_shapes(parameters):
    """Up to two parameters of each number of dimensions."""
    found = defaultdict(list)
    for parameter in parameters:
        if len(found[parameter.dim()]) < 2:
            found[parameter.dim()].append(parameter)
    return [parameter for several in found.values() for parameter in several]


def _with_ids(value, ids):
    """An attribute in which ids of parameters are those of the small ones."""
    if type(value) in (dict, defaultdict, OrderedDict) and any(key in ids for key in value if type(key) is int):
        changed = {ids.get(key, key) if type(key) is int else key: item for key, item in value.items()}
        value.clear()
        value.update(changed)
    elif type(value) in (list, tuple, set, frozenset) and any(item in ids for item in value if type(item) is int):
        value = type(value)(ids.get(item, item) if type(item) is int else item for item in value)
    return value


def _trial(client, originals, members):
    """After some steps of a copy of the optimizer that has these `members` of the small parameters alone: the parameters, and numbers that
    it keeps, as text, of each group and last of itself."""
    torch.manual_seed(0)
    small = [torch.nn.Parameter(torch.randn([min(size, _MAX_SIZE) for size in parameter.shape])) for parameter in originals]
    gradients = [torch.randn(parameter.shape) * 10.0 ** (i % 3) for i, parameter in enumerate(small)]
    chosen = {id(originals[i]) for i in members}
    probe = object.__new__(type(client))
    memo: dict[int, Any] = {id(client): probe}
    for group in client.param_groups:  # those that are not tried out, where the optimizer refers to them elsewhere
        memo.update((id(p), torch.nn.Parameter(torch.zeros([min(size, _MAX_SIZE) for size in p.shape]))) for p in group["params"])
    for original, parameter in zip(originals, small):
        memo[id(original)] = parameter
        for value in client.state.get(original, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == original.shape:
                memo[id(value)] = value.detach()[tuple(slice(0, size) for size in parameter.shape)].to("cpu", torch.float32, copy=True)
    probe.state = defaultdict(dict)
    probe.param_groups = [{"params": [memo[id(p)] for p in group["params"] if id(p) in chosen]} for group in client.param_groups]
    # An optimizer inside of this one may share its states and groups.
    memo.update({id(client.state): probe.state, id(client.param_groups): probe.param_groups})
    memo.update((id(group), of_probe) for group, of_probe in zip(client.param_groups, probe.param_groups))
    for group, of_probe in zip(client.param_groups, probe.param_groups):
        of_probe.update(copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo))
    probe.state.update((memo[id(key)], copy.deepcopy(client.state[key], memo)) for key in originals if id(key) in chosen and key in client.state)
    kept = {key: value for key, value in vars(client).items() if key not in ("state", "param_groups", "step") and "_hooks" not in key}
    ids = {i: id(small_one) for i, small_one in memo.items() if isinstance(small_one, torch.nn.Parameter)}
    vars(probe).update({name: _with_ids(value, ids) for name, value in copy.deepcopy(kept, memo).items()})
    vars(probe).update({name: OrderedDict() for name in vars(client) if "_hooks" in name})
    for group in probe.param_groups:
        if isinstance(group.get("lr"), (float, int)) and group["lr"] == 0:
            group["lr"] = 1e-2  # at the beginning of a warm-up
    if callable(getattr(probe, "train", None)):  # schedulefree's
        probe.train()
    step = type(client).step
    step = step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step  # without the hooks of steps
    for _ in range(_TRIAL_STEPS):
        torch.manual_seed(1)
        for parameter, gradient in zip(small, gradients):
            parameter.grad = gradient.clone()
        step(probe)
    return [parameter.detach() for parameter in small], [_numbers(kept) for kept in (*probe.param_groups, vars(probe))]


def _numbers(kept):
    """As text, so that NaN is equal to itself."""
    return str({key: value.item() if isinstance(value, torch.Tensor) else value for key, value in kept.items()
                if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)})

