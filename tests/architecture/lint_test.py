"""The sources are as clang-format lays them out, and ruff and shellcheck find nothing in them. The versions are pinned in
requirements.txt, because another one lays out otherwise."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from source_tree import CPP_SUFFIXES, project_files

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ["LINTERS"])


def lint(program, *arguments, cwd=ROOT):
    """(exit code, what it says)."""
    done = subprocess.run([BIN / program, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def files(*suffixes):
    return [str(path) for path in project_files(ROOT) if path.suffix in suffixes]


class Lint(unittest.TestCase):
    def assert_clean(self, result, advice):
        code, said = result
        self.assertEqual((code, said.strip().removesuffix("All checks passed!").strip()), (0, ""), f"\n{said}\n{advice}")

    def test_clang_format(self):
        sources = files(*CPP_SUFFIXES)
        self.assertGreater(len(sources), 500)
        self.assert_clean(lint("clang-format", "--dry-run", "-Werror", *sources), "clang-format -i lays them out")

    def test_ruff(self):
        sources = files(".py")
        self.assertGreater(len(sources), 50)
        self.assert_clean(lint("ruff", "check", "--no-cache", "--output-format", "concise", *sources),
                          "ruff check --fix mends some")

    def test_shellcheck(self):
        scripts = [*files(".sh"), ".ci/run"]
        self.assertGreater(len(scripts), 5)
        self.assert_clean(lint("shellcheck", *scripts), "")

    def test_each_of_them_bites(self):
        with tempfile.TemporaryDirectory() as folder:
            for program, name, text in [("clang-format", "a.cc", "int  a ;\n"), ("ruff", "a.py", "import os\n"),
                                        ("shellcheck", "a.sh", "#!/bin/bash\necho $1\n")]:
                Path(folder, name).write_text(text)
                arguments = {"clang-format": ["--dry-run", "-Werror"], "ruff": ["check", "--no-cache"], "shellcheck": []}[program]
                self.assertNotEqual(lint(program, *arguments, name, cwd=folder)[0], 0, program)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
