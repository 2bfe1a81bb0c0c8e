"""Ranks that die and launchers that are told to end, in the middle of training."""
import os
import signal
import time
import unittest

from tool import NOISE, ToolTest, free_port


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
        # Rank 0's screen is the launcher's; a log stays where another rank has said how it noticed.
        self.assertEqual("the log of rank" in outcome.err or "the logs of ranks" in outcome.err, num_ranks > 2, outcome)
        self.assertEqual(any(self.tmp.iterdir()), num_ranks > 2, outcome)
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()

    def test_rank_1_is_killed(self):
        self.check_killed(1, 2)

    def test_rank_0_is_killed(self):
        self.check_killed(0, 3)

    def check_told_to_end(self, number):
        """It finishes the step, saves, says how to go on, and goes on from there when asked."""
        launcher, _ = self.start_training()
        launcher.send_signal(number)
        outcome = self.finish(launcher)
        self.assertLess(outcome.seconds, 5)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertNotIn("error:", outcome.err)
        self.assertRegex(outcome.out, r"stopped  saved in run/checkpoints/global_step\d+\n +go on with: .*--resume")
        last_step = self.lines_of_metrics()[-1]["step"]
        resumed = self.run_tool("train", self.name, "--nproc", 2, "--resume", "--set", f"trainer.max_steps={last_step + 20}")
        self.assertEqual(resumed.code, 0, resumed)
        self.assertIn("going on after step ", resumed.out)
        steps = [record["step"] for record in self.lines_of_metrics() if "loss" in record]
        self.assertEqual(steps, list(range(1, last_step + 21)))
        (self.folder / "run" / "all_results.json").unlink()
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertGreaterEqual(len(self.lines_of_metrics()), 3)  # what was done stays written, in whole lines
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()

    def test_interrupt(self):
        self.check_told_to_end(signal.SIGINT)

    def test_terminate(self):
        self.check_told_to_end(signal.SIGTERM)

    def test_a_mistake_of_all_ranks_is_said_once(self):
        for change, words in (({"data": {"type": "fashion_mnist", "path": "nowhere"}}, "nowhere"),
                              ({"trainer": {"max_steps": 5, "output_dir": "config.json", "device": "cpu"}}, "config.json")):
            outcome = self.run_tool("train", self.write("wrong.json", self.config(**change)), "--nproc", 2)
            self.assertEqual(outcome.code, 1, outcome)
            self.assertEqual(outcome.err.count("\n"), 1, outcome)
            self.assertTrue(outcome.err.startswith("error: ") and words in outcome.err, outcome)
            self.assertNotIn("rank", outcome.err)
            self.assertEqual(list(self.tmp.iterdir()), [])

    def test_a_rank_by_hand_waits_for_the_others(self):
        """It says so, and a signal ends it at once."""
        for rank, words in ((0, "for rank 1 of 2"), (1, "for rank 0 to serve the rendezvous at 127.0.0.1:")):
            by_hand = self.environment(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
            with self.start("train", self.name, env=by_hand) as process:
                line = process.stderr.readline()  # after 5 s
                self.assertIn(f"rank {rank} waits ", line)
                self.assertIn(words, line)
                begin = time.monotonic()
                process.send_signal(signal.SIGTERM)
                self.assertEqual(process.wait(10), -signal.SIGTERM)
                self.assertLess(time.monotonic() - begin, 2)

    def test_launcher_is_killed(self):
        launcher, _ = self.start_training()
        launcher.kill()
        self.finish(launcher)
        self.assert_nothing_runs()


if __name__ == "__main__":
    unittest.main()
