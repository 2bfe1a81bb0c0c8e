"""The bundle of `make bundle`: what its binaries need and name, and that it runs on a machine with nothing but Python and torch.

BUILD_DIR and TORCH_DIR (the wheel's folder `torch`) come from ctest. The machine is tests/install/bare_root.py.
"""
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

import bare_root

ROOT = Path(__file__).resolve().parents[2]
BUILD, TORCH = Path(os.environ["BUILD_DIR"]), Path(os.environ["TORCH_DIR"])
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
WHEELS = {"libtorch.so", "libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libtorch_cuda.so", "libc10_cuda.so", "libcudart.so.13"}
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}  # as the wheel's tag says: Debian 12, Ubuntu 22.04


def output_of(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


class BundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.home = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_bundle_", ignore_cleanup_errors=True)))
        made = output_of(sys.executable, "-B", ROOT / "bundle" / "make_bundle.py", "--build", BUILD, "--out", cls.home / "out")
        print(made.strip())
        (cls.archive,) = (cls.home / "out").glob("*.tar.gz")
        cls.root = cls.home / "root"
        (cls.root / "opt").mkdir(parents=True)
        with tarfile.open(cls.archive) as archive:
            archive.extractall(cls.root / "opt")
        cls.name = cls.archive.name.removesuffix(".tar.gz")
        cls.bundle = cls.root / "opt" / cls.name
        cls.why_not = bare_root.why_not()
        if not cls.why_not:
            cls.machine = bare_root.BareRoot(cls.root, TORCH.parent)

    def inside(self, *command, code=0, machine=None, **variables):
        """Runs a program in the bundle's folder of the bare machine. Returns what it wrote to stdout, or to stderr if it is to fail."""
        if self.why_not:
            self.skipTest(self.why_not)
        done = (machine or self.machine).run(*command, cwd=f"/opt/{self.name}", **variables)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout if code == 0 else done.stderr

    def binaries(self):
        found = [path for folder in ("bin", "lib") for path in (self.bundle / folder).iterdir()
                 if not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"]
        self.assertGreaterEqual(len(found), 7)
        return found

    # ----------------------------------------------------------------------------------------- what it is

    def test_it_fits_and_is_complete(self):
        self.assertLess(self.archive.stat().st_size, 60 << 20)
        for name in ("run.sh", "gpu_check.sh", "README.md", "bin/tessera", "bin/step_rank", "bin/bench_kernels", "bin/engine_gpu_test",
                     "lib/tests.json", "configs/fashion_mnist.json", "data/fashion-mnist/train-images-idx3-ubyte.gz", "licenses/tessera"):
            self.assertTrue((self.bundle / name).exists(), name)
        self.assertEqual((self.bundle / "bin/libtessera_cuda.so").exists(), (BUILD / "libtessera_cuda.so").exists())
        for path in (self.bundle / "run.sh", self.bundle / "gpu_check.sh"):
            self.assertTrue(os.access(path, os.X_OK), path)
            self.assertNotIn("@", path.read_text().replace("$@", ""), "a placeholder")

    def test_binaries_name_no_path_and_need_nothing_more(self):
        own = {path.name for path in (self.bundle / "lib").iterdir()}
        for path in self.binaries():
            dynamic = output_of("readelf", "-d", path)
            self.assertEqual(set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)) - {"$ORIGIN/../lib"}, set(), path)
            needed = set(re.findall(r"\(NEEDED\) +Shared library: \[(.*)\]", dynamic))
            self.assertEqual(needed - SYSTEM - WHEELS - own, set(), path)
            self.assertNotIn(".symtab", output_of("readelf", "-S", "-W", path), f"{path} is not stripped")
            for name, number in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", output_of("readelf", "-V", path)):
                self.assertLessEqual(tuple(map(int, number.split("."))), NEWEST[name], path)

    def test_what_counts_as_a_failure(self):
        sys.path.insert(0, str(self.bundle / "lib"))
        self.addCleanup(sys.path.pop, 0)
        import tables
        row = {"engine": "Tessera", "backend": "nccl", "ranks": 1, "way": "stage_3", "step_ms": 2, "state_bytes": 10, "formula_bytes": 10}
        peer = {"engine": "PyTorch", "backend": "", "ranks": 1, "way": "bf16_compiled"}
        results = {"tests": [{"name": "a_test", "status": "passed"}], "kernels": [], "seconds": 1.0, "machine": {},
                   "steps": [{"title": "GPT", "rows": [row, {**peer, "error": "no compiler"}]}]}
        self.assertEqual(tables.failures(results), [])
        results["tests"] += [{"name": "b_test", "status": "FAILED"}, {"name": "c_test", "status": "no time"}]
        results["steps"][0]["rows"] += [{**row, "formula_bytes": 11}, {**row, "error": "no time was left"}]
        name = "Tessera bf16, stage 3 (nccl x 1)"
        self.assertEqual(tables.failures(results), ["b_test: FAILED", "c_test: no time", f"{name}: memory is not the formula's", f"{name}: no time was left"])

    # ------------------------------------------------------------------------- on a machine with Python and torch

    @staticmethod
    def torch():
        """The version that was built with."""
        return re.search(r"__version__ = '([\d.]+)", (Path(os.environ["TORCH_DIR"]) / "version.py").read_text(encoding="utf-8"))[1]

    def test_size_is_what_the_page_says(self):
        page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
        megabytes = int(re.search(r"^make bundle +# dist/tessera-\S+, (\d+) MB$", page, re.MULTILINE)[1])
        self.assertLess(abs(self.archive.stat().st_size / 1e6 - megabytes), 3)

    def test_the_command(self):
        self.assertRegex(self.inside("./run.sh", "--version"), r"^\d+\.\d+\.\d+\n$")
        self.assertRegex(self.inside("/bin/sh", "run.sh", "--version"), r"^\d+\.\d+\.\d+\n$")
        report = self.inside("./run.sh", "doctor")
        self.assertRegex(report, r"(?m)^  ok       GPUs        none: .+$")
        self.assertRegex(report, r"(?m)^  ok       libtorch    " + re.escape(self.torch()))

    def test_it_trains_on_two_ranks(self):
        text = self.inside("./run.sh", "train", "configs/fashion_mnist.json", "--nproc", 2, "--set", "trainer.device=cpu", "--set",
                           "trainer.epochs=1", "--set", "zero_optimization.stage=3")
        self.assertGreater(float(re.findall(r"accuracy (0\.\d+)", text)[-1]), 0.6, text)

    def test_no_gpu_is_one_line(self):
        line = self.inside("./gpu_check.sh", code=2)
        self.assertRegex(line, r"^gpu_check: no GPU: [^\n]+\n$")

    def test_the_check_runs_on_the_cpu(self):
        # Of its gpu tests every eighth: the suite has them all.
        text = self.inside("./gpu_check.sh", "--cpu", "--out", "/tmp/check", GTEST_TOTAL_SHARDS="8", GTEST_SHARD_INDEX="0")
        for row in ("Tessera forward + backward, pure bf16", *(f"Tessera bf16, stage {stage} (shm x 2)" for stage in range(4)),
                    "PyTorch DDP, bf16 autocast, fused AdamW", "PyTorch FSDP2, bf16, fused AdamW", "PyTorch pure bf16, fused AdamW"):
            self.assertRegex(text, rf"(?m)^{re.escape(row)}.*( +\d+\.\d+){{7}}$")
        self.assertRegex(text, r"passed   engine_gpu_test shm x 2 \(\d+ cases")
        self.assertRegex(text, r"(?m)^(memcpy|copy) +\d")
        self.assertRegex(text, r"(?m)^all passed in [\d.]+ s$")

    # ------------------------------------------------------------------------------------ what is missing

    def test_no_torch_and_another_torch(self):
        if self.why_not:
            self.skipTest(self.why_not)
        without = self.home / "without"
        machine = bare_root.BareRoot(without)
        shutil.copytree(self.bundle, without / "opt" / self.name, symlinks=True)
        full = self.torch()
        minor = full.rpartition(".")[0]
        todo = f"expected torch {minor}; pip install 'torch=={minor}.*', or set PYTHON to a Python that has it\n"
        self.assertEqual(self.inside("./run.sh", "--version", code=1, machine=machine), f"error: /usr/bin/python3 has no torch: {todo}")
        self.assertEqual(self.inside("./gpu_check.sh", code=1, machine=machine), f"error: /usr/bin/python3 has no torch: {todo}")
        torch = without / "opt" / "python" / "torch"
        torch.mkdir()
        (torch / "__init__.py").touch()
        (torch / "version.py").write_text("__version__ = '2.9.1+cu130'\n")
        self.assertEqual(self.inside("./run.sh", "--version", code=1, machine=machine),
                         f"error: /usr/bin/python3 has torch 2.9.1+cu130 (/opt/python/torch): {todo}")
        (torch / "version.py").write_text(f"__version__ = '{full}'\n")
        self.assertIn("/opt/python/torch/lib/libtorch_cpu.so is not there", self.inside("./run.sh", "--version", code=1, machine=machine))
        self.assertIn(f"nothing is no program here: expected a Python with torch {minor}",
                      self.inside("./run.sh", "--version", code=1, machine=machine, PYTHON="nothing"))


if __name__ == "__main__":
    unittest.main()
