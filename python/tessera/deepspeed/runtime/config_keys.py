"""Configurations as scripts of DeepSpeed give them to `initialize`: what Accelerate and TRL write in another form."""
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from tessera import _engine, arguments, comm
from tessera.errors import ConfigError
from tessera.initialize import json_of


def readable(config: Any) -> Any:
    """A configuration as Tessera reads it; another thing than a dict as it is.

    A value that is infinite, Accelerate's way to say never, is left out. A key with dots at the top is put into its section, where it counts
    instead of what the section has; a fraction, of elements, is rounded down. Raises ConfigError where the section is none.
    """
    if not isinstance(config, dict):
        return config
    result = {key: value for key, value in config.items() if not _is_infinite(value) and not _is_dotted(key)}
    for key, value in config.items():
        if _is_dotted(key) and not _is_infinite(value):
            *path, last = key.split(".")
            section = result
            for i, name in enumerate(path):
                section[name] = dict(section.get(name) or {}) if isinstance(section.get(name), (dict, type(None))) else section[name]
                section = section[name]
                if not isinstance(section, dict):
                    raise ConfigError(f"config: {key} is given, and {'.'.join(path[:i + 1])} is no section; expected a dict there")
            section[last] = int(value) if isinstance(value, float) and math.isfinite(value) and path[0] == "zero_optimization" else value
    return result


def given(config: Any) -> dict[str, Any]:
    """What a configuration, or the file that a path names, holds. Raises ConfigError for a file that is none."""
    if isinstance(config, (str, os.PathLike)):
        return json.loads(_engine.read_document(arguments.path(config, "config")))
    return config if isinstance(config, dict) else {}


def parsed(config: Any, overrides: Sequence[str] = ()) -> tuple[_engine.Config, list[str]]:
    """(The configuration, warnings) of a readable one, for the ranks that there are. Raises ConfigError."""
    is_file = not isinstance(config, dict)
    text = arguments.path(config, "config") if is_file else json_of(config)
    return _engine.read_config(text, is_file, comm.get_world_size(), list(overrides))[:2]


def names_optimizer(given: dict[str, Any]) -> bool:
    """Whether it says how to train: without "optimizer" DeepSpeed trains nothing."""
    return any(given.get(key) for key in ("optimizer", "optim", "learning_rate", "trainer"))  # with those of Hugging Face, which count, too


def has_lists_of_schedule(given: dict[str, Any]) -> bool:
    """Whether an option of the schedule has a value for each param group."""
    section = given.get("scheduler")
    params = section.get("params") if isinstance(section, dict) else None
    return isinstance(params, dict) and any(isinstance(value, (list, tuple)) for value in params.values())


def defaults(given: dict[str, Any]) -> list[str]:
    """DeepSpeed's defaults that are not Tessera's, of keys that it does not have: "KEY=VALUE"."""
    return [] if {"gradient_clipping", "max_grad_norm"} & given.keys() else ["gradient_clipping=1.0"]


def _is_infinite(value):
    return isinstance(value, float) and math.isinf(value)


def _is_dotted(key):
    return isinstance(key, str) and "." in key
