"""What a module holds besides its parameters, alone and on two ranks."""
import unittest

from ranks import RanksTest


class ModuleState(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "module_state_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "module_state_rank.py", "shm")

    def test_members_alone(self):
        self.run_ranks(1, "module_members_rank.py", "auto")

    def test_members_on_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "module_members_rank.py", "shm")


if __name__ == "__main__":
    unittest.main()
