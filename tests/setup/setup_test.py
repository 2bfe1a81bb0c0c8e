"""The set-up fits together: package lists, CMake's messages, commands, presets; and the tree names no machine."""
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "architecture"), str(ROOT / "scripts")]
import release_check  # noqa: E402
from source_tree import project_files  # noqa: E402

# Built from parts, so that this file has none of them.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])" + "/" + r"(?:work|root|home/\w+|Users/\w+|workspace|builds|opt/wheels)(?=/|\b)")
PACKAGE_INDEX = re.compile(
    "--(?:extra-)?index" + "-url|--find" + "-links|--trusted" + "-host|PIP_(?:INDEX|FIND)" + "_")
PRIVATE_HOST = re.compile(
    r"https?://(?:[^/\s\"'<>)]*@|(?!127\.)\d+\.\d+\.\d+\.\d+|[\w.-]+\.(?:internal|corp|lan|local)\b)")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def debian_packages(text, section=""):
    """The names in packages.txt, in front of all sections or in one; a ValueError names a line that is not "name  # what needs it"."""
    names = []
    parts = re.split(r"^# \[(\w+)\].*$", text, flags=re.MULTILINE)
    for line in (parts[0] if not section else parts[parts.index(section) + 1]).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9][a-z0-9+.-]+) +# \S.*", line)
        if not match:
            raise ValueError(f'packages.txt: "{line}" is not "name  # what needs it"')
        names.append(match.group(1))
    return names


def source_packages(text):
    """{name: (version, SHA-256)} of the section [source] of packages.txt; a ValueError names a line that is not pinned."""
    sources = {}
    for line in text.split("# [source]")[1].splitlines()[1:]:
        if line.strip():
            match = re.fullmatch(r"([a-z0-9]+)=([0-9][0-9a-z.+]*) ([0-9a-f]{64})  # \S.*", line)
            if not match:
                raise ValueError(f'packages.txt: "{line}" is not "name=version SHA-256  # what needs it"')
            sources[match.group(1)] = match.group(2, 3)
    return sources


def requirements(text):
    """{section: {name: version}} of requirements.txt; a ValueError names a line that is not pinned exactly."""
    sections, current = {}, None
    for line in text.splitlines():
        if match := re.match(r"# \[([\w.-]+)\] \S", line):
            current = sections.setdefault(match.group(1), {})
        elif line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
            if not match or current is None or match.group(1) in current:
                raise ValueError(f'requirements.txt: "{line}" is not one "name==version" in a section')
            current[match.group(1)] = match.group(2)
    for torch in torches(sections) or [""]:  # what is installed together has each package once
        names = [name for section, packages in sections.items() if section.endswith(f"-{torch}") or "-" not in section and section != "docs"
                 for name in packages]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"requirements.txt: {', '.join(sorted(twice))}: in two sections")
    return sections


def torches(sections):
    """The versions of torch that have a section, the default first."""
    return [name.removeprefix("torch-") for name in sections if name.startswith("torch-")]


def machine_names(text):
    """(line number, what was found) of everything that holds on one machine only."""
    return [(number, match.group()) for number, line in enumerate(text.splitlines(), 1)
            for pattern in (MACHINE_PATH, PACKAGE_INDEX, PRIVATE_HOST) for match in pattern.finditer(line)]


def cmake_files():
    return [path for path in project_files(ROOT) if path.suffix == ".cmake" or path.name == "CMakeLists.txt"]


