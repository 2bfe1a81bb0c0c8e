"""Parameters and modules that are changed between steps, and models that are refused: patterns_rank.py on one rank and more."""
import unittest

from ranks import RanksTest


class Patterns(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "patterns_rank.py", "auto")

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "patterns_rank.py", "shm")

    def test_three_ranks_over_gloo(self):
        self.run_ranks(3, "patterns_rank.py", "gloo")

    def test_ranks_that_use_different_parameters_at_stage_3_are_told(self):
        for code, text in self.outcome(self.start_ranks(2, "uneven_rank.py", "plain")):
            self.assertNotEqual(code, 0, text)
            last = text.strip().splitlines()[-1]
            self.assertRegex(last, r"^tessera\.errors\.CommError: rank \d exchanges \"gather of unit \d+ \(branches\.\d.*rank \d exchanges")
            self.assertRegex(last, r"zero_optimization\.stage to 2, or .* in one GatheredParameters$")

    def test_what_they_are_told_to_do_helps(self):
        self.run_ranks(2, "uneven_rank.py", "held")

    def test_leaf_modules_of_ranks_that_use_different_experts_helps(self):
        self.run_ranks(2, "uneven_rank.py", "leaf")


if __name__ == "__main__":
    unittest.main()
