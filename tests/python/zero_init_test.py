"""Models that are made under a stage 3 configuration, by zero.Init, by GatheredParameters or by transformers: every rank has the values."""
import unittest

from ranks import RanksTest


class ZeroInit(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "zero_init_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "zero_init_rank.py", "shm")

    def test_three_ranks_over_gloo(self):
        self.run_ranks(3, "zero_init_rank.py", "gloo", "values_of_rank_0", "gathered_before_initialize", "from_pretrained")


if __name__ == "__main__":
    unittest.main()
