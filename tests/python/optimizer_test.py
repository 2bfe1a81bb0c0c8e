"""Optimizers, schedulers and the data loader, alone and on two ranks."""
import unittest

from ranks import RanksTest


class Optimizer(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "optimizer_rank.py", "auto")

    def test_two_ranks(self):
        self.run_ranks(2, "optimizer_rank.py", "auto")


if __name__ == "__main__":
    unittest.main()
