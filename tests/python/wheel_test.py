"""What the wheel holds, beside an installed torch: it trains, its command runs, and nothing in it points at this machine."""
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import torch
from ranks import HERE, RanksTest

BUILD = Path(os.environ["BUILD_DIR"])
SITE_PACKAGES = Path(torch.__file__).parents[1]


class Wheel(RanksTest):
    def setUp(self):
        super().setUp()
        self.site = self.folder / "site-packages"
        subprocess.run(["cmake", "--install", BUILD, "--component", "python", "--prefix", self.site], check=True, capture_output=True)
        for path in SITE_PACKAGES.iterdir():  # as if pip had put all of it into one folder
            if path.name != "tessera":
                (self.site / path.name).symlink_to(path)

    def test_trains_and_starts_ranks(self):
        command = self.site / "tessera" / "bin" / "tessera"
        interpreter = [os.path.realpath(sys.executable), "-s"]
        (text,) = self.finish([self.start(*interpreter, "-c", "import tessera; print(tessera.__file__)", PYTHONPATH=self.site)])
        self.assertTrue(text.startswith(str(self.site)), text)
        (text,) = self.finish([self.start(command, "launch", "-n", 2, "--", *interpreter, HERE / "train_script.py", PYTHONPATH=self.site)])
        self.assertIn('"world": 2', text)
        (text,) = self.finish([self.start(*interpreter, "-m", "tessera", "--version", PYTHONPATH=self.site)])
        self.assertRegex(text, r"\d+\.\d+\.\d+")

    def test_finds_torch_beside_itself_and_exports_its_entry_alone(self):
        (module,) = (self.site / "tessera").glob("_engine*.so")
        for path in [module, *(self.site / "tessera" / "bin").iterdir()]:
            dynamic = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
            for folder in re.search(r"runpath: \[(.*)\]", dynamic)[1].split(":"):
                self.assertTrue(folder.startswith("$ORIGIN/"), f"{path.name}: {folder}")
        exported = subprocess.run(["nm", "-D", "--defined-only", module], check=True, capture_output=True, text=True).stdout
        self.assertEqual([line.split()[-1] for line in exported.splitlines()], ["PyInit__engine"])


if __name__ == "__main__":
    unittest.main()
