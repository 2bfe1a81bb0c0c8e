"""What the tests on two hosts share: the testbed, and a training by any launcher, whose losses are compared."""
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE.parent / "support")]
import hosts as testbed  # noqa: E402
from tool import ROOT, TESSERA, ToolTest  # noqa: E402

TORCHRUN = os.environ.get("TORCHRUN") or "torchrun"
# The training: five steps of a small one; or an epoch of configs/fashion_mnist.json, 132 of the 60,000 images a step, for 2, 3 and 4 ranks (make fashion-hosts).
IS_FASHION = os.environ.get("TESSERA_TEST_JOB") == "fashion_mnist"
NUM_STEPS = 454 if IS_FASHION else 5
LAUNCHERS = re.compile(r"OMPI_|PMIX?_|SLURM_|HOROVOD_|PET_|PDSH_")


def needs(*programs):
    """Skips a test where a program is missing, unless the tests have to run (make test-hosts)."""
    missing = [name for name in programs if not (testbed.which(name) or os.path.isfile(name))]
    reason = f"not installed: {', '.join(missing)}; `make test-hosts` installs the Debian packages"
    if missing and os.environ.get("TESSERA_TEST_HOSTS_REQUIRED"):
        raise SystemExit(reason)
    return unittest.skipIf(missing, reason)


class HostsCase(ToolTest):
    """A test on the testbed: two hosts with sshd and Slurm, one training under any launcher, and nothing left behind after each test."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bed = testbed.Testbed(tempfile.mkdtemp(dir=cls.shared, prefix="bed"))
        cls.addClassCleanup(cls.end_bed)
        if testbed.which("sshd"):
            cls.bed.start_sshd()
        if testbed.which("slurmctld") and testbed.which("munged"):
            cls.bed.start_slurm()
        cls.before = set(testbed.processes())

    @classmethod
    def end_bed(cls):
        cls.bed.end()
        if left := testbed.processes():
            raise AssertionError(f"left behind: {left}")

    def setUp(self):
        super().setUp()
        self.write("hosts", "# the testbed\nn1 slots=2\nn2 slots=1\n")
        self.write("pair", "n1 slots=1\nn2 slots=1\n")

    def left_behind(self):
        return {pid: name for pid, name in testbed.processes().items() if pid not in self.before and name not in ("slurmstepd", "sshd")}

    def tearDown(self):
        give_up = time.monotonic() + 10
        while self.left_behind() and time.monotonic() < give_up:  # what ended a host's launcher may be faster than that
            time.sleep(0.1)
        self.assertEqual(self.left_behind(), {}, "left behind")

    def environment(self, **changes):
        base = {name: value for name, value in super().environment().items() if not LAUNCHERS.match(name)}
        return {**base, **self.bed.environment(), "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in changes.items()}}

    def config(self, **changes):
        return super().config(**{"zero_optimization": {"stage": 2}, **changes})

    def write_config(self, name):
        config = self.config()
        if IS_FASHION:
            config = json.loads(re.sub(r"(?m)^ *//.*$", "", (ROOT / "configs" / "fashion_mnist.json").read_text()))
            config["trainer"].update(epochs=1, device="cpu")
            config.update(train_batch_size=132, steps_per_print=1)
        config["trainer"].update(output_dir=f"run_{name}", num_threads=1)  # the number of threads changes sums
        return self.write(f"{name}.json", config)

    def train(self, name, *command, code=0):
        """Trains into a folder of its own; the losses and gradient norms of all steps."""
        self.write_config(name)
        words = [word.replace("CONFIG", f"{name}.json") if isinstance(word, str) else word for word in command]
        outcome = self.run_tool(*words[1:], program=words[0])
        self.assertEqual(outcome.code, code, outcome)
        return self.losses(f"run_{name}") if code == 0 else outcome

    def expected(self, num_ranks=2):
        losses = self.train("expected", TESSERA, "train", "CONFIG", "--nproc", num_ranks)
        self.assertEqual(len(losses), NUM_STEPS)
        return losses

    def ssh_flags(self):
        return ["--launcher-args", f"-F {self.bed.folder}/ssh_config"]

    def mpich_flags(self):
        """For MPICH's mpirun on several hosts, which takes a program in place of ssh, but no arguments for it."""
        self.write("ssh.sh", f"#!/bin/sh\nexec ssh -F '{self.bed.folder}/ssh_config' \"$@\"\n")
        (self.folder / "ssh.sh").chmod(0o755)
        return ["-launcher", "ssh", "-launcher-exec", self.folder / "ssh.sh"]

    def wait_for_files(self, *names, seconds=20):
        self.wait_until(lambda: all((self.folder / name).exists() for name in names), seconds)

    def wait_until(self, condition, seconds=20):
        give_up = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), give_up, "it did not happen")
            time.sleep(0.05)


def main():
    if reason := testbed.enter():
        print(f"skipped: {reason}")
        sys.exit(1 if os.environ.get("TESSERA_TEST_HOSTS_REQUIRED") else testbed.SKIPPED)
    unittest.main(module="__main__", verbosity=2)
