"""Converted checkpoints in the hands of torch: torch.distributed.checkpoint reads the distributed one, torch.load the files of DeepSpeed's
universal one. Each has the bits of the consolidated model. That runs go on from them is shown by tests/peers/continued_suite.py.

The path comes from ctest: CONSOLIDATE_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TOOL = os.environ["CONSOLIDATE_TOOL"]
FROZEN = {"frozen.weight": torch.bfloat16, "frozen.table": torch.float16, "frozen.exact": torch.float64}
STATES = ("exp_avg", "exp_avg_sq")


def tool(*args):
    return json.loads(subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, check=True).stdout or "null")


def without_nan(tensor):
    return tensor.nan_to_num(nan=0.125) if tensor.is_floating_point() else tensor


class ConvertTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_convert_")))

    def model(self, world):
        """The consolidated model of a sample on so many ranks."""
        tool("sample", self.folder / "checkpoints", world)
        tool("convert", self.folder / "checkpoints", self.folder / "model.pt", "pt", "fp32")
        return torch.load(self.folder / "model.pt", weights_only=True)

    def same(self, found, expected, name):
        """As the consolidated model has it, in fp32; but what is frozen, and buffers, are in their own types."""
        self.assertEqual(found.shape, expected.shape, name)
        self.assertEqual(found.dtype, FROZEN.get(name, found.dtype), name)
        self.assertTrue(torch.equal(without_nan(found.to(expected.dtype)), without_nan(expected)), name)

    def test_dcp_to_torch_save_gives_the_model_and_the_optimizer(self):
        for world in (1, 2, 3):
            model = self.model(world)
            tool("convert", self.folder / "checkpoints", self.folder / "dcp", "dcp")
            dcp_to_torch_save(self.folder / "dcp", self.folder / "dcp.pt")
            found = torch.load(self.folder / "dcp.pt", weights_only=False)
            self.assertEqual(set(found["model"]), set(model))
            for name, tensor in model.items():
                self.same(found["model"][name], tensor, name)
            states = found["optimizer"]["state"]
            self.assertEqual(set(states) & set(FROZEN), set())
            self.assertIn("fc.weight", states)
            for name, state in states.items():
                self.assertEqual(set(state), {*STATES, "step"})
                for key in STATES:
                    self.assertEqual((state[key].shape, state[key].dtype), (model[name].shape, torch.float32))
                self.assertEqual((state["step"].shape, state["step"].dtype), ((), torch.float32))
            self.assertEqual([len(group["params"]) for group in found["optimizer"]["param_groups"]], [7, 1])
            self.assertFalse({name for group in found["optimizer"]["param_groups"] for name in group["params"]} & set(FROZEN))

    def test_universal_has_the_same_tensors(self):
        model = self.model(3)
        tool("convert", self.folder / "checkpoints", self.folder / "dcp", "dcp")
        universal = Path(tool("convert", self.folder / "checkpoints", self.folder / "universal", "universal")["output"])
        dcp_to_torch_save(self.folder / "dcp", self.folder / "dcp.pt")
        states = torch.load(self.folder / "dcp.pt", weights_only=False)["optimizer"]["state"]
        for name, state in states.items():
            folder = universal / "zero" / name
            self.same(torch.load(folder / "fp32.pt", weights_only=True)["param"], model[name], name)
            for key in STATES:
                self.same(torch.load(folder / f"{key}.pt", weights_only=True)["param"], state[key], f"{name}: {key}")
            self.assertEqual(torch.load(folder / "step.pt", weights_only=True).shape, ())
        for file, lacks in (("mp_rank_00_model_states.pt", set()), ("zero_pp_rank_0_mp_rank_00_model_states.pt", {*states, "head.weight"})):
            saved = torch.load(universal / file, weights_only=False)
            self.assertEqual(set(saved["module"]), set(model) - lacks)
            self.assertEqual(saved["shared_params"], {"head.weight": "embedding.weight"})
            self.assertEqual(set(saved["frozen_param_shapes"]), set(FROZEN))
            self.assertEqual(set(saved["param_shapes"][0]) | set(saved["param_shapes"][1]), set(states))
        self.same(saved["module"]["frozen.table"], model["frozen.table"], "frozen.table")

    def test_the_model_has_the_type_that_is_asked_for(self):
        model = self.model(2)
        tool("convert", self.folder / "checkpoints", self.folder / "dcp", "dcp", "bf16")
        wanted = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in model.items() if tensor.is_floating_point()}
        dcp.load({"model": wanted}, checkpoint_id=self.folder / "dcp", no_dist=True)
        metadata = dcp.FileSystemReader(self.folder / "dcp").read_metadata().state_dict_metadata
        for name, tensor in wanted.items():
            self.assertEqual(metadata[f"model.{name}"].properties.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(without_nan(tensor), without_nan(model[name].to(torch.bfloat16))), name)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
