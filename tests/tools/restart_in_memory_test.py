"""Ranks that die and continue from a checkpoint in memory (trainer.save_in_memory_every_steps), which the launcher keeps for them."""
import os
import time
import unittest
from pathlib import Path

from restarts import Restarts

STEPS = {"save_in_memory_every_steps": 1, "save_every_steps": 1000, "save_every_epochs": 0}  # on disk only at the end of a run


class RestartInMemoryTest(Restarts):
    def memory_folder(self):
        folders = {environment["TESSERA_MEMORY_DIR"] for environment in self.marked().values() if "TESSERA_MEMORY_DIR" in environment}
        self.assertEqual(len(folders), 1)
        return Path(folders.pop())

    def files_of(self, memory, name):
        """Files of the checkpoints in memory, while ranks go on saving: a folder may be renamed while it is looked at."""
        for _ in range(20):
            try:
                return list(memory.glob(f"global_step*/{name}"))
            except FileNotFoundError:
                pass
        return self.fail(f"{memory} changes all the time")

    def test_it_loses_at_most_the_step_under_way(self):
        """Rank 1 and then rank 0 are killed. The model and all losses are those of a run without."""
        self.undisturbed("--nproc", 2)
        process = self.start("train", self.configure("run", trainer=STEPS), "--nproc", 2, "--max-restarts", 2)
        done = []
        for rank, step in ((1, 7), (0, 18)):
            self.kill_at(process, rank, step)
            done.append(self.num_recorded)
            (memory,) = self.memory_folders
            self.assertEqual(os.stat(memory).st_mode & 0o777, 0o700)
        outcome = self.finish(process)
        for start, recorded in zip(self.resumed_at(outcome), done, strict=True):
            self.assertGreaterEqual(start, recorded - 1)
        self.assertEqual(outcome.out.count("from /dev/shm/tessera_memory_"), 2, outcome)
        self.check_same(outcome)

    def test_the_later_of_disk_and_memory(self):
        """Every 3 steps in memory, every 4 on disk: the later one, or where both are of one step that on disk."""
        self.undisturbed("--nproc", 2)
        process = self.start("train", self.configure("run", trainer={"save_in_memory_every_steps": 3, "save_every_steps": 4}), "--nproc", 2,
                             "--max-restarts", 3)
        done = []
        for step in (5, 11, 22):
            self.kill_at(process, 1, step)
            done.append(self.num_recorded)
            while len(self.ranks()) == 2 or process.poll() is not None:
                time.sleep(0.002)
        outcome = self.finish(process)
        for line, recorded in zip((line for line in outcome.out.splitlines() if "resuming after step" in line), done, strict=True):
            step = int(line.split(",")[0].split()[-1])
            self.assertTrue(step % 3 == 0 or step % 4 == 0, line)
            self.assertIn("/dev/shm/" if step % 4 else "run/checkpoints/", line)
            finished = recorded - 1  # the last step that is recorded may not be saved yet
            self.assertGreaterEqual(step, max(finished - finished % 3, finished - finished % 4), line)
        self.check_same(outcome)

    def test_fewer_ranks(self):
        outcome = self.check_fewer(3, 1, 2, disturbed={"trainer": STEPS})
        for said in ("from /dev/shm/tessera_memory_", "batch 12 = 4 x 1 accumulated x 3 ranks", "batch 12 = 3 x 2 accumulated x 2 ranks"):
            self.assertIn(said, outcome.out)

    def test_a_killed_launcher_leaves_no_memory(self):
        """Also after a restart."""
        process = self.start("train", self.configure("run", trainer=STEPS), "--nproc", 2, "--max-restarts", 1)
        self.kill_at(process, 1, 5)
        self.wait_for_steps(process, self.num_recorded + 5)
        memory = self.memory_folder()
        self.assertGreater(len(self.files_of(memory, "rank_*.h5")), 1)
        process.kill()
        process.wait()
        self.finish(process)
        give_up = time.monotonic() + 20
        while self.marked():  # ranks, and what cleans up
            self.assertLess(time.monotonic(), give_up, self.marked())
            time.sleep(0.01)
        self.assertFalse(memory.exists(), list(memory.rglob("*")))

    def test_a_full_memory_is_a_warning(self):
        """A folder that cannot be written, as where /dev/shm is full: said once."""
        outcome = self.run_tool("train", self.configure("run", trainer={**STEPS, "max_steps": 5}), env={"TESSERA_MEMORY_DIR": "/proc/nowhere"})
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.err.count("warning: no checkpoint in memory at step 1, training continues"), 1, outcome)
        self.assertEqual(outcome.err.count("checkpoint in memory"), 1, outcome)

    def test_without_restarts_it_has_no_effect(self):
        outcome = self.run_tool("train", self.configure("run", trainer={**STEPS, "max_steps": 5}), "--nproc", 2)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.err.count("trainer.save_in_memory_every_steps: no effect without --max-restarts"), 1, outcome)


if __name__ == "__main__":
    unittest.main()
