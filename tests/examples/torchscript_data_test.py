"""Data of models from Python: their order, their parts, several files; a trace for evaluation; predictions."""
import csv
import itertools
import json
import unittest

import h5py
import python_models as models
import torch
from safetensors.torch import load_file, save_file
from sampler import shuffled_indices
from torch.nn import functional as F
from torchscript_test import TorchScriptTest, train_plainly


class OrderTest(TorchScriptTest):
    def setUp(self):
        super().setUp()
        self.model, self.samples = self.export(models.classification())

    def loss(self, rows):
        return F.cross_entropy(self.model(self.samples["x"][rows]), self.samples["y"][rows])

    def train_plainly(self, order_of_epoch):
        """order_of_epoch(number): the samples of an epoch in order."""
        order = (rows[begin:begin + models.BATCH] for rows in map(list, map(order_of_epoch, itertools.count()))
                 for begin in range(0, len(rows) - models.BATCH + 1, models.BATCH))
        return train_plainly(self.model, itertools.islice(order, models.STEPS), self.loss)

    def test_without_shuffle(self):
        expected = self.train_plainly(lambda epoch: range(models.NUM_SAMPLES))
        self.assert_close(self.train(data={"shuffle": False}), expected)

    def check_random_split(self, keys, seed):
        shuffled = shuffled_indices(models.NUM_SAMPLES, seed, 0)
        test, rest = sorted(shuffled[:10]), sorted(shuffled[10:])
        expected = self.train_plainly(lambda epoch: [rest[i] for i in shuffled_indices(30, 42, epoch)])
        found = self.train(data={"eval_fraction": 0.25, **keys})
        self.assert_close(found, expected)
        self.model.load_state_dict(load_file(self.folder / "run" / "model.safetensors"))
        with torch.no_grad():
            self.assertAlmostEqual(self.results()["eval_loss"], self.loss(test).item(), delta=1e-5)
        return found

    def test_random_split(self):
        start = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = []
        for keys, seed in (({"split": "random"}, 0), ({"split_seed": 7}, 7)):
            self.model.load_state_dict(start)
            found.append(self.check_random_split(keys, seed))
        self.assertNotEqual(*found)
        self.assertEqual(self.train(data={"eval_fraction": 0.25, "split": "tail"}), self.train(data={"eval_fraction": 0.25}))

    def test_random_split_without_shuffle(self):
        rest = sorted(shuffled_indices(models.NUM_SAMPLES, 3, 0)[10:])
        expected = self.train_plainly(lambda epoch: rest)
        self.assert_close(self.train(data={"eval_fraction": 0.25, "split_seed": 3, "shuffle": False}), expected)


class FilesTest(TorchScriptTest):
    def setUp(self):
        super().setUp()
        self.model, self.samples = self.export(models.classification())
        for name, begin, end in (("part-00", 0, 7), ("part-01", 7, 8), ("part-02", 8, 29), ("part-10", 29, 40)):
            self.save(name, begin, end)

    def save(self, name, begin, end, **changes):
        tensors = {key: value[begin:end].clone() for key, value in {**self.samples, **changes}.items()}
        save_file(tensors, self.folder / f"{name}.safetensors")

    def test_several_files_are_one_set(self):
        expected = self.train(data={"eval_fraction": 0.25})
        results = self.results()
        with h5py.File(self.folder / "rest.h5", "w") as file:
            for key, value in self.samples.items():
                file[key] = value[29:].numpy()
        listed = [f"part-0{i}.safetensors" for i in range(3)]
        for path in ("part-*.safetensors", ["part-0[0-9].safetensors", "part-1?.safetensors"], [*listed, "rest.h5"]):
            with self.subTest(path=path):
                self.assertEqual(self.train(data={"path": path, "eval_fraction": 0.25}), expected)
                self.assertEqual(self.results()["eval_loss"], results["eval_loss"])
        self.assertNotEqual(self.train(data={"path": ["part-10.safetensors", *listed], "eval_fraction": 0.25}), expected)  # lists keep their order

    def test_a_name_with_brackets_is_a_name(self):
        self.save("a[1]", 0, 40)
        self.assertEqual(self.train(data={"path": "a[1].safetensors"}), self.train())

    def test_the_test_set_may_be_several_files(self):
        self.train(data={"eval_path": ["part-00.safetensors", "part-01.safetensors"]})
        self.assertEqual(self.results()["eval_samples"], 8)


