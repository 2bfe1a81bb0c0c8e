"""Configurations as scripts of DeepSpeed give them to `initialize`: what Accelerate and TRL write in another form."""
import json
import math
import os
from pathlib import Path
from typing import Any

from tessera.errors import ConfigError


def readable(config: Any) -> Any:
    """A configuration as Tessera reads it; another thing than a dict, or a file that is Hjson, as it is.

    A value that is infinite, Accelerate's way to say never, is left out. A key with dots at the top is put into its section, where it counts
    instead of what the section has; a fraction, of elements, is rounded down. Raises ConfigError where the section is none.
    """
    if isinstance(config, (str, os.PathLike)):
        config = _of_hjson(config)
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
            section[last] = int(value) if isinstance(value, float) and path[0] == "zero_optimization" else value
    return result


def _of_hjson(path):
    """What a file holds that is no JSON, but Hjson, which DeepSpeed reads; else the path. Without the package hjson Tessera's reader of
    configurations says what is wrong with it; comments alone are not."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError):
        return path
    try:
        json.loads(text)
        return path
    except ValueError:
        pass
    try:
        import hjson
    except ImportError:
        return path
    try:
        return hjson.loads(text)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{path}: {error}; expected JSON or Hjson") from None


def names_optimizer(config: Any) -> bool:
    """Whether a configuration, or the file that a path names, says how to train: without "optimizer" DeepSpeed trains nothing."""
    return _names(config, ("optimizer", "optim", "learning_rate", "trainer"))  # with those of Hugging Face, which count, too


def defaults(config: Any) -> list[str]:
    """DeepSpeed's defaults that are not Tessera's, of keys that a configuration, or a file, does not have: "KEY=VALUE"."""
    return [] if _names(config, ("gradient_clipping", "max_grad_norm"), also_false=True) else ["gradient_clipping=1.0"]


def _names(config, keys, also_false=False):
    """Whether it has one of the keys, with a value that is not empty, or `also_false` with any. True for what cannot be read, whose errors
    are said by who reads it."""
    if isinstance(config, (str, os.PathLike)):
        try:
            text = Path(config).read_text()
        except (OSError, ValueError):
            return True
        return any(f'"{key}"' in text for key in keys)
    return not isinstance(config, dict) or any(key in config if also_false else config.get(key) for key in keys)


def _is_infinite(value):
    return isinstance(value, float) and math.isinf(value)


def _is_dotted(key):
    return isinstance(key, str) and "." in key
