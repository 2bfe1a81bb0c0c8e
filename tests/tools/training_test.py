"""Training from one command: every way to start ranks, every stage, and the files a run leaves."""
import os
import subprocess
import unittest
from pathlib import Path

from tool import NUM_TEST, NUM_TRAIN, ROOT, TESSERA, ToolTest, free_port


def torchrun():
    """The wheel's own torchrun as a command line, or why there is none."""
    torch_dir = Path(os.environ.get("TORCH_DIR") or
                     next(ROOT.glob(".deps/venv/lib/python3*/site-packages/torch"), Path("torch")))
    if len(torch_dir.parts) < 5:
        return None, "no installed torch is known"
    program = torch_dir.parents[3] / "bin" / "torchrun"
    if not program.exists():
        return None, f"{program} is not there"
    check = subprocess.run([program, "--help"], capture_output=True, text=True)
    if check.returncode != 0:
        return None, f"{program} does not run: {check.stderr.strip().splitlines()[-1]} (`make test` installs what it needs)"
    return str(program), ""


class TrainingTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config())

    def train(self, folder, *args):
        outcome = self.run_tool("train", self.name, "--set", f"trainer.output_dir={folder}", *args)
        self.assert_succeeded(outcome)
        return outcome

    def check_run(self, folder, world_size):
        results = self.results(folder)
        self.assertEqual(results["eval_samples"], NUM_TEST)
        self.assertEqual((results["train_steps"], results["train_samples"]), (5, 60))
        self.assertEqual(results["world_size"], world_size)
        # An accuracy is a whole number of samples.
        self.assertAlmostEqual(results["eval_accuracy"] * NUM_TEST % 1, 0, delta=1e-9)
        losses = self.losses(folder)
        self.assertEqual(len(losses), 5)
        self.assertAlmostEqual(sum(loss for loss, _ in losses) / 5, results["train_loss"], places=12)
        self.assertEqual(sorted(path.name for path in (self.folder / folder).iterdir()),
                         ["all_results.json", "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "run_id", "trainer_state.json"])

    def test_numbers_of_ranks(self):
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                outcome = self.train(f"run{ranks}", *(["--nproc", ranks] if ranks > 1 else []))
                self.check_run(f"run{ranks}", ranks)
                lines = outcome.out.splitlines()
                self.assertIn(f"{NUM_TRAIN} training and {NUM_TEST} test samples", outcome.out)
                self.assertEqual(sum(line.startswith("step ") for line in lines), 5, outcome)
                self.assertIn(f"on {NUM_TEST} test samples", outcome.out)
                self.assertNotIn("\r", outcome.out)  # stdout is no terminal: whole lines, no bar
                self.assertNotIn("\x1b", outcome.out)

    def test_stages_give_the_same_bits(self):
        losses, accuracies = [], []
        for stage in range(4):
            self.train(f"stage{stage}", "--nproc", 2, "--set", f"zero_optimization.stage={stage}",
                       "--set", "zero_optimization.stage3_param_persistence_threshold=0",
                       "--set", "zero_optimization.unit_numel=500")
            losses.append(self.losses(f"stage{stage}"))
            accuracies.append({key: value for key, value in self.results(f"stage{stage}").items()
                               if key in ("train_loss", "eval_loss", "eval_accuracy")})
            self.assertEqual(self.results(f"stage{stage}")["zero_stage"], stage)
        for stage in (1, 2, 3):
            self.assertEqual(losses[stage], losses[0], f"stage {stage}")
            self.assertEqual(accuracies[stage], accuracies[0], f"stage {stage}")
        self.assertGreater(len(set(losses[0])), 4)

    def test_saved_configuration_runs_again(self):
        self.train("first", "--nproc", 2, "--set", "scheduler.type=WarmupDecayLR", "--set",
                   "scheduler.params.warmup_num_steps=2", "--set", "zero_optimization.stage=1")
        self.name = "first/config.json"
        self.train("second", "--nproc", 2)
        self.assertEqual(self.losses("second"), self.losses("first"))
        without_place = [(self.folder / folder / "config.json").read_text().replace('"second"', '"first"')
                         for folder in ("first", "second")]
        self.assertEqual(without_place[1], without_place[0])

    def test_ranks_above_zero_are_silent(self):
        self.train("run", "--nproc", 3, "--log-dir", "logs")
        logs = sorted((self.folder / "logs").iterdir())
        self.assertEqual([log.name for log in logs], ["rank_00001.log", "rank_00002.log"])
        for log in logs:
            self.assertEqual(log.read_text(), "")


class StartingTest(ToolTest):
    """However two ranks are started, they compute the same."""

    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config())
        self.assert_succeeded(self.run_tool("train", self.name, "--nproc", 2))
        self.expected = self.losses()
        self.again = ("train", self.name, "--set", "trainer.output_dir=again")

    def check(self):
        self.assertEqual(self.losses("again"), self.expected)
        self.assertEqual(self.results("again")["world_size"], 2)
        self.assertEqual(self.results("again")["eval_samples"], NUM_TEST)
        self.assert_nothing_runs()

    def test_by_hand(self):
        zero, one = [self.finish(process) for process in self.start_by_hand([2, 2], *self.again)]
        self.assert_succeeded(zero)
        self.assert_succeeded(one)
        self.assertEqual(one.out, "")
        self.check()

    def test_under_tessera_launch(self):
        self.assert_succeeded(self.run_tool("launch", "-n", 2, "--", TESSERA, *self.again))
        self.check()

    def test_under_torchrun(self):
        program, reason = torchrun()
        if program is None:
            self.skipTest(reason)
        outcome = self.run_tool("--no-python", "--nproc-per-node", 2, "--master-port", free_port(), TESSERA, *self.again,
                                program=program)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.out.count("eval     accuracy"), 1, outcome)  # only rank 0 prints
        self.check()
        failed = self.run_tool("--no-python", "--nproc-per-node", 2, "--master-port", free_port(), TESSERA, *self.again,
                               "--set", "data.path=/nowhere", program=program)
        self.assertEqual(failed.code, 1, failed)
        self.assertIn("error: /nowhere/train-images", failed.err)
        summary = failed.err[failed.err.index("Root Cause"):]
        self.assertRegex(summary, r"traceback : /nowhere/train-images\S+: not found", failed)


if __name__ == "__main__":
    unittest.main()
