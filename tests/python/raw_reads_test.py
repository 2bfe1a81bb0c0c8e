"""state_dict, torch.save, pickle, numpy, deepcopy and raw pointers of a model in training, alone and on two ranks."""
import unittest

from ranks import RanksTest


class RawReads(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "raw_reads_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "raw_reads_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "raw_reads_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
