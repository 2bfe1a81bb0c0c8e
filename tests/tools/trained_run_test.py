"""A trained model used again: `tessera eval` and `tessera predict`."""
import json
import os
import shutil
import subprocess
import time
import unittest

from tool import ToolTest

LETTERS = "abcdefghij"


class TrainedRunTest(ToolTest):
    """Texts, all different: positive ones contain 好, negative ones 坏."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.texts = cls.shared / "texts"
        cls.texts.mkdir()
        for label, sign in (("neg", "坏"), ("pos", "好")):
            lines = [LETTERS[i % 10] * (i % 5) + sign + LETTERS[i // 10] * (1 + i % 3) + str(i) for i in range(100)]
            (cls.texts / f"{label}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def setUp(self):
        """Each test begins with a copy of one run."""
        super().setUp()
        if not (self.shared / "run").exists():
            name = self.write("texts.json", {
                "model": {"type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 24,
                          "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
                "data": {"type": "labelled_text", "path": str(self.texts)},
                "trainer": {"epochs": 4, "output_dir": "run", "device": "cpu", "metric_for_best": "accuracy", "num_threads": 1},
                "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}}, "checkpoint": {"fsync": False}})
            outcome = self.run_tool("train", name, "--nproc", 2, "--set", "zero_optimization.stage=3")
            self.assert_succeeded(outcome)
            type(self).said = outcome.out
            (self.folder / "run").rename(self.shared / "run")
        shutil.copytree(self.shared / "run", self.folder / "run")

    def eval_results(self, *args):
        """Those of `tessera eval run`, and what it prints."""
        outcome = self.run_tool("eval", "run", *args)
        self.assert_succeeded(outcome)
        return json.loads((self.folder / "run" / "eval_results.json").read_text()), outcome.out

    def test_eval_on_other_numbers_of_ranks(self):
        table = self.said[self.said.index("              precision"):self.said.index("\ntraining ")]
        for ranks in ([], ["-n", 3]):
            with self.subTest(ranks=ranks):
                results, said = self.eval_results(*ranks)
                self.assertEqual((results["eval_samples"], results["test_samples"]), (20, 20))
                self.assertEqual(results["test_accuracy"], self.results()["test_accuracy"])
                self.assertAlmostEqual(results["test_loss"], self.results()["test_loss"], delta=1e-6)
                self.assertTrue(said.startswith("              precision"), said)
                self.assertIn(table[:-12], said)  # with the weights that were tested at the end of training
                self.assertRegex(said, r"\neval     accuracy .*, on 20 validation samples\n")
                self.assertLessEqual(max(map(len, said.splitlines())), 80)

    def test_eval_on_other_data_keeps_the_vocabulary(self):
        before, _ = self.eval_results()
        others = self.folder / "others"
        others.mkdir()
        for label in ("neg", "pos"):  # the same texts after others, whose characters are more frequent
            (others / f"{label}.txt").write_text("\n".join(f"{chr(0x4e00 + i)}{chr(0x4e00 + i)}{label}" for i in range(60)) + "\n" +
                                                 (self.texts / f"{label}.txt").read_text(encoding="utf-8"), encoding="utf-8")
        found, _ = self.eval_results("--set", f"data.path={others}", "--set", "trainer.num_workers=1")
        self.assertGreater(found["eval_samples"], before["eval_samples"])
        self.assertEqual(self.eval_results()[0]["test_loss"], before["test_loss"])

    def test_predict(self):
        outcome = self.run_tool("predict", "run", "--text", "a好b", "--text", "cc坏d")
        self.assert_succeeded(outcome)
        self.assertRegex(outcome.out, r"^pos 0\.\d{4}\nneg 0\.\d{4}\n$")

        # Everything there is, from a file and from a pipe: what the sets' accuracies allow, in the order of the lines.
        for label in ("neg", "pos"):
            outcome = self.run_tool("predict", "run", "--json", "--file", self.texts / f"{label}.txt")
            self.assert_succeeded(outcome)
            answers = [json.loads(line) for line in outcome.out.splitlines()]
            self.assertEqual(len(answers), 100)
            self.assertGreaterEqual(sum(answer["label"] == label for answer in answers), 95)
            self.assertTrue(all(0.5 <= answer["score"] <= 1 for answer in answers))
        first = self.run_tool("predict", "run", "--json", "--text", (self.texts / "pos.txt").read_text().splitlines()[0])
        self.assertAlmostEqual(json.loads(first.out)["score"], answers[0]["score"], delta=1e-6)  # alone or in a batch

    def test_predict_needs_no_data(self):
        self.assert_succeeded(self.run_tool("predict", "run", "--set", "data.path=/nowhere", "--text", "好"))
        (self.folder / "run" / "model.safetensors").unlink()
        self.assert_succeeded(self.run_tool("predict", "run", "--set", "data.path=/nowhere", "--text", "好"))  # of the checkpoint

    def test_predict_by_a_copy_of_the_checkpoints(self):
        """Beside the run's own, which are there no more."""
        (self.folder / "run" / "model.safetensors").unlink()
        expected = self.run_tool("predict", "run", "--text", "a好b", "--json")
        self.assert_succeeded(expected)
        (self.folder / "run" / "checkpoints").rename(self.folder / "run" / "copy")
        tag = (self.folder / "run" / "copy" / "latest").read_text().strip()
        for folder in ("run/copy", f"run/copy/{tag}"):
            outcome = self.run_tool("predict", folder, "--text", "a好b", "--json")
            self.assert_succeeded(outcome)
            self.assertEqual(outcome.out, expected.out)

    def test_a_language_model_goes_on(self):
        (self.folder / "letters.txt").write_text("abcdefg" * 400)
        name = self.write("gpt.json", {
            "model": {"type": "gpt", "dim": 16, "layers": 1, "heads": 2, "sequence": 16},
            "data": {"type": "text", "path": "letters.txt", "sample_bytes": 11, "temperature": 0.0},
            "trainer": {"max_steps": 150, "output_dir": "letters", "device": "cpu", "num_threads": 1},
            "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "checkpoint": {"fsync": False}})
        self.assert_succeeded(self.run_tool("train", name))
        outcome = self.run_tool("predict", "letters", "--text", "cdefg", "--json")
        self.assert_succeeded(outcome)
        self.assertEqual(json.loads(outcome.out), {"generated_text": "cdefgabcdefgabcd"})
        (self.folder / "prompt.txt").write_bytes(b"\xef\xbb\xbfcdefg\r\n")  # as Windows saves it
        from_file = self.run_tool("predict", "letters", "--file", "prompt.txt", "--json")
        self.assertEqual(from_file.out, outcome.out)
        outcome = self.run_tool("eval", "letters", "-n", 2)
        self.assert_succeeded(outcome)
        self.assertIn("perplexity", outcome.out)

    def test_mistakes(self):
        (self.folder / "run").rename(self.folder / "trained")
        self.write("in.safetensors", "inputs")
        self.write("empty.txt", "")
        (self.folder / "latin1.txt").write_bytes("grün\n".encode() + b"gr\xfcn\n")
        for args, *parts in (
                (("predict", "run", "--text", "x"), "run: has no config.json"),
                (("predict", "run", "--file", "in.safetensors", "--out", "in.safetensors"), "--out in.safetensors: is the input"),
                (("eval", "run", "-n", 2), "run: has no config.json"),
                (("predict", "run"), "nothing to predict", "--text TEXT"),
                (("predict", "run", "--file", "none.txt"), "none.txt: cannot be read: No such file or directory"),
                (("predict", "run", "--file", "empty.txt"), "empty.txt: has no lines"),
                (("predict", "run", "--text", "x", "--file", "latin1.txt"), "latin1.txt: line 2 is not UTF-8"),
                (("predict", "run", "--text", "x", "--text", "gr\udcfcn"), "--text 2: is not UTF-8"),
                (("eval", "trained", "--tag", "global_step77"), "global_step77")):
            with self.subTest(args=args):
                self.assert_one_error(self.run_tool(*args), *parts)
        self.assertEqual((self.folder / "in.safetensors").read_text(), "inputs")
        self.assert_succeeded(self.run_tool("train", self.write("config.json", self.config()), "--set", "trainer.output_dir=images"))
        self.assert_one_error(self.run_tool("predict", "images", "--text", "x"), "data.type", "fashion_mnist", "to predict with", "labelled_text, tensors, text")
        (self.folder / "trained" / "model.safetensors").write_bytes(b"damaged")
        self.assert_one_error(self.run_tool("eval", "trained"), "trained/model.safetensors")


class ReadingTest(ToolTest):
    def test_eval_of_a_folder_that_may_not_be_written(self):
        """Another user's run."""
        self.assert_succeeded(self.run_tool("train", self.write("images.json", self.config())))
        self.assert_succeeded(self.run_tool("eval", "run"))
        before = (self.folder / "run" / "eval_results.json").read_text()
        for folder in (self.shared, self.folder):
            folder.chmod(0o755)
        self.tmp.chmod(0o777)
        options = {}
        if os.geteuid() == 0:  # who may write everywhere
            options["preexec_fn"] = lambda: os.setresuid(65534, 65534, 65534)
        else:
            (self.folder / "run").chmod(0o555)
            self.addCleanup((self.folder / "run").chmod, 0o755)
        for ranks in ([], ["--nproc", 2]):
            outcome = self.finish(self.start("eval", "run", *ranks, env={"HOME": self.tmp}, **options))
            self.assertEqual(outcome.code, 0, outcome)
            self.assertRegex(outcome.out, "eval +accuracy", outcome)
            self.assertEqual(outcome.err, "warning: run/eval_results.json is not written: Permission denied; what it holds is of an earlier evaluation\n")
            self.assertEqual((self.folder / "run" / "eval_results.json").read_text(), before)

    def test_reading_beside_a_run_that_keeps_one_checkpoint(self):
        config = self.write("images.json", self.config(
            trainer={"max_steps": 100_000, "save_every_steps": 1, "output_dir": "run", "device": "cpu"}, steps_per_print=0,
            checkpoint={"keep_last": 1, "fsync": False}, train_batch_size=4))
        process = self.start("train", config, stdout=subprocess.DEVNULL)
        while not (self.folder / "run" / "checkpoints" / "latest").exists():
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        for command in 3 * [("inspect", "run", "--verify"), ("consolidate", "run", "out.safetensors"), ("consolidate", "run", "folder/")] + [("eval", "run")]:
            outcome = self.run_tool(*command)
            self.assertEqual(outcome.code, 0, outcome)
            for line in outcome.err.splitlines():
                self.assertRegex(line, r"^warning: run/checkpoints/global_step\d+ was removed by its run while it was read; "
                                       r"run/checkpoints/global_step\d+ is read instead$")
        self.assertIsNone(process.poll())
        process.kill()
        self.finish(process)


if __name__ == "__main__":
    unittest.main()
