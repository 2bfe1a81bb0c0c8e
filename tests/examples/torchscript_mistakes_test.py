"""Models and data from Python that do not fit or fail: each error is one line with what was found, where and what was expected."""
import shutil
import unittest

import h5py
import python_models as models
import torch
from safetensors.torch import save_file
from torchscript_test import TorchScriptTest


class Moody(torch.nn.Module):
    """Its output has another shape in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)

    def forward(self, x):
        scores = self.linear(x)
        return scores if self.training else scores.squeeze(1)


class MistakesTest(TorchScriptTest):
    def setUp(self):
        super().setUp()
        self.model, self.data = self.export(models.classification())

    def expect(self, *parts, ranks=1, engine_made=False, **changes):
        """`engine_made`: found with the engine there, before the first step; the run's folder has been made, and nothing written."""
        self.expect_of(self.run_config(**changes), *parts, ranks=ranks, engine_made=engine_made)

    def expect_of(self, config, *parts, ranks=1, engine_made=False):
        name = self.write("config.json", config)
        with self.subTest(parts=parts, ranks=ranks):
            outcome = self.run_tool("train", name, "--nproc", ranks)
            if engine_made:
                self.assertEqual([(path.name, path.stat().st_size) for path in (self.folder / "run").iterdir()], [("metrics.jsonl", 0)])
                shutil.rmtree(self.folder / "run")
            self.assert_one_error(outcome, *parts)

    def save(self, name, **changes):
        save_file({key: value.contiguous() for key, value in {**self.data, **changes}.items() if value is not None}, self.folder / name)
        return {"path": name}

    def test_keys(self):
        self.expect('model.loss: found "entropy"', 'did you mean "cross_entropy"?', loss="entropy")
        self.expect("data.inputs: is missing", data={"inputs": None})
        self.expect("data.target: is missing", "cross_entropy", data={"target": None})
        self.expect("data.eval_fraction", "one of the two", data={"eval_fraction": 0.5, "eval_path": "train.safetensors"})
        self.expect("data.pth", 'did you mean "path"?', data={"pth": "a"})
        self.expect('data.split: found "tial"', 'did you mean "tail"?', data={"split": "tial"})
        self.expect("data.split_seed: found beside data.split", data={"split": "tail", "split_seed": 3})

    def test_keys_of_losses_and_metrics(self):
        def expect(*parts, loss="cross_entropy", engine_made=False, **keys):
            config = self.run_config(loss=loss)
            config["model"].update(keys)
            self.expect_of(config, *parts, engine_made=engine_made)
        expect('model.metrics: found "acuracy" (did you mean "accuracy"?); expected some of accuracy, f1, ', metrics=["f1", "acuracy"])
        expect('model.metrics: found "f1"; expected some of mse, rmse, mae, r2 for model.loss mse', metrics=["f1"], loss="mse")
        expect("model.metrics: found beside model.loss model", "expected a loss function", metrics=["accuracy"], loss="model")
        expect("model.class_weights: found beside model.loss mse; expected it with cross_entropy or nll only", class_weights=[1], loss="mse")
        expect("model.label_smoothing: found beside model.loss nll", label_smoothing=0.1, loss="nll")
        expect("model.label_smoothing: found beside a class of weight 0", label_smoothing=0.1, class_weights=[1, 0])
        expect("model.pos_weight: found beside model.loss cross_entropy", pos_weight=[1])
        expect("m.pt: model.class_weights has 3 numbers, and the model gives 5 classes", class_weights=[1, 2, 3], engine_made=True)
        expect("train.safetensors: 'y' has samples of shape []; expected [T], at least two tokens, for model.loss causal_lm", loss="causal_lm")

    def test_model_files(self):
        self.expect("no.pt: cannot be opened: No such file", model="no.pt")
        self.expect(f"{self.folder}: is a folder", model=str(self.folder), ranks=2)
        self.write("text.pt", "text")
        self.expect("text.pt: no TorchScript module", "torch.jit.save", model="text.pt")
        torch.save(self.model.state_dict(), self.folder / "state.pt")
        self.expect("state.pt: no TorchScript module", "torch.jit.save", model="state.pt")
        content = (self.folder / "m.pt").read_bytes()
        (self.folder / "cut.pt").write_bytes(content[:len(content) // 2])
        self.expect("cut.pt: no TorchScript module", model="cut.pt")
        torch.jit.freeze(torch.jit.script(self.model.eval())).save(str(self.folder / "frozen.pt"))
        self.expect("frozen.pt: the module has no parameters", "freeze", model="frozen.pt")
        torch.jit.script(self.model.requires_grad_(False)).save(str(self.folder / "still.pt"))
        self.expect("still.pt: none of the module's 8 parameters requires a gradient", model="still.pt")

    def test_data_files(self):
        self.expect("no.safetensors: No such file", data={"path": "no.safetensors"}, ranks=2)
        self.expect("cannot open no.h5: No such file", data={"path": "no.h5"})
        self.expect("m.pt: its name ends in '.pt'", ".safetensors, .h5", data={"path": "m.pt"})
        self.expect("train.safetensors: has no tensor 'z'; it holds 'x', 'y'", inputs=["z"])
        content = (self.folder / "train.safetensors").read_bytes()
        (self.folder / "cut.safetensors").write_bytes(content[:-8])
        self.expect("cut.safetensors", "truncated", data={"path": "cut.safetensors"})
        self.write("text.h5", "text")
        self.expect("cannot open text.h5: no HDF5 file", data={"path": "text.h5"})
        with h5py.File(self.folder / "some.h5", "w") as file:
            file["x"], file["y"], file["t"] = self.data["x"].numpy(), self.data["y"].numpy(), ["a", "b"]
            file["u"] = self.data["y"].numpy().astype("u4")
        self.expect("some.h5: has no tensor 'z'; it holds 't', 'u', 'x', 'y'", data={"path": "some.h5", "target": "z"})
        self.expect("some.h5: 't' holds text", data={"path": "some.h5", "target": "t"})
        self.expect("some.h5: 'u' holds an unsigned integer of 4 bytes", data={"path": "some.h5", "target": "u"})
        with h5py.File(self.folder / "linked.h5", "w") as file:  # tests/checkpoint/hdf5 has the other ways to be elsewhere
            file["y"], file["x"] = self.data["y"].numpy(), h5py.ExternalLink("some.h5", "x")
        self.expect("linked.h5: 'x' leads by an external link to 'x' in 'some.h5'", data={"path": "linked.h5"})
        cut = (self.folder / "some.h5").read_bytes()[:6000]
        (self.folder / "cut.h5").write_bytes(cut)
        self.expect("cut.h5", data={"path": "cut.h5"})

    def test_samples(self):
        self.expect("few.safetensors: 'y' has 39 samples, but 'x' has 40", data=self.save("few.safetensors", y=self.data["y"][:39]))
        self.expect("none.safetensors: 'x' has no samples", data=self.save("none.safetensors", x=self.data["x"][:0]))
        self.expect("one.safetensors: 'y' is a single number", data=self.save("one.safetensors", y=torch.tensor(3)))
        self.expect("float.safetensors: 'y' is of type fp32; expected class numbers",
                    data=self.save("float.safetensors", y=self.data["y"].float()))

    def test_test_set_unlike_the_training_set(self):
        def check(*parts, loss="cross_entropy", **changes):
            self.save("test.safetensors", **changes)
            self.expect(*parts, loss=loss, data={"eval_path": "test.safetensors"})
        x, y = self.data["x"], self.data["y"]
        check("test.safetensors: 'x' has samples of shape [3, 6, 5]; expected [3, 6, 6], as in train.safetensors", x=x[..., :5])
        check("test.safetensors: 'x' is of type int64; expected fp32, as in train.safetensors", x=x.long())
        check("test.safetensors: 'y' has samples of shape [1]; expected [], as in train.safetensors", y=y.unsqueeze(1))
        check("test.safetensors: has no tensor 'y'; it holds 'x'", y=None)

    def expect_of_model(self, *parts, **changes):
        self.expect(*parts, engine_made=True, **changes)

    def test_what_does_not_fit_the_model(self):
        wrong = self.data["y"].clone()
        wrong[31] = 5
        self.expect_of_model("label.safetensors: 'y': record 31 holds 5; expected 0 to 4, as the model gives 5 classes",
                             data=self.save("label.safetensors", y=wrong), ranks=2)
        wrong[31] = -1
        self.save("test.safetensors", y=wrong)
        self.expect_of_model("test.safetensors: 'y': record 31 holds -1; expected 0 to 4", data={"eval_path": "test.safetensors"})
        self.expect_of_model("wide.safetensors: records 0 to 5: m.pt: forward failed: ", "channels", ranks=2,
                             data=self.save("wide.safetensors", x=self.data["x"].repeat(1, 2, 1, 1)))
        self.expect_of_model("m.pt: the model gives [12, 5], the target is [12, 2]; expected a target of [12]",
                             data=self.save("two.safetensors", y=self.data["y"].unsqueeze(1).repeat(1, 2)))
        self.expect_of_model("m.pt: the model gives [12, 5], the target is [12]; expected a target of [12, 5]", loss="mse")
        self.expect("m.pt: forward takes 1 argument (images), and is given 2: x, x of data.inputs; expected as many names there", inputs=["x", "x"])
        for loss in (None, "model"):  # left out, and its default by name
            self.expect("m.pt: forward takes 1 argument (images), the inputs alone, and so gives scores and no loss; expected model.loss, such as",
                        '"cross_entropy"', "'y'", loss=loss, ranks=1)
        self.expect_of_model("m.pt: forward gives a loss of shape [12, 5]; expected one number", loss="model", data={"target": None})
        torch.jit.script(models.OwnLoss()).save(str(self.folder / "own.pt"))
        tokens = models.numbers(17, models.NUM_SAMPLES, 7, seed=2)
        self.save("tokens.safetensors", x=tokens, y=tokens.clone())
        self.expect("own.pt: forward takes 2 arguments (", "labels), and is given 1: x of data.inputs", 'model.loss "model"',
                    model="own.pt", loss="cross_entropy", data={"path": "tokens.safetensors"})


class RunsThatBreakOffTest(TorchScriptTest):
    """Errors that checking the files and the first samples cannot find."""

    def error(self, **changes):
        return self.error_of("train", self.write("config.json", self.run_config(**changes)))

    def test_numbers_outside_of_an_embedding(self):
        model, data = self.export(models.own_loss())
        self.assertEqual(model.embed.num_embeddings, 17)
        reason = "m.pt: forward failed: index out of range in self\n"
        tokens = data["x"].clone()
        tokens[31, 4] = 17
        save_file({**data, "x": tokens}, self.folder / "bad.safetensors")
        error = self.error(loss="model", data={"path": "bad.safetensors"})
        self.assertRegex(error, r"^error: bad\.safetensors: records (\d+, )*31(, \d+)*: " + reason)
        self.assertEqual(error.count(", "), models.BATCH - 1, error)
        self.assertEqual(self.error(loss="model", data={"eval_path": "bad.safetensors"}),
                         "error: bad.safetensors: records 30 to 32: " + reason)
        self.assertEqual(self.error(loss="model", data={"path": "bad.safetensors", "eval_fraction": 0.2501}),
                         "error: bad.safetensors: records 30 to 32: " + reason, "the last 10 are the test set")
        tokens[3, 0] = -1
        save_file({**data, "x": tokens}, self.folder / "bad.safetensors")
        self.assertEqual(self.error(loss="model", data={"path": "bad.safetensors"}), "error: bad.safetensors: records 0 to 11: " + reason)

    def test_another_shape_in_training(self):
        """(B, 1) beside (B) would be broadcast to (B, B), which is a wrong loss."""
        torch.jit.script(Moody()).save(str(self.folder / "m.pt"))
        save_file({"x": models.random(models.NUM_SAMPLES, 6, seed=2), "y": models.random(models.NUM_SAMPLES, seed=3)},
                  self.folder / "train.safetensors")
        self.assertEqual(self.error(loss="mse"), "error: m.pt: the model gives [12, 1], the target is [12]; expected a target of [12, 1] "
                                                 "(train.safetensors: 'y')\n")


if __name__ == "__main__":
    unittest.main()
