"""configs/fashion_mnist.json, an epoch of it, under every launcher with the real programs: every loss and gradient norm of all 468 steps is that
of `tessera train --nproc 2`, to the bit, on one host with two ranks and on two hosts with one each. On two hosts with two ranks each all launchers
are equal to the bit, and to four ranks on one host but for rounding.

    fashion_mnist_test.py [TEST...]        TESSERA and TORCHRUN name the programs
"""
import hashlib
import json
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import hosts_case  # noqa: E402
from hosts_case import TORCHRUN, HostsCase, needs  # noqa: E402
from tool import ROOT, TESSERA  # noqa: E402

CONFIG = ROOT / "configs" / "fashion_mnist.json"
DATA = Path("/usr/share/datasets/fashion-mnist")
NUM_STEPS = 468  # 60,000 images, 128 a step; what is left is dropped
HOSTFILES = {"one": "n1 slots=2\n", "pair": "n1 slots=1\nn2 slots=1\n", "four": "n1 slots=2\nn2 slots=2\n"}
MPIRUN = "mpirun.openmpi"


@unittest.skipUnless(DATA.is_dir(), "not installed: Debian package dataset-fashion-mnist")
@needs(TORCHRUN, MPIRUN, "mpirun.mpich", "srun", "munged", "pdsh", "ssh", "sshd")
class FashionMnist(HostsCase):
    def setUp(self):
        super().setUp()
        for name, text in HOSTFILES.items():
            self.write(name, text)

    def job(self, name, *flags):
        return [TESSERA, "train", CONFIG, *flags, *(word for key, value in (
            ("epochs", 1), ("output_dir", f"run_{name}"), ("num_threads", 1), ("device", "cpu")) for word in ("--set", f"trainer.{key}={value}")),
            "--set", "steps_per_print=1"]

    def finish_all(self, *processes):
        for outcome in [self.finish(process) for process in processes]:
            self.assertEqual(outcome.code, 0, outcome)

    def run_under(self, name, *before, flags=()):
        """The job as the ranks of a launcher: what stands before it."""
        program, *words = [*before, *self.job(name, *flags)]
        self.finish_all(self.start(*words, program=str(program)))

    def run_torchrun_on_two_hosts(self, name):
        agents = []
        for node, host in enumerate(("n1", "n2")):
            program, *words = [*self.bed.on(host), TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1, "--master-addr", "n1",
                               "--master-port", 29612, "--no-python", *self.job(name)]
            agents.append(self.start(*words, program=program))
        self.finish_all(*agents)

    def run_sbatch(self, name, *flags):
        script = self.write(f"{name}.sh", f"#!/bin/bash\nsrun '{TESSERA}' " + " ".join(map(str, self.job(name)[1:])) + "\n")
        self.finish_all(self.start("--wait", *flags, "-o", f"{name}.out", script, program="sbatch"))

    def show(self, name, what, expected=None):
        """Prints a line of the table. The losses and norms."""
        losses = self.losses(f"run_{name}")
        results = json.loads((self.folder / f"run_{name}" / "all_results.json").read_text())
        self.assertEqual(len(losses), NUM_STEPS)
        digest = hashlib.sha256(repr(losses).encode()).hexdigest()[:16]
        equal = "" if expected is None else "equal to the bit" if losses == expected else "DIFFERENT"
        print(f"{what:42} {losses[0][0]:.15f}  {losses[-1][0]:.15f}  {results['eval_accuracy']:.4f}  {digest}  {equal}", flush=True)
        return losses

    def compare(self, expected, ways):
        """Runs each of (what, run, *arguments) and compares its losses."""
        different = []
        for number, (what, run, *arguments) in enumerate(ways):
            name = f"{self._testMethodName}_{number}"
            run(name, *arguments)
            if self.show(name, what, expected) != expected:
                different.append(what)
        self.assertEqual(different, [])

    def alone(self, num_ranks):
        name = f"nproc_{num_ranks}"
        self.run_under(name, flags=("--nproc", num_ranks))
        print(f"\n{'':42} {'first loss':17}  {'last loss':17}  {'accuracy':8}  SHA-256 of all losses and norms")
        return self.show(name, f"tessera train --nproc {num_ranks}")

    def driven(self, what, hostfile, launcher, *flags):
        """`tessera train --hostfile --launcher`."""
        return (what, lambda name: self.run_under(name, flags=("--hostfile", hostfile, "--launcher", launcher, *flags)))

    def mpich(self):
        return ["mpirun.mpich", *self.mpich_flags()]

    def test_two_ranks(self):
        expected = self.alone(2)
        ssh, slurm = self.ssh_flags(), ("--launcher-args", "--overcommit")
        self.compare(expected, [
            ("one host: torchrun", self.run_under, TORCHRUN, "--no-python", "--nproc-per-node", 2),
            ("one host: mpirun (Open MPI)", self.run_under, MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", 2),
            ("one host: mpirun (MPICH)", self.run_under, "mpirun.mpich", "-n", 2),
            ("one host: srun", self.run_under, "srun", "-N", 1, "-n", 2, "-w", "n1"),
            ("one host: sbatch", self.run_sbatch, "-N", 1, "-n", 2, "-w", "n1"),
            self.driven("one host: ssh", "one", "ssh", *ssh), self.driven("one host: pdsh", "one", "pdsh"),
            ("two hosts: torchrun", self.run_torchrun_on_two_hosts),
            ("two hosts: mpirun (Open MPI)", self.run_under, MPIRUN, "--bind-to", "none", "--host", "n1:1,n2:1", "-n", 2, "-x", "OMP_NUM_THREADS",
             "-x", "MASTER_ADDR=n1"),
            ("two hosts: mpirun (MPICH)", self.run_under, *self.mpich(), "-hosts", "n1,n2", "-ppn", 1, "-n", 2, "-genv", "MASTER_ADDR", "n1"),
            ("two hosts: srun", self.run_under, "srun", "-N", 2, "-n", 2),
            ("two hosts: sbatch", self.run_sbatch, "-N", 2, "-n", 2),
            self.driven("two hosts: ssh", "pair", "ssh", *ssh), self.driven("two hosts: pdsh", "pair", "pdsh"),
            self.driven("two hosts: --launcher openmpi", "pair", "openmpi"), self.driven("two hosts: --launcher slurm", "pair", "slurm", *slurm)])

    def test_four_ranks(self):
        alone = self.alone(4)
        self.run_under("ssh", flags=("--hostfile", "four", *self.ssh_flags()))
        expected = self.show("ssh", "two hosts x 2: ssh")
        self.compare(expected, [
            ("two hosts x 2: mpirun (MPICH)", self.run_under, *self.mpich(), "-hosts", "n1,n2", "-ppn", 2, "-n", 4, "-genv", "MASTER_ADDR", "n1"),
            self.driven("two hosts x 2: pdsh", "four", "pdsh"), self.driven("two hosts x 2: --launcher openmpi", "four", "openmpi"),
            ("two hosts x 2: srun, a launcher a host", lambda name: self.run_under(name, "srun", "-N", 2, "--ntasks-per-node", 1, flags=("--nproc", 2)))])
        # The sums have another order: losses differ by rounding, and from step to step by more.
        first = max(abs(one - other) / other for (one, _), (other, _) in zip(expected[:10], alone[:10]))
        last, last_alone = (sum(loss for loss, _ in losses[-100:]) / 100 for losses in (expected, alone))
        print(f"two hosts x 2 beside four ranks on one: losses of steps 1 to 10 differ by {first:.1e} at most; means of the last 100 are "
              f"{last:.4f} and {last_alone:.4f}")
        self.assertLess(first, 1e-6)
        self.assertLess(abs(last - last_alone) / last_alone, 0.02)


if __name__ == "__main__":
    hosts_case.main()
