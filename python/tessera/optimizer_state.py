"""`optimizer.state`: the moments and step counts in an engine's shards, by parameter and in the format of torch's optimizers."""
import types
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from tessera import _engine, arguments, comm, wrapper_tensors
from tessera.containers import map_tensors
from tessera.errors import CannotBeCopied, Error
from tessera.module_state import first_names
from tessera.optimizer_options import plain
from tessera.whole_optimizer import WholeOptimizer

_MOST_UPDATES = 2**53  # larger ones are not exact in floating point
_TYPES_WITH_STEP = ("AdamW", "Adam", "Adagrad", "RMSprop", "LAMB", "Muon")  # whose states have a number of updates
STATE_OF = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq"}  # options of a group that it has a state for


class _Copy(dict):
    """The states of one parameter, read from the shards."""

    def _refuse(self, *_, **__):
        raise Error("optimizer.state[parameter] is a copy of what is in the engine's shards, and writing it would have no effect: assign a "
                    "whole dict, optimizer.state[parameter] = {...}")

    def __setitem__(self, key, value):
        """The same value is accepted, perhaps on another device: frameworks move states to where they are."""
        now = self.get(key)
        if not (isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.shape == now.shape and value.dtype == now.dtype
                and torch.equal(value.to(now.device), now)):
            self._refuse()
        super().__setitem__(key, value)

    __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = _refuse


def refuse_copy() -> None:
    """Raise CannotBeCopied: of an optimizer of an engine, and of one that it has replaced, which has its states."""
    raise CannotBeCopied("the optimizer of an engine cannot be pickled or copied; expected optimizer.state_dict(), on all ranks, or "
                         "engine.save_checkpoint(folder)")


