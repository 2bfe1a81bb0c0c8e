"""Models of PyTorch, transformers and torchvision train at every stage, over every CPU backend, as in plain PyTorch. Argument 1 is the
family of models."""
import sys
import unittest

from ranks import RanksTest

FAMILY = "torch"


class Parity(RanksTest):
    def test_alone(self):
        if FAMILY == "patterns":
            self.skipTest("two ranks and three see more")
        self.run_ranks(1, "parity_rank.py", "auto", FAMILY)

    def test_two_ranks_in_shared_memory(self):
        self.run_ranks(2, "parity_rank.py", "shm", FAMILY)

    def test_two_ranks_over_gloo(self):
        if FAMILY == "patterns":
            self.skipTest("three ranks see more")
        self.run_ranks(2, "parity_rank.py", "gloo", FAMILY)

    def test_three_ranks(self):
        if FAMILY in ("torch", "patterns"):
            self.run_ranks(3, "parity_rank.py", "gloo", FAMILY)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        FAMILY = sys.argv.pop(1)
    unittest.main()
