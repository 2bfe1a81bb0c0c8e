"""Frozen parameters of any type: alone, on two ranks in shared memory, and over Gloo."""
import unittest

from ranks import RanksTest


class FrozenDtypes(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "frozen_dtypes_rank.py", "auto")

    def test_shared_memory(self):
        self.run_ranks(2, "frozen_dtypes_rank.py", "auto")

    def test_gloo(self):
        self.run_ranks(2, "frozen_dtypes_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
