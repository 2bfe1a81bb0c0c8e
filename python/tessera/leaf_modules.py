"""Leaf modules: all parameters of one are gathered together, when it is entered and for its backward, so that ranks may use different ones.

`deepspeed.utils.set_z3_leaf_modules` marks them, and the section `zero_optimization.leaf_module`. Elsewhere than at stage 3 over Gloo or NCCL
nothing has to be gathered together, and a mark does nothing.
"""
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tessera import zero
from tessera.containers import tensors_in

MARK = "_z3_leaf"


def attach(model: torch.nn.Module) -> None:
    """Let the marked modules inside of `model` gather their parameters from the next forward on. One that has no forward, a ModuleList of
    experts, does so when the module around it is entered."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not vars(module).get(MARK, False):
            continue
        host = name
        while host and type(modules[host]).forward is torch.nn.Module.forward:
            host = host.rpartition(".")[0]
        leaf = _Leaf(name[len(host):].lstrip("."))
        hooks = modules[host]._forward_pre_hooks.values()
        if not any(getattr(hook, "__self__", None) == leaf for hook in hooks):
            modules[host].register_forward_pre_hook(leaf.enter, prepend=True, with_kwargs=True)
            modules[host].register_forward_hook(leaf.leave, always_call=True)


def abandon(model: torch.nn.Module) -> None:
    """A forward has ended by what is no Exception, such as a KeyboardInterrupt: torch calls no hooks then."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            leaf = getattr(hook, "__self__", None)
            while isinstance(leaf, _Leaf) and leaf._open:
                leaf._leave((), failed=True)


def matching(model: torch.nn.Module, classes: Iterable[type | str] = (), names: Iterable[str] = (), suffixes: Iterable[str] = ()) -> list[torch.nn.Module]:
    """The modules of these classes, or classes' names, of these names in `named_modules()`, or ends of names."""
    kinds = tuple(one for one in classes if isinstance(one, type))
    texts, wanted, ends = {one for one in classes if isinstance(one, str)}, set(names), tuple(suffixes)
    return [module for name, module in model.named_modules()
            if isinstance(module, kinds) or name in wanted or (ends and name.endswith(ends)) or
            {type(module).__name__, type(module).__qualname__, f"{type(module).__module__}.{type(module).__qualname__}"} & texts]


class _Leaf:
    """The hooks of a module, for the marked one at `path` inside of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open: list[tuple[_Held | None, BaseException | None]] = []  # of the forwards that run, with what was being handled before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and other._path == self._path

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: Any) -> "_Leaf":
        return _Leaf(self._path)

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Gathers the leaf's parameters before its forward begins."""
        leaf = module.get_submodule(self._path)
        parameters = list(leaf.parameters())
        owner = zero.owner_of(parameters[0]) if parameters and vars(leaf).get(MARK, False) else None
        gathers = owner is not None and owner[0]._engine.shards_parameters and owner[0].world_size > 1
        held = _Held(parameters, owner[0]._engine.recomputes) if gathers else None
        self._open.append((held, sys.exc_info()[1]))  # what fails from here on is followed by leave()
        if held is not None:
            held.open()
            if torch.is_grad_enabled():
                held.watch_inputs(tensors_in([args, kwargs]))

    def leave(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        """Releases them when the forward has ended or failed, or keeps them for backward."""
        failure = sys.exc_info()[1]
        if self._open:  # else a hook before enter() has failed
            stops = type(failure).__name__ == "_StopRecomputationError"  # torch.utils.checkpoint has what it needs
            self._leave(output, failed=failure is not None and failure is not self._open[-1][1] and not stops)

    def _leave(self, output, failed):
        held, _ = self._open.pop()
        if held is not None:
            held.forward_has_ended(tensors_in(output), failed)


class _Held:
    """The parameters of a leaf in one forward, and in its backward. With `throughout` also in between, where recomputation may read them: that
    of what follows the leaf begins in the forward before it. Lives as long as the graph, whose outputs' hooks own it."""

    def __init__(self, parameters: list[torch.Tensor], throughout: bool) -> None:
        self._parameters, self._throughout = parameters, throughout
        self._gathered: zero.GatheredParameters | None = None
        self._inputs_to_come = 0
        self._hooks_of_inputs: list[Any] = []  # which may live longer, and must not keep it

    def __del__(self) -> None:
        for hook in self._hooks_of_inputs:
            hook.remove()
        self.close(failed=True)

    def open(self) -> None:
        """Collective, as `close` is."""
        if self._gathered is None:
            self._gathered = zero.GatheredParameters(self._parameters)
            self._gathered.__enter__()

    def close(self, failed: bool = False) -> None:
        """`failed`: ranks need not do it alike."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.__exit__(RuntimeError if failed else None, None, None)

    def watch_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Its backward ends with the gradients of its inputs, or with the whole one."""
        this = weakref.ref(self)

        def has_its_gradient(_):
            held = this()
            if held is not None:
                held._input_has_its_gradient()

        for tensor in {id(one): one for one in tensors if one.requires_grad}.values():
            self._inputs_to_come += 1
            self._hooks_of_inputs.append(tensor.register_hook(has_its_gradient))

    def forward_has_ended(self, outputs: Iterable[torch.Tensor], failed: bool) -> None:
        """Closes, unless they are held throughout."""
        differentiable = [one for one in outputs if one.requires_grad and not one.is_leaf] if torch.is_grad_enabled() and not failed else []
        if not differentiable or not self._throughout:
            self.close(failed)
        for tensor in differentiable:
            tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _):
        self.open()
        torch.autograd.Variable._execution_engine.queue_callback(self.close)

    def _input_has_its_gradient(self):
        self._inputs_to_come -= 1
        if self._inputs_to_come == 0:
            self.close()
