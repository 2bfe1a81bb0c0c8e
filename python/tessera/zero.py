"""GatheredParameters: whole parameters in hand, for code that reads raw pointers, for inspection and initialisation."""
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tessera import _engine

_engines = weakref.WeakSet()


def register(engine: Any) -> None:
    """Make an engine known to GatheredParameters, until it is gone."""
    _engines.add(engine)


def engines() -> "weakref.WeakSet":
    """The engines of this process."""
    return _engines


class GatheredParameters:
    """Whole parameters inside of a `with`. Collective: all ranks enter and leave it with the same parameters.

    Operators gather the parameters they read by themselves. This is for what reads memory in another way, such as `numpy()` or
    `torch.save`, and for writing.

    Parameters
    ----------
    params : Parameter, iterable of them, or Module
        Those that no engine owns are whole anyway.
    modifier_rank : int, optional
        What this rank writes becomes every rank's value on leaving. Without it writes are refused.
    fwd_module : Module, optional
        Not needed; DeepSpeed's argument.
    enabled : bool
        False: does nothing.

    Raises
    ------
    CommError
        Ranks gather different parameters.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module, modifier_rank: int | None = None,
                 fwd_module: torch.nn.Module | None = None, enabled: bool = True) -> None:
        if isinstance(params, torch.Tensor):
            params = [params]
        elif isinstance(params, torch.nn.Module):
            params = params.parameters()
        self._params = list(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._open = []

    def __enter__(self) -> "GatheredParameters":
        wanted = {id(parameter) for parameter in self._params}
        for engine in list(_engines) if wanted else ():
            names, seen = [], set()
            for name, parameter in engine.named_tensors:
                if id(parameter) in wanted and id(parameter) not in seen:
                    names.append(name)
                    seen.add(id(parameter))
            if names:
                self._open.append(_engine.GatheredParameters(engine._engine, names, self._modifier_rank))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        for gathered in self._open:
            gathered.close() if kind is None else gathered.abandon()
        self._open = []
