"""A host that loses its power or its cable closes no connection: the ranks on other hosts end nevertheless, and name its rank.

Hosts are network namespaces on a bridge of this test's own; one is cut off by taking its link down.

    host_loss_test.py COMM_TEST_RANK
"""

import os
import shutil
import subprocess
import sys
import time
import unittest

NUM_HOSTS = 3
HOST_IS_GONE_S = 20  # comm/liveness.h: kHostIsGone
SKIPPED = 77
RANK_PROGRAM = sys.argv.pop(1)


def run(*command):
    subprocess.run(command, check=True)


class Host:
    """A network namespace on the bridge; it ends with its process."""

    def __init__(self, network, number):
        self.address = f"10.77.{network}.{number + 1}"
        self.link = f"host{network}.{number}"
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdout=subprocess.DEVNULL)
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.holder.pid}/ns/net") == ours:
            time.sleep(0.01)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        run("ip", "link", "set", self.link, "master", "bridge", "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
            run(*self.inside("ip", *words))

    def inside(self, *command):
        return ["nsenter", f"--target={self.holder.pid}", "--net", *command]

    def start(self, rank, scenario, master):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(NUM_HOSTS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": master.address, "MASTER_PORT": "29511", "TEST_BACKEND": "gloo", "TEST_TIMEOUT_MS": "120000"}
        return subprocess.Popen(self.inside(RANK_PROGRAM, scenario), env=environment, stdout=subprocess.PIPE, text=True)

    def cut_off(self):
        run("ip", "link", "set", self.link, "down")

    def end(self):
        self.holder.kill()
        self.holder.wait()


class Group:
    """A rank on each of three hosts, one of which is cut off while the ranks communicate."""

    def __init__(self, network, scenario, lost):
        self.scenario, self.lost = scenario, lost
        self.hosts = [Host(network, number) for number in range(NUM_HOSTS)]
        self.ranks = [host.start(rank, scenario, self.hosts[0]) for rank, host in enumerate(self.hosts)]

    def cut_off(self):
        for rank in self.ranks:
            assert rank.stdout.readline() == "running\n"
        self.hosts[self.lost].cut_off()

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        for host in self.hosts:
            host.end()


class HostLossTest(unittest.TestCase):
    def test_others_end_and_name_it(self):
        groups = []
        self.addCleanup(lambda: [group.end() for group in groups])
        for network, (scenario, lost) in enumerate((("loop", 2), ("exchange_loop", 1), ("exchange_loop", 0))):
            groups.append(Group(network, scenario, lost))
        for group in groups:
            group.cut_off()
        start = time.monotonic()
        for group in groups:
            for number, rank in enumerate(group.ranks):
                if number == group.lost:
                    continue
                said = rank.communicate(timeout=100)[0]
                seconds = time.monotonic() - start
                print(f"{group.scenario}, rank {group.lost}'s host is cut off: rank {number} ends within {seconds:.1f} s: {said}", end="")
                self.assertEqual(rank.returncode, 3)
                self.assertIn(f"rank {group.lost} is gone", said)
                self.assertLess(seconds, HOST_IS_GONE_S + 5)


def main():
    if "--inside" not in sys.argv:
        if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
            sys.exit(SKIPPED)
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        probe = ["unshare", *user, "--net", "sh", "-c", "ip link set lo up && ip link add bridge type bridge && ip link set bridge up"]
        if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0:
            print("skipped: this system lets us have no network namespaces with a bridge")
            sys.exit(SKIPPED)
        os.execvp("unshare", ["unshare", *user, "--net", sys.executable, "-B", __file__, RANK_PROGRAM, "--inside", *sys.argv[1:]])
    sys.argv.remove("--inside")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "link", "set", "bridge", "up")
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
