"""Consolidated checkpoints in the hands of torch, safetensors and h5py, compared with the checkpoint's own model.h5 as h5py
shows it: another way through the files, by HDF5's virtual datasets.

The path comes from ctest: CONSOLIDATE_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np
import safetensors.torch
import torch

TOOL = os.environ["CONSOLIDATE_TOOL"]
SANITIZED = b"__asan_init" in Path(TOOL).read_bytes()  # then red zones and shadow count as the program's memory
OUTPUTS = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin", "h5": "model.h5"}


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def tool(*args):
    return subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, check=True).stdout


class ConsolidateTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_consolidate_")))

    def consolidate(self, format_name, dtype):
        path = self.folder / OUTPUTS[format_name]
        tool("convert", self.folder / "checkpoints", path, format_name, dtype)
        return path

    def test_every_format_holds_what_the_checkpoint_shows(self):
        for world in (1, 2, 3, 8):
            tool("sample", self.folder / "checkpoints", world)
            tensors = safetensors.torch.load_file(self.consolidate("safetensors", "fp32"))
            torch_path = self.consolidate("pt", "fp32")
            h5_path = self.consolidate("h5", "fp32")
            for mmap in (False, True):
                from_torch = torch.load(torch_path, weights_only=True, mmap=mmap)
                self.assertEqual(set(from_torch), set(tensors))
                for name, tensor in tensors.items():
                    self.assertEqual((from_torch[name].dtype, from_torch[name].shape), (tensor.dtype, tensor.shape))
                    self.assertEqual(bits(from_torch[name].numpy()), bits(tensor.numpy()), name)
            with h5py.File(h5_path) as file, h5py.File(self.folder / "checkpoints" / "step" / "model.h5") as checkpoint:
                self.assertEqual({key.replace("%2F", "/") for key in file}, set(tensors))
                for key in file:
                    tensor = tensors[key.replace("%2F", "/")]
                    self.assertEqual((file[key].shape, bits(file[key][()])), (tuple(tensor.shape), bits(tensor.numpy())), key)
                self.compare_with_checkpoint(tensors, checkpoint)
            self.assertEqual(tensors["embedding.weight"].data_ptr() == tensors["head.weight"].data_ptr(), False)
            self.assertEqual(from_torch["embedding.weight"].data_ptr(), from_torch["head.weight"].data_ptr())

    def compare_with_checkpoint(self, tensors, checkpoint):
        num_compared = 0
        for name, tensor in tensors.items():
            key = name.replace("/", "%2F")
            if key not in checkpoint:
                continue
            shown = checkpoint[key][()]
            num_compared += 1
            self.assertEqual(shown.shape, tuple(tensor.shape), name)
            if shown.dtype.kind == "f":
                self.assertEqual(tensor.dtype, torch.float32, name)
                with np.errstate(over="ignore"):
                    expected = shown.astype(np.float32)
                nan = np.isnan(expected)
                self.assertTrue(np.array_equal(nan, tensor.isnan().numpy()), name)
                self.assertEqual(bits(np.where(nan, 0, expected)), bits(np.where(nan, 0, tensor.numpy())), name)
            else:
                self.assertEqual((shown.dtype, bits(shown)), (tensor.numpy().dtype, bits(tensor.numpy())), name)
        self.assertGreaterEqual(num_compared, 12)

    def check_narrow(self, word, dtype):
        wide = safetensors.torch.load_file(self.consolidate("safetensors", "fp32"))
        for format_name in OUTPUTS:
            path = self.consolidate(format_name, word)
            if format_name == "h5":
                if dtype == torch.bfloat16:  # which numpy does not have
                    continue
                with h5py.File(path) as file:
                    narrow = {key.replace("%2F", "/"): torch.from_numpy(np.asarray(file[key][()])) for key in file}
            else:
                narrow = torch.load(path, weights_only=True) if format_name == "pt" else safetensors.torch.load_file(path)
            self.assertEqual(set(narrow), set(wide))
            for name, tensor in wide.items():
                expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
                self.assertEqual(narrow[name].dtype, expected.dtype, name)
                if not tensor.is_floating_point():
                    self.assertEqual(bits(narrow[name].numpy()), bits(tensor.numpy()), name)
                    continue
                self.assertTrue(torch.equal(narrow[name].isnan(), expected.isnan()), name)
                self.assertTrue(torch.equal(narrow[name].nan_to_num(0, 1e4, -1e4), expected.nan_to_num(0, 1e4, -1e4)), name)
        return wide

    def test_narrow_types_are_what_torch_makes_of_fp32(self):
        tool("sample", self.folder / "checkpoints", 3)
        self.check_narrow("bf16", torch.bfloat16)
        wide = self.check_narrow("fp16", torch.float16)
        # What was finite and is infinite now is counted (the sample's aliases share their elements).
        reports = {word: json.loads(tool("convert", self.folder / "checkpoints", self.folder / "m.pt", "pt", word)) for word in ("fp32", "fp16")}
        shared = torch.load(self.folder / "m.pt", weights_only=True)
        distinct = {shared[name].data_ptr(): name for name in sorted(wide) if shared[name].numel() and shared[name].is_floating_point()}
        expected = sum(int((shared[name].isinf() & wide[name].isfinite()).sum()) for name in distinct.values())
        self.assertGreater(expected, 0)
        self.assertEqual(reports["fp16"]["overflowed"] - reports["fp32"]["overflowed"], expected)  # of fp64 there may be what fp32 cannot hold
        name = reports["fp16"]["first_overflowed"]
        self.assertTrue((shared[name].isinf() & wide[name].isfinite()).any(), name)

    def test_memory_does_not_grow_with_the_model(self):
        """At most 64 MiB, in all, for models of 20 and of 100 MB."""
        for target in (*OUTPUTS, "dcp", "universal", "tessera"):
            peaks = []
            for count in (5, 25):
                tool("layers", self.folder / str(count), 2, count)
                out = self.folder / f"{count}_{OUTPUTS.get(target, target)}"
                report = json.loads(tool("convert", self.folder / str(count), out, target))
                self.assertGreater(report["bytes"], count * 4_000_000 - 1)
                peaks.append(report["peak_kib"])
            if not SANITIZED:
                self.assertLess(max(peaks), 64 << 10, target)
            self.assertLess(peaks[1] - peaks[0], 4 << 10, target)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
