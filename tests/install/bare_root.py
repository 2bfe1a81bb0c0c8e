"""A root folder with a shell, Python and the system's libraries that these and torch need, and nothing else; programs run in it by chroot,
in a mount namespace of their own. It stands for a machine without Debian's packages."""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PYTHON = Path(os.path.realpath(sys.executable))
STDLIB = Path(sysconfig.get_path("stdlib"))
CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin") or "chroot"


def why_not():
    """Why this machine cannot make one; empty when it can."""
    done = subprocess.run(BareRoot.NAMESPACE + ["sh", "-c", f"mount --bind /tmp /tmp && {CHROOT} / true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no mount namespace or chroot here: {done.stderr.strip()}"


class BareRoot:
    NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]

    def __init__(self, folder, site_packages=None):
        """`site_packages`: a folder with torch and what it needs, found by Python at another path than here; None: no torch."""
        self.folder, self.site_packages = Path(folder), site_packages
        for name in ("bin", "usr/bin", "tmp", "proc", "dev/shm", "etc", f".{STDLIB}", "opt/python", "opt/tessera"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("null", "zero", "urandom"):
            (self.folder / "dev" / name).touch()
        (self.folder / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
        shell = Path(os.path.realpath("/bin/sh"))
        shutil.copy(shell, self.folder / "bin" / "sh")
        shutil.copy(PYTHON, self.folder / "usr" / "bin" / "python3")
        binaries = [shell, PYTHON, *STDLIB.glob("lib-dynload/*.so")]
        if site_packages is not None:
            binaries += Path(site_packages).glob("torch/lib/*.so")
        self.copy_libraries(binaries)

    def copy_libraries(self, binaries):
        """What these need of the system, at the same paths. torch's and NVIDIA's come with site-packages."""
        text = "".join(subprocess.run(["ldd", str(one)], capture_output=True, text=True, check=False).stdout for one in binaries)
        ours = str(self.site_packages) if self.site_packages else None
        for name in set(re.findall(r"(/\S+) \(0x", text)):
            target = self.folder / name.lstrip("/")
            if (ours and os.path.realpath(name).startswith(os.path.realpath(ours))) or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(name), target)

    def run(self, *command, cwd="/", timeout=120, **variables):
        """Runs it inside. Returns subprocess's result."""
        mounts = [("--rbind", "/proc", "proc"), ("--bind", str(STDLIB), str(STDLIB).lstrip("/")), ("--bind", "/dev/shm", "dev/shm")]
        mounts += [("--bind", f"/dev/{name}", f"dev/{name}") for name in ("null", "zero", "urandom")]
        if self.site_packages is not None:
            mounts.append(("--bind", str(self.site_packages), "opt/python"))
        script = "set -e\n" + "".join(f'mount {how} "{source}" "{self.folder / target}"\n' for how, source, target in mounts)
        # env -i outside: the root has no env.
        script += f"exec env -i PATH=/usr/bin:/bin PYTHONPATH=/opt/python HOME=/tmp USER=user LANG=C.UTF-8 \"$@\" {CHROOT} \"{self.folder}\" "
        environment = [f"{name}={value}" for name, value in variables.items()]
        inner = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *map(str, command)]
        quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in inner)
        return subprocess.run([*self.NAMESPACE, "sh", "-c", script + quoted, "sh", *environment], capture_output=True, text=True, timeout=timeout, check=False)
