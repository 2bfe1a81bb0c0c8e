"""A checkpoint of Tessera 0.1.0 is read, and training goes on from it with the losses that 0.1.0 had.

checkpoint_of_0.1.0.tar.gz: 0.1.0's example_minimal on two ranks at stage 2 saved after 6 of 12 steps (checkpoints/, format version 1), and wrote
the loss of each step and rank (losses.txt: step, rank, loss). A rank's batch in a step is randn with the seed 2 * step + rank.
"""
import json
import subprocess
import tarfile
import tempfile
import unittest
from pathlib import Path

import tessera
import torch
from ranks import TESSERA, environment
from torch import nn

ARCHIVE = Path(__file__).with_name("checkpoint_of_0.1.0.tar.gz")
SAVED_AT, STEPS, RANKS, MICRO_BATCH = 6, 12, 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.fc2(torch.relu(self.fc1(x))), y)


def batch(step):
    """What all ranks had."""
    parts = []
    for rank in range(RANKS):
        torch.manual_seed(2 * step + rank)
        parts.append(torch.randn(MICRO_BATCH, 16))
    return torch.cat(parts)


class EarlierVersion(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_earlier_")))
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(self.folder)

    def test_its_checkpoint_is_whole(self):
        done = subprocess.run([TESSERA, "inspect", self.folder / "checkpoints", "--verify", "--json"], capture_output=True, text=True, check=False,
                              env=environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual((found["format_version"], found["global_steps"], found["world_size"], found["zero_stage"], found["verified"]["problems"]),
                         (1, SAVED_AT, RANKS, 2, []))

    def test_training_goes_on_with_its_losses(self):
        sums = dict.fromkeys(range(STEPS), 0.0)
        for line in (self.folder / "losses.txt").read_text(encoding="utf-8").splitlines():
            step, _, loss = line.split()
            sums[int(step)] += float(loss)
        for stage in (0, 3):
            with self.subTest(stage=stage):
                engine, *_ = tessera.initialize(model=Net(), config={
                    "train_batch_size": RANKS * MICRO_BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                    "zero_optimization": {"stage": stage}})
                self.addCleanup(engine.destroy)
                engine.load_checkpoint(self.folder / "checkpoints")
                self.assertEqual(engine.global_steps, SAVED_AT)
                for step in range(SAVED_AT, STEPS):
                    x = batch(step)
                    loss = engine(x, x.sum(1, keepdim=True))
                    self.assertAlmostEqual(loss.item(), sums[step] / RANKS, delta=1e-5 * sums[step], msg=f"step {step}")
                    engine.backward(loss)
                    engine.step()


if __name__ == "__main__":
    unittest.main()
