"""torch.compile with inductor and aot_eager, beside plain PyTorch."""
import sys
import unittest

from ranks import RanksTest


class Compile(RanksTest):
    """Compiled code is kept in one folder, so that the second of two tests finds that of the first."""

    def compare(self, world, backend, compiler, stages):
        self.run_ranks(world, "compile_rank.py", backend, compiler, stages, TORCHINDUCTOR_FX_GRAPH_CACHE=1)

    def test_inductor_in_shared_memory(self):
        self.compare(2, "shm", "inductor", "03")

    def test_inductor_over_gloo(self):
        self.compare(2, "gloo", "inductor", "123")

    def test_aot_eager(self):
        self.compare(2, "gloo", "aot_eager", "13")

    def test_eager(self):
        self.compare(1, "auto", "eager", "3")


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
