"""`tessera.initialize` with a callable that makes the module, on ranks that are processes."""
import unittest

from ranks import RanksTest


class Making(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "making_rank.py", "auto")

    def test_three_ranks_in_shared_memory(self):
        self.run_ranks(3, "making_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "making_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
