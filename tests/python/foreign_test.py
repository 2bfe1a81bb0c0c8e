"""Checkpoints of other programs, loaded on one rank and on two. What DeepSpeed and the like write: tests/peers."""
import unittest

from ranks import RanksTest


class Foreign(RanksTest):
    def test_worlds(self):
        for world in (2, 1):
            self.run_ranks(world, "foreign_rank.py", "auto", SAVED=self.folder)


if __name__ == "__main__":
    unittest.main()