class Noisy(torch.nn.Module):
    """Behaves differently in evaluation (dropout, running statistics); has a frozen layer and tied weights."""

    def __init__(self, size=12):
        super().__init__()
        self.first = torch.nn.Linear(6, size)
        self.norm = torch.nn.BatchNorm1d(size)
        self.fixed = torch.nn.Linear(size, size).requires_grad_(False)
        self.again = torch.nn.Linear(size, size)
        self.other = torch.nn.Linear(size, size)
        self.other.weight = self.again.weight
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(size, 4)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        return {"logits": self.head(self.other(torch.tanh(self.again(self.fixed(hidden))))), "hidden": hidden, "scale": self.head.weight.abs().max()}


class Exported(TorchScriptTest):
    def setUp(self):
        super().setUp()
        torch.manual_seed(1)
        self.model = Noisy()
        self.samples = {"x": models.random(80, 6, seed=2), "y": models.numbers(4, 80, seed=3)}
        save_file(self.samples, self.folder / "train.safetensors")
        self.trace(self.model.train(), "m.pt")
        self.trace(self.model.eval(), "eval.pt")

    def trace(self, model, name):
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        torch.jit.trace(model, self.samples["x"][:4], strict=False, check_trace=False).save(str(self.folder / name))
        model.load_state_dict(buffers, strict=False)

    def run_config(self, eval_path="eval.pt", **changes):
        config = super().run_config(**changes)
        if eval_path is not None:
            config["model"]["eval_path"] = eval_path
        return config

    def loss(self, rows):
        return F.cross_entropy(self.model(self.samples["x"][rows])["logits"], self.samples["y"][rows])

    def load(self):
        self.model.load_state_dict(load_file(self.folder / "run" / "model.safetensors"), strict=True)
        return self.model.eval()


class EvaluationTraceTest(Exported):
    def check(self, expect_equal=True, **changes):
        self.train(data={"eval_fraction": 0.25}, **changes)
        self.load()
        with torch.no_grad():
            difference = abs(self.results()["eval_loss"] - self.loss(slice(60, None)).item())
        if expect_equal:
            self.assertLess(difference, 1e-5)
        else:
            self.assertGreater(difference, 1e-3)

    def test_evaluates_without_dropout(self):
        for stage in (0, 3):
            with self.subTest(stage=stage):
                self.check(zero_optimization={"stage": stage, "unit_numel": 100, "stage3_param_persistence_threshold": 0})
        self.check(comm={"backend": "gloo"}, zero_optimization={"stage": 3, "unit_numel": 100, "stage3_param_persistence_threshold": 0})
        self.check(eval_path=None, expect_equal=False)  # what a trace in training mode gives alone

    def test_trains_with_dropout(self):
        noisy = self.train(ranks=1)
        self.assertEqual(self.train(ranks=1, eval_path=None), noisy)
        self.assertNotEqual(self.train(ranks=1, model="eval.pt", eval_path=None), noisy)

    def test_eval_and_resume_use_it_too(self):
        self.check()
        before = self.results()["eval_loss"]
        self.assert_succeeded(self.run_tool("eval", "run", "--nproc", 2))
        self.assertAlmostEqual(json.loads((self.folder / "run" / "eval_results.json").read_text())["eval_loss"], before, delta=1e-6)

    def test_one_that_forks_is_refused_at_stage_3(self):
        class Forks(Noisy):
            def forward(self, x):
                hidden = torch.tanh(self.norm(torch.jit.wait(torch.jit.fork(self.first, x))))
                return {"logits": self.head(self.other(torch.tanh(self.again(self.fixed(hidden)))))}

        self.trace(Forks().eval(), "forks.pt")
        self.train(data={"eval_fraction": 0.25}, eval_path="forks.pt", zero_optimization={"stage": 2})
        outcome = self.run_tool("train", self.write("config.json", self.run_config(eval_path="forks.pt", zero_optimization={"stage": 3})))
        self.assertEqual(outcome.code, 1, outcome)
        self.assertRegex(outcome.err, r"\Aerror: the model's \S+ uses torch.jit.fork: at stage 3 one thread at a time may run the model.*\n\Z")


