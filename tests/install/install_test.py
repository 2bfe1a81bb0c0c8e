"""What `cmake --install` installs is complete: a project outside of the tree finds it, builds, trains on two ranks and saves.

BUILD_DIR, TORCH_DIR (the wheel's folder `torch`), CMAKE and CXX come from ctest.
"""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BUILD_DIR", ROOT / "build"))
TORCH = os.environ.get("TORCH_DIR") or str(next(ROOT.glob(".deps/venv/lib/python3*/site-packages/torch")))
CMAKE = os.environ.get("CMAKE", "cmake")


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_install_", ignore_cleanup_errors=True)))
        first = cls.folder / "first"
        cls.run_command(CMAKE, "--install", BUILD, "--prefix", first)
        cls.prefix = first.rename(cls.folder / "tessera")  # the package must not contain its own path either

    @classmethod
    def run_command(cls, *args, code=0, **environment):
        ours = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|TORCHELASTIC_|TESSERA_|CMAKE_|DESTDIR")
        env = {**{name: value for name, value in os.environ.items() if not ours.match(name)}, **environment}
        done = subprocess.run([*map(str, args)], cwd=cls.folder, env=env, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode != code:
            raise AssertionError(f"{args}\nexit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def test_what_is_there(self):
        for name in ("bin/tessera", "bin/zero_to_fp32", "include/tessera/tessera.h", "include/tessera/engine/engine.h", "include/tessera/train/task/task.h",
                     "share/tessera/configs/minimal.json", "share/tessera/project/CMakeLists.txt", "share/tessera/project/main.cc",
                     "share/tessera/project/config.json"):
            self.assertTrue((self.prefix / name).exists(), name)
        for name, kind in (("bash-completion/completions/tessera", "bash"), ("zsh/site-functions/_tessera", "zsh"), ("man/man1/tessera.1", "man")):
            self.assertEqual((self.prefix / "share" / name).read_text(encoding="utf-8"), self.run_command(self.prefix / "bin/tessera", "completion", kind))
        self.assertFalse((self.prefix / "include/tessera/tests").exists())
        self.assertEqual(sorted(path.name for path in self.prefix.iterdir()), ["bin", "include", "lib", "share"], "the Python package is the wheel's")
        self.assertRegex(self.run_command(self.prefix / "bin/tessera", "--version"), r"^\d+\.\d+\.\d+$")
        version = self.run_command(self.prefix / "bin/tessera", "--version").strip()
        package = next(self.prefix.rglob("tesseraConfigVersion.cmake")).read_text(encoding="utf-8")
        self.assertIn(f'set(PACKAGE_VERSION "{version}")', package)
        self.assertIn("CHECKPOINT", self.run_command(self.prefix / "bin/zero_to_fp32", "--help").upper())

    def test_headers_lie_under_one_name(self):
        include = self.prefix / "include"
        self.assertEqual([entry.name for entry in include.iterdir()], ["tessera"])
        headers = list(include.rglob("*.h"))
        self.assertGreater(len(headers), 100)
        for header in headers:
            for name in re.findall(r'^#include "(.*)"', header.read_text(encoding="utf-8"), re.MULTILINE):
                self.assertTrue(name.startswith("tessera/") and (include / name).is_file(), f"{header}: {name}")

    def test_package_names_no_path_of_this_machine(self):
        files = list(self.prefix.rglob("*.cmake"))
        self.assertGreaterEqual(len(files), 6)
        for path in files:
            text = path.read_text(encoding="utf-8")
            for known in (ROOT, BUILD, Path(TORCH), self.folder):
                self.assertNotIn(str(known), text, path)

    def test_page_shows_the_project(self):
        page = (ROOT / "docs/own_model_cpp.md").read_text(encoding="utf-8")
        shown = re.findall(r"^```cmake\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        self.assertEqual(shown, [(self.prefix / "share/tessera/project/CMakeLists.txt").read_text(encoding="utf-8")])

    def test_a_project_of_its_own(self):
        shutil.copytree(self.prefix / "share/tessera/project", self.folder / "project")
        settings = json.loads((self.folder / "project/config.json").read_text(encoding="utf-8"))
        build = self.folder / "project" / "build"
        configure = (CMAKE, "-S", self.folder / "project", "-B", build, "-G", "Ninja",
                     f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX', 'c++')}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_CXX_FLAGS=-O1 -Wall -Wextra -Werror")
        missing = self.run_command(*configure, f"-DCMAKE_PREFIX_PATH={self.prefix}", code=1)
        self.assertIn("PyPI package torch brings it, of version ", " ".join(missing.split()))
        # libtorch's folder as for find_package(Torch); -DTESSERA_TORCH_DIR is the other way.
        self.run_command(*configure, f"-DCMAKE_PREFIX_PATH={self.prefix};{TORCH}")
        command = json.loads((build / "compile_commands.json").read_text())[0]["command"].replace(str(Path(TORCH).parent), "SITE")
        self.assertNotIn(str(ROOT), command)
        self.run_command(CMAKE, "--build", build)

        lines = {}
        for stage in (0, 2):
            config = self.folder / f"stage{stage}.json"
            config.write_text(json.dumps({**settings, "zero_optimization": {"stage": stage}}), encoding="utf-8")
            lines[stage] = self.run_command(self.prefix / "bin/tessera", "launch", "-n", 2, "--", build / "app", config,
                                            OMP_NUM_THREADS="1")
        accuracy = re.fullmatch(r"stage 2, 2 ranks, accuracy (\S+), weight \S+\n", lines[2])
        self.assertTrue(accuracy, lines)
        self.assertGreater(float(accuracy[1]), 0.8)
        self.assertEqual(lines[2].removeprefix("stage 2"), lines[0].removeprefix("stage 0"), "not the same bits")
        with_rule = {}
        for stage in (0, 2):
            with_rule[stage] = self.run_command(self.prefix / "bin/tessera", "launch", "-n", 2, "--", build / "app",
                                                self.folder / f"stage{stage}.json", "RMSprop", OMP_NUM_THREADS="1")
        self.assertGreater(float(re.search(r"accuracy (\S+),", with_rule[2])[1]), 0.8)
        self.assertEqual(with_rule[2].removeprefix("stage 2"), with_rule[0].removeprefix("stage 0"), "not the same bits")
        self.assertNotEqual(with_rule[2], lines[2], "another formula")
        self.run_command(self.prefix / "bin/tessera", "consolidate", "checkpoints", "model.safetensors")
        self.assertGreater((self.folder / "model.safetensors").stat().st_size, 3000)
        self.assertEqual(self.run_command(build / "app", "no.json", code=1),
                         "error: no.json: cannot be opened (No such file or directory)\n")


if __name__ == "__main__":
    unittest.main()
