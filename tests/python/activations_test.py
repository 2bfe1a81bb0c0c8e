"""Activation recomputation of Python models, alone and on two ranks."""
import unittest

from ranks import RanksTest


class Activations(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "activations_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "activations_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "activations_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
