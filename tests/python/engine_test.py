"""The engine's calls from Python, alone and on two ranks."""
import unittest

from ranks import RanksTest


class Engine(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "engine_rank.py", "auto")

    def test_flops(self):
        self.run_ranks(1, "flops_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "engine_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "engine_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
