"""A host that loses its power or its cable closes no connection: the ranks on other hosts end nevertheless, and name its rank.

Hosts are network namespaces on a bridge of this test's own; one is cut off by taking its link down.

    host_loss_test.py COMM_TEST_RANK
"""

import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from hosts import Host, own_network, rank_environment  # noqa: E402

NUM_HOSTS = 3
HANGS_S = 300  # a host is gone after 20 s (comm/control/liveness.h: kHostTimeout)


class Group:
    """Ranks on three hosts, one of which is cut off while the ranks communicate."""

    def __init__(self, network, scenario, lost, backend="gloo", ranks_a_host=1, numel=1 << 16):
        self.scenario, self.lost, self.backend, self.ranks_a_host, self.numel = scenario, lost, backend, ranks_a_host, numel
        self.hosts = [Host(number, network) for number in range(NUM_HOSTS)]
        world = NUM_HOSTS * ranks_a_host
        self.ranks = [self.start(rank, rank_environment(rank, world, self.hosts, 29511)) for rank in range(world)]

    def start(self, rank, environment):
        environment.update(TEST_BACKEND=self.backend, TEST_TIMEOUT_MS="3600000", TEST_NUMEL=str(self.numel))
        return self.hosts[rank // self.ranks_a_host].popen([RANK_PROGRAM, self.scenario], env=environment, stdout=subprocess.PIPE, text=True)

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
        groups.append(Group(3, "loop", 1, "hybrid", ranks_a_host=2))
        # Cut off in the middle of a message, for which Gloo then waits until comm.timeout_s.
        groups += [Group(4 + number, "loop", 1, backend, numel=4 << 20) for number, backend in enumerate(("gloo", "gloo", "hybrid"))]
        for group in groups:
            group.cut_off()
        start = time.monotonic()
        for group in groups:
            for number, rank in enumerate(group.ranks):
                if number // group.ranks_a_host == group.lost:
                    continue
                said = rank.communicate(timeout=HANGS_S)[0]
                seconds = time.monotonic() - start
                print(f"{group.backend}, {group.scenario}, host {group.lost} is cut off: rank {number} ends within {seconds:.1f} s: {said}", end="")
                self.assertEqual(rank.returncode, 3)
                if group.ranks_a_host == 1:
                    self.assertIn(f"rank {group.lost} is gone", said)
                else:
                    self.assertRegex(said, "rank [23] is gone|ranks 2 and 3 are gone")

    def test_hosts_ask_each_other_over_one_connection_a_pair(self):
        """Besides, each rank asks the host of the store."""
        group = Group(10, "exchange_loop", 2, "hybrid", ranks_a_host=3)
        self.addCleanup(group.end)
        for rank in group.ranks:
            self.assertEqual(rank.stdout.readline(), "running\n")
        port = 29511
        for number, host in enumerate(group.hosts):
            table = subprocess.run(host.inside("cat", "/proc/net/tcp"), stdout=subprocess.PIPE, text=True, check=True).stdout
            asked = 0
            for line in table.splitlines()[1:]:
                _, local, remote, state, _, timer = line.split()[:6]
                ports = {int(end.split(":")[1], 16) for end in (local, remote)}
                kind, jiffies = (int(text, 16) for text in timer.split(":"))
                # Asked within 20 s (in jiffies of 10 ms, as the kernel shows them), and not every 5 min.
                asked += state == "01" and kind == 2 and jiffies < 2000 and port not in ports and local[:8] != remote[:8]
            self.assertEqual(asked, NUM_HOSTS - 1, f"host {number}:\n{table}")


if __name__ == "__main__":
    own_network()
    RANK_PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
