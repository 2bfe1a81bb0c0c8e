"""The memory that a model's state takes, before it is trained."""
from pathlib import Path
from typing import Any

import torch

from tessera import _engine, arguments, module_state
from tessera.errors import ConfigError
from tessera.initialize import json_of


def estimate(model: torch.nn.Module, world: int = 1, config: dict[str, Any] | str | Path | None = None) -> "Estimate":
    """Bytes of model state on one rank, at each ZeRO stage, by the formula that real allocations are tested against.

    Parameters
    ----------
    model : torch.nn.Module
        On any device, "meta" too: shapes alone count.
    world : int
        Ranks.
    config : dict, str or Path, optional
        Precision, optimizer and so on, as for `initialize`. All stages are shown, those below 3 without groups of ranks and
        `offload_param`, which they do not have. What is offloaded counts, too.

    Returns
    -------
    Estimate
        A dict by stage of {"parameters", "gradients", "master", "optimizer", "total"}, with `checkpoint.async` "snapshot", too; printed,
        a table. Activations and buffers of communication come on top: `tessera memory` measures those.

    Raises
    ------
    ConfigError
        The configuration cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is {arguments.shown(model)}; expected a torch.nn.Module")
    seen, parameters = set(), []
    for name, parameter in module_state.named_parameters(model):
        if id(parameter) not in seen:
            parameters.append((name, list(parameter.shape), parameter.dtype, parameter.requires_grad))
        seen.add(id(parameter))
    if arguments.integer(world, "world", -(2**31), 2**31 - 1) < 1:
        raise ConfigError(f"world is {world}; expected a number of ranks from 1")
    if config is not None and not isinstance(config, (dict, str, Path)):
        raise ConfigError(f"config is {arguments.shown(config)}; expected a dict or the path of a "
                          "ds_config.json")
    is_file = isinstance(config, (str, Path))
    given = {} if is_file else config or {}
    has_batch = given.get("train_batch_size", "auto") != "auto"
    default = {} if has_batch else {"train_micro_batch_size_per_gpu": 1}  # a size is required, and does not count here
    text = arguments.path(config, "config") if is_file else json_of({**default, **given})
    table = Estimate()
    parsed = _engine.read_config(text, is_file, world, [])[0]
    for stage in range(4):
        table[stage] = _engine.state_bytes(parsed, parameters, world, stage)
        table[stage]["total"] = sum(table[stage].values())
    return table


class Estimate(dict):
    """What `estimate` returns: bytes by stage and kind; as text, a table."""

    _COLUMNS = ("parameters", "gradients", "master", "optimizer", "snapshot", "total")

    def __str__(self):
        columns = [name for name in self._COLUMNS if name in self[0]]
        lines = ["stage" + "".join(f"{name:>14}" for name in columns)]
        for stage, sizes in self.items():
            lines.append(f"{stage:<5}" + "".join(f"{_shown(sizes[name]):>14}" for name in columns))
        return "\n".join(lines)

    __repr__ = __str__


def _shown(size):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, {"B": "KiB", "KiB": "MiB", "MiB": "GiB", "GiB": "TiB"}[unit]
    return f"{size:.1f} {unit}" if unit != "B" else f"{size} B"
