"""Losses and metrics by name, for models from Python: PyTorch's, Hugging Face's and scikit-learn's numbers, for any division of a step."""
import json
import math
import unittest

import numpy as np
import python_models as models
import torch
from safetensors.torch import load_file, save_file
from sampler import batches
from sklearn import metrics as sklearn_metrics
from torch.nn import functional as F
from torchscript_test import TorchScriptTest, train_plainly
from transformers import GPT2Config, GPT2LMHeadModel

CUT = (2, 3)  # ranks, micro-steps: 2 of 12 samples at once


class LanguageModel(torch.nn.Module):
    """The second positional argument of GPT-2's forward is not the labels."""

    def __init__(self, config):
        super().__init__()
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, input_ids, attention_mask):
        return self.gpt(input_ids=input_ids, attention_mask=attention_mask).logits


class StepTest(TorchScriptTest):
    """A step's loss is that of one batch of all its samples."""

    def check(self, model, data, loss_of, num_test=0, compare_weights=True, **changes):
        size = len(data["y"]) - num_test
        state = {name: value.clone() for name, value in model.state_dict().items()}
        expected = train_plainly(model, batches(size, models.BATCH, models.STEPS), loss_of)
        self.assertGreater(max(expected) - min(expected), 0.01)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        if num_test:
            changes["data"] = {**changes.get("data", {}), "eval_fraction": num_test / len(data["y"]) + 1e-9}
        found = self.train("--set", f"gradient_accumulation_steps={CUT[1]}", ranks=CUT[0], zero_optimization={"stage": 3}, **changes)
        self.assert_close(found, expected)
        for name, value in load_file(self.folder / "run" / "model.safetensors").items() if compare_weights else ():
            self.assertLess((value - trained[name]).abs().max().item(), 1e-4, name)
        model.load_state_dict(trained)
        return model.eval()

    def few_labels(self):
        """Most samples have no label: many micro-steps have none."""
        model, data = models.classification()
        data["y"][torch.rand(models.NUM_SAMPLES, generator=torch.Generator().manual_seed(5)) < 0.6] = -100
        return self.export((model, data))

    def test_ignored_labels(self):
        model, data = self.few_labels()
        self.assertTrue(any((data["y"][rows[i:i + 2]] == -100).all() for rows in batches(40, 12, 10) for i in range(0, 12, 2)))
        self.check(model, data, lambda rows: F.cross_entropy(model(data["x"][rows]), data["y"][rows]))

    def test_class_weights_and_label_smoothing(self):
        for weights, smoothing in (([0.5, 2.0, 0.0, 1.0, 4.0], 0.0), ([0.5, 2.0, 0.25, 1.0, 4.0], 0.2), (None, 0.3)):
            model, data = self.few_labels()

            def loss_of(rows):
                return F.cross_entropy(model(data["x"][rows]), data["y"][rows], weight=torch.tensor(weights) if weights else None,
                                       label_smoothing=smoothing)
            with self.subTest(weights=weights, smoothing=smoothing):
                self.check(model, data, loss_of, num_test=13, model_keys={"class_weights": weights or [], "label_smoothing": smoothing})
                with torch.no_grad():
                    self.assertAlmostEqual(self.results()["eval_loss"], loss_of(slice(27, None)).item(), delta=1e-5)

    def test_pos_weight(self):
        model, data = self.export(models.regression(models.numbers(2, models.NUM_SAMPLES, 2, seed=5).float()))
        weights = torch.tensor([3.0, 0.5])
        self.check(model, data, lambda rows: F.binary_cross_entropy_with_logits(model(data["x"][rows], data["w"][rows])[0], data["y"][rows],
                                                                                pos_weight=weights),
                   loss="bce_with_logits", inputs=("x", "w"), model_keys={"pos_weight": [3.0, 0.5]})

    def test_causal_lm_is_hugging_faces_loss(self):
        torch.manual_seed(1)
        config = GPT2Config(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                            use_cache=False, attn_implementation="eager")
        model = LanguageModel(config)
        tokens = models.numbers(31, models.NUM_SAMPLES, 12, seed=2)
        lengths = models.numbers(12, models.NUM_SAMPLES, seed=3) + 1  # some texts are a single token: nothing to foretell
        mask = (torch.arange(12) < lengths[:, None]).long()
        labels = torch.where(mask == 1, tokens, -100)
        data = {"ids": tokens, "mask": mask, "y": labels}
        self.assertTrue((lengths == 1).any())
        self.export((model, data), lambda model: torch.jit.trace(model, (tokens[:2], mask[:2]), strict=False))

        def loss_of(rows):
            return model.gpt(input_ids=tokens[rows], attention_mask=mask[rows], labels=labels[rows]).loss
        # The gradient of attention's key bias is rounding noise, of which Adam makes full steps.
        self.check(model, data, loss_of, num_test=11, compare_weights=False, loss="causal_lm", inputs=("ids", "mask"))
        with torch.no_grad():
            expected = loss_of(slice(29, None)).item()
        results = self.results()
        self.assertAlmostEqual(results["eval_loss"], expected, delta=1e-5)
        self.assertAlmostEqual(results["eval_perplexity"], math.exp(expected), delta=1e-3)
        self.assertNotIn("eval_accuracy", results)

    def run_config(self, model_keys=None, **changes):
        config = super().run_config(**changes)
        config["model"].update(model_keys or {})
        return config


