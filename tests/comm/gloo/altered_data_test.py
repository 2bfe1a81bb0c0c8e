"""Bytes that are altered on their way under a right checksum: with JoinOptions::verify both ranks end, and say between which ranks.

    altered_data_test.py COMM_TEST_RANK
"""

import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from hosts import Host, Relay, own_network, rank_environment  # noqa: E402


class AlteredDataTest(unittest.TestCase):
    def run_ranks(self, backend, ranks_a_host, verify):
        hosts = [Host(number, bridged=False) for number in range(2)]
        self.addCleanup(lambda: [host.end() for host in hosts])
        relay = Relay(hosts, delay_s=0.0005, loss=0, bytes_per_s=100e6)
        self.addCleanup(relay.end)
        ranks = []
        for rank in range(2 * ranks_a_host):
            environment = rank_environment(rank, 2 * ranks_a_host, hosts, 29541)
            environment.update(TEST_BACKEND=backend, TEST_TIMEOUT_MS="3600000", TEST_NUMEL="1000000", **({"TEST_VERIFY": "1"} if verify else {}))
            ranks.append(hosts[rank // ranks_a_host].popen([RANK_PROGRAM, "loop"], env=environment, stdout=subprocess.PIPE, text=True))
            self.addCleanup(ranks[-1].communicate)
            self.addCleanup(ranks[-1].kill)
        for rank in ranks:
            self.assertEqual(rank.stdout.readline(), "running\n")
        return ranks, relay

    def alter_until_ended(self, ranks, relay):
        """A receiver may drop the packet that was altered: one that was sent twice, or that finds a full queue. The ranks then go on with
        what TCP sends anew, unaltered, so that another packet is altered."""
        give_up, next_one = time.monotonic() + 300, 0
        while any(rank.poll() is None for rank in ranks):
            self.assertLess(time.monotonic(), give_up, f"{relay.num_to_alter} packets were not altered yet")
            if time.monotonic() >= next_one:
                relay.num_to_alter, next_one = 1, time.monotonic() + 20
            time.sleep(0.05)

    def test_a_digest_tells(self):
        for backend, ranks_a_host in (("gloo", 1), ("hybrid", 2)):
            with self.subTest(backend):
                ranks, relay = self.run_ranks(backend, ranks_a_host, verify=True)
                self.alter_until_ended(ranks, relay)
                said = [rank.communicate(timeout=30)[0] for rank in ranks]
                self.assertEqual([rank.returncode for rank in ranks], [3] * len(ranks), said)
                for text in said:
                    self.assertRegex(text, r'^error: all_reduce of "numbers" .*data was altered on its way: '
                                           r"rank \d has received \d+ bytes from rank \d that are not those that rank \d sent\n$")

    def test_without_it_the_ranks_go_on(self):
        """So that the altered byte is one that counts."""
        ranks, relay = self.run_ranks("gloo", 1, verify=False)
        relay.num_to_alter = 1
        give_up = time.monotonic() + 300
        while relay.num_to_alter and time.monotonic() < give_up:
            time.sleep(0.05)
        self.assertEqual(relay.num_to_alter, 0)
        time.sleep(1)
        self.assertEqual([rank.poll() for rank in ranks], [None, None])


if __name__ == "__main__":
    own_network()
    RANK_PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
