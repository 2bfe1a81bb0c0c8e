"""Optimizers of torch as configurations, and the optimizer that `initialize` returns.

The engine updates its shards with formulas of its own. A torch optimizer says which formula and with which hyper-parameters; its
`step` is never called. What it is translated to is read once, but its param groups stay alive: what a scheduler or the script
writes into them (`group["lr"] = ...`) counts from the next step on.
"""
import copy
import json
import math
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessera import _engine, arguments
from tessera.errors import ConfigError, Error
from tessera.optimizer_options import HYPERS, OF_ALL_GROUPS, Options, as_hyper, full_name, is_option
from tessera.optimizer_state import STATE_OF, States, WholeStates, refuse_copy
from tessera.whole_optimizer import call_step_hooks

_REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")  # methods of the optimizer that was given
_MOVES = ("train", "eval")  # the same, where it has them


class Optimizer(torch.optim.Optimizer):
    """The optimizer of an engine, with the interface of torch.optim: `param_groups` and learning rates.

    Moments and master weights are in the engine's shards. Values written into `param_groups` count from the next step on; a
    schedule of the configuration sets the rates anew after each step. Other changes of the groups after `initialize` are an Error
    of the next step.
    """

    def __init__(self, engine: Any, client: torch.optim.Optimizer | None = None, groups: list[dict[str, Any]] | None = None) -> None:
        self._engine = weakref.ref(engine)
        self._accepts_groups = True
        self._mode = None  # of train() and eval(), as they were called last
        self._scheduled = bool(engine.config.get("scheduler", {}).get("type"))
        self._overruled = False  # a rate was written over the schedule's, for the next step
        kind = engine.config["optimizer"]["type"]
        self._whole = engine._whole_optimizer
        if self._whole is not None:
            self._options = Options.of_whole(client)
        else:
            self._options = Options.of_type(kind) if client is None else Options.of(client)
        hypers, names = engine._engine.hypers(), engine._engine.group_parameters()
        if client is not None:
            super().__init__([{"params": []}], client.defaults)
            self.param_groups = client.param_groups
        elif groups is not None:
            super().__init__([{"params": []}], _shown(kind, hypers[0]))
            filled = iter(hypers)
            self.param_groups = [{**(_shown(kind, next(filled)) if group["params"] else {}), **group} for group in groups]
        else:
            parameters = dict(engine.named_tensors)
            nothing = [{"params": []}]  # all are frozen: a model that is evaluated only
            super().__init__([{"params": [parameters[name] for name in of_group], **_shown(kind, hyper)}
                              for hyper, of_group in zip(hypers, names) if of_group] or nothing, _shown(kind, hypers[0]))
        self._accepts_groups = False
        given = client is not None or groups is not None
        # The engine has no groups without parameters but those of its configuration.
        has_all = given and len(names) == len(self.param_groups)
        self._indices = [i for i, of_group in enumerate([group["params"] for group in self.param_groups] if has_all else names)
                         if of_group or (given and not has_all)]
        self._structure = self._structure_now()
        self._client = client
        self._pushed = self._translated()
        self._states = (WholeStates(engine, self._groups(), self._whole) if self._whole is not None else
                        States(engine, self._groups(), kind, client is None or full_name(client).startswith("torch.")))
        self._note_options()
        if client is not None:
            self._take_the_place_of(client)
        if self._whole is not None:
            self.pull()  # it reads its rates in its groups

    # ------------------------------------------------------------------------------ the interface of torch.optim

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `engine.step()`. `closure` is called before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._live().step()
        return loss

    step.hooked = True  # engine.step() calls the hooks of steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `engine.zero_grad()`."""
        self._live().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises Error: the engine's shards are made by `initialize`."""
        if not self._accepts_groups:
            raise Error("add_param_group() after initialize(): the group would not be trained. Give all groups to initialize(); layers that "
                        "are to be trained later can be frozen with requires_grad_(False) after it, or have lr 0 until then")
        super().add_param_group(param_group)

    def train(self, mode: bool = True) -> None:
        """Call the `train()` of an optimizer that has one (schedulefree's), which moves the parameters. Others have nothing to do. Collective.

        Raises Error in the middle of an accumulation of gradients. A second call in a row does nothing.
        """
        self._move("train" if mode else "eval")

    def eval(self) -> None:
        """The same of `eval()`."""
        self._move("eval")

    def _move(self, mode):
        function = getattr(type(self._client), mode, None)
        if self._whole is None or not callable(function) or mode == self._mode:
            return
        self._live()._engine.apply_to_whole(lambda: self._whole.call(function, self._client))
        self._mode = mode

    @property
    def state(self) -> States:
        """By parameter, its moments: see States. Reading is Collective."""
        return self._states

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if "_states" not in self.__dict__:  # torch.optim.Optimizer.__init__, before there are any
            return
        written = {self._states.name_of(parameter): self._states.parsed(parameter, state) for parameter, state in value.items()}
        self._states.clear()
        self._states.write(written)

    def state_dict(self) -> dict[str, Any]:
        """What torch's would be: moments and step counts of whole parameters, on the CPU, and the param groups. Collective."""
        if self._whole is not None and self._whole.is_running:
            raise Error("state_dict() inside of step(): all ranks would have to call it; expected it after the step")
        self._states, kept = self._states.gathered(), self._states  # torch's function reads self.state
        try:
            return super().state_dict()
        finally:
            self._states = kept

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take moments, step counts and the values of param groups, from this `state_dict` or torch's of the same class. Collective.

        Raises
        ------
        Error
            It does not fit: other groups, shapes or states. Then nothing has changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        arguments.check_state(state_dict, ("state", "param_groups"), "the optimizer")
        for i, group in enumerate(state_dict["param_groups"]):
            arguments.check_state(group, ["params"], "the optimizer", f"load_state_dict(): param group {i}")
        saved_groups = copy.deepcopy(state_dict["param_groups"])  # as torch: training changes values in place
        sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups))
        if sizes != saved_sizes:
            raise Error(f"load_state_dict(): its param groups have {saved_sizes} parameters; expected {sizes}, as this optimizer's")
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups)):
            if self._whole is None and group.get("use_muon") != saved.get("use_muon"):  # the states have the same names, and mean something else
                raise Error(f"load_state_dict(): param group {i}: use_muon is {saved.get('use_muon')}; expected {group.get('use_muon')}, as "
                            "this optimizer's")
            self._check_values({**group, **saved}, f"load_state_dict(): param group {i}")
        states = self._states
        parsed = {states.name_of(parameter): states.parsed(parameter, state_dict["state"].get(index), saved)
                  for group, saved in zip(self.param_groups, saved_groups)
                  for parameter, index in zip(group["params"], saved["params"]) if states.is_trained(parameter)}
        states.write_others({key: value for key, value in state_dict["state"].items() if not isinstance(key, int)})
        states.write(parsed)
        self._mode = None
        for group, saved in zip(self.param_groups, saved_groups):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        self._note_options()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises CannotBeCopied: moments are in the engine's shards."""
        refuse_copy()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        engine = self._live()
        return engine._was_skipped

    # -------------------------------------------------------------------------------- for the engine

    def values(self) -> list[dict[str, Any]]:
        """What each param group holds besides its parameters; a tensor of one element as its value, unless the optimizer runs as it is."""
        def value_of(key, value):
            if not isinstance(value, torch.Tensor):
                return value
            return value.item() if value.numel() == 1 and (self._whole is None or key == "lr") else value.cpu()

        return [{key: value_of(key, value) for key, value in group.items() if isinstance(key, str) and key not in ("params", "param_names")}
                for group in self._groups()]

    def load_values(self, values: list[dict[str, Any]]) -> None:
        """Write what `values` has returned into the groups, of as many. What does not fit into one stays as it is, with a warning."""
        for i, (group, saved) in enumerate(zip(self._groups(), values, strict=True)):
            for key, value in saved.items():
                if key not in group and is_option(key):  # of another optimizer
                    continue
                if isinstance(group.get(key), tuple) and isinstance(value, list):  # another program's, read without its types
                    value = tuple(value)
                try:
                    self._check_values({**group, key: value}, f"param group {i}")
                except Error as error:
                    if self._live().global_rank == 0:
                        _engine.log_warning(f"load_checkpoint(): {error}; {key} stays {group.get(key)!r}")
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu"))
                else:
                    group[key] = value
        self._note_options()
        self._mode = None

    def call_hooks(self, when: str) -> None:
        """Call the hooks of steps of this optimizer and of the one it was translated from. `when`: "pre" or "post". One that runs as it is
        calls its own, and everybody's, in its step()."""
        if self._whole is not None:
            for hook in getattr(self, f"_optimizer_step_{when}_hooks").values():
                hook(self, (self,), {})
            return
        call_step_hooks(when, [self] if self._client is None else [self, self._client])

    def push(self) -> None:
        """Give the engine what has been written into the param groups. Raises Error for what cannot change after initialize()."""
        self._check_structure()
        now = self._translated()
        if now == self._pushed:
            return
        for i, (values, before) in enumerate(zip(now, self._pushed)):
            _check_numbers(values, before, f"optimizer.param_groups[{i}]")
        engine = self._live()._engine
        rates_changed = [values.get("lr") for values in now] != [values.get("lr") for values in self._pushed]
        for i, (index, values, before) in enumerate(zip(self._indices, now, self._pushed)):
            if values == before:
                continue
            if self._scheduled and values.get("betas") != before.get("betas") and schedule_sets_betas(self._live().config):
                raise Error(f"optimizer.param_groups[{i}]: betas={values['betas']} was written, and the schedule OneCycle of the "
                            "configuration sets them; expected cycle_momentum false there")
            try:
                engine.set_hyper(index, as_hyper(values))
            except Error as error:
                raise Error(f"optimizer.param_groups[{i}]: {error}") from None
            rate = {"lr": before["lr"]} if "lr" in before else {}  # rates are set together, below; a later group may be refused
            self._pushed[i] = {**{key: value for key, value in values.items() if key != "lr"}, **rate}
        if rates_changed:
            rates = engine.learning_rates
            for index, values in zip(self._indices, now):
                rates[index] = values.get("lr", rates[index])
            engine.set_learning_rates(rates)
            self._overruled = self._scheduled
        self._pushed = now
        self._note_options()

    def pull(self, skipped: bool = False) -> None:
        """Show the rates, and OneCycle's betas, that the configured schedule has for the next step. `skipped`: what was written for this one
        stays."""
        if not self._scheduled or (skipped and self._overruled):
            return
        engine = self._live()._engine
        if self._overruled:
            engine.use_configured_rates()
            self._overruled = False
        rates, hypers = engine.learning_rates, engine.hypers() if schedule_sets_betas(self._live().config) else None
        for index, group, pushed in zip(self._indices, self._groups(), self._pushed):
            group["lr"] = pushed["lr"] = rates[index]
            if hypers is not None and "betas" in group:
                group["betas"] = _betas_of(hypers[index])
                pushed["betas"] = list(group["betas"])

    def stepped(self) -> None:
        """A step was taken: for torch's schedulers, which warn when they run before the optimizer. Collective where it is rank 0's alone."""
        if self._whole is not None:
            self._whole.share_groups()
        for optimizer in (self, self._client):
            if optimizer is not None:
                optimizer._opt_called = True

    # ---------------------------------------------------------------------------------------- groups

    def _live(self):
        engine = self._engine()
        if engine is None:
            raise Error("the optimizer's engine is gone; expected it to be kept while its optimizer is used")
        return engine

    def _groups(self):
        return [group for group in self.param_groups if group["params"]]

    def _translated(self):
        return [self._options.values(group, f"optimizer.param_groups[{i}]") for i, group in enumerate(self.param_groups) if group["params"]]

    def _check_values(self, group, where):
        """Raises Error where the next step would refuse the values of a param group."""
        values = self._options.values(group, where)
        _check_numbers(values, values, where)
        for option in OF_ALL_GROUPS.get(self._options.type, ()):
            if option in values and values[option] != self._pushed[0][option]:
                raise Error(f"{where}: {option} is {values[option]}, and was {self._pushed[0][option]} at initialize(); expected no change")
        for option, state in STATE_OF.items():
            if values.get(option) and self._options.type != "Muon" and state not in self._live()._engine.state_names:
                raise Error(f"{where}: {option} is {values[option]}, and no param group had {option} at initialize(), so that there is no memory "
                            f"for it; expected {0 if option == 'momentum' else False}")

    def _note_options(self):
        for i, values in enumerate(self._translated()):
            self._states.note_options(i, values)

    def _structure_now(self):
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def _check_structure(self):
        if self._client is not None and self._client.param_groups is not self.param_groups:
            raise Error("the param groups of the optimizer that initialize() was given, or of the one that it returned, were replaced by "
                        "another list, which would have no effect: change the values of the groups, or call load_state_dict()")
        now = self._structure_now()
        if now == self._structure:
            return
        if len(now) != len(self._structure):
            raise Error(f"the optimizer has {len(now)} param groups, and had {len(self._structure)} at initialize(): a group of its own, "
                        "or one that went, would have no effect. Give all groups to initialize()")
        for i, (ids, before) in enumerate(zip(now, self._structure)):
            if ids != before:
                changed = next(iter(sorted(set(ids) ^ set(before))), ids[0] if ids else before[0])
                parameter = next((p for group in self.param_groups for p in group["params"] if id(p) == changed), None)
                name = "a parameter" if parameter is None else self._states.name_of(parameter)
                raise Error(f"optimizer.param_groups[{i}]: {name} was {'added' if changed in ids else 'taken out'} after initialize(), which "
                            "would have no effect. Change the groups before initialize(); afterwards change the values of a group, or "
                            "freeze parameters with requires_grad_(False)")

    def _take_the_place_of(self, client):
        """Calls of the optimizer that was translated mean this one: it has neither gradients nor states of its own. Until `release`."""
        ours = weakref.ref(self)
        self._states.replaced = {name: vars(client)[name] for name in ("state", *_REPLACED, *_MOVES) if name in vars(client)}
        for name in (*_REPLACED, *(name for name in _MOVES if callable(getattr(type(client), name, None)))):
            def forward(_, *args, _name=name, **kwargs):
                optimizer = ours()
                if optimizer is None:
                    raise Error(f"{_name}(): the engine of this optimizer is gone")
                return getattr(optimizer, _name)(*args, **kwargs)
            forward._wrapped_by_lr_sched = name == "step"  # torch's schedulers look for it; stepped() tells them of steps
            setattr(client, name, types.MethodType(forward, client))
        for name in vars(client):
            if name.startswith(("_optimizer_state_dict_", "_optimizer_load_state_dict_")):
                setattr(self, name, getattr(client, name))  # hooks: one dict for both
        client.state = self._states

    def leave(self) -> None:
        """The engine has ended: the optimizer that was translated has its own methods again."""
        if self._client is not None and self._client.state is self._states:  # not another engine's by now
            release(self._client)


