"""The code of docs/python.md, and the commands of docs/migrating.md, run as they stand."""
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections import OrderedDict
from pathlib import Path

import safetensors.torch
import tessera
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import TESSERA  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(heading, page="python.md", language="python"):
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)[1]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


class Document(unittest.TestCase):
    def test_code_runs(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            names = {"dataset": torch.utils.data.TensorDataset(torch.randn(256, 784), torch.arange(256) % 10)}
            for code in blocks("Train"):
                exec(code, names)
            self.assertEqual(names["engine"].global_steps, 12)
            self.assertTrue(Path("model.safetensors").exists())
            for code in blocks("Checkpoints"):
                exec(code, names)
            self.assertEqual(names["client_state"], {"epoch": 2})
            names["model"] = torch.nn.Sequential(OrderedDict(head=torch.nn.Linear(4, 2), experts=torch.nn.Sequential(torch.nn.Linear(2, 2))))
            names["engine"] = tessera.initialize(model=names["model"], config={"train_batch_size": 1, "zero_optimization": {"stage": 3}})[0]
            names.update(x=torch.ones(1, 4), nn=torch.nn)
            names["engine"].backward(names["model"](names["x"]).sum())
            whole, branches = blocks("Whole parameters")
            exec(whole, names)
            self.assertEqual(names["engine"].full_parameter("head.weight").abs().sum(), 0)
            names["engine"].step()
            exec(branches, names)
            self.assertEqual(names["engine"].global_steps, 2)

class Migrating(unittest.TestCase):
    """Each source is written by its program (that of DeepSpeed by `convert`, from one of torch), of a model that plain PyTorch has trained for three steps."""

    def setUp(self):
        self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(4, 8), head=torch.nn.Linear(8, 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def save_distributed(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        with warnings.catch_warnings():  # that there is no process group
            warnings.simplefilter("ignore")
            dcp.save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=folder)

    def run_block(self, block):
        """Each command; what `consolidate` writes are the weights."""
        lines = [line for line in block.splitlines() if line]
        self.assertTrue(lines)
        for line in lines:
            words = shlex.split(line, comments=True)
            self.assertEqual(words[0], "tessera", line)
            done = subprocess.run([TESSERA, *words[1:]], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, line + "\n" + done.stdout + done.stderr)
            if words[1] == "consolidate":
                written = safetensors.torch.load_file(words[3])
                self.assertEqual(set(written), set(self.weights), line)
                for name, value in self.weights.items():
                    self.assertTrue(torch.equal(written[name], value.to(written[name].dtype)), line)
                Path(words[3]).unlink()
        return lines

    def check(self, heading, commands=("inspect", "consolidate", "convert")):
        (block,) = blocks(heading, "migrating.md", "sh")
        self.assertEqual([line.split()[1] for line in self.run_block(block)], list(commands), heading)

    def test_deepspeed(self):
        self.save_distributed("dcp")
        self.run_block("tessera convert dcp runs/ds --to universal")
        self.check("DeepSpeed")
        (code,) = blocks("DeepSpeed", "migrating.md")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        names = {"tessera": tessera, "model": self.model, "optimizer": optimizer, "scheduler": scheduler, "config": {"train_batch_size": 1}}
        for parameter in self.model.parameters():
            parameter.data.zero_()
        exec(code, names)
        self.assertEqual(names["engine"].global_steps, 3)
        for name, value in names["engine"].state_dict().items():
            self.assertTrue(torch.equal(value, self.weights[name]), name)

    def test_fsdp(self):
        self.save_distributed("runs/fsdp/step-1000")
        self.check("FSDP and torchtitan")

    def test_trainer(self):
        folder = Path("output/checkpoint-500")
        folder.mkdir(parents=True)
        torch.save(self.model.state_dict(), folder / "pytorch_model.bin")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.0}))
        self.check("Accelerate and the HF Trainer")

    def test_lightning(self):
        torch.save({"epoch": 3, "global_step": 3, "pytorch-lightning_version": "2.5.0", "state_dict": self.model.state_dict(),
                    "optimizer_states": [self.optimizer.state_dict()], "lr_schedulers": []}, "epoch=3.ckpt")
        self.check("Lightning, and files of torch.save")

    def test_models(self):
        Path("my-model").mkdir()
        Path("my-model/config.json").write_text("{}")
        torch.save(self.model.state_dict(), "my-model/pytorch_model.bin")
        self.check("Models")
        self.assertTrue(torch.equal(torch.load("my-model-copy.pt", weights_only=True)["head.weight"], self.weights["head.weight"]))

    def test_the_way_back(self):
        self.save_distributed("dcp-before")
        self.run_block("tessera convert dcp-before runs/mine --to tessera")
        self.check("The way back", ["convert"] * 3)
        self.assertTrue(torch.equal(torch.load("model.pt", weights_only=True)["head.weight"], self.weights["head.weight"]))
        state = {"model": {name: torch.zeros_like(value) for name, value in self.weights.items()}}
        (folder,) = {path.parent for path in Path("dcp").rglob(".metadata")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder)
        for name, value in self.weights.items():
            self.assertTrue(torch.equal(state["model"][name], value), name)


if __name__ == "__main__":
    unittest.main()
