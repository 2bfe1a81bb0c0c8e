"""Models and data from Python: the same losses as PyTorch's own training, and weights that go back."""
import math
import sys
import unittest
from pathlib import Path

import h5py
import python_models as models
import torch
from safetensors.torch import load_file, save_file
from sampler import batches
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import ToolTest  # noqa: E402

LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss,
          "bce_with_logits": F.binary_cross_entropy_with_logits, "nll": lambda x, y: F.nll_loss(x, y)}


def output_of(given, key):
    if isinstance(given, dict):
        return given.get(key, next(iter(given.values())))
    return given[0] if isinstance(given, tuple) else given


def loss_of(model, data, inputs, name, rows):
    arguments = [data[key][rows] for key in inputs]
    if name == "model":
        return output_of(model(*arguments, data["y"][rows]), "loss")
    return LOSSES[name](output_of(model(*arguments), "logits"), data["y"][rows])


def train_plainly(model, order, loss_of):
    """PyTorch's losses, of a step for each batch of rows in `order`."""
    optimizer, losses = models.optimizer(model), []
    for rows in order:
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_parts(model, data, inputs, name, size, accumulation=1, world=2):
    """A step's loss is the mean over the micro-batches of all ranks, as with DDP and accumulation."""
    def loss_of_step(rows):
        share = len(rows) // (world * accumulation)
        parts = [rows[i:i + share] for i in range(0, len(rows), share)]
        return sum(loss_of(model, data, inputs, name, part) for part in parts) / len(parts)
    return train_plainly(model, batches(size, models.BATCH, models.STEPS), loss_of_step)


class TorchScriptTest(ToolTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        torch.set_num_threads(1)

    def run_config(self, loss="cross_entropy", inputs=("x",), model="m.pt", data=None, **changes):
        model_section = {"type": "torchscript", "path": model, "loss": loss}
        data_section = {"type": "tensors", "path": "train.safetensors", "inputs": list(inputs), "target": "y", **(data or {})}
        return self.config(
            model={key: value for key, value in model_section.items() if value is not None},
            data={key: value for key, value in data_section.items() if value is not None},
            train_batch_size=models.BATCH,
            trainer={"max_steps": models.STEPS, "eval_every_epochs": 0, "eval_batch_size": 3, "output_dir": "run", "device": "cpu",
                     "overwrite_output_dir": True},
            optimizer={"type": "AdamW", "params": {"lr": models.LEARNING_RATE, "weight_decay": 0.01}}, **changes)

    def export(self, case, script=torch.jit.script):
        model, data = case
        script(model).save(str(self.folder / "m.pt"))
        save_file(data, self.folder / "train.safetensors")
        return model, data

    def train(self, *args, ranks=2, **changes):
        name = self.write("config.json", self.run_config(**changes))
        outcome = self.run_tool("train", name, "--nproc", ranks, *args)
        self.assert_succeeded(outcome)
        return [loss for loss, _ in self.losses()]

    def assert_close(self, found, expected, limit=1e-5):
        self.assertEqual(len(found), len(expected))
        self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), limit, (found, expected))