class MetricsTest(TorchScriptTest):
    """scikit-learn's numbers, on 1 to 3 ranks."""

    NUM_TEST = 61

    def check(self, output_size, y, loss, names, expected_of, report_of=None):
        """expected_of(given, wanted): the metrics by name, from the model's output for the test set."""
        torch.manual_seed(3)
        x = models.random(200, 6, seed=2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, output_size))
        self.export((model, {"x": x, "y": y}))
        config = self.run_config(loss=loss, data={"eval_fraction": self.NUM_TEST / 200 + 1e-9})
        config["model"]["metrics"] = names
        config["trainer"]["metric_for_best"] = "loss"
        outcome = self.run_tool("train", self.write("config.json", config))
        self.assert_succeeded(outcome)
        model.load_state_dict(load_file(self.folder / "run" / "model.safetensors"))
        with torch.no_grad():
            given, wanted = model(x[-self.NUM_TEST:]).numpy(), y[-self.NUM_TEST:].numpy()
        expected = expected_of(given, wanted)
        shown = [name for name in names if name != "classification_report"]
        self.assertEqual(set(expected), set(shown))
        for ranks, results in ((1, self.results()), (3, None)):
            if results is None:
                outcome = self.run_tool("eval", "run", "--nproc", ranks)
                self.assert_succeeded(outcome)
                results = json.loads((self.folder / "run" / "eval_results.json").read_text())
            self.assertEqual([key for key in results if key.startswith("eval_")][:len(names) + 1 - (len(names) - len(shown))],
                             [f"eval_{name}" for name in shown] + ["eval_loss"])
            for name, value in expected.items():
                self.assertAlmostEqual(results[f"eval_{name}"], value, delta=1e-6 * max(1, abs(value)), msg=f"{name} on {ranks} ranks")
            if report_of:
                self.assertIn(report_of(given, wanted), outcome.out)

    @staticmethod
    def scores(wanted, predicted, **options):
        values = {}
        for average in ("macro", "weighted", "micro"):
            precision, recall, f1, _ = sklearn_metrics.precision_recall_fscore_support(wanted, predicted, average=average, zero_division=0, **options)
            values.update({f"precision_{average}": precision, f"recall_{average}": recall, f"f1_{average}": f1})
        return {**values, "f1": values["f1_macro"]}

    def test_class_numbers(self):
        y = torch.minimum(models.numbers(7, 200, seed=4), torch.tensor(4))  # classes of different sizes, and one that nobody has
        y[::17] = -100

        def counted(given, wanted):
            return wanted[wanted != -100], given.argmax(1)[wanted != -100]

        def expected(given, wanted):
            target, predicted = counted(given, wanted)
            return {"accuracy": sklearn_metrics.accuracy_score(target, predicted), **self.scores(target, predicted, labels=range(6))}

        def report(given, wanted):
            return sklearn_metrics.classification_report(*counted(given, wanted), labels=range(6), digits=4, zero_division=0).rstrip("\n")
        names = ["f1_weighted", "accuracy", *[f"{s}_{a}" for s in ("precision", "recall") for a in ("macro", "weighted", "micro")], "f1", "f1_macro",
                 "f1_micro", "classification_report"]
        # scikit-learn says "micro avg" for "accuracy" if labels without samples are asked for.
        self.check(6, y, "cross_entropy", names, expected, lambda *args: report(*args).split("\n\n")[1])

    def test_several_labels(self):
        y = (models.random(200, 3, seed=4) > torch.tensor([0.0, 1.0, 9.0])).to(torch.uint8)  # the last one nobody has

        def expected(given, wanted):
            predicted = (given > 0).astype(int)
            return {"accuracy": sklearn_metrics.accuracy_score(wanted, predicted), "hamming_loss": sklearn_metrics.hamming_loss(wanted, predicted),
                    **self.scores(wanted, predicted)}
        self.check(3, y, "bce_with_logits", ["accuracy", "hamming_loss", *self.scores(y.numpy(), y.numpy())], expected)

    def test_one_label(self):
        y = (models.random(200, 1, seed=4) > 0.3).float()

        def expected(given, wanted):
            predicted = (given > 0).astype(int)
            return {"accuracy": sklearn_metrics.accuracy_score(wanted, predicted), "f1": sklearn_metrics.f1_score(wanted, predicted)}
        self.check(1, y, "bce_with_logits", ["accuracy", "f1"], expected)

    def test_numbers(self):
        y = models.random(200, 3, seed=4)
        y[:, 1] = 1e4 + 1e-2 * y[:, 1]  # far from 0 beside its variation
        y[:, 2] = 7  # constant: its r2 is 0

        def expected(given, wanted):
            given, wanted = given.astype(np.float64), wanted.astype(np.float64)
            mse = sklearn_metrics.mean_squared_error(wanted, given)
            return {"r2": sklearn_metrics.r2_score(wanted, given), "mae": sklearn_metrics.mean_absolute_error(wanted, given), "mse": mse, "rmse": mse ** 0.5}
        self.check(3, y, "smooth_l1", ["r2", "mae", "mse", "rmse"], expected)

    def test_errors_are_best_when_least(self):
        torch.jit.script(torch.nn.Linear(6, 1)).save(str(self.folder / "m.pt"))
        save_file({"x": models.random(200, 6, seed=2), "y": models.random(200, 1, seed=4)}, self.folder / "train.safetensors")
        config = self.run_config(loss="mse", data={"eval_fraction": 0.3})
        config["model"]["metrics"] = ["mae"]
        config["optimizer"]["params"]["lr"] = 1.0  # so that it does not get better and better
        config["trainer"].update(metric_for_best="mae", eval_every_steps=1, save_every_steps=1)
        self.assert_succeeded(self.run_tool("train", self.write("config.json", config)))
        values = [record["eval_mae"] for record in self.lines_of_metrics() if "eval_mae" in record]
        self.assertEqual(len(values), models.STEPS)
        self.assert_succeeded(self.run_tool("eval", "run"))
        exported = json.loads((self.folder / "run" / "eval_results.json").read_text())["eval_mae"]
        self.assertAlmostEqual(exported, min(values), delta=1e-6)
        self.assertLess(min(values), max(values) - 1e-3)


if __name__ == "__main__":
    unittest.main()
