"""TrainersTest: reads checkpoints of other programs with Tessera and compares them, to the bit, with tensors.

The path of the program comes from ctest: TRAINERS_TOOL. Runs with the Python of .deps/venv.
"""
import base64
import json
import os
import subprocess
import tempfile
import unittest
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch

TOOL = os.environ["TRAINERS_TOOL"]
TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
         "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool}


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def decoded(value):
    """What Python gets back: python/tessera/json_values.py says how types that JSON lacks are written."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tessera" not in value:
        return {key: decoded(item) for key, item in value.items()}
    kind = value["$tessera"]
    if "items" in value:
        return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind]({decoded(key): decoded(item) for key, item in value["items"]})
    if kind == "array":
        return np.frombuffer(base64.b64decode(value["value"]), value["dtype"]).reshape(value["shape"])
    if kind == "dtype":
        return getattr(torch, value["value"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "float": float}[kind](decoded(value["value"]))


class Found:
    """What Tessera's reader found: `parameters`, `buffers` and `states` are tensors by name."""

    def __init__(self, answer, data):
        self.answer, self.data = answer, data
        self.names = [one["name"] for one in answer["parameters"]]
        self.parameters = {one["name"]: self.tensor(one["weights"]) for one in answer["parameters"]}
        self.aliases = {alias: one["name"] for one in answer["parameters"] for alias in one["aliases"]}
        self.buffers = {name: self.tensor(one) for name, one in answer["buffers"].items()}
        self.states = {one["name"]: {state: self.tensor(tensor) for state, tensor in one["states"].items()}
                       for one in answer["parameters"] if one["states"]}
        self.steps = {one["name"]: one["steps"] for one in answer["parameters"] if one["steps"]}
        self.groups = {one["name"]: one["group"] for one in answer["parameters"]}
        self.frozen = {one["name"] for one in answer["parameters"] if not one["trainable"]}

    def __getitem__(self, key):
        return self.answer[key]

    def tensor(self, one):
        dtype = TYPES[one["type"]]
        count = int(torch.tensor(one["shape"], dtype=torch.int64).prod()) if one["shape"] else 1
        if count == 0:
            return torch.empty(one["shape"], dtype=dtype)
        return torch.frombuffer(bytearray(self.data[one["begin"]:one["begin"] + count * dtype.itemsize]),
                                dtype=dtype).reshape(one["shape"])

    def entries(self):
        """As a state dict has them, with all names of tied parameters."""
        tied = {alias: self.parameters[name] for alias, name in self.aliases.items()}
        return {**self.parameters, **tied, **self.buffers}


class TrainersTest(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_trainers_")))

    def ask(self, reader, path, order=None):
        command = [TOOL, reader, str(path), str(self.folder / "data.bin")]
        if order is not None:
            (self.folder / "order.txt").write_text("".join(name + "\n" for name in order))
            command.append(str(self.folder / "order.txt"))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def read(self, reader, path, order=None):
        answer = self.ask(reader, path, order)
        self.assertIsNotNone(answer, f"{path} is not recognized")
        self.assertNotIn("error", answer)
        return Found(answer, (self.folder / "data.bin").read_bytes())

    def assert_refused(self, reader, path, *words):
        answer = self.ask(reader, path)
        self.assertIsNotNone(answer, f"{path} is not recognized")
        self.assertIn("error", answer)
        for word in words:
            self.assertIn(word, answer["error"])
        self.assertNotIn("\n", answer["error"])

    def assert_same(self, found, expected):
        """Tensors by name: the same names, types, shapes and bits."""
        self.assertEqual(sorted(found), sorted(expected))
        for name, tensor in expected.items():
            self.assertEqual((name, found[name].dtype, found[name].shape), (name, tensor.dtype, tensor.shape))
            self.assertEqual(bits(found[name]), bits(tensor), name)

    def assert_states(self, found, expected, steps=None):
        """`expected`: by parameter what the optimizer's state has, step included."""
        tensors = {name: {key: value for key, value in state.items() if key != "step" and value is not None}
                   for name, state in expected.items()}
        self.assertEqual(sorted(found.states), sorted(name for name, state in tensors.items() if state))
        for name, state in tensors.items():
            if state:
                self.assert_same(found.states[name], state)
        if steps is None:
            steps = {name: int(state["step"]) for name, state in expected.items() if "step" in state}
        self.assertEqual(found.steps, steps)

    def assert_all_read(self, found):
        self.assertEqual(found["not_read"], [])
