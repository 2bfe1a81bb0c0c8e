"""`make methods`: Tessera's rows and Python's train the same model on the same batches, and the table says what happened.

TESSERA, from ctest, is the command. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "methods"))
import methods  # noqa: E402
from document import markers, replace_table  # noqa: E402
from rows import ROWS, Row  # noqa: E402
from table import COMMAND as TABLE_COMMAND  # noqa: E402
from table import Table  # noqa: E402

BEGIN, END = markers(TABLE_COMMAND)

COMMAND = [sys.executable, "-B", str(ROOT / "benchmarks" / "methods" / "methods.py")]
RECIPE = """// Comments stand on lines of their own.
{
  "model": {"type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
            "initializer_range": 0.2, "max_position_embeddings": 24, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
  // Half of the texts are longer than max_length.
  "data": {"type": "labelled_text", "path": "PATH", "min_frequency": 2, "max_length": 20, "validation_fraction": 0.2, "test_fraction": 0.2},
  "trainer": {"epochs": 3, "eval_batch_size": 3, "metric_for_best": "accuracy"},
  "train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 1, "seed": 7,
  "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1},
                "param_groups": [{"match": ["*.bias", "*LayerNorm*"], "weight_decay": 0.0}]},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": 5e-3, "warmup_num_steps": 3,
                                                     "warmup_type": "linear"}},
  "zero_optimization": {"stage": 2}, "checkpoint": {"fsync": false}
}
"""


def write_texts(folder):
    """Characters of one, two, three and four bytes, with accents and case, some of them rare; texts that are there twice or under
    both labels; empty lines."""
    rng = random.Random(5)
    characters = "书店的了不 很贵房間aÁb!?。,Éñ\u3000𠀀"
    for label, sign in (("neg", "差"), ("pos", "好")):
        texts = [sign * 2 + "".join(rng.choices(characters, k=rng.randint(1, 35))) for _ in range(60)]
        texts += ["both 書", "", texts[3], f"  {texts[4]}\u3000\r", f"rare {chr(0x4e00 + len(sign) + ord(sign) % 100)}"]
        (folder / f"{label}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8", newline="")


class Rows(unittest.TestCase):
    """Two rows, run once."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_methods_")))
        write_texts(cls.folder)
        (cls.folder / "recipe.json").write_text(RECIPE.replace("PATH", str(cls.folder)), encoding="utf-8")
        cls.outcome = cls.run_methods("--only", "tessera", "ddp")
        results = cls.folder / "out" / "results.jsonl"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        cls.results = {result["row"]: result for result in map(json.loads, lines)}

    @classmethod
    def run_methods(cls, *flags):
        return subprocess.run([*COMMAND, "--config", str(cls.folder / "recipe.json"), "--folder", str(cls.folder / "out"), *flags],
                              capture_output=True, text=True, check=False)

    def test_they_see_the_same_batches(self):
        self.assertEqual(self.outcome.returncode, 0, self.outcome.stdout + self.outcome.stderr)
        ours = self.results["tessera"]["losses"]
        self.assertGreaterEqual(len(ours), 24, "three epochs, each with its own order")
        self.assertGreater(max(ours) - min(ours), 0.2, "it learns, so that optimizer and schedule show")
        theirs = self.results["ddp"]["losses"]
        self.assertEqual(len(theirs), len(ours))
        self.assertAlmostEqual(theirs[0], ours[0], delta=1e-5)
        for step, (a, b) in enumerate(zip(ours, theirs)):
            self.assertAlmostEqual(a, b, delta=1e-4, msg=f"step {step + 1}")
        for name in ("validation_accuracy", "test_accuracy"):
            self.assertAlmostEqual(self.results["ddp"][name], self.results["tessera"][name], places=6)

    def test_the_whole_takes_longer_than_the_training(self):
        for row, result in self.results.items():
            self.assertLess(0, result["train_s"], row)
            self.assertLess(result["train_s"], result["wall_s"], row)

    def test_the_table_fits_and_goes_on(self):
        document = self.folder / "methods.md"
        document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
        again = self.run_methods("--only", "tessera", "--resume", "--write", str(document))
        self.assertEqual(again.returncode, 0, again.stderr)
        table = self.outcome.stdout[self.outcome.stdout.index("\n\n"):]
        self.assertEqual(again.stdout[again.stdout.index("\n"):].strip(), table.strip(), "nothing was run again, nothing is lost")
        self.assertRegex(table, r"3 epochs, batch 8, seed 7;.*cores(.|\n)*torch \d")
        self.assertLessEqual(max(map(len, self.outcome.stdout.splitlines())), 80)
        text = document.read_text(encoding="utf-8")
        self.assertRegex(text, rf"^before\n{BEGIN}\n3 epochs(.|\n)*\| DDP, torchrun \| 2 \|(.|\n)*{END}\nafter\n$")
        self.assertNotIn("old", text)


