"""`tessera doctor` on two hosts, which are network namespaces, with the real launchers: what crosses the network is measured, a host that
cannot be reached is named with the reason, and the others are checked.

    doctor_test.py [TEST...]        TESSERA names the program
"""
import contextlib
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import hosts_case  # noqa: E402
from hosts_case import HostsCase, needs, testbed  # noqa: E402


@contextlib.contextmanager
def small_shm(size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "/dev/shm"], check=True)


@needs("ssh", "sshd")
class DoctorOnHosts(HostsCase):
    def setUp(self):
        super().setUp()
        self.write("hosts", "n1 slots=2\nn2 slots=2\n")
        self.write("three", "n1 slots=2\nn3 slots=2\nn2 slots=2\n")

    def report(self, *flags, code=0):
        outcome = self.run_tool("doctor", "--json", *flags)
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(outcome.err, "", outcome)
        self.assert_nothing_runs()
        return json.loads(outcome.out)

    def check_two_hosts(self, report):
        self.assertEqual((report["ranks"], report["backend"], report["problems"]), (4, "hybrid", 0), report)
        self.assertEqual([(host["name"], host["num_ranks"], host["address"], host["interface"]) for host in report["hosts"]],
                         [("n1", 2, "10.78.0.1", "eth0"), ("n2", 2, "10.78.0.2", "eth0")])
        self.assertEqual([host["facts"]["name"] for host in report["hosts"]], ["n1", "n2"])
        self.assertEqual([(host["mtu"], host["link_bits_per_s"]) for host in report["hosts"]], [(1500, 10**10)] * 2, "those of veth")
        clock = report["hosts"][1]  # one clock, in truth
        self.assertTrue(clock["has_clock"])
        self.assertLess(abs(clock["clock_s"]), clock["clock_error_s"] + 1e-4)
        self.assertLess(clock["clock_error_s"], 0.1)
        self.assertEqual(len(report["collectives"]), 12)

    def test_ssh(self):
        self.check_two_hosts(self.report("--hostfile", "hosts", *self.ssh_flags()))

    @needs("pdsh")
    def test_pdsh(self):
        self.check_two_hosts(self.report("--hostfile", "hosts", "--launcher", "pdsh"))

    @needs("mpirun")
    def test_openmpi(self):
        self.check_two_hosts(self.report("--hostfile", "hosts", "--launcher", "openmpi"))

    @needs("srun", "munged")
    def test_slurm(self):
        """With hosts of our choice, and of Slurm's."""
        for flags in (["--hostfile", "hosts"], ["--nnodes", 2, "--nproc", 2]):
            self.check_two_hosts(self.report("--launcher", "slurm", "--launcher-args", "--overcommit", *flags))

    def test_unreachable_host(self):
        """n3 has no address. The others are measured."""
        outcome = self.run_tool("doctor", "--hostfile", "three", *self.ssh_flags())
        self.assertEqual(outcome.code, 1, outcome)
        self.assertRegex(outcome.out, r"(?m)^n3\n  problem  reach +ssh: Could not resolve hostname n3: ", outcome)
        self.assertIn("-> correct the name in the hostfile", outcome.out)
        self.assertLessEqual(max(map(len, outcome.out.splitlines())), 80, outcome)
        report = self.report("--hostfile", "three", *self.ssh_flags(), code=1)
        self.assertEqual([host["has_facts"] for host in report["hosts"]], [True, False, True])
        self.assertEqual([finding["host"] for finding in report["findings"] if finding["level"] == "problem"], ["n3"])
        self.check_two_hosts({**report, "problems": 0, "hosts": [report["hosts"][0], report["hosts"][2]]})

    @needs("pdsh", "mpirun")
    def test_unreachable_host_under_other_launchers(self):
        for launcher in ("pdsh", "openmpi"):
            with self.subTest(launcher=launcher):
                report = self.report("--hostfile", "three", "--launcher", launcher, code=1)
                (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
                self.assertEqual((problem["host"], problem["check"]), ("n3", "reach"))
                self.assertIn("Could not resolve hostname n3", problem["found"])
                self.assertEqual([host["has_facts"] for host in report["hosts"]], [True, False, True])
                self.assertEqual(len(report["collectives"]), 12)

    def test_key_is_not_accepted(self):
        report = self.report("--hostfile", "hosts", "--ssh-port", testbed.SSH_PORT, "--launcher-args",
                             "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR", code=1)
        problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
        self.assertEqual([finding["host"] for finding in problems], ["n1", "n2"])
        for finding in problems:
            self.assertIn("Permission denied", finding["found"])
            self.assertIn("ssh-copy-id " + finding["host"], finding["advice"])

    def test_small_shm(self):
        with small_shm("16m"):
            report = self.report("--hostfile", "hosts", *self.ssh_flags())
        warned = {(finding["host"], finding["check"]): finding["advice"] for finding in report["findings"] if finding["level"] == "warning"}
        for host in ("n1", "n2"):
            self.assertIn("--shm-size", warned[host, "/dev/shm"])
        self.assertEqual(report["hosts"][1]["facts"]["shm"], 16 << 20)
        self.check_two_hosts(report)  # ranks on CPUs share memory elsewhere

    def test_ranks_that_cannot_meet(self):
        """ssh passes, the ranks do not meet: the hosts are checked, and the ranks' error is a problem."""
        report = self.report("--hostfile", "hosts", "--master-addr", "10.78.0.99", "--rendezvous-timeout", 4, *self.ssh_flags(), code=1)
        (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
        self.assertEqual(problem["check"], "ranks")
        self.assertIn("10.78.0.99", problem["found"])
        self.assertIn("firewalls", problem["advice"])
        self.assertEqual([host["facts"]["name"] for host in report["hosts"]], ["n1", "n2"])


if __name__ == "__main__":
    hosts_case.main()
