"""The wheel, as `make wheel` makes it, installed by pip into a fresh virtual environment: what it needs, what it shows, and that it trains.

torch is not downloaded again (0.6 GB): the packages of .deps/venv are linked into the environment, as if pip had installed them there, or
are named in a .pth file, as where an environment builds upon another one.
"""
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
import zipfile
from email.parser import Parser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import packaging.tags
import safetensors.torch
import torch
from ranks import PROGRAMS, ROOT, RanksTest, environment

sys.path += [str(ROOT / "bundle"), str(ROOT / "tests" / "architecture")]
import make_bundle  # noqa: E402
from source_tree import project_files  # noqa: E402

BUILD = Path(os.environ["BUILD_DIR"])
SITE_PACKAGES = Path(torch.__file__).parents[1]
VERSION = f"{sys.version_info[0]}{sys.version_info[1]}"
PLATFORM = "manylinux_2_35_x86_64"
# What auditwheel's list for manylinux_2_35 has of what we link, and torch's libraries, which `import torch` has loaded.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp.so.1"}
CUDA = {"libtorch_cuda.so", "libc10_cuda.so", "libcudart.so.13"}
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def supported_torches():
    return re.search(r"set\(TESSERA_TORCH_MINORS ([0-9. ]+)\)", (ROOT / "cmake" / "Torch.cmake").read_text(encoding="utf-8"))[1].split()


