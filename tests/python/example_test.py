"""examples/python trains and resumes, on Fashion-MNIST."""
import re
import unittest
from pathlib import Path

from ranks import ROOT, TESSERA, RanksTest, python

DATA = Path("/usr/share/datasets/fashion-mnist")


@unittest.skipUnless(DATA.exists(), "Debian package dataset-fashion-mnist is not installed")
class Example(RanksTest):
    def test_fashion_mnist(self):
        script = [TESSERA, "launch", "-n", 2, "--", *python(), ROOT / "examples" / "python" / "fashion_mnist.py"]
        (text,) = self.finish([self.start(*script, "--max-steps", 120)])
        self.assertGreater(float(re.search(r"test accuracy ([0-9.]+)", text)[1]), 0.65, text)
        (text,) = self.finish([self.start(*script, "--max-steps", 150, "--stage", 3, "--resume")])
        self.assertIn("after 150 steps", text)
        self.assertTrue((self.folder / "runs" / "fashion_mnist_python" / "model.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