class ParityTest(TorchScriptTest):
    def test_equals_pytorch_at_the_first_and_the_last_stage(self):
        """tests/python/ddp_test.py holds what PyTorch's own ranks compute."""
        model, data = self.export(models.classification())
        found = [self.train("--set", f"zero_optimization.stage={stage}", "--set", "zero_optimization.unit_numel=100",
                            "--set", "zero_optimization.stage3_param_persistence_threshold=0") for stage in (0, 3)]
        expected = train_in_parts(model, data, ["x"], "cross_entropy", models.NUM_SAMPLES)
        self.assertGreater(expected[0] - expected[-1], 0.05)  # it has trained
        self.assert_close(found[0], expected)
        self.assertEqual(found[1], found[0], "not the same bits")

    def check(self, case, inputs=("x",), loss="cross_entropy", accuracy=None, accumulation=1, **changes):
        """Losses, weights and the evaluation of a run whose last 15 samples are the test set, against PyTorch's."""
        model, data = case
        size, num_test = models.NUM_SAMPLES - 15, 15
        data_section = {"eval_fraction": num_test / models.NUM_SAMPLES + 1e-9, **changes.pop("data", {})}
        found = self.train("--set", f"gradient_accumulation_steps={accumulation}", loss=loss, inputs=inputs, data=data_section,
                           zero_optimization={"stage": 3}, **changes)
        self.assert_close(found, train_in_parts(model, data, inputs, loss, size, accumulation))

        state = load_file(self.folder / "run" / "model.safetensors")
        model.load_state_dict(state, strict=True)  # replaces what PyTorch has trained by what Tessera has
        results = self.results()
        self.assertEqual(results["eval_samples"], num_test)
        with torch.no_grad():
            test_loss = loss_of(model.eval(), data, inputs, loss, slice(size, None)).item()
        self.assertAlmostEqual(results["eval_loss"], test_loss, delta=1e-5)
        self.assertEqual("eval_accuracy" in results, accuracy is not None)
        if accuracy is not None:
            test_set = {key: value[size:] for key, value in data.items()}
            self.assertAlmostEqual(results["eval_accuracy"], accuracy(model, test_set), delta=1e-6)

    def test_classification_with_accumulation(self):
        def accuracy(model, data):
            return (model(data["x"]).argmax(1) == data["y"]).float().mean().item()
        self.check(self.export(models.classification(), lambda model: torch.jit.trace(model, torch.ones(2, 3, 6, 6))),
                   accuracy=accuracy, accumulation=3)

    def test_segmentation_with_ignored_labels(self):
        def accuracy(model, data):
            counted = data["y"] != -100
            return (model(data["x"])["out"].argmax(1) == data["y"])[counted].float().mean().item()
        self.check(self.export(models.segmentation()), accuracy=accuracy)

    def test_regression_losses_with_two_inputs(self):
        for loss in ("mse", "l1", "smooth_l1"):
            with self.subTest(loss=loss):
                self.check(self.export(models.regression()), ("x", "w"), loss)
        with self.subTest(loss="bce_with_logits"):
            target = models.numbers(2, models.NUM_SAMPLES, 2, seed=5).float()
            self.check(self.export(models.regression(target)), ("x", "w"), "bce_with_logits")

    def test_loss_of_the_model(self):
        self.check(self.export(models.own_loss()), loss="model")

    def test_model_alone_is_the_loss_where_nothing_is_said(self):
        self.export(models.own_loss())
        self.assertEqual(self.train(loss=None), self.train(loss="model"))

    def test_bf16(self):
        """Inputs are cast; class numbers are not."""
        model, data = self.export(models.classification())
        expected = train_in_parts(model, data, ["x"], "cross_entropy", models.NUM_SAMPLES)
        self.assert_close(self.train(bf16={"enabled": True}, zero_optimization={"stage": 3}), expected, 0.05)


class DataTest(TorchScriptTest):
    """Ways to store the same samples give the same bits, on one rank."""

    def train(self, *args, **changes):
        return super().train(*args, ranks=1, **changes)

    def setUp(self):
        super().setUp()
        self.export(models.classification())
        self.expected = self.train()

    def test_hdf5(self):
        """tests/examples/tensor_file_test.cc has other ways to store it."""
        tensors = load_file(self.folder / "train.safetensors")
        with h5py.File(self.folder / "train.h5", "w") as file:
            file.create_dataset("set/x", data=tensors["x"].numpy(), chunks=(7, 3, 6, 6), compression="gzip", dtype=">f4")
            file.create_dataset("set/y", data=tensors["y"].numpy(), dtype="u1")
        self.assertEqual(self.train(inputs=["set/x"], data={"path": "train.h5", "target": "set/y"}), self.expected)

    def test_types(self):
        tensors = load_file(self.folder / "train.safetensors")
        save_file({"x": tensors["x"].double(), "y": tensors["y"].to(torch.uint8), "odd": torch.zeros(3, dtype=torch.uint8)},
                  self.folder / "types.safetensors")
        self.assertEqual(self.train(data={"path": "types.safetensors"}), self.expected)

    def test_test_set_of_its_own(self):
        tensors = load_file(self.folder / "train.safetensors")
        save_file({key: value[:7].clone() for key, value in tensors.items()}, self.folder / "test.safetensors")
        self.assertEqual(self.train(data={"eval_path": "test.safetensors"}), self.expected)
        self.assertEqual(self.results()["eval_samples"], 7)
        results = self.results()
        self.assertTrue(math.isfinite(results["eval_loss"]))
        save_file({"x": tensors["x"][:7].double(), "y": tensors["y"][:7].to(torch.uint8)}, self.folder / "test.safetensors")
        self.assertEqual(self.train(data={"eval_path": "test.safetensors"}), self.expected)
        self.assertEqual(self.results()["eval_loss"], results["eval_loss"])

    def test_running_statistics_are_those_of_training(self):
        """The forward pass on the first samples before training changes no buffers, although a trace in training mode changes them."""
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(108), torch.nn.Linear(108, 5))
        torch.jit.trace(model, torch.randn(6, 3, 6, 6), check_trace=False).save(str(self.folder / "m.pt"))
        before = int(model[1].num_batches_tracked)
        self.train()
        state = load_file(self.folder / "run" / "model.safetensors")
        self.assertEqual(int(state["1.num_batches_tracked"]) - before, models.STEPS)


if __name__ == "__main__":
    unittest.main()
