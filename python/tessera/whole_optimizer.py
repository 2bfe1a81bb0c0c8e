"""An optimizer of torch that has no formula here runs as it is, on whole parameters: each has one owner, a rank, which keeps its states.

`zero/optimizer/whole_optimizer.h` says what the engine does around it. `optimizer_trial` finds out which optimizers can be divided so; the
others are rank 0's.
"""
import copy
import hashlib
import inspect
import json
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from tessera import _engine, comm, json_values, wrapper_tensors
from tessera.containers import map_tensors, tensors_in
from tessera.errors import ConfigError, Error
from tessera.module_state import first_names
from tessera.optim import taken_states
from tessera.optimizer_trial import NoCollectives, lists_by_parameter, own_states_inside, package_of, try_out

_GUARDED_STEPS = 2  # a collective in the first steps is an error, and not a wait


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
    name : str or None
        What stands in checkpoints; None: module and class.

    Attributes
    ----------
    name : str
        As given.
    on_one_rank : bool
        Whether rank 0 owns all parameters.
    why : str
        Why it does.

    Raises
    ------
    ConfigError
        It can only be called with a closure, calls collectives, gives parameters other memory, its states and groups are another optimizer's, or
        its states cannot be saved.
    """

    def __init__(self, client: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]], world_size: int,
                 name: str | None = None) -> None:
        self.name = name or f"{type(client).__module__}.{type(client).__qualname__}"
        if _needs_closure(client):
            raise ConfigError(f"{self.name} calls a closure, which computes the loss anew inside of step(), and here gradients are reduced before "
                              "it; expected an optimizer whose step() needs none")
        for attribute in ("state", "param_groups"):
            if isinstance(getattr(type(client), attribute, None), property):
                raise ConfigError(f"{self.name}.{attribute} is a property, as of an optimizer around another one, and its states cannot be told by "
                                  "parameter here; expected an optimizer that keeps them itself")
        self._client = client
        self._step = vars(client).get("step") or types.MethodType(type(client).step, client)  # a scheduler may have put one there
        self._tensors = dict(reversed(named_parameters))
        self._names = first_names(named_parameters)
        self._world_size = world_size
        self._owned: set[str] = set()
        self._others: set[int] = set()  # ids of parameters that other ranks own
        self._by_parameter = [lists_by_parameter(group) for group in client.param_groups]
        self._package = package_of(client)
        trial = try_out(client, self.name, self._tensors.values())
        if trial.unsaved_state:
            raise ConfigError(f"{self.name} has {trial.unsaved_state}; a checkpoint could not be continued")
        self._unsaved = trial.unsaved  # what of it no checkpoint has; "": nothing that is known
        self._attributes = trial.attributes
        self._tried_states = trial.states
        self.why = trial.depends if world_size > 1 else ""
        self.on_one_rank = False
        self.began_with = {self._names[id(key)] for key in client.state if id(key) in self._names}  # had states at initialize()
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict, client.state)
        self.num_steps = 0
        self.is_running = False  # inside of `call`
        self._before: list[dict[str, Any]] = []  # the groups as they were before the last `call`

    def agree(self) -> None:
        """Rank 0 owns all parameters where some rank's trial says so, or where there is one; states that there are, are rank 0's. Collective.

        Raises
        ------
        ConfigError
            Ranks have other values in their groups.
        """
        if difference := self.first_difference():
            raise ConfigError(f"{self.name}: {difference}; expected the same on all ranks")
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            data = self._to_bytes(self._by_name()) if self._state else data
        except Exception as error:  # of this rank alone, perhaps, and the others go on into the collective
            self.why = self.why or f"its states cannot be compared between ranks ({error})"
        by_rank = comm.all_gather([self.why, data.numel(), _engine.hash_of(data), sorted(self.began_with)], "trial of the optimizer")
        self.why = next((one[0] for one in by_rank if one[0]), "")
        self.on_one_rank = bool(self.why) or (self._world_size > 1 and sum(len(group["params"]) for group in self._client.param_groups) < 2)
        self.began_with = set(by_rank[0][3])
        if not self.on_one_rank and any(one[1:] != by_rank[0][1:] for one in by_rank):  # as the weights, where ranks have made others
            data = data if comm.get_rank() == 0 else torch.empty(by_rank[0][1], dtype=torch.uint8, device="cpu")
            values = self._from_bytes(comm.broadcast(data.to(comm.group().device), 0, "the optimizer's states").cpu())
            self._replace(values["state"], values["other"])

    def warnings(self) -> list[str]:
        """What a user has to know of it, a line each."""
        lines = []
        if self.on_one_rank:
            lines.append(f"{self.name}: {self.why or 'it has one parameter'}; so rank 0 updates all parameters and has all of the optimizer's "
                         "states in its memory")
        if self._unsaved:
            lines.append(f"{self.name}: no checkpoint has {self._unsaved}; what is in self.state and in the param groups is saved")
        return lines

    # -------------------------------------------------------------------- for the engine, which calls these members by name

    def own(self, names: Iterable[str]) -> None:
        """The names of the parameters that this rank owns. States of others are let go."""
        self._owned = set(names)
        self._others = {id(p) for group in self._client.param_groups for p in group["params"]
                        if p.requires_grad and self._names[id(p)] not in self._owned}
        for key in list(self._state):
            if id(key) in self._others:
                del self._state[key]
            elif id(key) in self._names:
                self._state[key] = self._on_device(key, self._state[key])

    def step(self) -> None:
        """Call the optimizer's step() with the parameters in its groups that no other rank owns. Not on the other ranks of one that is rank
        0's."""
        self.num_steps += 1
        if not self._calls_step():
            for when in ("pre", "post"):  # those that step() would call: they may call collectives
                call_step_hooks(when, [self._client])
            return
        if self.num_steps <= _GUARDED_STEPS and self._world_size > 1:
            with NoCollectives(self.name):
                self.call(self._step)
        else:
            self.call(self._step)

    def _calls_step(self):
        return not self.on_one_rank or bool(self._owned)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the optimizer on what this rank owns."""
        client, groups = self._client, self._client.param_groups
        shown, self._before = client.state, [dict(group) for group in groups]
        client.state = self._state
        kept = []
        for group, keys in zip(groups, self._by_parameter):
            kept.append([i for i, p in enumerate(group["params"]) if id(p) not in self._others])
            for key in keys:
                group[key] = [group[key][i] for i in kept[-1]]
        self.is_running = True
        try:
            return function(*arguments)
        finally:
            self.is_running = False
            self._state, client.state = client.state, shown
            self._restore(groups, kept)

    def drop_step(self) -> None:
        """Some rank's step() has raised: what others have written into the groups is taken back."""
        for group, before in zip(self._client.param_groups, self._before):
            group.clear()
            group.update(before)

    def _restore(self, groups, kept):
        """All parameters are in the groups again, with what step() has written into lists that have an element for each."""
        changed = ""
        for number, (group, before, indices, keys) in enumerate(zip(groups, self._before, kept, self._by_parameter)):
            for key in keys:
                if key != "params" and isinstance(group.get(key), list):
                    if len(group[key]) != len(indices):
                        changed = f"param_groups[{number}]['{key}']"
                    for i, value in zip(indices, group[key]):
                        before[key][i] = value
                group[key] = before[key]
        if changed:
            raise Error(f"{self.name}: step() changed the number of elements of {changed}, which was taken for a list with one for each parameter; "
                        "expected another place for it, such as an attribute")

    def digest(self) -> int:
        """Equal where the values in the groups are; 0 for one rank alone."""
        if self._world_size == 1:
            return 0
        text = json.dumps(self._values(), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") | 1

    def first_difference(self) -> str:
        """The first value in the groups that is another than rank 0's, as "param group 0 has lr 0.1 on rank 0, but 0.01 on rank 2"; "": there is
        none. Collective."""
        first, *others = comm.all_gather(self._values(), "values of the param groups")
        for rank, other in enumerate(others, 1):
            for i, (ours, theirs) in enumerate(zip(first, other)):
                for key in {**ours, **theirs}:
                    found = [f"{json_values.decode(values[key])!r:.80}" if key in values else "absent" for values in (ours, theirs)]
                    if ours.get(key) != theirs.get(key):
                        return f"param group {i} has {key} {found[0]} on rank 0, but {found[1]} on rank {rank}"
        return "" if all(len(other) == len(first) for other in others) else "the ranks have other numbers of param groups"

    def _values(self):
        """The optimizer's options in the groups, encoded: numbers, flags, and what is made of them. What else a program keeps there may be a
        rank's own."""
        options = {"lr", *self._client.defaults}
        return [{key: json_values.encode(_on_cpu(value), key) for key, value in group.items()
                 if key in options and key not in keys and _is_number(value)}
                for group, keys in zip(self._client.param_groups, self._by_parameter)]

    def share_groups(self) -> None:
        """After a step that only rank 0 has made: what it has written into the groups is everybody's. Collective."""
        if not self.on_one_rank:
            return
        encoded = None
        if comm.get_rank() == 0:
            groups = [{key: _on_cpu(value) for key, value in group.items() if key != "params"} for group in self._client.param_groups]
            encoded = json_values.encode(json_values.encodable(groups), "param_groups")
        groups = json_values.decode(comm.all_gather(encoded, "param groups of rank 0")[0])
        if comm.get_rank() > 0:
            for group, values in zip(self._client.param_groups, groups):
                for key in [key for key in group if key != "params" and key not in values and json_values.can_encode(_on_cpu(group[key]))]:
                    del group[key]
                for key, value in values.items():
                    before = group.get(key)
                    group[key] = value.to(before.device) if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) else value

    def bytes(self) -> int:
        """Of the tensors that this rank keeps, each counted once."""
        return sum({id(tensor): tensor.nbytes for tensor in _in_memory(self._state)}.values())

    def state_bytes(self) -> torch.Tensor:
        """What a checkpoint keeps of this rank's states: (n) uint8."""
        if problem := self._other_states():
            raise Error(problem)
        return self._to_bytes({**self._by_name(),
                               "attributes": {name: vars(self._client)[name] for name in self._attributes if name in vars(self._client)}})

    def check_state_of_another_program(self, saved: torch.Tensor) -> None:
        """Raises Error where a parameter lacks a state that step() has made of a small one with as many dimensions, and where
        taken_states() does."""
        for name, state in self._from_bytes(saved)["state"].items():
            lacking = sorted(self._tried_states.get(self._tensors[name].dim(), set()) - state.keys())
            if lacking:
                raise Error(f"{name} has the states {', '.join(sorted(state)) or 'none'}, and {self.name} needs {', '.join(lacking)} too; expected "
                            "the checkpoint of the same optimizer, or load_optimizer_states=False")
            try:
                self.taken(name, state)
            except Error as error:
                raise Error(f"{error}; expected the checkpoint of the same optimizer, or load_optimizer_states=False") from None

    def taken(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What taken_states() makes of a parameter's states."""
        return taken_states(self._client, self._tensors[name].shape, state, f"state of parameter {name}")

    def set_state_bytes(self, saved: list[torch.Tensor], names: dict[str, str] | None) -> None:
        """Take this rank's states out of what all ranks have saved, as they were. `names`: by parameter that they are taken of, its name
        there; those of others stay. None: of all, under their own names."""
        names = {name: name if names is None else names[name] for name in sorted(self._owned) if names is None or name in names}
        found = {name: state for name, state in self._by_name()["state"].items() if name not in names}
        other = {}
        for i, data in enumerate(saved):
            values = self._from_bytes(data)
            found.update({name: self.taken(name, values["state"][theirs]) for name, theirs in names.items() if theirs in values["state"]})
            if i == 0:
                other = values["other"]
                vars(self._client).update((name, value) for name, value in values.get("attributes", {}).items() if name in self._attributes)
        self._replace(found, other)

    # ---------------------------------------------------------------------------------------------- for optimizer.state

    def gathered(self, names: Iterable[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """The states of these parameters, and those of no parameter, as copies on the CPU, for all ranks. Collective."""
        mine = {name: self._state[self._tensors[name]] for name in names if name in self._owned and self._tensors[name] in self._state}
        problem, data = self._other_states(), torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            data = self._to_bytes({"state": mine, "other": self._not_of_parameters()})
        except Exception as error:  # as in agree()
            problem = problem or str(error) or type(error).__name__
        by_rank = comm.all_gather([data.numel(), problem], "sizes of the optimizer's states")
        if problem := next((one[1] for one in by_rank if one[1]), ""):
            raise Error(problem)
        found, other = {}, {}
        for rank, (size, _) in enumerate(by_rank):
            theirs = data if rank == comm.get_rank() else torch.empty(size, dtype=torch.uint8, device="cpu")
            theirs = comm.broadcast(theirs.to(comm.group().device), rank, "the optimizer's states").cpu()
            values = self._from_bytes(theirs)
            found.update(values["state"])
            other = values["other"] if rank == 0 else other
        return found, other

    def set_state(self, name: str, state: dict[str, Any] | None) -> None:
        """Replace the states of a parameter, on the rank that owns it, by what torch's load_state_dict would make of them. None: it has none."""
        if name not in self._owned:
            return
        parameter = self._tensors[name]
        self._state.pop(parameter, None)
        if state:
            self._state[parameter] = self._on_device(parameter, state, cast=True)

    def set_states_of_none(self, states: dict[str, Any]) -> None:
        """Replace those that belong to no parameter."""
        copies = copy.deepcopy(states)
        for key in self._not_of_parameters():
            del self._state[key]
        self._state.update(copies)

    def _to_bytes(self, values):
        return json_values.to_bytes(values, self._package)

    def _from_bytes(self, data):
        return json_values.from_bytes(data, self._package)

    def _by_name(self):
        return {"state": {self._names[id(key)]: state for key, state in self._state.items() if id(key) in self._names},
                "other": self._not_of_parameters()}

    def _replace(self, by_name, other):
        self._state = defaultdict(dict, other)
        for name, state in by_name.items():
            self._state[self._tensors[name]] = self._on_device(self._tensors[name], state)

    def _not_of_parameters(self):
        return {key: state for key, state in self._state.items() if not isinstance(key, torch.Tensor)}

    def _other_states(self):
        """Why what is in `state` is not all, or ""."""
        inside = own_states_inside(self._client, self._state)  # that one which shares has the states of `call`
        return f"{self.name} has {inside}" if inside else ""

    def _on_device(self, parameter, state, cast=False):
        """Copies on the parameter's device. `step` is where torch's optimizers have it. `cast`: to fp32, as masters are."""
        group = next((group for group in self._client.param_groups if any(p is parameter for p in group["params"])), {})
        step_too = bool(group.get("capturable") or group.get("fused"))

        def place(key, value):
            if wrapper_tensors.is_wrapper(value):
                return wrapper_tensors.with_parts(value, lambda _, part: part.to(parameter.device, copy=True))
            if key == "step" and not step_too:
                return value.clone()
            return value.to(parameter.device, torch.float32 if cast and value.is_floating_point() else value.dtype, copy=True)

        return {key: map_tensors(value, lambda tensor, key=key: place(key, tensor), objects=True) for key, value in state.items()}


def _is_number(value: Any) -> bool:
    """Whether a value is numbers, flags and None alone."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return all(map(_is_number, value)) if isinstance(value, (tuple, list)) else value is None or isinstance(value, (bool, int, float))


def _on_cpu(value: Any) -> Any:
    """A value of a group, as it is compared and sent."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _in_memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in a state."""
    for tensor in tensors_in(value, objects=True):
        yield from _in_memory(wrapper_tensors.parts(tensor)) if wrapper_tensors.is_wrapper(tensor) else [tensor]


def call_step_hooks(when: str, owners: list[torch.optim.Optimizer]) -> None:
    """Call the hooks of steps of these optimizers, and everybody's, which get the first, in torch's order. `when`: "pre" or "post"."""
    own = [(owner, hook) for owner in owners for hook in getattr(owner, f"_optimizer_step_{when}_hooks", {}).values()]
    everybodys = [(owners[0], hook) for hook in getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()]
    for owner, hook in chain(everybodys, own) if when == "pre" else chain(own, everybodys):
        hook(owner, (owner,), {})


def _needs_closure(client):
    """Whether step() has an argument that has to be given."""
    try:
        arguments = inspect.signature(type(client).step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in list(arguments)[1:])
