"""The same small training under every launcher, with the real programs: torchrun, mpirun, srun, ssh, pdsh. The losses are those of
`tessera train --nproc`, to the bit.

    hosts_test.py [TEST...]        TESSERA and TORCHRUN name the programs
"""
import json
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE)]
import testbed  # noqa: E402
from tool import TESSERA, ToolTest  # noqa: E402

SKIPPED = 77
TORCHRUN = os.environ.get("TORCHRUN", "")
NUM_RANKS = 3
LAUNCHERS = re.compile(r"OMPI_|PMIX?_|SLURM_|HOROVOD_|PET_|PDSH_")


def needs(*programs):
    """Skips a test where a program is missing, unless the tests have to run (make test-hosts)."""
    missing = [name for name in programs if not (testbed.which(name) or os.path.isfile(name))]
    reason = f"not installed: {', '.join(missing)}; `make test-hosts` installs the Debian packages"
    if missing and os.environ.get("TESSERA_TEST_HOSTS_REQUIRED"):
        raise SystemExit(reason)
    return unittest.skipIf(missing, reason)


class HostsTest(ToolTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["OMP_NUM_THREADS"] = "1"  # the number of threads changes sums
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
        (self.folder / "hosts").write_text("# the testbed\nn1 slots=2\nn2 slots=1\n")

    def tearDown(self):
        left = {pid: name for pid, name in testbed.processes().items() if pid not in self.before and name not in ("slurmstepd", "sshd")}
        self.assertEqual(left, {}, "left behind")

    def environment(self, **changes):
        base = {name: value for name, value in super().environment().items() if not LAUNCHERS.match(name)}
        return {**base, **self.bed.environment(), "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in changes.items()}}

    def config(self, **changes):
        return super().config(**{"zero_optimization": {"stage": 2}, **changes})

    def train(self, name, *command, code=0):
        """Trains into a folder of its own; the losses and gradient norms of all steps."""
        config = self.config()
        config["trainer"]["output_dir"] = f"run_{name}"
        self.write(f"{name}.json", config)
        words = [word.replace("CONFIG", f"{name}.json") if isinstance(word, str) else word for word in command]
        outcome = self.run_tool(*words[1:], program=words[0])
        self.assertEqual(outcome.code, code, outcome)
        return self.losses(f"run_{name}") if code == 0 else outcome

    def expected(self):
        losses = self.train("expected", TESSERA, "train", "CONFIG", "--nproc", NUM_RANKS)
        self.assertEqual(len(losses), 5)
        return losses

    def world_size(self, name):
        return json.loads((self.folder / f"run_{name}" / "config.json").read_text())

    # --------------------------------------------------------- under launchers that start every rank themselves

    @needs(TORCHRUN or "torchrun")
    def test_torchrun(self):
        self.assertEqual(self.train("torchrun", TORCHRUN or "torchrun", "--no-python", "--nproc-per-node", NUM_RANKS, TESSERA, "train", "CONFIG"), self.expected())

    @needs("mpirun")
    def test_mpirun(self):
        losses = self.train("mpirun", "mpirun", "--oversubscribe", "--bind-to", "none", "-n", NUM_RANKS, TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())

    @needs("mpirun", "sshd")
    def test_mpirun_on_two_hosts(self):
        losses = self.train("mpirun2", "mpirun", "--bind-to", "none", "--host", "n1:2,n2:1", "-n", NUM_RANKS, "-x", "OMP_NUM_THREADS",
                            "-x", "MASTER_ADDR=n1", TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())
        outcome = self.train("unsaid", "mpirun", "--bind-to", "none", "--host", "n1:2,n2:1", "-n", NUM_RANKS, TESSERA, "train", "CONFIG", code=1)
        self.assertIn("MASTER_ADDR is not set, and Open MPI does not say where rank 0 is", outcome.err)

    @needs("srun", "munged")
    def test_srun(self):
        losses = self.train("srun", "srun", "-N", 2, "-n", NUM_RANKS, "--overcommit", TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())

    @needs("srun", "munged")
    def test_srun_starts_one_launcher_a_host(self):
        losses = self.train("srun4", "srun", "-N", 2, "--ntasks-per-node", 1, TESSERA, "train", "CONFIG", "--nproc", 2)
        self.assertEqual(losses, self.train("four", TESSERA, "train", "CONFIG", "--nproc", 4))

    @needs("sbatch", "munged")
    def test_sbatch(self):
        """In the script itself there is one rank, srun in it starts all."""
        self.write("alone.json", {**self.config(), "trainer": {**self.config()["trainer"], "output_dir": "run_alone"}})
        self.write("job.json", {**self.config(), "trainer": {**self.config()["trainer"], "output_dir": "run_job"}})
        self.write("job.sh", f"#!/bin/bash\n'{TESSERA}' train alone.json && srun --overcommit '{TESSERA}' train job.json\n")
        outcome = self.run_tool("--wait", "-N", 2, "-n", NUM_RANKS, "-o", "job.out", "job.sh", program="sbatch")
        self.assertEqual(outcome.code, 0, f"{outcome}\n{(self.folder / 'job.out').read_text()}")
        self.assertEqual(self.losses("run_job"), self.expected())
        self.assertEqual(self.losses("run_alone"), self.train("one", TESSERA, "train", "CONFIG"))

    # ------------------------------------------------------------------------------- driven by --launcher

    def check_launcher(self, launcher, *flags):
        losses = self.train(launcher, TESSERA, "train", "CONFIG", "--hostfile", "hosts", "--launcher", launcher, *flags)
        self.assertEqual(losses, self.expected())
        # A rank on the second host dies: one line names the host and the rank.
        script = self.write("fail.sh", 'if [ "$RANK" = 2 ]; then echo "error: rank $RANK is out of luck" >&2; exit 9; fi; sleep 100')
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--launcher", launcher, "--save-grace", 2, *flags, "--", "sh", script)
        self.assertEqual(outcome.code, 9, outcome)
        self.assertRegex(outcome.err, r"(?m)^error: rank 2 of 3 failed first: exit code 9, on host n2 at [\d:.]+; last error: error: rank 2 is out of luck$")
        self.assertLess(outcome.seconds, 30)

    @needs("ssh", "sshd")
    def test_ssh(self):
        self.check_launcher("ssh", "--launcher-args", f"-F {self.bed.folder}/ssh_config")

    @needs("pdsh", "ssh", "sshd")
    def test_pdsh(self):
        self.check_launcher("pdsh")

    @needs("mpirun", "sshd")
    def test_openmpi(self):
        self.check_launcher("openmpi")

    @needs("srun", "munged")
    def test_slurm(self):
        self.check_launcher("slurm", "--launcher-args", "--overcommit")

    @needs("ssh", "sshd")
    def test_include_and_python(self):
        """A host and a slot of the other, and the Python package."""
        flags = ["--hostfile", "hosts", "--launcher-args", f"-F {self.bed.folder}/ssh_config"]
        self.write("place.sh", "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $(hostname) $CUDA_VISIBLE_DEVICES > place_$RANK")
        outcome = self.run_tool("launch", *flags, "--include", "n1:1@n2", "--", "sh", "place.sh")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual([(self.folder / f"place_{rank}").read_text() for rank in (0, 1)], ["0/2 0/1 n1 1\n", "1/2 0/1 n2\n"])

    @needs("ssh", "sshd")
    def test_ssh_is_refused(self):
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--", "true")  # without the key
        self.assertEqual(outcome.code, 255, outcome)
        self.assertRegex(outcome.err, r"error: ssh to n[12] failed: exit code 255; what it said is above")

    @needs("ssh", "sshd")
    def test_ctrl_c_saves_on_all_hosts(self):
        script = self.write("save.sh", 'trap "echo saved > saved_$RANK; exit 0" TERM; touch ready_$RANK; while :; do sleep 0.1; done')
        process = self.start("launch", "--hostfile", "hosts", "--launcher-args", f"-F {self.bed.folder}/ssh_config", "--", "sh", script)
        self.wait_for_files("ready_0", "ready_1", "ready_2")
        process.send_signal(2)
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 0, outcome)
        self.wait_for_files("saved_0", "saved_1", "saved_2", seconds=0)

    @needs("ssh", "sshd")
    def test_killed_launcher_leaves_nothing(self):
        script = self.write("hang.sh", "touch ready_$RANK; sleep 1000")
        process = self.start("launch", "--hostfile", "hosts", "--launcher-args", f"-F {self.bed.folder}/ssh_config", "--", "sh", script)
        self.wait_for_files("ready_0", "ready_1", "ready_2")
        process.kill()
        self.finish(process)
        self.wait_until(lambda: not [name for pid, name in testbed.processes().items() if name in ("sleep", "sh", "tessera") and pid not in self.before])

    def wait_for_files(self, *names, seconds=20):
        self.wait_until(lambda: all((self.folder / name).exists() for name in names), seconds)

    def wait_until(self, condition, seconds=20):
        import time
        give_up = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), give_up, "it did not happen")
            time.sleep(0.05)


if __name__ == "__main__":
    if reason := testbed.enter():
        print(f"skipped: {reason}")
        sys.exit(1 if os.environ.get("TESSERA_TEST_HOSTS_REQUIRED") else SKIPPED)
    unittest.main(verbosity=2)
