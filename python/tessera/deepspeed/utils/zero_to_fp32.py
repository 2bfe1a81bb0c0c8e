"""`deepspeed.utils.zero_to_fp32`: one model out of a sharded checkpoint of Tessera, by the command `tessera consolidate`."""
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tessera import arguments, comm, zero
from tessera.errors import CheckpointError, Error
from tessera.launch import command_path, environment_of_child

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False,
                                             lazy_mode: bool = False) -> dict[str, torch.Tensor]:
    """The state dict of a checkpoint's model: whole tensors on the CPU, parameters in fp32, their master weights. Local.

    Parameters
    ----------
    checkpoint_dir : str or Path
        A folder of `save_checkpoint`.
    tag : str, optional
        By default the one in its file "latest".
    exclude_frozen_parameters : bool
        True is refused: save with `exclude_frozen_parameters` then.
    lazy_mode : bool
        Tensors are read from the disk, a temporary file, when they are used.

    Raises
    ------
    CheckpointError
        There is none, it is damaged, or not Tessera's.
    """
    with tempfile.TemporaryDirectory(prefix="tessera_fp32_") as folder:
        path = Path(folder) / "model.pt"
        _consolidate(checkpoint_dir, path, tag, exclude_frozen_parameters, torch.float32)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=bool(lazy_mode))


def convert_zero_checkpoint_to_state_dict(checkpoint_dir: str | Path, output_dir: str | Path, dtype: Any = torch.float32,
                                          max_shard_size: str | None = "5GB", safe_serialization: bool = False, tag: str | None = None,
                                          exclude_frozen_parameters: bool = False) -> None:
    """Write that state dict to OUTPUT_DIR/pytorch_model.bin, or with `safe_serialization` to safetensors. Local.

    `dtype`: fp32, bf16 or fp16, of torch or by its name. A model above `max_shard_size` needs `safe_serialization`: it is written in
    shards with an index. Raises as `get_fp32_state_dict_from_zero_checkpoint`, and Error for a .bin that would be larger. After an error an
    earlier .bin is as it was.
    """
    os.makedirs(output_dir, exist_ok=True)
    if safe_serialization:
        more = ["--max-shard-size", str(max_shard_size)] if max_shard_size is not None else []
        whole = Path(output_dir) / "model.safetensors"
        _consolidate(checkpoint_dir, output_dir if more else whole, tag, exclude_frozen_parameters, dtype, *more)
        return
    path = Path(output_dir) / "pytorch_model.bin"
    most = None if max_shard_size is None else _bytes_of(max_shard_size)
    with tempfile.TemporaryDirectory(prefix=".tessera_", dir=output_dir) as folder:
        written = Path(folder) / path.name
        _consolidate(checkpoint_dir, written, tag, exclude_frozen_parameters, dtype)
        if most is not None and written.stat().st_size > most:
            raise Error(f"{path} would be larger than max_shard_size, {max_shard_size}, and .bin files are written whole; expected "
                        "safe_serialization=True, or max_shard_size=None")
        os.replace(written, path)


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir: str | Path, output_dir: str | Path, max_shard_size: str | None = "5GB",
                                               safe_serialization: bool = False, tag: str | None = None,
                                               exclude_frozen_parameters: bool = False) -> None:
    """As `convert_zero_checkpoint_to_state_dict`, in fp32."""
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
                                          exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> torch.nn.Module:
    """Move a module to the CPU, load the checkpoint's values into it, as far as names fit, and return it. Local.

    An engine that the module has, or that is given in its place, is ended. All ranks call it where that engine shards parameters. The module
    is a plain one afterwards, also where this is called inside of a GatheredParameters of its parameters without a `modifier_rank`.
    """
    from tessera.deepspeed.runtime.engine import end_engines_of  # it imports this package

    model = model if isinstance(model, torch.nn.Module) else model.module
    call = "load_state_dict_from_zero_checkpoint()"
    owners = map(zero.owner_of, model.parameters())
    is_collective = any(owner is not None and owner[0]._engine.shards_parameters for owner in owners)

    def read():  # before the engine is ended: without a checkpoint it stays
        return get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), {}

    state = comm.agreed(call, read) if is_collective else read()[0]
    zero.end_reading(model.parameters())
    end_engines_of(model, call)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def _consolidate(checkpoint_dir, out, tag, exclude_frozen_parameters, dtype, *more):
    if exclude_frozen_parameters:
        raise Error("exclude_frozen_parameters=True: all that a checkpoint has is read; expected False, or "
                    "save_checkpoint(…, exclude_frozen_parameters=True)")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected torch.float32, torch.bfloat16 or torch.float16")
    words = ["tessera", "consolidate", arguments.path(checkpoint_dir, "checkpoint_dir"), str(out), "--dtype", _DTYPES[dtype], *more]
    if tag is not None:
        words += ["--tag", str(tag)]
    done = subprocess.run(words, executable=command_path(), env=environment_of_child(), capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CheckpointError(lines[-1].removeprefix("error: ") if lines else f"tessera consolidate: exit code {done.returncode}")


def _bytes_of(size):
    """Of "5GB", "500MB", or a number. Raises ValueError for another text."""
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "B": 1, "": 1}
    text = str(size).strip().upper()
    unit = next(unit for unit in units if text.endswith(unit))
    try:
        return float(text.removesuffix(unit)) * units[unit]
    except ValueError:
        raise ValueError(f"max_shard_size is {size!r}; expected a number of bytes, a text such as \"5GB\", or None") from None
