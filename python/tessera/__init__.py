"""Tessera: ZeRO training of unmodified PyTorch modules, with DeepSpeed's names.

    import tessera
    engine, optimizer, _, _ = tessera.initialize(model=model, config="ds_config.json")
"""
import os as _os
from pathlib import Path as _Path

import tessera._check_torch as _check_torch  # noqa: F401  imports torch, before the module that links it
from tessera import comm, errors, failures, optim, zero
from tessera._engine import __version__
from tessera.data import DataLoader
from tessera.engine import Engine
from tessera.errors import CheckpointError, CommError, ConfigError, DataError, Error
from tessera.estimate import estimate
from tessera.initialize import initialize
from tessera.launch import launch, run_command
from tessera.loss import chunked_cross_entropy
from tessera.memory import memory_report
from tessera.optimizer import Optimizer
from tessera.zero import GatheredParameters

failures.install()
_plugin = _Path(__file__).parent / "bin" / "libtessera_cuda.so"
if _plugin.exists() and not _os.environ.get("TESSERA_CUDA_PLUGIN"):  # empty: unset
    _os.environ["TESSERA_CUDA_PLUGIN"] = str(_plugin)

__all__ = ["CheckpointError", "CommError", "ConfigError", "DataError", "DataLoader", "Engine", "Error", "GatheredParameters", "Optimizer",
           "__version__", "chunked_cross_entropy", "comm", "errors", "estimate", "initialize", "launch",
           "memory_report", "optim", "run_command", "zero"]
