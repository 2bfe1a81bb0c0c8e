"""Loops of plain PyTorch around an engine: alone, on two ranks in shared memory, and over Gloo."""
import unittest

from ranks import RanksTest


class Loops(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "loops_rank.py", "auto")

    def test_shared_memory(self):
        self.run_ranks(2, "loops_rank.py", "auto")

    def test_gloo(self):
        self.run_ranks(2, "loops_rank.py", "gloo")

    def different_engines(self, backend):
        for stage, call in ((0, "gather"), (3, "gather"), (2, "eval"), (3, "state_dict")):
            with self.subTest(stage=stage, call=call):
                self.run_ranks(2, "different_engines_rank.py", backend, stage, call)

    def test_different_engines_in_shared_memory(self):
        self.different_engines("auto")

    def test_different_engines_over_gloo(self):
        self.different_engines("gloo")


if __name__ == "__main__":
    unittest.main()
