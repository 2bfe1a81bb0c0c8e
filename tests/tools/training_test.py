"""Training from one command: every way to start ranks, and the files a run leaves."""
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
    """Numbers of ranks and ways to start them. tests/train and tests/engine own stages and worlds; here each way to start two ranks is at
    another stage, and all of them give the same bits."""

    def setUp(self):
        super().setUp()
        if not (self.shared / "run").exists():
            self.train("run", "--nproc", 2, stage=0)
            for name in ("run", "config.json"):
                (self.folder / name).rename(self.shared / name)
        for name in ("run", "config.json"):
            (self.folder / name).symlink_to(self.shared / name)
        self.expected = self.losses()

    def flags(self, folder, stage, config="config.json"):
        settings = {"trainer.output_dir": folder, "zero_optimization.stage": stage, "zero_optimization.unit_numel": 500,
                    "zero_optimization.stage3_param_persistence_threshold": 0}
        return ["train", config, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]

    def train(self, folder, *args, stage=2, config=None):
        outcome = self.run_tool(*self.flags(folder, stage, config or self.write("config.json", self.config())), *args)
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
        self.assertEqual(len(set(losses)), 5)
        self.assertAlmostEqual(sum(loss for loss, _ in losses) / 5, results["train_loss"], places=12)
        self.assertEqual(sorted(path.name for path in (self.folder / folder).iterdir()),
                         ["all_results.json", "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "run_id", "trainer_state.json"])

    def check_same(self, stage):
        """The two ranks that were started in another way computed what those of `--nproc 2` had."""
        self.check_run("again", 2)
        self.assertEqual(self.losses("again"), self.expected)
        for key in ("train_loss", "eval_loss", "eval_accuracy"):
            self.assertEqual(self.results("again")[key], self.results("run")[key], key)
        self.assertEqual(self.results("again")["zero_stage"], stage)
        self.assert_nothing_runs()

    def test_numbers_of_ranks(self):
        """All of them print on rank 0 alone."""
        self.check_run("run", 2)
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                outcome = self.train(f"run{ranks}", *(["--nproc", ranks, "--log-dir", "logs"] if ranks > 1 else []))
                self.check_run(f"run{ranks}", ranks)
                lines = outcome.out.splitlines()
                self.assertIn(f"{NUM_TRAIN} training and {NUM_TEST} test samples", outcome.out)
                self.assertEqual(sum(line.startswith("step ") for line in lines), 5, outcome)
                self.assertIn(f"on {NUM_TEST} test samples", outcome.out)
                self.assertNotIn("\r", outcome.out)  # stdout is no terminal: whole lines, no bar
                self.assertNotIn("\x1b", outcome.out)
        self.assertEqual({log.name: log.read_text() for log in (self.folder / "logs").iterdir()}, {"rank_00001.log": "", "rank_00002.log": ""})

    def test_saved_configuration_runs_again(self):
        self.assert_succeeded(self.run_tool("train", "run/config.json", "--set", "trainer.output_dir=again", "--nproc", 2))
        self.check_same(0)
        again, first = [(self.folder / folder / "config.json").read_text() for folder in ("again", "run")]
        self.assertEqual(again.replace('"again"', '"run"'), first)

    def test_by_hand(self):
        zero, one = [self.finish(process) for process in self.start_by_hand([2, 2], *self.flags("again", 1))]
        self.assert_succeeded(zero)
        self.assert_succeeded(one)
        self.assertEqual(one.out, "")
        self.check_same(1)

    def test_under_tessera_launch(self):
        self.assert_succeeded(self.run_tool("launch", "-n", 2, "--", TESSERA, *self.flags("again", 2)))
        self.check_same(2)

    def test_under_torchrun(self):
        program, reason = torchrun()
        if program is None:
            self.skipTest(reason)
        agent = ("--no-python", "--nproc-per-node", 2, "--master-port", free_port(), TESSERA)
        outcome = self.run_tool(*agent, *self.flags("again", 3), program=program)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.out.count("eval     accuracy"), 1, outcome)  # only rank 0 prints
        self.check_same(3)
        failed = self.run_tool(*agent, *self.flags("again", 3), "--set", "data.path=/nowhere", program=program)
        self.assertEqual(failed.code, 1, failed)
        self.assertIn("error: /nowhere/train-images", failed.err)
        summary = failed.err[failed.err.index("Root Cause"):]
        self.assertRegex(summary, r"traceback : /nowhere/train-images\S+: not found", failed)


if __name__ == "__main__":
    unittest.main()
