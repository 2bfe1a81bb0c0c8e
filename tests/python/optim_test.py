"""The configuration's optimizers of whole parameters, alone, on two ranks and on three."""
import unittest

from ranks import RanksTest

SCRIPT = "optim_rank.py"


class Optim(RanksTest):
    def _run(self, world, *checks):
        self.run_ranks(world, SCRIPT, "auto", *checks, SAVED=self.folder)

    def test_two_ranks(self):
        self._run(2)

    def test_other_worlds(self):
        for world in (3, 1, 2):
            self._run(world, "what_another_world_has_saved")


if __name__ == "__main__":
    unittest.main()