def pip_alone():
    """The environment without what tells pip of other places to look at."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PIP_")}, "PIP_CONFIG_FILE": os.devnull}


def metadata_wheel(folder, name, version, tag, *requires):
    """A wheel of nothing but its metadata."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.10", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Overrides one that prints."""


class Wheel(RanksTest):
    @classmethod
    def setUpClass(cls):
        cls.home = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_wheel_")))
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", cls.home, ROOT,
            "--config-settings", f"cmake.define.TESSERA_BUILD_DIR={BUILD}", "--config-settings", "cmake.define.TESSERA_BUILD=OFF",
            "--config-settings", f"build-dir={cls.home / 'work'}", "--config-settings", f"cmake.define.TESSERA_PLATFORM={PLATFORM}",
            "--config-settings", f"wheel.tags=cp{VERSION}-cp{VERSION}-{PLATFORM}",
            env=environment(PIP_DISABLE_PIP_VERSION_CHECK=1))
        (cls.wheel,) = cls.home.glob("tessera-*.whl")
        cls.site = cls.make_environment("beside")
        for path in SITE_PACKAGES.iterdir():
            if not (cls.site / path.name).exists() and path.name != "tessera":
                (cls.site / path.name).symlink_to(path)
        cls.package = cls.site / "tessera"
        cls.python = cls.home / "beside" / "bin" / "python"
        print(f"{cls.wheel.name}: {cls.wheel.stat().st_size} bytes")

    @classmethod
    def make_environment(cls, name):
        run(os.path.realpath(sys.executable), "-m", "venv", cls.home / name)
        run(cls.home / name / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", cls.wheel,
            env=environment(PIP_DISABLE_PIP_VERSION_CHECK=1))
        (site,) = (cls.home / name).glob("lib/python3*/site-packages")
        return site

    def installed(self, *command, code=0, **variables):
        """Runs a program of the environment, far from the sources. Returns what it wrote."""
        process = self.start(*command, **{"PYTHONPATH": "", "TESSERA": "", **variables})
        ((found, text),) = self.outcome([process])
        self.assertEqual(found, code, text)
        return text

    def binaries(self):
        return [*self.package.glob("_engine*.so"), *(self.package / "bin").iterdir()]

    # ----------------------------------------------------------------------------------------- what it is

    def test_tags_and_metadata(self):
        minor = ".".join(torch.__version__.split(".")[:2])
        self.assertRegex(self.wheel.name, rf"^tessera-\d+\.\d+\.\d+\+torch{re.escape(minor)}-cp{VERSION}-cp{VERSION}-{PLATFORM}\.whl$")
        with zipfile.ZipFile(self.wheel) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(wheel.read(name).decode())
            names = set(wheel.namelist())
        self.assertIn(self.wheel.stem.split("-", 2)[2], {str(tag) for tag in packaging.tags.sys_tags()}, "pip takes it on Debian 12")
        self.assertEqual(metadata.get_all("Requires-Dist"), [f"torch=={minor}.*"])
        self.assertEqual(metadata["License-Expression"], "Apache-2.0")
        for known in ("tessera/py.typed", "tessera/_engine.pyi", "tessera/bin/tessera"):
            self.assertIn(known, names)
        linked = {name.removesuffix("-dev") for name in make_bundle.LICENSES} - {"libgtest", "libbenchmark", "dataset-fashion-mnist"}
        self.assertEqual({f"tessera/licenses/{name}" for name in {*linked, "hdf5", "torch"}} - names, set())
        self.assertIn("Wenzel Jakob", self.licenses(), "pybind11's")
        self.assertFalse([name for name in names if "torch/" in name or "nvidia" in name or name.endswith(".in")])
        self.assertEqual("tessera/bin/libtessera_cuda.so" in names, (BUILD / "libtessera_cuda.so").exists())

    def licenses(self):
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in (self.package / "licenses").iterdir())

    def test_sdist(self):
        """What pip builds for the torch at hand (`make sdist`); `make test-torches` builds one."""
        run(sys.executable, "-c", "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])", self.folder, cwd=ROOT)
        (path,) = self.folder.glob("tessera-*.tar.gz")
        self.assertLess(path.stat().st_size, 10 << 20)
        with tarfile.open(path) as sdist:
            top = path.name.removesuffix(".tar.gz")
            files = {member.name.removeprefix(top + "/") for member in sdist.getmembers() if not member.isdir()}
            metadata = Parser().parsestr(sdist.extractfile(f"{top}/PKG-INFO").read().decode())
        self.assertRegex(metadata["Version"], r"^\d+\.\d+\.\d+$")
        self.assertEqual((metadata.get_all("Requires-Dist"), metadata.get_all("Dynamic")), (["torch"], ["Requires-Dist"]))
        self.assertEqual(files - {"PKG-INFO"}, {str(name) for name in project_files(ROOT)})

    def test_a_build_without_torch_says_what_to_do(self):
        program = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"
        # The backend alone, beside no torch.
        (self.folder / "site").mkdir()
        for name in ("scikit_build_core", "packaging", "pathspec"):
            (self.folder / "site" / name).symlink_to(SITE_PACKAGES / name)
        for found, metadata in (("torch was not found", None), ("found torch 2.9.1", "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")):
            if metadata:
                (self.folder / "site" / "torch-2.9.1.dist-info").mkdir()
                (self.folder / "site" / "torch-2.9.1.dist-info" / "METADATA").write_text(metadata)
            done = subprocess.run([os.path.realpath(sys.executable), "-S", "-c", program, self.folder], cwd=ROOT, text=True, capture_output=True, check=False,
                                  env=environment(PYTHONPATH=self.folder / "site"))
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr.strip().splitlines()[-1], f"^error: {re.escape(found)}.*expected torch 2.11 or ")

    def test_a_build_for_another_torch_is_refused(self):
        (self.folder / "build").mkdir()
        (self.folder / "build" / "build.ninja").touch()
        (self.folder / "build" / "CMakeCache.txt").write_text("TESSERA_TORCH_VERSION:INTERNAL=2.9.1\n")
        done = subprocess.run(["cmake", "-S", ROOT / "python" / "wheel", "-B", self.folder / "wheel", f"-DTESSERA_BUILD_DIR={self.folder / 'build'}",
                               f"-DPython3_EXECUTABLE={sys.executable}"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(f"{self.folder / 'build'} is a build with torch 2.9.1, and {sys.executable} has torch {torch.__version__.split('+')[0]}: "
                      "name another folder", " ".join(done.stderr.split()))

    def test_size_is_what_the_page_says(self):
        page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
        megabytes = int(re.search(r"^make wheel +# .*dist/tessera-\S+, (\d+) MB$", page, re.MULTILINE)[1])
        self.assertLess(abs(self.wheel.stat().st_size / 1e6 - megabytes), 1.5)

    def test_needs_torch_and_what_every_linux_has(self):
        for path in self.binaries():
            dynamic = run("readelf", "-d", path)
            needed = set(re.findall(r"\(NEEDED\) +Shared library: \[(.*)\]", dynamic))
            self.assertTrue({"libtorch_cpu.so", "libc.so.6"} <= needed, path)
            self.assertEqual(needed - SYSTEM - TORCH - (CUDA if "cuda" in path.name else set()), set(), path)
            for folder in re.search(r"runpath: \[(.*)\]", dynamic)[1].split(":"):
                self.assertTrue(folder.startswith("$ORIGIN/"), f"{path.name}: {folder}")
            for name, number in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", run("readelf", "-V", path)):
                self.assertLessEqual(tuple(map(int, number.split("."))), NEWEST[name], path)
            self.assertNotIn(f"{ROOT}/".encode(), path.read_bytes(), "a folder of the machine that built it")

    @unittest.skipUnless(hasattr(ctypes.CDLL(None), "arc4random"), "glibc is older than 2.36, which brought arc4random")
    def test_a_tag_that_is_not_true_is_refused(self):
        (self.folder / "tessera").mkdir()
        run("cc", "-shared", "-fPIC", "-x", "c", "-o", self.folder / "tessera" / "_engine.so", "-",
            input="unsigned arc4random(void);\nunsigned draw(void) { return arc4random(); }\n")
        for tag, found in (("manylinux_2_35_x86_64", "_engine.so needs GLIBC_2.36, and manylinux_2_35_x86_64 has GLIBC_2.35"),
                           ("manylinux_2_17_x86_64", "expected manylinux_2_35_x86_64, or nothing"), ("", None)):
            done = subprocess.run(["cmake", f"-DCMAKE_INSTALL_PREFIX={self.folder}", f"-DTESSERA_PLATFORM={tag}", "-P",
                                   ROOT / "python" / "wheel" / "PlatformTag.cmake"], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode != 0, found is not None, done.stderr)
            self.assertIn(found or "", " ".join(done.stderr.split()))

    def test_exports_its_entry_alone(self):
        (module,) = self.package.glob("_engine*.so")
        exported = run("nm", "-D", "--defined-only", module)
        self.assertEqual([line.split()[-1] for line in exported.splitlines()], ["PyInit__engine"])

    def test_help_and_another_hdf5_in_the_process(self):
        text = self.installed(self.python, "-c", """if 1:
            import h5py, tessera, torch
            help(tessera.initialize)
            model = torch.nn.Linear(3, 2)
            engine, *_ = tessera.initialize(model=model, config={"train_batch_size": 1})
            engine.save_model("model.h5")
            with h5py.File("model.h5") as file:
                print(sorted(file), (torch.tensor(file["weight"][:]) == model.weight).all().item())""", PAGER="cat")
        self.assertIn("['bias', 'weight'] True", text)
        self.assertIn("initialize(args: Any = None, model: torch.nn.modules.module.Module", text)
        self.assertIn("Returns\n", text)

    # --------------------------------------------------------------------------------------- that it works

    def test_trains_saves_resumes_and_consolidates(self):
        command = self.home / "beside" / "bin" / "tessera"
        result = json.loads(self.installed(command, "launch", "-n", 2, "--", self.python, PROGRAMS / "resume_script.py", 3).splitlines()[-1])
        self.assertTrue(result["file"].startswith(str(self.package)), result)
        self.assertEqual(result["resumed"], result["losses"][3:])
        self.installed(self.python, "-m", "tessera", "consolidate", "checkpoints3", "model3.safetensors")
        saved, merged = (safetensors.torch.load_file(self.folder / name) for name in ("saved3.safetensors", "model3.safetensors"))
        self.assertTrue(saved.keys() == merged.keys() and all(saved[name].equal(merged[name]) for name in saved))

    def test_the_command(self):
        self.assertRegex(self.installed(self.home / "beside" / "bin" / "tessera", "--version"), r"^\d+\.\d+\.\d+\n$")
        self.assertIn("consolidate", self.installed(self.python, "-m", "tessera", "--help"))

    def test_torch_elsewhere(self):
        """First nowhere."""
        site = self.make_environment("above")
        needs = f"tessera needs torch {'.'.join(torch.__version__.split('.')[:2])}, which is not installed here: pip install 'torch=="
        self.assertRegex(self.installed(self.home / "above" / "bin" / "tessera", "--version", code=1), rf"\Aerror: {re.escape(needs)}[\d.]+\*'\n\Z")
        self.assertIn(f"ImportError: {needs}", self.installed(self.home / "above" / "bin" / "python", "-c", "import tessera", code=1))
        (site / "others.pth").write_text(f"{SITE_PACKAGES}\n")
        python = self.home / "above" / "bin" / "python"
        self.assertRegex(self.installed(python, "-m", "tessera", "--version"), r"^\d+\.\d+\.\d+\n$")
        text = self.installed(python, PROGRAMS / "train_script.py")
        self.assertIn('"world": 1', text)

    def test_another_torch_is_refused_by_name(self):
        minor = ".".join(torch.__version__.split(".")[:2])
        supported = supported_torches()
        others = [version for version in supported if version != minor]
        for version in ("2.16.1+cu130", "2.10.0", f"{others[0]}.1", f"{others[-1]}.0+cpu", f"{minor}.7"):
            folder = self.folder / version
            (folder / "torch").mkdir(parents=True)
            (folder / "torch" / "__init__.py").write_text(f"__version__ = '{version}'\n")
            text = self.installed(self.python, "-c", "import tessera", PYTHONPATH=folder, code=1)
            found = ".".join(version.split(".")[:2])
            if found == minor:  # the libraries are looked for, which this torch has not
                self.assertNotIn("was built for torch", text)
                continue
            todo = (f", or the wheel tessera-*+torch{found}-*.whl, which `make wheel TESSERA_TORCH={found}` makes (docs/install.md)"
                    if found in supported else f"; tessera can be built for torch {supported[0]} to {supported[-1]}")
            self.assertEqual(text.strip().splitlines()[-1], f"ImportError: this tessera was built for torch {minor}, and found torch {version} "
                                                            f"({folder}/torch/__init__.py): pip install 'torch=={minor}.*'{todo}")

    # -------------------------------------------------------------------------------------- which one pip takes

    def test_pip_takes_the_wheel_for_the_torch_that_is_installed(self):
        """Of an index as `make wheels` writes it: this wheel, and for the other torches wheels of metadata alone."""
        built_for = ".".join(torch.__version__.split(".")[:2])
        version = self.wheel.name.split("-")[1].split("+")[0]
        dist, other = self.folder / "dist", self.folder / "other"
        for folder in (dist, other):
            folder.mkdir()
        os.link(self.wheel, dist / self.wheel.name)
        for minor in supported_torches():
            if minor != built_for:
                metadata_wheel(dist, "tessera", f"{version}+torch{minor}", f"cp{VERSION}-cp{VERSION}-{PLATFORM}", f"torch=={minor}.*")
            metadata_wheel(other, "torch", f"{minor}.1", "py3-none-any")
        run(sys.executable, "-B", ROOT / "scripts" / "simple_index.py", dist)
        index = f"file://{dist / 'simple'}"
        run(os.path.realpath(sys.executable), "-m", "venv", self.folder / "venv")

        def install(*packages, **variables):
            """{name: version} of what pip would install."""
            pip = [self.folder / "venv" / "bin" / "pip", "install", "--quiet", "--no-cache-dir", "--dry-run", "--report", "-", "-i", index, *packages]
            done = subprocess.run(list(map(str, pip)), capture_output=True, text=True, check=False,
                                  env={**pip_alone(), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables})
            if done.returncode != 0:
                return done.stderr
            return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}

        newest = supported_torches()[-1]
        with_torch = {"PIP_EXTRA_INDEX_URL": f"file://{self.folder / 'with_torch'}"}
        shutil.copytree(other, self.folder / "with_torch" / "torch")
        (self.folder / "with_torch" / "torch" / "index.html").write_text("".join(f'<a href="{path.name}">{path.name}</a>\n' for path in other.iterdir()))
        self.assertEqual(install("tessera", **with_torch), {"tessera": f"{version}+torch{newest}", "torch": f"{newest}.1"}, "no torch: the newest")
        self.assertIn("have conflicting dependencies", install("tessera"))
        for minor in (supported_torches()[0], supported_torches()[-2]):
            with self.subTest(installed=minor):
                run(self.folder / "venv" / "bin" / "pip", "install", "--quiet", "--no-index", "--force-reinstall", other / f"torch-{minor}.1-py3-none-any.whl",
                    env={**pip_alone(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
                self.assertEqual(install("tessera"), {"tessera": f"{version}+torch{minor}"})
                # An index that has torch, too, lets pip put the newest in the place of the one that is installed, unless the command names it.
                self.assertEqual(install("tessera", **with_torch), {"tessera": f"{version}+torch{newest}", "torch": f"{newest}.1"})
                self.assertEqual(install("tessera", f"torch=={minor}.*", **with_torch), {"tessera": f"{version}+torch{minor}"})

    def test_an_index_is_served_by_any_web_server(self):
        (self.folder / "dist").mkdir()
        os.link(self.wheel, self.folder / "dist" / self.wheel.name)
        run(sys.executable, "-B", ROOT / "scripts" / "simple_index.py", self.folder / "dist")
        shutil.move(self.folder / "dist" / "simple", self.folder / "simple")  # all that it names lies in it
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=self.folder / "simple"))
        self.addCleanup(server.server_close)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        run(self.home / "beside" / "bin" / "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "-i", f"http://127.0.0.1:{server.server_port}/",
            "-d", self.folder, "tessera", env={**pip_alone(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        self.assertEqual((self.folder / self.wheel.name).read_bytes(), self.wheel.read_bytes())

    def test_an_index_of_nothing_is_refused(self):
        done = subprocess.run([sys.executable, "-B", ROOT / "scripts" / "simple_index.py", self.folder], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr),
                         (1, f"error: {self.folder}: found no tessera-*.whl; expected at least one: make wheels\n"))


if __name__ == "__main__":
    unittest.main()