class States(MutableMapping):
    """By parameter, what the engine's shards hold of it, as torch has it: `{"step": …, "exp_avg": …}`. A parameter without a step has none.

    Reading is Collective, and returns copies that cannot be written. Assigning the states of a parameter puts them into the
    shards, and deleting them resets it; all ranks do the same.

    Parameters
    ----------
    engine : Engine
        Referred to weakly.
    param_groups : list of dict
        Those that have parameters, in the order of the engine's.
    type_ : str
        The configuration's `optimizer.type`.
    step_is_a_tensor : bool
        As in torch's optimizers; else an int, as in DeepSpeed's.
    """

    def __init__(self, engine: Any, param_groups: list[dict[str, Any]], type_: str, step_is_a_tensor: bool) -> None:
        self._engine = weakref.ref(engine)
        self._type = type_
        self._step_is_a_tensor = step_is_a_tensor and type_ != "LAMB"
        self._group_of = {id(parameter): i for i, group in enumerate(param_groups) for parameter in group["params"]}
        self._parameters = [parameter for group in param_groups for parameter in group["params"]]
        self._names = first_names(engine.named_tensors)
        self._trained = {name for names in engine._engine.group_parameters() for name in names}
        self._had: list[set[str]] = [set() for _ in param_groups]  # by group, those of STATE_OF
        self.replaced: dict[str, Any] = {}  # attributes of the optimizer that was translated, as they were before

    # ------------------------------------------------------------------------------------ a mapping

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        name = self.name_of(parameter)
        if not self._has(parameter):
            return _Copy()
        engine = self._live()
        unit = next(i for i, names in enumerate(engine.units()) if name in names)
        comm.check_usable(self, "state of the optimizer")
        state = self._as_torch_has_it(parameter, *engine.optimizer_states(unit)[name])
        with torch.inference_mode():  # whose tensors cannot be written: it would have no effect
            return _Copy((key, value.clone() if isinstance(value, torch.Tensor) else value) for key, value in state.items())

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        self.write({self.name_of(parameter): self.parsed(parameter, state)})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self.write({self.name_of(parameter): ([], 0)})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self._parameters if self.is_live and self._has(parameter))  # none of an engine that has ended

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Reset all parameters."""
        self.write({self.name_of(parameter): ([], 0) for parameter in self})

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()

    # --------------------------------------------------------------------------------- for the optimizer

    def check_usable(self) -> None:
        """Raise Error where the engine is gone, or cannot be used."""
        self._live().check_usable()

    def gathered(self) -> dict[torch.Tensor, dict[str, Any]]:
        """All states, in tensors that can be written. Collective."""
        found = {}
        comm.check_usable(self, "state_dict() of the optimizer")
        if len(self) > 0:
            engine = self._live()
            for unit, _ in enumerate(engine.units()):
                found.update(engine.optimizer_states(unit))
        return {parameter: self._as_torch_has_it(parameter, *found[self.name_of(parameter)]) for parameter in self}

    def parsed(self, parameter: torch.Tensor, state: Mapping[str, Any] | None,
               group: Mapping[str, Any] = types.MappingProxyType({})) -> tuple[list[torch.Tensor], int]:
        """What `write` takes: whole tensors, and the number of updates. `group`: what was saved of the param group.

        Raises Error for a state that is not this parameter's, or not this optimizer's.
        """
        where = f"state of parameter {self.name_of(parameter)}"
        names = self._live().state_names
        state = {key: value for key, value in self._as_dict(parameter, state).items() if value is not None}  # SGD's before the first step
        for key in state:
            if key not in names and key != "step":
                raise Error(f"{where}: {key} is not a state of {self._type}; expected {', '.join(names) or 'none'}")
        if not state or not names:
            return [], 0
        step = state.get("step", group.get("step"))
        if step is None and self._type in _TYPES_WITH_STEP:
            raise Error(f"{where}: step is missing; expected the number of updates")
        tensors = []
        for name in names:
            tensor = state.get(name)
            if tensor is None and not self._belongs(name, parameter, group):
                tensor = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                found = "is missing" if tensor is None else f"is {list(getattr(tensor, 'shape', []))}"
                raise Error(f"{where}: {name} {found}; expected a tensor of shape {list(parameter.shape)}")
            if not arguments.is_dense(tensor) or tensor.is_complex():
                raise Error(f"{where}: {name} is {arguments.described(tensor)}; expected a dense one of real numbers")
            tensors.append(tensor.detach().to("cpu", torch.float32))
        number = 1 if step is None else plain(step, f"{where}: step")
        if not isinstance(number, (int, float)) or not 0 <= number <= _MOST_UPDATES or number != int(number):  # NaN, too
            raise Error(f"{where}: step is {number!r}; expected the number of updates, a whole number from 0")
        return tensors, int(number)

    def _as_dict(self, parameter, state):
        if state is not None and not isinstance(state, Mapping):
            raise Error(f"state of parameter {self.name_of(parameter)} is a {type(state).__name__}; expected a dict")
        return state or {}

    def write(self, states: Mapping[str, tuple[list[torch.Tensor], int]]) -> None:
        """Put parsed states into the shards, by the parameters' names. Collective."""
        comm.check_usable(self, "load_state_dict() of the optimizer")
        engine = self._live()
        for name, (tensors, num_updates) in states.items():
            engine.set_optimizer_states(name, tensors, num_updates)

    def write_others(self, states: Mapping[Any, Any]) -> None:
        """Put in what belongs to no parameter. Raises Error where there is any: the engine's formulas have none."""
        for key in states:
            raise Error(f"load_state_dict(): it has a state of {key!r:.60}, which is not a parameter's number; {self._type} has none")

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer that runs as it is has taken steps here."""
        return False

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._names and super().__contains__(parameter)

    def is_trained(self, parameter: torch.Tensor) -> bool:
        """Whether the engine updates it: not what was frozen."""
        return self.name_of(parameter) in self._trained

    def name_of(self, parameter: torch.Tensor) -> str:
        """Raises Error for a tensor that is not the model's."""
        name = self._names.get(id(parameter))
        if name is None:
            raise Error(f"optimizer.state: {parameter!r:.60} is not a parameter of the engine's model")
        return name

    @property
    def is_live(self) -> bool:
        """Whether the engine is in use: neither gone nor ended."""
        engine = self._engine()
        return engine is not None and isinstance(engine._engine, _engine.Engine)

    def note_options(self, group: int, values: Mapping[str, Any]) -> None:
        """A parameter has the state that belongs to an option where its group has, or has had, that option."""
        self._had[group].update(state for option, state in STATE_OF.items() if values.get(option))

    def _live(self):
        engine = self._engine()
        if engine is None:
            raise Error("the optimizer's engine is gone; expected it to be kept while its optimizer is used")
        return engine._engine

    def _has(self, parameter):
        """Whether torch's optimizer would have a state for it by now. The same on all ranks."""
        engine = self._live()
        if not self.is_trained(parameter) or id(parameter) not in self._group_of or not engine.state_names:
            return False
        if self._type == "Adagrad":
            return True  # from the beginning
        return bool(self.names_of_states(parameter)) and engine.num_updates(self.name_of(parameter)) > 0

    def _belongs(self, name, parameter, group):
        """Whether a parameter has this state, by what was saved of its group, else by what its group has."""
        option = next((option for option, state in STATE_OF.items() if state == name), None)
        return bool(group[option]) if option in group else name in self.names_of_states(parameter)

    def names_of_states(self, parameter: torch.Tensor) -> list[str]:
        """Those of the engine that torch's optimizer has of this parameter."""
        had = self._had[self._group_of[id(parameter)]]
        return [name for name in self._live().state_names if name in had or name not in STATE_OF.values()]

    def _as_torch_has_it(self, parameter, num_updates, tensors):
        has = self.names_of_states(parameter)
        state = {name: tensor for name, tensor in zip(self._live().state_names, tensors) if name in has}
        if self._type not in _TYPES_WITH_STEP:
            return state
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # as torch's optimizers
        return {"step": torch.tensor(float(num_updates), dtype=dtype, device="cpu") if self._step_is_a_tensor else num_updates, **state}


