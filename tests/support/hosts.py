"""Hosts on one machine: network namespaces on a bridge, or joined by a relay that delays and loses packets.

A script calls own_network() first: it then runs in a network namespace of its own, which holds the bridge. The kernel removes all of it
when the script and what it has started have ended, however they end.
"""
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

SKIPPED = 77  # exit code of a test that cannot run
INSIDE = "--inside"
LIBC = ctypes.CDLL(None, use_errno=True)


def run(*command):
    subprocess.run(command, check=True)


def own_network(reason_to_skip=None):
    """Runs the script again in a network namespace of its own. Ends it with SKIPPED where that is not possible."""
    if INSIDE in sys.argv:
        sys.argv.remove(INSIDE)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "link", "set", "bridge", "up")
        return
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    missing = [program for program in ("ip", "tc", "unshare", "nsenter") if shutil.which(program) is None]
    probe = ["unshare", *user, "--net", "sh", "-c", "ip link set lo up && ip link add bridge type bridge && ip link set bridge up"]
    if missing:
        reason_to_skip = reason_to_skip or f"{', '.join(missing)} is missing (Debian: iproute2, util-linux)"
    elif reason_to_skip is None and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0:
        reason_to_skip = "this system lets us have no network namespaces with a bridge"
    if reason_to_skip:
        print(f"skipped: {reason_to_skip}")
        sys.exit(SKIPPED)
    os.execvp("unshare", ["unshare", *user, "--net", sys.executable, "-B", *sys.argv, INSIDE])


def end_with_parent():
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Host:
    """A network namespace, held by a process. On the bridge, unless a Relay joins it."""

    def __init__(self, number, network=0, bridged=True):
        self.address = f"10.77.{network}.{number + 1}"
        self.link = f"host{network}.{number}" if bridged else None
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.holder.pid}/ns/net") == ours:
            time.sleep(0.01)
        run(*self.inside("ip", "link", "set", "lo", "up"))
        if self.link:
            run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
            run("ip", "link", "set", self.link, "master", "bridge", "up")
            run(*self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0"))
            run(*self.inside("ip", "link", "set", "eth0", "up"))

    def inside(self, *command):
        return ["nsenter", f"--target={self.holder.pid}", "--net", *command]

    def popen(self, command, **options):
        return subprocess.Popen(self.inside(*map(str, command)), preexec_fn=end_with_parent, **options)

    def limit(self, rate):
        """Of what it sends and of what it receives, such as "1gbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
        run("tc", "qdisc", "add", "dev", self.link, *shape)
        run(*self.inside("tc", "qdisc", "add", "dev", "eth0", *shape))

    def received_bytes(self):
        """On the wire, headers included."""
        with open("/proc/net/dev", encoding="utf-8") as devices:
            for line in devices:
                name, _, numbers = line.partition(":")
                if name.strip() == self.link:
                    return int(numbers.split()[8])  # what the bridge has sent there
        raise LookupError(self.link)

    def cut_off(self):
        run("ip", "link", "set", self.link, "down")

    def end(self):
        if self.link:  # the kernel removes it with the namespace, but some time after: the next host of this name would find it
            subprocess.run(["ip", "link", "delete", self.link], stderr=subprocess.DEVNULL, check=False)
        self.holder.kill()
        self.holder.wait()


class Relay:
    """Carries packets between hosts that are not bridged: each is delayed, some are lost, and a host receives no more than so many bytes
    a second. (tc's netem does this too, where the kernel has it.) Of the next `num_to_alter` large packets it alters a byte, and corrects
    the checksum of TCP."""

    def __init__(self, hosts, delay_s, loss, bytes_per_s, seed=1):
        self.delay_s, self.loss, self.bytes_per_s = delay_s, loss, bytes_per_s
        self.random, self.lost, self.carried, self.num_to_alter = random.Random(seed), 0, 0, 0
        self.tunnels = {host.address: self.open_tunnel(host) for host in hosts}
        self.free_at = dict.fromkeys(self.tunnels, 0.0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    @staticmethod
    def open_tunnel(host):
        """A TUN device belongs to the namespace of the thread that makes it."""
        with open("/proc/self/ns/net") as ours, open(f"/proc/{host.holder.pid}/ns/net") as theirs:
            def enter(namespace):
                if LIBC.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                    raise OSError(ctypes.get_errno(), "setns")
            enter(theirs)
            try:
                tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH14s", b"tun0", 0x1001, b""))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
            finally:
                enter(ours)
        run(*host.inside("ip", "addr", "add", f"{host.address}/24", "dev", "tun0"))
        run(*host.inside("ip", "link", "set", "tun0", "mtu", "8000", "up"))
        return tunnel

    def carry(self):
        waiting, order = [], itertools.count()  # (when to deliver, order, tunnel, packet)
        while not self.ended.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            ready, _, _ = select.select(list(self.tunnels.values()), [], [], pause)
            for tunnel in ready:
                for packet in self.packets(tunnel):
                    to = ".".join(map(str, packet[16:20]))
                    if packet[0] >> 4 != 4 or to not in self.tunnels:
                        continue
                    if self.random.random() < self.loss:
                        self.lost += 1
                        continue
                    if self.num_to_alter and len(packet) > 4000 and packet[9] == socket.IPPROTO_TCP:
                        packet, self.num_to_alter = self.altered(packet), self.num_to_alter - 1
                    self.free_at[to] = max(self.free_at[to], time.monotonic()) + len(packet) / self.bytes_per_s
                    heapq.heappush(waiting, (self.free_at[to] + self.delay_s, next(order), self.tunnels[to], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                tunnel, packet = heapq.heappop(waiting)[2:]
                try:
                    os.write(tunnel, packet)
                    self.carried += 1
                except BlockingIOError:
                    self.lost += 1

    @staticmethod
    def altered(packet):
        """The last byte of the payload but some has another bit. A checksum is the complement of a sum of 16-bit words."""
        packet, tcp = bytearray(packet), 4 * (packet[0] & 15)
        at = len(packet) - 1000
        at -= (at - tcp) % 2  # the upper byte of a word
        before = packet[at] << 8
        packet[at] ^= 0x40
        total = (~int.from_bytes(packet[tcp + 16:tcp + 18], "big") & 0xFFFF) + (~before & 0xFFFF) + (packet[at] << 8)
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        packet[tcp + 16:tcp + 18] = (~total & 0xFFFF).to_bytes(2, "big")
        return bytes(packet)

    @staticmethod
    def packets(tunnel):
        for _ in range(64):
            try:
                yield os.read(tunnel, 65536)
            except BlockingIOError:
                return

    def end(self):
        self.ended.set()
        self.thread.join()
        for tunnel in self.tunnels.values():
            os.close(tunnel)


def rank_environment(rank, world, hosts, port):
    """torchrun's variables; `hosts[i]` has ranks i * world / len(hosts) and the next."""
    local_world = world // len(hosts)
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % local_world),
            "LOCAL_WORLD_SIZE": str(local_world), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
