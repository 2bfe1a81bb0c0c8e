"""Ranks whose models have equal parameters and compute something else."""
import unittest

from ranks import RanksTest


class SameProgram(RanksTest):
    def test_two_ranks(self):
        self.run_ranks(2, "same_program_rank.py", "auto")


if __name__ == "__main__":
    unittest.main()
