"""The messages of the command and of the configuration's reader, whole: runs the cases of each of FILES.

A case is `$ input`, further lines of it as `> line`, and below them all that is said. `@ driver` chooses how the cases below it run:
  @ document          the text of a file of configuration, by the reader alone
  @ config [RANKS] [KEY=VALUE ...]   a configuration on so many ranks (default: 1), with these --set
  @ keys [RANKS]      keys of a configuration beside a valid batch size
  @ run [RANKS]       the same of a configuration of `tessera train`
  @ override          a --set over {"n": 3, "l": [0]}
  @ shell             a command of the shell, in a folder with the files of FIXTURES
  @ train ARG ...     `tessera train` with a configuration: the one in config.json with these changes (null removes a key)

The first five run in one process. \\xNN is a byte of their text. The folder is $DIR in messages. A command's exit status is 1 with an
`error: ` and 0 without; another one is the last line, as `[2]`. Lines of standard output begin with `| `; `left: ` names a file
of the folder `run`, which is removed after each case. With BLESS=1 in the environment what is said is written into the files.
"""
import difflib
import json
import os
import re
import shlex
import subprocess
import unittest
from pathlib import Path

import fixtures

HERE = Path(__file__).resolve().parent
BLESS = os.environ.get("BLESS") == "1"
IN_ONE_PROCESS = ("document", "config", "keys", "run", "override")


class Case:
    def __init__(self, driver, first):
        self.driver, self.given = driver, [first]

    @property
    def input(self):
        return "\n".join(self.given)

    def answer_of(self, process):
        """What config_messages says of this case."""
        name, *words = self.driver
        text = re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), self.input.encode())
        process.stdin.write(json.dumps([name, words, len(text)]).encode() + b"\n" + text)
        process.stdin.flush()
        said = b""
        while not said.endswith(b"\0"):
            byte = process.stdout.read(1)
            if not byte:
                raise AssertionError(f"config_messages has ended at {self.input}")
            said += byte
        return said[:-1].decode()

    def lines(self):
        return [f"{sign} {line}".rstrip(" ") for sign, line in zip("$" + ">" * len(self.given), self.given)]


def parse(text):
    """The lines of a file, without what is said below a case: text and cases."""
    parts, driver, number = [], None, 0
    for number, line in enumerate(text.splitlines(), 1):
        last = parts[-1] if parts else None
        if line.startswith("@ "):
            driver = shlex.split(line[2:])
            if driver[0] not in (*IN_ONE_PROCESS, "shell", "train"):
                raise SystemExit(f"line {number}: unknown driver {line}")
            parts.append(line)
        elif line.startswith("$"):
            parts.append(Case(driver, line[2:]))
        elif line.startswith(">") and isinstance(last, Case):
            last.given.append(line[2:])
        elif not line or line.startswith("#"):
            parts.append(line)
        elif not isinstance(last, Case):
            raise SystemExit(f"line {number}: belongs to no case: {line}")
    return parts


class MessagesTest(fixtures.Fixtures):
    def run_case(self, case):
        name, *args = case.driver
        if name in IN_ONE_PROCESS:
            return case.answer_of(self.reader)
        command = case.input
        if name == "train":
            self.write("changed.json", fixtures.merged(json.loads((self.folder / "config.json").read_text()), json.loads(command)))
            command = shlex.join(["tessera", "train", "changed.json", *args])
        outcome = self.run_tool("-c", command, program="/bin/sh", env={"PATH": f"{self.bin}:{os.environ['PATH']}"})
        said = outcome.err + "".join(f"| {line}\n" for line in outcome.out.splitlines())
        if outcome.code != ("error: " in said):
            said += f"[{outcome.code}]\n"
        said += "".join(f"left: {path.relative_to(self.folder)}{', empty' if path.stat().st_size == 0 else ''}\n" for path in self.left())
        self.assertEqual(list(self.tmp.glob("tessera_*")), [], command)
        self.assert_nothing_runs()
        return said.replace(str(self.folder), "$DIR")

    def check(self, path):
        text = path.read_text(encoding="utf-8")
        parts = parse(text)
        drivers = {part.driver[0] for part in parts if isinstance(part, Case)}
        self.reader = None
        if drivers & set(IN_ONE_PROCESS):
            self.reader = subprocess.Popen([os.environ["CONFIG_MESSAGES"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.addCleanup(self.reader.communicate)
        if drivers - set(IN_ONE_PROCESS):
            self.make(path.stem)
        found = []
        for part in parts:
            found += [part] if isinstance(part, str) else [*part.lines(), *self.run_case(part).splitlines()]
        said = "\n".join(found) + "\n"
        if BLESS:
            path.write_text(said, encoding="utf-8")
        elif said != text:
            difference = difflib.unified_diff(text.splitlines(), found, str(path), "what is said now", lineterm="", n=3)
            self.fail("\n".join(difference) + "\nIf this is right: BLESS=1 ctest --test-dir build -R messages, and review the difference.")

    def test_every_file_is_run(self):
        entries = (HERE / "CMakeLists.txt").read_text()
        self.assertEqual([path.name for path in HERE.glob("*.txt") if path.name != "CMakeLists.txt" and path.name not in entries], [])

    def test_files(self):
        files = [HERE / name for name in os.environ["FILES"].split(",")]
        for path in files:
            with self.subTest(path.name):
                self.check(path)


if __name__ == "__main__":
    unittest.main()
