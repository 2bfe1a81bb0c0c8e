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
    """Connect again and again to each port of the processes; the given share of the connections stays open, up to 40 a port."""

    def __init__(self, processes, messages=MESSAGES, share_kept=0.5):
        self.processes, self.ended, self.kept, self.kept_of_port = processes, threading.Event(), [], collections.Counter()
        self.messages, self.share_kept = messages, share_kept
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
                    if rng.random() < self.share_kept and self.kept_of_port[port] < 40:
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


def run(backend, disturbed, hosts="aab"):
    """Seconds of the sums, what went wrong, connections of strangers."""
    port, ranks = free_port(), []

    def start(rank):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TEST_BACKEND": backend,
                       "TEST_SUMS": str(SUMS), "TEST_RENDEZVOUS_MS": "60000"}
        if backend == "hybrid":
            environment["TEST_HOSTS"] = hosts
        ranks.append(subprocess.Popen([RANK_PROGRAM, "sums"], env=environment, stdout=subprocess.PIPE, text=True))

    start(0)
    start(1)
    strangers = Strangers(ranks) if disturbed else None
    time.sleep(3)  # the strangers are there during the rendezvous
    start(2)
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        if strangers:
            strangers.end()
    return said, [rank.returncode for rank in ranks], strangers


def environment(rank, port, backend, **more):
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TEST_BACKEND": backend, "TEST_RENDEZVOUS_MS": "30000", **more}


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
    def finish(self, ranks):
        self.addCleanup(lambda: [rank.kill() for rank in ranks])
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * WORLD, said)

    def test_connections_that_are_closed_fill_no_queue(self):
        """More of them than a listening socket's queue holds, before the last rank comes."""
        port = free_port()

        def start(rank):
            return subprocess.Popen([RANK_PROGRAM, "sum"], env=environment(rank, port, "gloo"), stdout=subprocess.PIPE, text=True)
        ranks = [start(0), start(1)]
        give_up = time.monotonic() + 20
        while len(ports := {found[1] for found in listening_ports(ranks)} - {port}) < 2 and time.monotonic() < give_up:
            time.sleep(0.05)
        self.assertEqual(len(ports), 2)
        for listener in ports:
            for _ in range(5000):
                socket.create_connection(("127.0.0.1", listener), timeout=5).close()
        begin = time.monotonic()
        ranks.append(start(2))
        self.finish(ranks)
        self.assertLess(time.monotonic() - begin, 10)

    def test_the_first_numbers_of_gloo(self):
        """A connection that brings the right number and stays silent would hold a rank's place. The numbers begin anywhere.

        The last rank starts when strangers are at the ports of the others, however fast the machine is. (Of Gloo alone: gloo_group_test.)
        """
        port = free_port()
        variables = {"TEST_HOSTS": "aaaaabbb", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TEST_LOG": "1"}

        def start(rank):
            return subprocess.Popen([RANK_PROGRAM, "sum"], env=environment(rank, port, "hybrid", **variables), text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE)
        ranks = [start(rank) for rank in range(7)]
        strangers = Strangers(ranks, [struct.pack("=Q", number) for number in range(16)], share_kept=1)
        self.addCleanup(strangers.end)
        self.addCleanup(lambda: [rank.kill() for rank in ranks])
        give_up = time.monotonic() + 20
        while (len(strangers.kept_of_port) < 8 or len(strangers.kept) < 50) and time.monotonic() < give_up:
            time.sleep(0.05)
        self.assertGreaterEqual(len(strangers.kept_of_port), 8)  # the store, and a port of each of the seven
        self.assertGreaterEqual(len(strangers.kept), 50)
        ranks.append(start(7))
        said = [rank.communicate(timeout=60) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * 8, said)
        self.assertNotIn("connecting again", "".join(err for _, err in said))

    def test_connections_to_the_sockets_of_shared_memory(self):
        port = free_port()
        begin = time.monotonic()
        with SocketsOfSharedMemory():
            self.finish([subprocess.Popen([RANK_PROGRAM, "sum"], env=environment(rank, port, "shm"), stdout=subprocess.PIPE, text=True) for rank in range(WORLD)])
        self.assertLess(time.monotonic() - begin, 8)

    def test_a_run_goes_on(self):
        for backend in ("gloo", "shm", "hybrid"):
            with self.subTest(backend):
                alone, codes, _ = run(backend, disturbed=False)
                self.assertEqual(codes, [0] * WORLD, alone)
                disturbed, codes, strangers = run(backend, disturbed=True)
                self.assertEqual(codes, [0] * WORLD, disturbed)  # every sum was checked
                self.assertGreater(strangers.connections, 30)
                self.assertGreaterEqual(len(strangers.ports), WORLD)  # the store, and where two ranks wait for the third
                seconds = [max(float(text) for text in said) for said in (alone, disturbed)]
                print(f"{backend}: {SUMS} sums in {seconds[0]:.2f} s, beside {strangers.connections} connections of strangers to "
                      f"{len(strangers.ports)} ports {seconds[1]:.2f} s")
                self.assertLess(seconds[1], 10 * seconds[0] + 5)  # no sum waits for a time limit


if __name__ == "__main__":
    RANK_PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
