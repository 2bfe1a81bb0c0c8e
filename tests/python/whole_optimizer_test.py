"""Optimizers that run as they are, alone, on two ranks and on three, in shared memory and over Gloo."""
import unittest

from ranks import RanksTest

SCRIPT = "whole_optimizer_rank.py"


class WholeOptimizer(RanksTest):
    def _run(self, world, backend, *checks):
        self.run_ranks(world, SCRIPT, backend, *checks, SAVED=self.folder)

    def test_alone(self):
        self._run(1, "auto")

    def test_two_ranks_in_shared_memory(self):
        self._run(2, "auto")

    def test_two_ranks_over_gloo(self):
        self._run(2, "gloo", "every_optimizer_of_torch_has_its_own_bits", "accumulation_clipping_and_bf16", "state_on_disk_and_in_groups")

    def test_other_worlds(self):
        for world in (3, 1, 2):
            self._run(world, "auto", "checkpoints_resume")
        for world in (2, 3, 1):
            self._run(world, "auto", "checkpoints_of_another_world")


if __name__ == "__main__":
    unittest.main()
