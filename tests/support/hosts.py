"""Hosts on one machine, which are network namespaces: on a bridge (Host), joined by a relay that delays and loses packets (Relay), or two of
them with names, sshd and Slurm (Testbed).

A script starts itself again in namespaces of its own: by own_network() in one that holds the bridge, by enter() as host n1 of a testbed. The
kernel removes all of it when the script and what it has started have ended, however they end.
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
from pathlib import Path

SKIPPED = 77  # exit code of a test that cannot run
INSIDE = "TESSERA_TEST_HOSTS"
SBIN = ("/usr/sbin", "/sbin")
LIBC = ctypes.CDLL(None, use_errno=True)


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def which(program):
    return shutil.which(program, path=os.pathsep.join([os.environ["PATH"], *SBIN]))


def start_again(flags, probe, programs, before=(), reason=None):
    """Starts this script again in namespaces of its own, made by `unshare` with these flags. Returns there "", or here the reason why that cannot
    be: it was given, a program is missing, or the probe fails in such namespaces. `before`: what the command begins with there."""
    if os.environ.get(INSIDE):
        return ""
    if missing := [name for name in ("unshare", "nsenter", *programs) if not which(name)]:
        reason = reason or f"not installed: {', '.join(missing)} (Debian packages util-linux, iproute2)"
    if not reason:
        done = subprocess.run(["unshare", *flags, "sh", "-c", probe], capture_output=True, text=True)
        reason = done.returncode and "no network namespaces here: " + " ".join(done.stderr.split())
    if reason:
        return reason
    os.environ[INSIDE] = "1"
    return os.execvp("unshare", ["unshare", *flags, *before, sys.executable, "-B", *sys.argv])


def own_network(reason_to_skip=None):
    """The script runs in a network namespace of its own, with a bridge. Ends it with SKIPPED where that is not possible."""
    bridge = "ip link set lo up && ip link add bridge type bridge && ip link set bridge up"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    if reason := start_again([*user, "--net"], bridge, ("ip", "tc"), reason=reason_to_skip):
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    run("sh", "-c", bridge)


def enter():
    """The script is host n1 of a testbed, in namespaces of its own (processes, mounts, network): the daemons are its children, and what is left
    when it ends is killed by the kernel. Returns there "", or here the reason why that cannot be."""
    # Process 1 of the namespace gets the orphans, and has to wait for them, as a shell does: Slurm asks whether a zombie is there.
    init = ["bash", "-c", '"$@" & wait $!', "init"]
    return start_again(["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"],
                       "ip link add probe0 type veth peer name probe1", ("ip",), init, reason=os.geteuid() and "needs root, for network namespaces")


def end_with_parent():
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def hold(*namespaces):
    """A process that keeps namespaces of its own, by the flags of `unshare`."""
    holder = subprocess.Popen(["unshare", *namespaces, "sleep", "infinity"], stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
    names = [name.strip("-") for name in namespaces]
    while any(os.readlink(f"/proc/{holder.pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}") for name in names):
        time.sleep(0.01)
    return holder


def delete_link(link):
    """The kernel removes it with its namespace, but some time after: the next host of this name would find it."""
    subprocess.run(["ip", "link", "delete", link], stderr=subprocess.DEVNULL, check=False)


class Host:
    """A network namespace, held by a process. On the bridge, unless a Relay joins it."""

    def __init__(self, number, network=0, bridged=True):
        self.address = f"10.77.{network}.{number + 1}"
        self.link = f"host{network}.{number}" if bridged else None
        self.holder = hold("--net")
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
        if self.link:
            delete_link(self.link)
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


# ------------------------------------------------------------------------------------ two hosts with daemons

ADDRESSES = {"n1": "10.78.0.1", "n2": "10.78.0.2"}
SSH_PORT = 2222


def processes():
    """Name by process id, of all that run in these namespaces besides this one."""
    names = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (1, os.getpid()):
            try:
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    names[int(entry)] = Path(f"/proc/{entry}/comm").read_text().strip()
            except OSError:
                pass
    return names


class Testbed:
    """Hosts n1, where the script runs, and n2, joined by a cable (veth). All files are in one temporary folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.daemons = []
        self.holder = hold("--net", "--uts")
        run("hostname", "n1")
        run(*self.on("n2"), "hostname", "n2")
        run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.holder.pid)
        for host, address in ADDRESSES.items():
            run(*self.on(host), "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                run(*self.on(host), "ip", "link", "set", link, "up")
        names = self.folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in ADDRESSES.items()))
        run("mount", "--bind", names, "/etc/hosts")
        for folder in ("/run", "/dev/shm"):  # other runs of this machine keep theirs in memory too
            run("mount", "-t", "tmpfs", "tmpfs", folder)

    def on(self, host):
        """What a command begins with that runs on this host."""
        return [] if host == "n1" else ["nsenter", f"--target={self.holder.pid}", "--net", "--uts"]

    def start(self, host, *command):
        with open(self.folder / "daemons.log", "a") as log:
            process = subprocess.Popen([*self.on(host), *map(str, command)], env={**os.environ, **self.environment()},
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self.daemons.append(process)
        return process

    def wait_for(self, what, *command, seconds=30):
        give_up = time.monotonic() + seconds
        while True:
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **self.environment()})
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > give_up:
                raise AssertionError(f"{what} is not there after {seconds} s: {done.stdout}{done.stderr}{self.log()}")
            time.sleep(0.1)

    def log(self):
        return "".join(f"\n--- {path.name}\n" + path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    # ------------------------------------------------------------------------------------------------ sshd

    def start_sshd(self):
        for key in ("host_key", "key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key)
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / "sshd_config"
        config.write_text(f"Port {SSH_PORT}\nHostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/key.pub\n"
                          "PidFile none\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nStrictModes no\nUseDNS no\n")
        (self.folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.folder}/key\n  Port {SSH_PORT}\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  ControlMaster no\n")
        for host in ADDRESSES:
            self.start_sshd_on(host)

    def start_sshd_on(self, host):
        self.start(host, which("sshd"), "-D", "-e", "-f", self.folder / "sshd_config")
        self.wait_for("sshd", "ssh", "-F", self.folder / "ssh_config", host, "true")

    def kill_host(self, host):
        """Kills all that runs on a host, at once, and waits until it is gone, so that its ports are free; of its daemons Slurm's remain."""
        network = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        some_left = True
        while some_left:
            some_left = False
            for pid, name in processes().items():
                try:
                    if pid != self.holder.pid and name != "slurmd" and os.readlink(f"/proc/{pid}/ns/net") == network:
                        os.kill(pid, signal.SIGKILL)
                        some_left = True
                except OSError:
                    pass  # it has ended

    # ----------------------------------------------------------------------------------------------- Slurm

    def start_slurm(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        cores = os.cpu_count()
        self.slurm_conf().write_text(
            f"ClusterName=test\nSlurmctldHost=n1({ADDRESSES['n1']})\nAuthType=auth/munge\nAuthInfo=socket={self.folder}/munge.socket\n"
            f"SlurmUser=root\nMailProg=/bin/true\nStateSaveLocation={self.folder}/state\nSlurmdSpoolDir={self.folder}/%n\n"
            f"SlurmctldPidFile={self.folder}/slurmctld.pid\nSlurmdPidFile={self.folder}/%n.pid\nSlurmctldLogFile={self.folder}/slurmctld.log\n"
            f"SlurmdLogFile={self.folder}/slurmd.%n.log\nProctrackType=proctrack/pgid\nTaskPlugin=task/none\nSelectType=select/cons_tres\n"
            "SelectTypeParameters=CR_Core\nReturnToService=2\nMpiDefault=none\nKillWait=30\n"
            + "".join(f"NodeName={host} NodeAddr={address} CPUs={max(2, cores)} State=UNKNOWN\n" for host, address in ADDRESSES.items())
            + "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4\n")
        (self.folder / "state").mkdir()
        # A socket of the file system is reached from both hosts.
        self.start("n1", which("munged"), "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                   f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed")
        self.wait_for("munged", "munge", f"--socket={self.folder}/munge.socket", "--no-input")
        self.start("n1", which("slurmctld"), "-D")
        for host in ADDRESSES:
            self.start(host, which("slurmd"), "-D", "-N", host)
        self.wait_for("Slurm", "bash", "-c", "sinfo -h -o '%D %T' | grep -q '^2 idle'")

    def slurm_conf(self):
        return self.folder / "slurm.conf"

    def environment(self):
        """For what uses the daemons."""
        ssh_options = f"-F {self.folder}/ssh_config"
        return {"SLURM_CONF": str(self.slurm_conf()), "PDSH_SSH_ARGS_APPEND": ssh_options, "OMPI_MCA_plm_rsh_args": ssh_options, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl_tcp_if_include": "eth0", "OMPI_MCA_oob_tcp_if_include": "eth0"}

    def end(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        delete_link("eth0")
        self.holder.kill()
        self.holder.wait()
