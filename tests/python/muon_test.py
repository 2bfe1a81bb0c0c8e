"""The configuration's Muon, alone, on two ranks and on three, in shared memory and over Gloo."""
import unittest

from ranks import RanksTest

SCRIPT = "muon_rank.py"


class Muon(RanksTest):
    def _run(self, world, backend, *checks):
        self.run_ranks(world, SCRIPT, backend, *checks, SAVED=self.folder)

    def test_two_ranks_in_shared_memory(self):
        self._run(2, "auto")

    def test_two_ranks_over_gloo(self):
        self._run(2, "gloo", "stages_have_the_bits_of_torch", "half_precision_updates_masters")

    def test_other_worlds(self):
        self._run(2, "auto", "checkpoints_resume")
        for world in (2, 3, 1):
            self._run(world, "auto", "checkpoints_of_another_world", "stages_have_the_bits_of_torch")


if __name__ == "__main__":
    unittest.main()