class Packages(unittest.TestCase):
    def test_lines_are_well_formed_and_unique(self):
        names = debian_packages(read("packages.txt"))
        self.assertGreater(len(names), 5)
        self.assertEqual(len(names), len(set(names)))

    def test_a_malformed_line_is_caught(self):
        with self.assertRaises(ValueError):
            debian_packages("cmake ninja-build  # two\n")

    def test_sources_are_pinned(self):
        self.assertEqual(list(source_packages(read("packages.txt"))), ["hdf5"])
        with self.assertRaises(ValueError):
            source_packages("# [source] x\nhdf5=1.10 abc  # short\n")

    def test_only_the_section_asked_for_is_installed(self):
        """setup.sh asks dpkg for the lines above the sections, and with --hosts for those of [hosts]."""
        of_hosts, main = re.findall(r"listed=\$\((sed .*?)\)$", read("scripts/setup.sh"), re.MULTILINE)
        for script, section in ((main, ""), (of_hosts, "hosts")):
            listed = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
            self.assertEqual(sorted(listed), sorted(debian_packages(read("packages.txt"), section)))

    def test_hdf5_is_built_from_the_pinned_source(self):
        """hdf5.sh reads name and checksum from packages.txt; nothing is done where that is built already."""
        line = next(line for line in read("scripts/hdf5.sh").splitlines() if line.startswith("read -r name_version"))
        done = subprocess.run(["bash", "-c", f"{line}; echo $name_version $SHA256"], cwd=ROOT, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split(), ["hdf5=" + source_packages(read("packages.txt"))["hdf5"][0],
                                               source_packages(read("packages.txt"))["hdf5"][1]])

    def test_what_cmake_asks_for_is_listed(self):
        listed = set(debian_packages(read("packages.txt")))  # NVIDIA has packages of its own, for builds with CUDA
        asked = re.findall(r"^\s*tessera_(?:use|require_file|missing)\([^)$]*?([a-z0-9+.-]+)\)",
                           read("cmake/Packages.cmake"), re.MULTILINE)
        self.assertGreaterEqual(len(asked), 8)
        for path in cmake_files():
            asked += re.findall(r"(?<!NVIDIA's )Debian package ([a-z0-9][a-z0-9+.-]*)", read(path))
        self.assertEqual(set(asked) - listed, set(), "asked for by CMake, and not in packages.txt")


class Requirements(unittest.TestCase):
    def test_every_package_is_pinned(self):
        sections = requirements(read("requirements.txt"))
        of_torch = [f"{name}-{torch}" for torch in torches(sections) for name in ("torch", "nccl", "cuda")]
        self.assertEqual(list(sections), [*of_torch, "wheel", "python", "mlflow", "peers", "engines", "docs"])
        for torch in torches(sections):
            self.assertEqual(sections[f"torch-{torch}"]["torch"], torch)
            self.assertEqual(sorted(sections[f"torch-{torch}"]), ["nvidia-cuda-cupti", "nvidia-cuda-runtime", "torch", "torchvision"])

    def test_an_inexact_line_is_caught(self):
        for text in ["# [a] x\ntorch>=2.11\n", "torch==2.11.0\n", "# [a] x\nn==1\n# [b] x\nn==1\n", "# [torch-1] x\nn==1\nn==1\n"]:
            with self.subTest(text=text), self.assertRaises(ValueError):
                requirements(text)
        requirements("# [torch-1] x\nn==1\n# [torch-2] x\nn==2\n# [b] x\nm==1\n")

    def test_cmake_takes_the_same_torches(self):
        minors = re.search(r"set\(TESSERA_TORCH_MINORS ([0-9. ]+)\)", read("cmake/Torch.cmake"))[1].split()
        self.assertEqual(minors, [torch.rpartition(".")[0] for torch in sorted(torches(requirements(read("requirements.txt"))))])

    def test_a_torch_is_chosen_by_its_version_or_minor(self):
        versions = torches(requirements(read("requirements.txt")))
        script = 'source scripts/common.sh; echo "$TORCH ${VENV##*/} build$TESSERA_BUILD_SUFFIX"'
        for wanted, torch in [("", versions[0]), *((v, v) for v in versions), *((v.rpartition(".")[0], v) for v in versions)]:
            suffix = "" if torch == versions[0] else "-torch" + torch.rpartition(".")[0]
            self.assertEqual(self.bash(script, wanted), (0, f"{torch} venv{suffix} build{suffix}\n", ""))
        for wanted in ("2", "2.1", "2.11.9", "latest", "2.110"):
            code, _, error = self.bash(script, wanted)
            self.assertEqual((code, error), (1, f'error: TESSERA_TORCH is "{wanted}"; expected one of {" ".join(versions)} (requirements.txt)\n'))

    def bash(self, script, torch):
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env={**os.environ, "TESSERA_TORCH": torch}, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


