"""examples/python trains and resumes, on Fashion-MNIST; and README.md shows how a loop changes."""
import difflib
import re
import sys
import unittest
from pathlib import Path

from ranks import ROOT, TESSERA, RanksTest, free_port, python

DATA = Path("/usr/share/datasets/fashion-mnist")


@unittest.skipUnless(DATA.exists(), "Debian package dataset-fashion-mnist is not installed")
class Example(RanksTest):
    def test_fashion_mnist(self):
        """On two ranks, and then alone, where a variable that is empty counts as unset."""
        script = ROOT / "examples" / "python" / "fashion_mnist.py"
        (text,) = self.finish([self.start(TESSERA, "launch", "-n", 2, "--", *python(), script, "--max-steps", 120, "--stage", 3)])
        self.assertGreater(float(re.search(r"test accuracy ([0-9.]+)", text)[1]), 0.65, text)
        (text,) = self.finish([self.start(*python(), script, "--max-steps", 150, "--resume", TORCHELASTIC_RESTART_COUNT="")])
        self.assertIn("after 150 steps", text)
        self.assertTrue((self.folder / "runs" / "fashion_mnist_python" / "model.safetensors").exists())


class ALoop(RanksTest):
    """examples/python/plain_loop.py, which is PyTorch's alone, and tessera_loop.py."""

    def test_readme_shows_the_difference(self):
        plain, ours = ((ROOT / "examples" / "python" / f"{name}_loop.py").read_text(encoding="utf-8").splitlines() for name in ("plain", "tessera"))
        self.assertEqual(plain[0], ours[0])
        (shown,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        self.assertEqual(shown.splitlines(), list(difflib.unified_diff(plain[1:], ours[1:], n=99, lineterm=""))[3:])
        self.assertEqual(len(re.findall(r"^[-+]", shown, re.MULTILINE)), 4, "README.md says how many lines change")
        self.assertNotIn("tessera", "".join(plain[1:]))

    def test_both_have_the_same_losses(self):
        """The second is started as README.md says."""
        shown = re.search(r"^torchrun (.*) (examples/python/tessera_loop\.py) ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", free_port(), *shown[1].split(), ROOT / shown[2]]
        launch = [TESSERA, "launch", "-n", 2, "--", *python(), ROOT / "examples" / "python" / "plain_loop.py"]
        losses = []
        for command in (launch, torchrun):
            (text,) = self.finish([self.start(*command)])
            losses.append([float(loss) for loss in re.findall(r"^step \d+  loss ([0-9.]+)$", text, re.MULTILINE)])
        self.assertEqual([len(one) for one in losses], [32, 32])
        for plain, ours in zip(*losses):
            self.assertAlmostEqual(plain, ours, delta=1e-4)
        self.assertLess(losses[0][-1], losses[0][0] / 3)


if __name__ == "__main__":
    unittest.main()
