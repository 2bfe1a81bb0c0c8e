"""Optimizers, schedulers and the data loader, alone and on two ranks."""
import unittest

from ranks import RanksTest

SCRIPTS = ("optimizer_rank.py", "optimizer_state_rank.py")


class Optimizer(RanksTest):
    def test_alone(self):
        for script in SCRIPTS:
            self.run_ranks(1, script, "auto")

    def test_two_ranks_in_shared_memory(self):
        for script in SCRIPTS:
            self.run_ranks(2, script, "auto")


if __name__ == "__main__":
    unittest.main()
