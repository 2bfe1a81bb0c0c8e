"""loss.backward() of an engine's outputs: alone, on two ranks in shared memory, and over Gloo."""
import unittest

from ranks import RanksTest


class LossBackward(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "loss_backward_rank.py", "auto")

    def test_shared_memory(self):
        self.run_ranks(2, "loss_backward_rank.py", "auto")

    def test_gloo(self):
        self.run_ranks(2, "loss_backward_rank.py", "gloo")


if __name__ == "__main__":
    unittest.main()
