"""What torch.save and pickle wrote, read by Tessera: every object, protocol and format, value by value as torch.load has it.

Records of calls are compared by carrying them out here: the files are our own. ctest gives TORCH_FILE_TOOL.
"""
import collections
import importlib
import json
import math
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
import torch_file_zoo as zoo

TOOL = os.environ["TORCH_FILE_TOOL"]
ROOT = Path(__file__).resolve().parents[3]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def read(what, *paths):
    result = subprocess.run([TOOL, what, *map(str, paths)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise AssertionError(result.stderr)
    return [json.loads(line) for line in result.stdout.splitlines()]


def bits(tensor):
    tensor = tensor.detach().as_subclass(torch.Tensor).contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class ReadTensor:
    """A tensor as the tool shows it."""

    def __init__(self, fields):
        self.fields = fields


def looked_up(name):
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                value = getattr(value, part)
            return value
        except (ImportError, AttributeError):
            continue
    raise AssertionError(name)


def made(node):
    """The object of a record."""
    if node["object"].startswith("torch.") and node["object"].endswith("_rebuild_from_type_v2"):
        raise AssertionError("is a tensor")
    callable_, arguments = looked_up(node["object"]), [value_of(one) for one in node["arguments"]["tuple"]]
    try:
        made_ = callable_(*arguments)
    except TypeError:
        keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        made_ = callable_.__new__(callable_, *arguments, **keywords)
    if node["pairs"]:
        for key, value in node["items"]:
            made_[value_of(key)] = value_of(value)
    else:
        for value in node["items"]:
            made_.append(value_of(value))
    if node["state"] is not None:
        state = value_of(node["state"])
        if hasattr(made_, "__setstate__"):
            made_.__setstate__(state)
        else:
            for part in state if isinstance(state, tuple) else [state]:
                for key, value in (part or {}).items():
                    setattr(made_, key, value)
    return made_


def value_of(node):
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, list):
        return [value_of(one) for one in node]
    kind = next(key for key in ("long", "float", "bytes", "tuple", "set", "dict", "global", "tensor", "object") if key in node)
    content = node[kind]
    if kind == "long":
        return int(content)
    if kind == "float":
        return struct.unpack("<d", struct.pack("<Q", content))[0]
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(value_of(one) for one in content)
    if kind == "set":
        return {value_of(one) for one in content}
    if kind == "dict":
        read_dict = collections.OrderedDict((value_of(key), value_of(value)) for key, value in content)
        for key, value in (value_of(node["state"]) or {}).items():
            setattr(read_dict, key, value)
        return read_dict
    if kind == "global":
        return looked_up(content)
    return ReadTensor(content) if kind == "tensor" else made(node)


class TorchFileTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_torch_file_")))

    def assert_tensor(self, found, expected, where):
        fields = found.fields
        self.assertEqual(fields["type"], next((word for word, dtype in TYPES.items() if dtype == expected.dtype), str(expected.dtype)[6:]), where)
        self.assertEqual(fields["shape"], list(expected.shape), where)
        if expected.numel():
            self.assertEqual(fields["strides"], list(expected.stride()), where)
        self.assertEqual(fields["contiguous"], expected.is_contiguous(), where)
        self.assertEqual(fields["parameter"], isinstance(expected, torch.nn.Parameter), where)
        self.assertEqual(fields["requires_grad"], expected.requires_grad, where)
        self.assertEqual(fields["crc"], zlib.crc32(bits(expected)), where)

    def assert_same(self, found, expected, where=""):
        if isinstance(expected, torch.Tensor):
            self.assertIsInstance(found, ReadTensor, where)
            self.assert_tensor(found, expected, where)
        elif isinstance(expected, float):
            self.assertEqual(struct.pack("<d", found) if not math.isnan(expected) else math.isnan(found),
                             struct.pack("<d", expected) if not math.isnan(expected) else True, where)
        elif isinstance(expected, dict) and not isinstance(found, zoo.Attributes):
            self.assertEqual([type(key) for key in found], [type(key) for key in expected], where)
            self.assertEqual(list(found), list(expected), where)
            for key, value in expected.items():
                self.assert_same(found[key], value, f"{where}.{key}")
            self.assertEqual(getattr(found, "__dict__", {}).keys(), getattr(expected, "__dict__", {}).keys(), where)
        elif isinstance(expected, (list, tuple)) and type(expected) in (list, tuple, torch.Size):
            self.assertIs(type(found), list if isinstance(expected, list) else tuple, where)
            self.assertEqual(len(found), len(expected), where)
            for i, value in enumerate(expected):
                self.assert_same(found[i], value, f"{where}[{i}]")
        elif isinstance(expected, (np.number, np.bool_)):  # is read as the number that it is
            self.assertEqual((type(found), found), (type(expected.item()), expected.item()), where)
        elif isinstance(expected, (np.ndarray, np.generic)):
            self.assertEqual((found.dtype, found.shape, found.tobytes()), (expected.dtype, expected.shape, expected.tobytes()), where)
        elif isinstance(expected, bytearray):
            self.assertEqual(found, bytes(expected), where)
        elif isinstance(expected, (set, frozenset)):
            self.assertEqual(found, set(expected), where)
        else:
            self.assertIs(type(found), type(expected), where)
            self.assertEqual(found, expected, where)

    def other_pythons(self):
        """Of every other torch that is installed."""
        return [path for path in sorted(ROOT.glob(".deps/venv-torch*/bin/python"))
                if {"torch", "numpy"} <= {one.name for one in path.parents[1].glob("lib/python3*/site-packages/*")}]

    def test_every_object_protocol_and_format(self):
        """Another torch's in its own protocol and the newest."""
        for number, python in enumerate([None, *self.other_pythons()]):
            folder = self.folder / str(number)
            folder.mkdir()
            if python is None:
                with warnings.catch_warnings(action="ignore"):
                    zoo.main(folder)
            else:
                subprocess.run([python, "-B", "-W", "ignore", zoo.__file__, folder, "2", "5"], check=True)
            paths = sorted(folder.iterdir())
            self.assertGreater(len(paths), 150 if python else 300)
            trees = read("verify", *[path for path in paths if path.suffix == ".pt"]) + read("pickle", *[path for path in paths if path.suffix == ".pkl"])
            paths.sort(key=lambda path: path.suffix != ".pt")
            for path, tree in zip(paths, trees, strict=True):
                with self.subTest(python=python, file=path.name):
                    if path.name.startswith("cyclic"):
                        self.assertIn("the dump is too large", tree.get("error", ""))
                        continue
                    self.assertNotIn("error", tree)
                    if path.suffix == ".pt":
                        expected = torch.load(path, weights_only=False)
                        self.assertEqual(tree["verified"], ".zip." in path.name)
                        self.assertTrue(tree["recognized"])
                    else:
                        expected = pickle.loads(path.read_bytes())
                    self.assert_same(value_of(tree["root"]), expected)

    def test_older_protocols_are_refused_by_name(self):
        value = {"a": 1}
        for protocol in (0, 1):
            (self.folder / "old.pkl").write_bytes(pickle.dumps(value, protocol))
            self.assertIn("one of protocol 0 or 1 is not read", read("pickle", self.folder / "old.pkl")[0]["error"])
            for zipped in (True, False):
                torch.save(value, self.folder / "old.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
                self.assertRegex(read("torch", self.folder / "old.pt")[0]["error"], "protocol 0 or 1(, which)? is not read")

    def test_storages_are_shared(self):
        base = torch.arange(10.)
        for zipped in (True, False):
            path = self.folder / "shared.pt"
            torch.save([base, base[3:], torch.zeros(2)], path, _use_new_zipfile_serialization=zipped)
            keys = [one["tensor"]["storage"] for one in read("torch", path)[0]["root"]]
            self.assertEqual((keys[0] == keys[1], keys[0] == keys[2]), (True, False))

    def test_a_module(self):
        """Its classes are names; its tensors are read."""
        for zipped in (True, False):
            path = self.folder / "module.pt"
            torch.save(zoo.Model(), path, _use_new_zipfile_serialization=zipped)
            tree = read("torch", path)[0]
            self.assertEqual(tree["root"]["object"], "torch_file_zoo.Model")
            state = value_of({"dict": [pair for pair in tree["root"]["state"]["dict"] if pair[0] in ("_buffers", "training")], "state": None})
            self.assertEqual(state["_buffers"]["steps"].fields["shape"], [])

    def test_what_is_no_plain_tensor_is_said(self):
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        for value, word in ((torch.eye(3).to_sparse(), "sparse"), (torch.eye(3).to_sparse_csr(), "sparse"), (quantized, "quantized"), (torch.ones(2, device="meta"), "meta"),
                            (torch.ones(2, dtype=torch.complex64).conj(), '"conj"'), (torch.ones(2, dtype=torch.complex64).conj().imag, '"neg"'),
                            (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested")):
            path = self.folder / "other.pt"
            torch.save({"a": value}, path)
            self.assertIn(word, read("torch", path)[0].get("error", ""), word)

    def test_archives_of_other_settings(self):
        path = self.folder / "a.pt"
        value = {"a": torch.arange(1000.), "b": torch.ones(3)}
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(value, path)
        finally:
            torch.serialization.set_crc32_options(True)
        tree = read("verify", path)[0]
        self.assertEqual(tree["verified"], False)
        self.assert_same(value_of(tree["root"]), value)
        for alignment in (1, 4096):
            with torch.utils.serialization.config.patch({"save.storage_alignment": alignment}):
                torch.save(value, path)
            self.assert_same(value_of(read("verify", path)[0]["root"]), value)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(self.folder / "b.pt", "w") as new:  # as another program stores it
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
        self.assert_same(value_of(read("verify", self.folder / "b.pt")[0]["root"]), value)

    def test_other_files(self):
        scripted = self.folder / "script.pt"
        torch.jit.script(torch.nn.Linear(2, 2)).save(scripted)
        self.assertIn("is a TorchScript program", read("torch", scripted)[0]["error"])
        arrays = self.folder / "arrays.npz"
        np.savez(arrays, a=np.ones(3))
        for path, word in ((arrays, "without a data.pkl"), (Path(__file__), "is no file of torch.save")):
            tree = read("torch", path)[0]
            self.assertIn(word, tree["error"])
            self.assertFalse(tree["recognized"])
        (self.folder / "p.pt").write_bytes(pickle.dumps({"a": 1}))
        self.assertIn("is a pickle, but torch.save did not write it", read("torch", self.folder / "p.pt")[0]["error"])
        (self.folder / "lfs.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        self.assertIn("is a Git LFS pointer", read("torch", self.folder / "lfs.pt")[0]["error"])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