class Commands(unittest.TestCase):
    def test_help_lists_every_command(self):
        phony = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE).group(1).split()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, env=environment, capture_output=True, text=True,
                               check=True).stdout
        self.assertEqual(sorted(re.findall(r"^  make ([\w-]+) +\S", shown, re.MULTILINE)), sorted(phony))
        self.assertLessEqual(max(map(len, shown.splitlines())), 80)
        self.assertLessEqual({"deps", "build", "demo", "test", "asan", "bench", "clean", "help"}, set(phony))
        targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
        self.assertEqual(sorted(targets), sorted(phony))

    def test_scripts_are_sound_bash(self):
        scripts = [path for path in project_files(ROOT) if path.suffix == ".sh"] + [Path(".ci/run")]
        self.assertGreaterEqual(len(scripts), 4)
        for path in scripts:
            with self.subTest(path=path):
                result = subprocess.run(["bash", "-n", str(ROOT / path)], capture_output=True, text=True, check=False)
                self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_commands_are_executable(self):
        for name in [".ci/run", "scripts/setup.sh", "scripts/build.sh", "scripts/test.sh"]:
            self.assertTrue(os.access(ROOT / name, os.X_OK), name)

    def test_ci_runs_the_commands_of_the_readme_in_their_order(self):
        shown = re.search(r"^```sh\n(make demo.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL).group(1)
        commands = re.findall(r"^(make [a-z]+)", shown, re.MULTILINE)
        self.assertEqual(commands, ["make demo", "make test"])
        self.assertEqual(re.findall(r"^(make [a-z-]+)", read(".ci/run"), re.MULTILINE), [*commands, "make test-torches"])

    def test_containers_are_built_by_the_commands_of_the_pages(self):
        for name, base in (("containers/Dockerfile", "FROM debian:12"), ("containers/tessera.def", "From: debian:12")):
            with self.subTest(recipe=name):
                recipe = "\n".join(line for line in read(name).splitlines() if not line.startswith("#"))
                self.assertIn(base, recipe.splitlines())
                self.assertEqual(re.findall(r"\bmake [a-z]+", recipe), ["make build"])
                (installed,) = re.findall(r"apt-get install --yes --no-install-recommends ([a-z -]+)", recipe)
                self.assertLessEqual(set(installed.split()), {*debian_packages(read("packages.txt")), "ca-certificates"})
        self.assertRegex(read("docs/install.md"), r"(?m)^make build ")

    def test_presets_build_where_git_ignores(self):
        presets = json.loads(read("CMakePresets.json"))
        folders = {preset["name"]: preset["binaryDir"] for preset in presets["configurePresets"]}
        self.assertEqual(folders, {name: "${sourceDir}/" + folder + "$env{TESSERA_BUILD_SUFFIX}" for name, folder in
                                   {"release": "build", "debug": "build-debug", "asan": "build-asan", "tsan": "build-tsan", "fuzz": "build-fuzz"}.items()})
        for kind, without in (("buildPresets", set()), ("testPresets", {"fuzz"})):
            self.assertEqual({preset["configurePreset"] for preset in presets[kind]}, set(folders) - without)
        ignored = read(".gitignore").splitlines()
        for pattern in ("/build*/", "/.deps/"):
            self.assertIn(pattern, ignored)


class Builds(unittest.TestCase):
    """scripts/build.sh in a project of one CMakeLists.txt, which counts how often it was configured and notes what it found."""

    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_setup_")))
        (self.root / "scripts").mkdir()
        for name in ("scripts/build.sh", "scripts/common.sh", "CMakePresets.json", "requirements.txt"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(one NONE)\n"
            'set(found system)\nif(EXISTS "${PROJECT_SOURCE_DIR}/.deps/hdf5/lib/libhdf5.a")\n  set(found static)\nendif()\n'
            'file(APPEND "${PROJECT_SOURCE_DIR}/configured" "${found}\\n")\n')

    def build(self, torch=""):
        """Returns what each configuration until now has found."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        done = subprocess.run([self.root / "scripts" / "build.sh", "release"], env={**environment, "TESSERA_TORCH": torch}, capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return (self.root / "configured").read_text(encoding="utf-8").split()

    def install(self, name, text):
        path = self.root / ".deps" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def test_what_is_installed_later_is_found(self):
        self.assertEqual(self.build(), ["system"])
        self.assertEqual(self.build(), ["system"])
        self.install("hdf5/lib/libhdf5.a", "")
        self.install("hdf5/built-from", "1")
        self.assertEqual(self.build(), ["system", "static"])
        self.assertEqual(self.build(), ["system", "static"])

    def test_each_change_of_what_is_installed_configures_anew(self):
        configured = len(self.build())
        for name in ("hdf5/built-from", "venv/torch.sha256", "venv/nccl.sha256", "venv/cuda.sha256", "venv/python.sha256"):
            for text in ("1", "2"):
                self.install(name, text)
                configured += 1
                self.assertEqual(len(self.build()), configured, name)
        self.assertEqual(len(self.build()), configured)

    def test_another_torch_has_a_folder_and_an_environment_of_its_own(self):
        other = torches(requirements(read("requirements.txt")))[1]
        suffix = "-torch" + other.rpartition(".")[0]
        for number, torch in enumerate(["", other, "", other, other.rpartition(".")[0]]):
            self.assertEqual(len(self.build(torch)), min(number, 1) + 1)
        caches = {folder.name: (folder / "CMakeCache.txt").read_text(encoding="utf-8") for folder in self.root.glob("build*")}
        self.assertEqual(set(caches), {"build", "build" + suffix})
        for folder, cache in caches.items():
            self.assertRegex(cache, rf"(?m)^TESSERA_VENV:\w+={re.escape(str(self.root))}/.deps/venv{folder.removeprefix('build')}$")
        self.install(f"venv{suffix}/torch.sha256", "1")
        self.assertEqual((len(self.build()), len(self.build(other))), (2, 3))

    def test_what_cmake_looks_for_is_installed_by_every_set_up(self):
        """HDF5 does not depend on the flag of setup.sh: it comes in front of all that looks at the flag but the schedulers'."""
        lines = read("scripts/setup.sh").split("main() {")[1].splitlines()
        (hdf5,) = (number for number, line in enumerate(lines) if line.strip().startswith("scripts/hdf5.sh"))
        flags = [number for number, line in enumerate(lines) if "${1:-}" in line and "--hosts" not in line]
        self.assertLess(hdf5, min(flags))


class Versions(unittest.TestCase):
    HEADING = re.compile(r"^## \[(.+?)\](?: - (\S+))?$", re.MULTILINE)

    def test_changelog_and_cmake_agree(self):
        headings = self.HEADING.findall(read("CHANGELOG.md"))
        self.assertEqual(headings[0], ("Unreleased", ""))
        project = re.search(r"^project\(tessera VERSION (\d+\.\d+\.\d+) ", read("CMakeLists.txt"), re.MULTILINE)[1]
        self.assertEqual(headings[1][0], project, "the newest version of CHANGELOG.md, and that of CMakeLists.txt")

    def test_the_tree_is_ready_or_has_changes_to_come(self):
        """All of a release's checks of the tree but one: the next version's lines may stand under "Unreleased"."""
        self.assertEqual([line for line in release_check.problems_of_tree(ROOT) if 'lines under "Unreleased"' not in line], [])

    def test_each_check_of_a_release_finds_its_mistake(self):
        with tempfile.TemporaryDirectory(prefix="tessera_release_") as folder:
            root = Path(folder)
            good = {"CMakeLists.txt": "project(tessera VERSION 1.2.3 LANGUAGES CXX)\n", "requirements.txt": "# [torch-2.15.0] x\n",
                    "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.3] - 2027-01-02\n", "CITATION.cff": "version: 1.2.3\ndate-released: 2027-01-02\n"}
            for changed, text, found in (
                    ("", "", []), ("CMakeLists.txt", "project(tessera VERSION 1.2.4 X)\n", ["CHANGELOG.md: found 1.2.3 as", "CITATION.cff: version: found 1.2.3"]),
                    ("CHANGELOG.md", "## [Unreleased]\n- more\n## [1.2.3] - 2027-01-02\n", ['CHANGELOG.md: found lines under "Unreleased"']),
                    ("CITATION.cff", "version: 1.2.3\n", ["CITATION.cff: date-released: found None; expected 2027-01-02"])):
                for name, content in {**good, **({changed: text} if changed else {})}.items():
                    (root / name).write_text(content)
                problems = list(release_check.problems_of_tree(root))
                self.assertEqual([line[:len(start)] for line, start in zip(problems, found, strict=True)], found)
            for name, content in good.items():
                (root / name).write_text(content)
            git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
            for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
                subprocess.run([*git, *command], cwd=root, check=True)
            self.assertEqual(list(release_check.problems_of_commit(root)),
                             ["git: tag v1.2.3: found none; expected HEAD: git tag -a v1.2.3 -m 'Tessera 1.2.3'"])
            subprocess.run([*git, "tag", "-a", "v1.2.3", "-m", "one"], cwd=root, check=True)
            self.assertEqual(list(release_check.problems_of_commit(root)), [])
            self.assertEqual(list(release_check.problems_of_dist(root)),
                             ["dist: tessera-1.2.3.tar.gz not found; expected it: make sdist",
                              "dist: tessera-1.2.3+torch2.15-*.whl not found; expected it: make wheel TESSERA_TORCH=2.15"])
            (root / "dist").mkdir()
            for wanted in ("torch==2.15.*", "torch==2.14.*"):
                with zipfile.ZipFile(root / "dist" / "tessera-1.2.3+torch2.15-cp311-cp311-linux_x86_64.whl", "w") as wheel:
                    wheel.writestr("tessera-1.2.3.dist-info/METADATA", f"Name: tessera\nVersion: 1.2.3+torch2.15\nRequires-Dist: {wanted}\n")
                problems = [line.partition(": ")[2] for line in release_check.problems_of_dist(root)][1:]
                self.assertEqual(problems[-2:], ["LICENSE not found; expected in .dist-info/licenses",
                                                 "licenses of what is inside not found; expected tessera/licenses/: make the wheel with `make wheels`"])
                self.assertEqual(len(problems), 2 + (wanted == "torch==2.14.*"))

    def test_versions_are_dated_and_in_order(self):
        released = self.HEADING.findall(read("CHANGELOG.md"))[1:]
        dates = [datetime.date.fromisoformat(date) for _, date in released]
        versions = [tuple(map(int, version.split("."))) for version, _ in released]
        for values in (dates, versions):
            self.assertEqual(values, sorted(values, reverse=True))
        self.assertEqual(len(set(versions)), len(versions))

    def test_package_accepts_what_the_changelog_says(self):
        """find_package(tessera 0.2): any 0.2.x and no 0.3.0."""
        self.assertRegex(read("cmake/Install.cmake"), r"write_basic_package_version_file\([^)]*COMPATIBILITY SameMinorVersion\)")


class NoMachineNames(unittest.TestCase):
    def test_the_tree_holds_everywhere(self):
        found, num_read = [], 0
        for path in project_files(ROOT):
            try:
                text = read(path)
            except UnicodeDecodeError:
                continue  # a picture
            num_read += 1
            found += [f"{path}:{number}: {what}" for number, what in machine_names(text)]
        self.assertGreater(num_read, 20)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_a_machine_name_is_caught(self):
        for text in ["cd /" + "home/someone/x", "pip --index" + "-url x", "https://" + "pypi.corp/simple", "https://" + "me:secret@host/x"]:
            with self.subTest(text=text):
                self.assertEqual([number for number, _ in machine_names("\n" + text)], [2])


if __name__ == "__main__":
    unittest.main()