class Failures(unittest.TestCase):
    def test_a_row_that_fails_is_named_and_the_others_go_on(self):
        with tempfile.TemporaryDirectory(prefix="tessera_methods_") as folder:
            runs = methods.Runs({"trainer": {}}, Path(folder), resume=False)
            runs.weights = lambda seed: "weights"
            good = json.dumps({"train_s": 1.0, "validation_accuracy": 0.5, "test_accuracy": 0.25, "losses": []})
            rows = [Row("broken", "Broken", 1, ("sh", "-c", "echo trace; echo 'error: no such thing'; echo more; exit 3")),
                    Row("silent", "Silent", 1, ("true",)), Row("absent", "Absent", 1, ("true",), needs=("no_such_package",)),
                    Row("good", "Good", 1, ("echo", good))]
            reasons, out, err = {}, io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                self.assertFalse(methods.run_all(runs, rows, [1], reasons))
            said = err.getvalue().splitlines()
            self.assertEqual(len(said), 2)
            self.assertRegex(said[0], r"^error: broken: failed with seed 1: exit code 3: error: no such thing \(.*broken_1\.log\)$")
            self.assertRegex(said[1], r"^error: silent: failed with seed 1: reported nothing")
            self.assertIn("not run: no Python package no_such_package", reasons["absent"])
            self.assertEqual(list(runs.done()), [("good", 1)])
            (Path(folder) / "results.jsonl").open("a").write('{"row": "cut sh')
            self.assertEqual(list(methods.Runs({"trainer": {}}, Path(folder), resume=True).done()), [("good", 1)])
            self.assertEqual(methods.Runs({"trainer": {"epochs": 2}}, Path(folder), resume=True).done(), {}, "of another recipe")

    def test_a_document_without_markers_stays(self):
        with tempfile.TemporaryDirectory(prefix="tessera_methods_") as folder:
            document = Path(folder, "x.md")
            document.write_text("text", encoding="utf-8")
            with self.assertRaisesRegex(ValueError, "has no table to replace"):
                replace_table(document, TABLE_COMMAND, "table\n")
            self.assertEqual(document.read_text(encoding="utf-8"), "text")


class Shown(unittest.TestCase):
    def test_seeds_give_mean_and_standard_deviation(self):
        seeds = [{"train_s": 10000.0 + 60 * i, "wall_s": 10060.0 + 60 * i, "validation_accuracy": 0.8, "test_accuracy": 0.82 + 0.01 * i}
                 for i in range(3)]
        results = {row.name: seeds for row in ROWS}
        text = Table(ROWS, results, {ROWS[0].name: "not run: " + "why " * 40}, "about").text()
        self.assertLessEqual(max(map(len, text.splitlines())), 80)
        self.assertRegex(text, r"DDP, torchrun +167\.67 ± 1\.00 +168\.67 ± 1\.00  0\.8300 ± 0\.0100")
        self.assertIn("training, min", text)

    def test_rows_are_named_once(self):
        self.assertEqual(len({row.name for row in ROWS}), len(ROWS))
        listed = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual([line.split()[0] for line in listed], [row.name for row in ROWS])
        self.assertLessEqual(max(map(len, listed)), 80)


if __name__ == "__main__":
    os.environ.setdefault("TESSERA", str(ROOT / "build" / "tessera"))
    unittest.main()
