"""Ranks that die and launchers that are told to end, in the middle of training."""
import os
import signal
import time
import unittest

from tool import NOISE, ToolTest


class FailureTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config(
            trainer={"max_steps": 1000000, "output_dir": "run", "device": "cpu"}, zero_optimization={"stage": 2}))

    def start_training(self, num_ranks=2):
        """The launcher, once its ranks have done some steps, and the ranks' process ids."""
        launcher = self.start("train", self.name, "--nproc", num_ranks)
        metrics = self.folder / "run" / "metrics.jsonl"
        give_up = time.monotonic() + 60
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            self.assertIsNone(launcher.poll(), "the run has ended")
            self.assertLess(time.monotonic(), give_up, "the run does not start")
            time.sleep(0.02)
        ranks = {int(environment["RANK"]): pid for pid, environment in self.marked().items() if "RANK" in environment}
        self.assertEqual(sorted(ranks), list(range(num_ranks)))
        return launcher, ranks

    def check_killed(self, killed, num_ranks):
        launcher, ranks = self.start_training(num_ranks)
        os.kill(ranks[killed], signal.SIGKILL)
        outcome = self.finish(launcher)
        self.assertLess(outcome.seconds, 5)
        self.assertEqual(outcome.code, 137, outcome)
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome)
        self.assertIn(f"rank {killed} of {num_ranks} failed first: SIGKILL", errors[0])
        self.assertRegex(outcome.err, r"the logs? of rank")
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()

    def test_rank_1_is_killed(self):
        self.check_killed(1, 2)

    def test_rank_0_is_killed(self):
        self.check_killed(0, 3)

    def check_told_to_end(self, number, code):
        launcher, _ = self.start_training()
        launcher.send_signal(number)
        outcome = self.finish(launcher)
        self.assertLess(outcome.seconds, 5)
        self.assertEqual(outcome.code, code, outcome)
        self.assertNotIn("error:", outcome.err)
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertGreaterEqual(len(self.lines_of_metrics()), 3)  # what was done stays written, in whole lines
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()

    def test_interrupt(self):
        self.check_told_to_end(signal.SIGINT, 130)

    def test_terminate(self):
        self.check_told_to_end(signal.SIGTERM, 143)

    def test_launcher_is_killed(self):
        launcher, _ = self.start_training()
        launcher.kill()
        self.finish(launcher)
        self.assert_nothing_runs()


if __name__ == "__main__":
    unittest.main()
