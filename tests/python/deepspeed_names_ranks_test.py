"""deepspeed_names_rank.py on one rank and on two: what DeepSpeed's names compute where there are ranks."""
import unittest

from ranks import RanksTest


class DeepSpeedNamesOnRanks(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "deepspeed_names_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "deepspeed_names_rank.py", "shm")

    def test_two_ranks_over_gloo(self):
        self.run_ranks(2, "deepspeed_names_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
