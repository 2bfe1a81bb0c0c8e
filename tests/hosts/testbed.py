"""Two hosts on one machine, n1 and n2, with sshd and Slurm: network and UTS namespaces joined by a cable (veth).

The test runs in namespaces of its own (processes, mounts, network): it is host n1, the daemons are its children, and what is left
when it ends is killed by the kernel. enter() starts it again in them. All files are in one temporary folder.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = {"n1": "10.78.0.1", "n2": "10.78.0.2"}
SSH_PORT = 2222
INSIDE = "TESSERA_TEST_HOSTS"
SBIN = ("/usr/sbin", "/sbin")


def which(program):
    return shutil.which(program, path=os.pathsep.join([os.environ["PATH"], *SBIN]))


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def enter():
    """Starts this script again in namespaces of its own. Returns there "", or here the reason why that cannot be."""
    if os.environ.get(INSIDE):
        return ""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if missing := [name for name in ("unshare", "nsenter", "ip") if not which(name)]:
        return f"not installed: {', '.join(missing)} (Debian packages util-linux, iproute2)"
    command = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    probe = subprocess.run([*command, "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"], capture_output=True, text=True)
    if probe.returncode != 0:
        return "no network namespaces here: " + " ".join(probe.stderr.split())
    os.environ[INSIDE] = "1"
    # Process 1 of the namespace gets the orphans, and has to wait for them, as a shell does: Slurm asks whether a zombie is there.
    return os.execvp(command[0], [*command, "bash", "-c", '"$@" & wait $!', "init", sys.executable, "-B", *sys.argv])


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
    def __init__(self, folder):
        self.folder = Path(folder)
        self.daemons = []
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", "sleep", "infinity"])
        while os.readlink(f"/proc/{self.holder.pid}/ns/uts") == os.readlink("/proc/self/ns/uts"):
            time.sleep(0.01)
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
        # The kernel removes the link with the namespace, but some time after: the next one of this name would find it.
        subprocess.run(["ip", "link", "delete", "eth0"], stderr=subprocess.DEVNULL, check=False)
        self.holder.kill()
        self.holder.wait()