def _protected(value):
    """With tensors that cannot be written: it would have no effect."""
    def copied(tensor):
        with torch.inference_mode():
            return wrapper_tensors.with_parts(tensor, lambda _, part: part.clone()) if wrapper_tensors.is_wrapper(tensor) else tensor.clone()

    return map_tensors(value, copied, objects=True)


class WholeStates(States):
    """The same of an optimizer that runs as it is: what it keeps of each parameter, whatever that is."""

    def __init__(self, engine: Any, param_groups: list[dict[str, Any]], whole: WholeOptimizer) -> None:
        super().__init__(engine, param_groups, "", step_is_a_tensor=True)
        self._whole = whole

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        name = self.name_of(parameter)
        if not self._has(parameter):
            return _Copy()
        comm.check_usable(self, "state of the optimizer")
        found, _ = self._whole.gathered([name])
        return _Copy((key, _protected(value)) for key, value in found.get(name, {}).items())

    def gathered(self) -> dict[Any, Any]:
        """See `States.gathered`; with what belongs to no parameter."""
        comm.check_usable(self, "state_dict() of the optimizer")
        trained = {self.name_of(parameter): parameter for parameter in self._parameters if self.is_trained(parameter)}
        found, others = self._whole.gathered(trained)
        # An optimizer may keep states of a parameter that has never had a gradient.
        return {**{parameter: found[name] for name, parameter in trained.items() if found.get(name) or (name in found and self._has(parameter))}, **others}

    def write_others(self, states: Mapping[Any, Any]) -> None:
        """See `States.write_others`."""
        self._whole.set_states_of_none(dict(states))

    @property
    def has_stepped(self) -> bool:
        """See `States.has_stepped`."""
        return self._whole.num_steps > 0

    def parsed(self, parameter: torch.Tensor, state: Mapping[str, Any] | None,
               group: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
        """What `write` takes. Raises Error as the other one, and as WholeOptimizer.taken()."""
        state = self._whole.taken(self.name_of(parameter), self._as_dict(parameter, state))
        number = plain(state.get("step", group.get("step", 1)))
        is_count = isinstance(number, (int, float)) and 1 <= number <= _MOST_UPDATES  # not NaN
        return state, 0 if not state else int(number) if is_count else 1

    def write(self, states: Mapping[str, Any]) -> None:
        """See `States.write`."""
        comm.check_usable(self, "load_state_dict() of the optimizer")
        for name, (state, num_updates) in states.items():
            self._live().set_optimizer_states(name, [], num_updates)
            self._whole.set_state(name, state)
            self._whole.began_with.discard(name)

    def _has(self, parameter):
        name = self.name_of(parameter)
        return self.is_trained(parameter) and (name in self._whole.began_with or self._live().num_updates(name) > 0)
