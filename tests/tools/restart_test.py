"""Ranks that die in the middle of training and are started again, by `tessera train` and by torchrun: the run goes on from its
latest checkpoint, on as many ranks or on fewer, and ends as a run that nothing has disturbed."""
import fcntl
import os
import re
import shutil
import signal
import time
import unittest

from restarts import NO_DROPOUT, NUM_STEPS, Restarts
from tool import TESSERA, free_port

TORCHRUN = os.environ.get("TORCHRUN", "")


class RestartTest(Restarts):
    """What `train` adds to the launcher's restarts (tests/launcher/process/restarts_test.cc): where they go on, and on which batches."""

    # ------------------------------------------------------------------------------------------ the same ranks

    def test_a_killed_rank_and_the_same_bits(self):
        """Two kills, of rank 1 and of rank 0. The model, and the losses of all steps, are those of a run without."""
        self.undisturbed("--nproc", 2)
        process = self.start("train", self.configure("run"), "--nproc", 2, "--max-restarts", 2)
        self.kill_at(process, 1, 10)
        self.kill_at(process, 0, 25)
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("rank 1 of 2 failed first: SIGKILL", outcome.err)
        self.assertIn("rank 0 of 2 failed first: SIGKILL", outcome.err)
        self.assertEqual(re.findall(r"restart .*", outcome.err), ["restart 1 of 2: 2 ranks", "restart 2 of 2: 2 ranks"])
        first, second = self.resumed_at(outcome)
        self.assertTrue(4 <= first <= second < NUM_STEPS and first % 4 == second % 4 == 0, outcome)
        self.check_same(outcome)

    def test_before_the_first_checkpoint(self):
        """The folder has a finished run. The new one dies before it has saved, and begins anew, not where the old one ended."""
        self.undisturbed("--nproc", 2)
        self.trained_once("run", "--nproc", 2, trainer={"max_steps": 8}, seed=7)
        process = self.start("train", self.configure("run", trainer={"save_every_steps": 30}), "--nproc", 2, "--max-restarts", 1)
        while len(ranks := self.ranks()) < 2:
            time.sleep(0.002)
        self.assertTrue((self.folder / "run" / "all_results.json").exists(), "the checkpoints of the finished run are still there")
        os.kill(ranks[1], signal.SIGKILL)
        outcome = self.finish(process)
        self.assertEqual(self.resumed_at(outcome), [])
        self.check_same(outcome)

    def test_one_rank_whose_folder_is_in_use_for_a_while(self):
        """As by rank 0 on a host that is gone, whose lock a network file system keeps."""
        self.undisturbed()
        process = self.start("train", self.configure("run"), "--max-restarts", 1)
        self.wait_for_steps(process, 10)
        with open(self.folder / "run" / ".lock") as lock:
            rank_0 = self.ranks()[0]
            os.kill(rank_0, signal.SIGKILL)
            fcntl.flock(lock, fcntl.LOCK_EX)  # as soon as rank 0 has ended
            while self.ranks().get(0, rank_0) == rank_0:
                time.sleep(0.02)
            time.sleep(1)  # in which the next one waits
            self.assertEqual(list(self.ranks()), [0])
        outcome = self.finish(process)
        self.assertIn("restart 1 of 1: 1 rank\n", outcome.err)
        self.assertEqual(len(self.resumed_at(outcome)), 1)
        self.check_same(outcome)

    def test_a_resumed_run(self):
        """--resume TAG: from there, until there is a checkpoint of this run."""
        self.undisturbed("--nproc", 2)
        shutil.copytree(self.folder / "undisturbed", self.folder / "run")
        name = self.configure("run", trainer={"save_every_steps": 10, "save_every_epochs": 0})
        (self.folder / "run" / "metrics.jsonl").unlink()
        process = self.start("train", name, "--nproc", 2, "--max-restarts", 2, "--resume", "global_step8")
        ended_at = []
        for step in (1, 17):
            self.kill_at(process, 1, step)
            ended_at.append(8 + self.num_recorded - 1)  # the last step that is recorded may not be saved yet
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 0, outcome)
        first, *later = self.resumed_at(outcome)
        self.assertEqual(first, 8)
        for start, ended in zip(later, ended_at, strict=True):
            self.assertTrue(start == 8 or start % 10 == 0, outcome)
            self.assertGreaterEqual(start, max(8, ended - ended % 10), outcome)
        self.assertEqual(self.digest("run"), self.digest("undisturbed"))
        self.check_left_nothing(outcome)

    def test_a_run_begun_with_another_programs_checkpoint(self):
        """--resume PATH: from there, until there is a checkpoint of this run, and then without it."""
        model = {**NO_DROPOUT, "channels": 24, "hidden": 128}  # its steps take a while
        self.undisturbed("--nproc", 2, model=model)
        self.assert_succeeded(self.run_tool("convert", "undisturbed", "source", "--to", "universal", "--tag", "global_step8"))
        name = self.configure("run", model=model, trainer={"save_every_steps": 10})
        process = self.start("train", name, "--nproc", 2, "--max-restarts", 2, "--resume", "./source")
        self.kill_at(process, 1, 1)
        self.wait_for_steps(process, 22)  # step 30: the second start has saved
        shutil.rmtree(self.folder / "source")
        self.kill_at(process, 0, 24)
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 0, outcome)
        starts = self.resumed_at(outcome)
        self.assertEqual(starts[0], 8)
        self.assertIn(starts[1], (8, 10))
        self.assertGreaterEqual(starts[2], 20)
        self.assertEqual(self.losses("run"), self.losses("undisturbed")[8:])
        self.assertEqual(self.digest("run"), self.digest("undisturbed"))
        self.check_left_nothing(outcome)

    def test_a_mistake_is_not_restarted(self):
        name = self.configure("run", data={"type": "fashion_mnist", "path": str(self.data)}, trainer={"metric_for_best": "nonsense"})
        outcome = self.run_tool("train", name, "--nproc", 2, "--max-restarts", 3)
        self.assertEqual(outcome.code, 1, outcome)
        self.assertEqual(outcome.err.count("\n"), 2, outcome)
        self.assertIn("error: trainer.metric_for_best: found \"nonsense\"", outcome.err)
        self.assertIn("not restarted: the same error would occur again", outcome.err)

    # ---------------------------------------------------------------------------------------------- fewer ranks

    def test_the_next_number_that_divides_the_batch(self):
        """The configuration gives the micro-batch, of which each rank has one: the batch is that of 4 ranks, which 3 do not divide."""
        outcome = self.check_fewer(4, 2, 2, train_batch_size=None, train_micro_batch_size_per_gpu=2)
        self.assertIn("batch 8 = 2 x 1 accumulated x 4 ranks", outcome.out)
        self.assertIn("batch 8 = 2 x 2 accumulated x 2 ranks", outcome.out)

    def test_down_to_one(self):
        """All three numbers are given; an epoch ends in the middle of a step, and its last samples make a smaller one."""
        outcome = self.check_fewer(2, 0, 1, train_batch_size=12, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2,
                                      trainer={"dataloader_drop_last": False})
        self.assertIn("batch 12 = 3 x 4 accumulated x 1 rank", outcome.out)

    # ------------------------------------------------------------------------------------------------- torchrun

    @unittest.skipUnless(TORCHRUN and os.path.isfile(TORCHRUN), "torchrun is not installed")
    def test_an_agent_of_torchrun_leaves(self):
        """Two agents with a rank each; one is killed with its rank. The other goes on alone, on the same samples, although the
        configuration names the micro-batch only."""
        changes = {"model": NO_DROPOUT, "train_batch_size": None, "train_micro_batch_size_per_gpu": 6}
        self.undisturbed("--nproc", 2, **changes)
        name, endpoint = self.configure("run", **changes), f"127.0.0.1:{free_port()}"
        agents = [self.start("--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", "job7",
                             "--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={host},last_call_timeout=3,keep_alive_interval=1,"
                             "keep_alive_max_attempt=2", "--no-python", TESSERA, "train", name, program=TORCHRUN)
                  for host in ("true", "false")]  # the first one serves the rendezvous
        self.wait_for_steps(agents[0], 10)
        (leaves,) = [pid for pid in self.ranks().values() if self.parent(pid) == agents[1].pid]
        agents[1].kill()
        os.kill(leaves, signal.SIGKILL)
        self.finish(agents[1])
        outcome = self.finish(agents[0])
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("batch 12 = 6 x 2 accumulated x 1 rank", outcome.out)
        self.check_complete("run")
        self.assertLess(self.largest_difference(), 1e-5)
        self.assert_nothing_runs()


if __name__ == "__main__":
    unittest.main()
