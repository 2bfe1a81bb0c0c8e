"""A host that loses its power or its cable closes no connection: the ranks on other hosts end nevertheless, and name its rank.

Hosts are network namespaces on a bridge of this test's own; one is cut off by taking its link down.

    host_loss_test.py COMM_TEST_RANK
"""

import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from hosts import Host, own_network, rank_environment  # noqa: E402

NUM_HOSTS = 3
HOST_IS_GONE_S = 20  # comm/liveness.h: kHostIsGone


class Group:
    """Ranks on three hosts, one of which is cut off while the ranks communicate."""

    def __init__(self, network, scenario, lost, backend="gloo", ranks_a_host=1):
        self.scenario, self.lost, self.backend, self.ranks_a_host = scenario, lost, backend, ranks_a_host
        self.hosts = [Host(number, network) for number in range(NUM_HOSTS)]
        world = NUM_HOSTS * ranks_a_host
        self.ranks = [self.start(rank, rank_environment(rank, world, self.hosts, 29511)) for rank in range(world)]

    def start(self, rank, environment):
        environment.update(TEST_BACKEND=self.backend, TEST_TIMEOUT_MS="120000")
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
        for group in groups:
            group.cut_off()
        start = time.monotonic()
        for group in groups:
            for number, rank in enumerate(group.ranks):
                if number // group.ranks_a_host == group.lost:
                    continue
                said = rank.communicate(timeout=100)[0]
                seconds = time.monotonic() - start
                print(f"{group.backend}, {group.scenario}, host {group.lost} is cut off: rank {number} ends within {seconds:.1f} s: {said}", end="")
                self.assertEqual(rank.returncode, 3)
                if group.ranks_a_host == 1:
                    self.assertIn(f"rank {group.lost} is gone", said)
                else:
                    self.assertRegex(said, "rank [23] is gone|ranks 2 and 3 are gone")
                self.assertLess(seconds, HOST_IS_GONE_S + 5)


if __name__ == "__main__":
    own_network()
    RANK_PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
