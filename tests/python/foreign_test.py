"""Checkpoints of other programs, loaded on one rank and on two. What DeepSpeed and the like write: tests/peers."""
import unittest

from ranks import RanksTest


class Foreign(RanksTest):
    def _run(self, world):
        self.run_ranks(world, "foreign_rank.py", "auto", SAVED=self.folder)

    def test_alone(self):
        self._run(1)

    def test_in_shared_memory(self):
        self._run(2)


if __name__ == "__main__":
    unittest.main()
