"""A network that loses packets ends no run, and one that is cut does, soon: ranks on two hosts that are idle most of the time, that communicate
all the time, and that talk over the store.

    lossy_network_test.py COMM_TEST_RANK [--loss 0.1] [--seconds 60]
"""

import argparse
import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from hosts import Host, Relay, own_network, rank_environment  # noqa: E402

HOST_IS_GONE_S = 20  # comm/control/liveness.h: kHostTimeout
# name, scenario of comm_test_rank, ranks a host, backend, milliseconds between collectives
GROUPS = (("idle", "loop", 3, "hybrid", 15000), ("idle alone", "loop", 1, "gloo", 15000), ("busy", "loop", 2, "hybrid", 50),
          ("busy over Gloo", "loop", 2, "gloo", 50), ("at the store", "exchange_loop", 1, "gloo", 0))


class LossyNetworkTest(unittest.TestCase):
    def start(self, hosts, number, scenario, ranks_a_host, backend, pause_ms):
        ranks = []
        for rank in range(2 * ranks_a_host):
            environment = rank_environment(rank, 2 * ranks_a_host, hosts, 29520 + number)
            environment.update(TEST_BACKEND=backend, TEST_TIMEOUT_MS="1800000", TEST_RENDEZVOUS_MS="60000", TEST_PAUSE_MS=str(pause_ms), TEST_NUMEL="20000")
            ranks.append(hosts[rank // ranks_a_host].popen([ARGUMENTS.program, scenario], env=environment, stdout=subprocess.PIPE, text=True))
        return ranks

    def test_lost_packets_end_nothing_and_a_cut_does(self):
        hosts = [Host(number, bridged=False) for number in range(2)]
        relay = Relay(hosts, delay_s=0.001, loss=0, bytes_per_s=50e6)
        groups = []

        def end():
            for ranks in groups:
                for rank in ranks:
                    rank.kill()
                    rank.communicate()
            relay.end()
            for host in hosts:
                host.end()
        self.addCleanup(end)
        for number, (_, *how) in enumerate(GROUPS):
            groups.append(self.start(hosts, number, *how))
        for ranks in groups:
            for rank in ranks:
                self.assertEqual(rank.stdout.readline(), "running\n")

        relay.loss, start = ARGUMENTS.loss, time.monotonic()
        while (passed := time.monotonic() - start) < ARGUMENTS.seconds:
            for (name, *_), ranks in zip(GROUPS, groups):
                for number, rank in enumerate(ranks):
                    self.assertIsNone(rank.poll(), f"{name}, rank {number}, after {passed:.0f} s: {rank.poll() is not None and rank.stdout.read()}")
            time.sleep(0.2)
        print(f"{ARGUMENTS.loss:.0%} of packets lost for {passed:.0f} s ({relay.lost} of {relay.lost + relay.carried}): all ranks of {len(GROUPS)} groups go on", flush=True)
        self.assertGreater(relay.lost, 5)

        relay.loss, start = 1.0, time.monotonic()
        ended = {}
        while len(ended) < sum(map(len, groups)) and time.monotonic() - start < 100:
            ended.update({rank.pid: time.monotonic() - start for ranks in groups for rank in ranks if rank.pid not in ended and rank.poll() is not None})
            time.sleep(0.05)
        for (name, _, _, _, pause_ms), ranks in zip(GROUPS, groups):
            for number, rank in enumerate(ranks):
                seconds = ended[rank.pid]
                said = rank.stdout.read()
                print(f"cut, {name}: rank {number} ends within {seconds:.1f} s: {said}", end="", flush=True)
                self.assertEqual(rank.returncode, 3, said)
                self.assertIn("gone", said)
                self.assertEqual(said.count("\n"), 1, said)
                self.assertLess(seconds, HOST_IS_GONE_S + 10 + pause_ms / 1000, name)  # in a pause nobody asks


if __name__ == "__main__":
    own_network()
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=60)
    ARGUMENTS = parser.parse_args()
    unittest.main(argv=sys.argv[:1], verbosity=2)
