"""The code of docs/python.md runs as it stands."""
import os
import re
import tempfile
import unittest
from collections import OrderedDict
from pathlib import Path

import tessera
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()


def blocks(heading):
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


class Document(unittest.TestCase):
    def test_code_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            self.addCleanup(os.chdir, os.getcwd())
            os.chdir(folder)
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


if __name__ == "__main__":
    unittest.main()