class PredictTest(Exported):
    def setUp(self):
        super().setUp()
        self.train(ranks=1)
        self.load()
        self.new = models.random(11, 6, seed=9)  # does not divide by the batch of 3
        save_file({"x": self.new, "unused": torch.zeros(2)}, self.folder / "new.safetensors")
        with torch.no_grad():
            self.expected = self.model(self.new)

    def predict(self, *args):
        outcome = self.run_tool("predict", "run", *args)
        self.assert_succeeded(outcome)
        return outcome.out

    def assert_equal(self, found, expected):
        self.assertEqual((found.shape, found.dtype), (expected.shape, torch.float32))
        self.assertLess((found - expected).abs().max().item(), 1e-6)

    def test_safetensors_and_hdf5(self):
        self.assertEqual(self.predict("--file", "new.safetensors", "--out", "out.safetensors"), "out.safetensors: logits [11, 4], hidden [11, 12]\n")
        found = load_file(self.folder / "out.safetensors")
        self.assertEqual(sorted(found), ["hidden", "logits"], "'scale' has no rows")
        for name, tensor in found.items():
            self.assert_equal(tensor, self.expected[name])
        with h5py.File(self.folder / "new.h5", "w") as file:
            file["x"] = self.new.numpy()
        (self.folder / "train.safetensors").unlink()  # not needed
        self.predict("--file", "new.h5", "--out", "out.h5")
        with h5py.File(self.folder / "out.h5") as file:
            self.assert_equal(torch.from_numpy(file["logits"][:]), self.expected["logits"])

    def test_csv(self):
        self.predict("--file", "new.safetensors", "--out", "out.csv")
        with open(self.folder / "out.csv", newline="") as file:
            rows = list(csv.reader(file))
        self.assertEqual(rows[0], [f"logits_{i}" for i in range(4)] + [f"hidden_{i}" for i in range(12)])
        values = torch.tensor([[float(value) for value in row] for row in rows[1:]])
        self.assert_equal(values, torch.cat((self.expected["logits"], self.expected["hidden"]), 1))

    def test_several_files_and_a_single_output(self):
        class Plain(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(6, 1)

            def forward(self, x):
                return self.linear(x).squeeze(1), self.linear(x).squeeze(1) > 0

        model = Plain()
        torch.jit.script(model).save(str(self.folder / "m.pt"))
        save_file({"x": self.samples["x"], "y": self.samples["y"].float()}, self.folder / "train.safetensors")
        self.train(ranks=1, loss="mse", eval_path=None)
        model.load_state_dict(load_file(self.folder / "run" / "model.safetensors"))
        for i, part in enumerate(self.new.split(4)):
            save_file({"x": part.clone()}, self.folder / f"new-{i}.safetensors")
        self.predict("--file", "new-*.safetensors", "--out", "out.csv")
        with torch.no_grad():
            numbers, flags = model(self.new)
        with open(self.folder / "out.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["output_1"] for row in rows], [str(int(flag)) for flag in flags])
        self.assert_equal(torch.tensor([float(row["output_0"]) for row in rows]), numbers)

    def test_mistakes(self):
        def expect(*args, parts):
            error = self.error_of("predict", "run", *args)
            for part in parts:
                self.assertIn(part, error)
            self.assertEqual([path.name for path in self.folder.glob("out*")], [])
        expect("--file", "new.safetensors", parts=["--file new.safetensors: holds tensors; expected --out FILE.safetensors or --out FILE.csv"])
        expect("--out", "out.csv", parts=["--out out.csv: is for tensors; expected --file"])
        expect("--text", "a", parts=["this run's model takes tensors, not texts; expected --file"])
        expect("--file", "new.safetensors", "--out", "out.txt", parts=["--out out.txt: expected a name that ends in .safetensors, .csv"])
        for made_of in ("m.pt", "eval.pt", "train.safetensors"):
            expect("--file", "new.safetensors", "--out", made_of, parts=[f"--out {made_of}: is the input, which would be replaced"])
        expect("--file", "new.safetensors", "--out", "no/out.csv", parts=["--out no/out.csv: its folder does not exist; expected the name of a file"])
        expect("--file", "no.safetensors", "--out", "out.csv", parts=["no.safetensors", "No such file"])
        save_file({"z": self.new}, self.folder / "other.safetensors")
        expect("--file", "other.safetensors", "--out", "out.csv", parts=["other.safetensors: has no tensor 'x'; it holds 'z'"])
        save_file({"x": self.new[:, :5].clone()}, self.folder / "other.safetensors")
        expect("--file", "other.safetensors", "--out", "out.safetensors", parts=["other.safetensors: records 0 to 2: eval.pt: forward failed"])


if __name__ == "__main__":
    unittest.main()
