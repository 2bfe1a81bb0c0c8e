"""Connections from strangers: silence, garbage and half a protocol at every port where ranks listen neither stop a run nor change it.

    strangers_test.py COMM_TEST_RANK
"""

import collections
import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from tool import free_port  # noqa: E402

WORLD = 3
SUMS = 300
HANGS_S = 300  # no test takes as long
RANK_PROGRAM = ""

# What a client of c10d's TCPStore says first, and queries of its (TCPStoreBackend.hpp): SET with a key of 2^60 bytes, one of no meaning.
VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
MESSAGES = (
    b"",
    b"\0" * 8,
    b"\0" * 4096,
    b"\xff" * 64,
    b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    *(struct.pack("=Q", number) for number in range(1, 9)),  # Gloo's numbers of connections
    VALIDATE,
    VALIDATE + struct.pack("=BQ", 1, 1 << 60),
    VALIDATE + b"\xee" * 32,
)


def listening_ports(processes):
    """(address, port) of the TCP sockets where the processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry.path).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                found.add((family, int(fields[1].rsplit(":", 1)[1], 16), fields[1].rsplit(":", 1)[0]))
    return found


class Strangers:
    """Connect again and again to each port of the processes; the given share of the connections stays open, up to `most_kept` a port."""

    def __init__(self, processes, messages=MESSAGES, share_kept=0.5, most_kept=40):
        self.processes, self.ended, self.kept, self.kept_of_port = processes, threading.Event(), [], collections.Counter()
        self.messages, self.share_kept, self.most_kept = messages, share_kept, most_kept
        self.connections, self.ports = 0, set()
        self.thread = threading.Thread(target=self.disturb, daemon=True)
        self.thread.start()

    def disturb(self):
        rng = random.Random(1)
        while not self.ended.is_set():
            self.ports |= listening_ports(self.processes)
            for family, port, _ in sorted(self.ports):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection(("127.0.0.1" if family == socket.AF_INET else "::1", port), timeout=1)
                    stranger.setblocking(False)
                    stranger.send(rng.choice(self.messages))
                    self.connections += 1
                    if rng.random() < self.share_kept and self.kept_of_port[port] < self.most_kept:
                        self.kept.append(stranger)
                        self.kept_of_port[port] += 1
                    else:
                        stranger.close()
            time.sleep(0.005)

    def end(self):
        self.ended.set()
        self.thread.join()
        for stranger in self.kept:
            stranger.close()


def start(rank, port, backend, scenario="sum", world=WORLD, stderr=None, **variables):
    """A rank without a time limit: one that waits for what strangers hold up never ends."""
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TEST_BACKEND": backend,
                   "TEST_SUMS": str(SUMS), "TEST_RENDEZVOUS_MS": "3600000", "TEST_TIMEOUT_MS": "3600000", **variables}
    return subprocess.Popen([RANK_PROGRAM, scenario], env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


class SocketsOfSharedMemory:
    """Two processes that connect, again and again and at once, to the abstract Unix sockets of ranks; silent, and one closes nothing for long."""
    PROGRAM = """
import collections, re, socket, sys
kept = collections.deque(maxlen=int(sys.argv[1]))
while True:
    with open("/proc/net/unix") as table:
        names = set(re.findall("@(tessera-[0-9a-f]+)", table.read()))
    for name in names:
        for _ in range(50):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.setblocking(False)
            try:
                stranger.connect(chr(0) + name)
                kept.append(stranger)
            except OSError:
                break
"""

    def __enter__(self):
        self.processes = [subprocess.Popen([sys.executable, "-c", self.PROGRAM, str(most)]) for most in (1, 500)]

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


class StrangersTest(unittest.TestCase):
    def started(self, ranks):
        self.addCleanup(lambda: [(rank.kill(), rank.wait()) for rank in ranks])
        return ranks

    def finish(self, ranks):
        said = [rank.communicate(timeout=HANGS_S) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * len(ranks), said)
        return said

    def wait_until(self, condition):
        give_up = time.monotonic() + HANGS_S
        while not condition():
            self.assertLess(time.monotonic(), give_up, "it did not happen")
            time.sleep(0.05)

    def test_the_first_numbers_of_gloo(self):
        """A connection that brings the right number and stays silent would hold a rank's place. The numbers begin anywhere.

        The last rank starts when strangers are at the ports of the others, however fast the machine is. (Of Gloo alone: gloo_group_test.)
        """
        port = free_port()
        how = {"world": 8, "stderr": subprocess.PIPE, "TEST_HOSTS": "aaaaabbb", "TEST_LOG": "1"}
        ranks = self.started([start(rank, port, "hybrid", **how) for rank in range(7)])
        strangers = Strangers(ranks, [struct.pack("=Q", number) for number in range(16)], share_kept=1)
        self.addCleanup(strangers.end)
        # The store, and a port of each of the seven.
        self.wait_until(lambda: len(strangers.kept_of_port) >= 8 and len(strangers.kept) >= 50)
        ranks.append(start(7, port, "hybrid", **how))
        self.assertNotIn("connecting again", "".join(err for _, err in self.finish(ranks)))

    def test_more_silent_connections_than_the_soft_limit_of_files(self):
        """Gloo's thread ends its process when accept() finds no descriptor left."""
        port = free_port()
        ranks = self.started([start(rank, port, "gloo", "sums", TEST_SOFT_NOFILE="48") for rank in (0, 1)])
        strangers = Strangers(ranks, [b""], share_kept=1, most_kept=100)
        self.addCleanup(strangers.end)
        self.wait_until(lambda: sum(kept >= 100 for kept in strangers.kept_of_port.values()) >= WORLD)
        ranks.append(start(2, port, "gloo", "sums", TEST_SOFT_NOFILE="48"))
        self.finish(ranks)

    def test_connections_to_the_sockets_of_shared_memory(self):
        port = free_port()
        with SocketsOfSharedMemory():
            self.finish(self.started([start(rank, port, "shm") for rank in range(WORLD)]))

    def test_a_run_goes_on(self):
        for backend in ("gloo", "shm", "hybrid"):
            with self.subTest(backend):
                port = free_port()
                hosts = {"TEST_HOSTS": "aab"} if backend == "hybrid" else {}
                ranks = self.started([start(rank, port, backend, "sums", **hosts) for rank in (0, 1)])
                strangers = Strangers(ranks)
                self.addCleanup(strangers.end)
                # During the rendezvous, at the store and where two ranks wait for the third.
                self.wait_until(lambda there=strangers: there.connections > 30 and len(there.ports) >= WORLD)
                ranks.append(start(2, port, backend, "sums", **hosts))
                self.finish(ranks)  # every sum was checked
                strangers.end()


if __name__ == "__main__":
    RANK_PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