def schedule_cycles_momentum(config: dict[str, Any]) -> bool:
    """Whether the schedule of a configuration, with all its values, is one for betas too."""
    scheduler = config.get("scheduler", {})
    return scheduler.get("type") == "OneCycle" and scheduler["params"].get("cycle_momentum", True)


def schedule_sets_betas(config: dict[str, Any]) -> bool:
    """Whether it sets those of the configuration's optimizer."""
    type_ = config["optimizer"]["type"]
    return schedule_cycles_momentum(config) and "betas" in HYPERS[type_] and type_ != "Muon"


def release(client: torch.optim.Optimizer) -> None:
    """An optimizer that was translated becomes what it was before, with the values that its groups have now. Others stay as they are.

    Raises ConfigError while its engine is in use.
    """
    states = client.state
    if not isinstance(states, States) or isinstance(client, Optimizer):
        return
    if states.is_live:
        raise ConfigError("the optimizer belongs to an engine already; call engine.destroy() on all ranks before it is given to another one")
    for name in (*_REPLACED, *_MOVES):
        vars(client).pop(name, None)
    vars(client).update(states.replaced)
    if states.has_stepped:  # what was there before belongs to other weights
        client.state = defaultdict(dict)


def _check_numbers(values, before, where):
    for key in before:
        if key not in values:
            raise Error(f"{where}: {key} was taken out after initialize(); expected a value")
    for key, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise Error(f"{where}: {key} is {number}; expected a finite number")


def _shown(type_, hyper):
    values = {key: hyper[key] for key in HYPERS[type_] if key != "betas"}
    if type_ == "Adafactor":
        values["eps"] = (hyper["eps"], hyper["eps2"])
    return {**values, "betas": _betas_of(hyper)} if "betas" in HYPERS[type_] else values


def _betas_of(hyper):
    return hyper["betas[0]"], hyper["betas[1]"]


def to_override(path: str, value: Any) -> str:
    """A key of the configuration with its value, as `--set` takes it."""
    return f"{path}={json.dumps(value)}"
