"""Says whether a release is ready: its version is the same everywhere, the commit has its tag, and dist/ has the sdist and a wheel for each torch,
with licenses, which twine takes. The exit code is 1 where something is missing. `make release-check` runs it.

twine is installed into an environment of its own, .deps/venv-twine, with what it needs: nothing else of the project uses them.
"""
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from simple_index import metadata_of

ROOT = Path(__file__).resolve().parents[1]
TWINE = "twine==6.2.0"


def read(root, name):
    return (root / name).read_text(encoding="utf-8")


def version_of(root):
    return re.search(r"^project\(tessera VERSION (\d+\.\d+\.\d+) ", read(root, "CMakeLists.txt"), re.MULTILINE)[1]


def problems_of_tree(root):
    """What is wrong in the files that say which version this is."""
    version = version_of(root)
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", read(root, "CHANGELOG.md"), re.MULTILINE)
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)^## \[", read(root, "CHANGELOG.md"), re.MULTILINE | re.DOTALL)[1]
    found, date = headings[1]
    if found != version:
        yield f"CHANGELOG.md: found {found} as the newest version; expected {version}, as in CMakeLists.txt"
    if unreleased.strip():
        yield f'CHANGELOG.md: found lines under "Unreleased"; expected none: move them to {version}'
    citation = dict(re.findall(r"^([a-z-]+): (\S+)$", read(root, "CITATION.cff"), re.MULTILINE))
    for key, expected in (("version", version), ("date-released", date)):
        if citation.get(key) != expected:
            yield f"CITATION.cff: {key}: found {citation.get(key)}; expected {expected}, as in CHANGELOG.md"


def git(root, *command):
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def problems_of_commit(root):
    tag = f"v{version_of(root)}"
    if git(root, "status", "--porcelain"):
        yield "git: found changes that are not committed; expected none: git status"
    tagged = git(root, "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}")
    if tagged != git(root, "rev-parse", "HEAD"):
        yield f"git: tag {tag}: found {tagged[:8] or 'none'}; expected HEAD: git tag -a {tag} -m 'Tessera {tag[1:]}'"


def torches(root):
    return [torch.rpartition(".")[0] for torch in re.findall(r"^# \[torch-([0-9.]+)\]", read(root, "requirements.txt"), re.MULTILINE)]


def problems_of_wheel(path, version, torch):
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    metadata = Parser().parsestr(metadata_of(path).decode())
    if (metadata["Version"], metadata.get_all("Requires-Dist")) != (f"{version}+torch{torch}", [f"torch=={torch}.*"]):
        yield f"{path.name}: found version {metadata['Version']}, for {metadata.get_all('Requires-Dist')}; expected {version}+torch{torch} for torch=={torch}.*"
    if not any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in names):
        yield f"{path.name}: LICENSE not found; expected in .dist-info/licenses"
    if not {"tessera/licenses/hdf5", "tessera/licenses/torch"} <= set(names):
        yield f"{path.name}: licenses of what is inside not found; expected tessera/licenses/: make the wheel with `make wheels`"


def problems_of_dist(root):
    version = version_of(root)
    sdist = root / "dist" / f"tessera-{version}.tar.gz"
    if not sdist.exists():
        yield f"dist: {sdist.name} not found; expected it: make sdist"
    else:
        with tarfile.open(sdist) as files:
            if f"tessera-{version}/LICENSE" not in files.getnames():
                yield f"{sdist.name}: LICENSE not found; expected it"
    for torch in torches(root):
        wheels = list((root / "dist").glob(f"tessera-{version}+torch{torch}-*.whl"))
        if not wheels:
            yield f"dist: tessera-{version}+torch{torch}-*.whl not found; expected it: make wheel TESSERA_TORCH={torch}"
        for wheel in wheels:
            yield from problems_of_wheel(wheel, version, torch)


def problems_of_twine(root):
    """twine reads what a package index reads: the metadata, and the README as the page of the package."""
    files = sorted(str(path) for path in (root / "dist").glob(f"tessera-{version_of(root)}[-+.]*") if path.suffix in (".whl", ".gz"))
    if not files:
        return
    folder = root / ".deps" / "venv-twine"
    if not (folder / "bin" / "twine").exists():
        print(f"{TWINE} from PyPI, into .deps/venv-twine", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TWINE], check=True)
    done = subprocess.run([folder / "bin" / "twine", "check", "--strict", *files], capture_output=True, text=True, check=False,
                          env={**os.environ, "NO_COLOR": "1"})
    if done.returncode != 0:
        yield f"twine check: {done.stdout.strip()}{done.stderr.strip()}"


def main():
    problems = [line for check in (problems_of_tree, problems_of_commit, problems_of_dist, problems_of_twine) for line in check(ROOT)]
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{version_of(ROOT)} is ready: the sdist, and wheels for torch {', '.join(torches(ROOT))}")


if __name__ == "__main__":
    main()
