"""Training that goes on after an exception in a forward or a backward, alone and on two ranks."""
import unittest

from ranks import RanksTest


class FailedSteps(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "failed_steps_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "failed_steps_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "failed_steps_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
