"""Models for tests with other libraries, and FormatsTest, which writes them with Tessera.

The path of the program comes from ctest: FORMATS_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import random
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

TOOL = os.environ["FORMATS_TOOL"]
TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
         "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
         "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "complex64": torch.complex64}
WORDS = {dtype: word for word, dtype in TYPES.items()}
FORMATS = {"safetensors": "model.safetensors", "pt": "model.pt", "h5": "model.h5"}


def bits(tensor):
    """A tensor's bytes, so that NaN equals itself and -0 differs from 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_tensor(shape, dtype, seed):
    """Any bit pattern, NaN and denormal numbers included."""
    count = int(np.prod(shape, dtype=np.int64))
    source = random.Random(seed)
    if dtype == torch.bool:
        return torch.tensor([source.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
    return torch.frombuffer(bytearray(source.randbytes(count * dtype.itemsize)) or bytearray(8), dtype=dtype)[:count].reshape(shape)


def every_kind():
    """[(name, tensor, aliases)]: each type, 0-dim, empty, one too odd to be aligned, tied, names beyond ASCII."""
    tensors = [(f"layer.{word}", random_tensor((3, 5), dtype, i), []) for i, (word, dtype) in enumerate(TYPES.items())]
    tensors += [(f"scalar.{word}", random_tensor((), dtype, 50 + i), []) for i, (word, dtype) in enumerate(TYPES.items())]
    tensors += [
        ("empty", torch.zeros(0), []),
        ("empty.rows", torch.zeros(0, 4, dtype=torch.int64), []),
        ("empty.columns", torch.zeros(4, 0, 3, dtype=torch.bfloat16), []),
        ("odd", random_tensor((7,), torch.uint8, 90), []),
        ("embedding.weight", random_tensor((11, 4), torch.float32, 91), ["lm_head.weight", "decoder.weight"]),
        ("tied.empty", torch.zeros(0), ["tied.empty.too"]),
        ("größe.重み", random_tensor((2, 2, 2), torch.float32, 92), ["🙂"]),
        ('quote " backslash \\ tab \t', random_tensor((2,), torch.float32, 93), []),
        ("deep", random_tensor((1, 2, 1, 3, 1, 2), torch.float16, 94), []),
        ("big", random_tensor((5_000,), torch.int16, 95), []),
        ("last", random_tensor((300,), torch.float32, 96), []),
    ]
    return tensors


def all_names(tensors):
    return {name: tensor for main, tensor, aliases in tensors for name in [main, *aliases]}


class FormatsTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_formats_")))

    def write(self, format_name, tensors, path=None, piece_bytes=1000, max_shard_bytes=0, expect=0):
        """Writes with ours; returns the path (or, where it is to fail, the message)."""
        data, spec, path = self.folder / "data.bin", self.folder / "spec.json", path or self.folder / FORMATS[format_name]
        with open(data, "wb") as file:
            for _, tensor, _ in tensors:
                file.write(bits(tensor))
        spec.write_text(json.dumps({
            "format": format_name, "path": str(path), "data": str(data), "piece_bytes": piece_bytes, "max_shard_bytes": max_shard_bytes, "sync": False,
            "tensors": [{"name": name, "shape": list(tensor.shape), "type": WORDS[tensor.dtype], "aliases": aliases}
                        for name, tensor, aliases in tensors]}))
        result = subprocess.run([TOOL, "write", str(spec)], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, expect, result.stderr)
        data.unlink()
        spec.unlink()
        if expect:
            return result.stderr
        self.report = json.loads(result.stdout)
        return path

    def assert_same(self, loaded, expected):
        self.assertEqual(set(loaded), set(expected))
        for name, tensor in expected.items():
            self.assertEqual((name, loaded[name].dtype, loaded[name].shape), (name, tensor.dtype, tensor.shape))
            self.assertEqual(bits(loaded[name]), bits(tensor), name)
