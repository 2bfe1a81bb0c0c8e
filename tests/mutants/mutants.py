"""Puts realistic bugs into a copy of the project, one at a time, and reports which of them the tests notice.

The bugs are edits in mutants.toml (the format stands at its top). For each one the copy is edited, the program of the tests it
names is built, these tests are run, and the edit is taken back. A bug that they do not notice is a test that is missing.

    make mutants                                   all of them
    make mutants ARGS="--only 'reducer|residency'" those whose name matches
    make mutants ARGS="--changed"                  those in files that differ from the last commit
    make mutants ARGS="--log FILE"                 goes on where a run that was stopped has left off
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = pathlib.Path(__file__).with_name("mutants.toml")


@dataclasses.dataclass
class Mutant:
    name: str
    file: str
    function: str
    old: str
    new: str
    effect: str
    program: str
    tests: str  # GoogleTest's pattern
    backend: str = ""

    def places(self, text):
        """Matches of its text in its function, ignoring white space, which clang-format may change."""
        pattern = re.compile(r"\s*".join(re.escape(char) for char in self.old if not char.isspace()))
        return [place for begin, end in bodies(text, self.function) for place in pattern.finditer(text, begin, end)]

    def applied_to(self, text):
        [place] = self.places(text)
        return text[: place.start()] + self.new + text[place.end() :]


def matching(text, start):
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "({") - (text[place] in ")}")
        if depth == 0:
            return place + 1
    return len(text)


def bodies(text, function):
    """(begin, end) of the body of each definition of a function of this name."""
    for name in re.finditer(rf"\b{re.escape(function)}\(", text):
        after = matching(text, name.end() - 1)
        if opening := re.match(r"[^;{}()=]*\{", text[after:]):
            begin = after + opening.end() - 1
            yield begin, matching(text, begin)


def fail(message):
    sys.exit(f"error: {message}")



def read_list(path):
    mutants = [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    names = [mutant.name for mutant in mutants]
    for name in set(names):
        if names.count(name) > 1:
            fail(f"{path.name}: two bugs are named {name}")
    return mutants


def stale(tree, mutant):
    """Why the edit cannot be made in this tree, or None."""
    path = tree / mutant.file
    if not path.exists():
        return f"{mutant.file} does not exist"
    count = len(mutant.places(path.read_text()))
    if count != 1:
        return f"{mutant.file}: {mutant.function}() has its text {count} times, expected once"
    return "the edit changes nothing" if mutant.old == mutant.new else None


class Copy:
    """A copy of the tracked files, with a build of its own, that is edited and built again and again."""

    def __init__(self, tree):
        self.tree = tree
        self.build = tree / "build"

    def refresh(self):
        """Makes the copy equal to the project; touches what differs only, so that little is built again."""
        if self.tree == ROOT:
            fail("--tree: the copy that is edited must not be the project itself")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for name in tracked:
            source, target = ROOT / name, self.tree / name
            if target.exists() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        for folder, folders, files in os.walk(self.tree):
            relative = pathlib.Path(folder).relative_to(self.tree)
            if relative == pathlib.Path():
                folders[:] = [name for name in folders if name not in ("build", ".deps", ".git")]
            for name in files:
                if str(relative / name) not in tracked:
                    (self.tree / relative / name).unlink()
        if not (self.tree / ".deps").exists():
            (self.tree / ".deps").symlink_to(ROOT / ".deps")

    def configure(self):
        if not (self.build / "build.ninja").exists():
            self.run(["cmake", "--preset", "release", "-DTESSERA_BUILD_BENCHMARKS=OFF", "-DTESSERA_JOIN_SOURCES=OFF"], check=True)

    def run(self, command, **options):
        return subprocess.run(command, cwd=self.tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", **options)

    def build_programs(self, programs, jobs):
        return self.run(["ninja", "-C", str(self.build), "-j", str(jobs), *sorted(programs)])

    def run_tests(self, mutant, limit_s):
        """("passed", "failed" or "timeout", what was printed) of the tests of a bug."""
        command = [self.build / mutant.program, f"--gtest_filter={mutant.tests}", "--gtest_fail_fast"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        if mutant.backend:
            environment["TESSERA_TEST_BACKEND"] = mutant.backend
        with tempfile.TemporaryFile("w+", errors="replace") as output:  # processes that outlive the tests would hold a pipe
            process = subprocess.Popen(command, cwd=self.build, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                verdict = "failed" if process.wait(limit_s) else "passed"
            except subprocess.TimeoutExpired:
                verdict = "timeout"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return verdict, output.read()

    def seconds_without(self, mutant):
        """How long its tests take without the bug. They pass, and there are some."""
        start = time.monotonic()
        verdict, output = self.run_tests(mutant, limit_s=300)
        if verdict != "passed" or not re.search(r"^\[  PASSED  \] [1-9]", output, re.MULTILINE):
            fail(f"{mutant.name}: {mutant.program} --gtest_filter={mutant.tests} without the bug: {verdict}; expected tests that pass:\n{output[-4000:]}")
        return time.monotonic() - start


def read_log(path):
    """What a run that was stopped has written: {bug: verdict}."""
    entries = map(json.loads, path.read_text().splitlines()) if path and path.exists() else ()
    return {entry["name"]: entry["verdict"] for entry in entries}


def try_mutant(copy, mutant, seconds, jobs):
    """(verdict, what was seen)"""
    path = copy.tree / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied_to(before))
    try:
        built = copy.build_programs([mutant.program], jobs)
        if built.returncode != 0:
            errors = [line for line in built.stdout.splitlines() if "error" in line]
            return "invalid", "does not compile: " + (errors or ["?"])[0]
        # A test that hangs with a bug is ended once it has taken twice as long as without one, and a little more.
        verdict, output = copy.run_tests(mutant, limit_s=20 + 2 * seconds)
        failed = re.search(r"\[  FAILED  \] (\S+?),? ", output)
        return {"passed": "survived", "failed": "noticed"}.get(verdict, verdict), failed[1] if failed else mutant.tests
    finally:
        path.write_text(before)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression: the bugs whose name it is found in")
    parser.add_argument("--changed", action="store_true", help="the bugs in files that differ from the last commit")
    parser.add_argument("--list", type=pathlib.Path, default=LIST, help="another list of bugs")
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT / "build-mutants", help="where the copy lies")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--at-least", type=float, default=95, metavar="PERCENT", help="fewer noticed is a failure")
    parser.add_argument("--log", type=pathlib.Path, help="a file of results: those that stand there are kept, new ones are added")
    parser.add_argument("--check", action="store_true", help="only look whether every edit still fits the code")
    return parser.parse_args()


def main():
    if os.environ.get("TESSERA_TORCH"):
        fail("TESSERA_TORCH: bugs are put into a build with the default torch; expected no TESSERA_TORCH")
    args = options()
    mutants = [mutant for mutant in read_list(args.list) if re.search(args.only, mutant.name)]
    if args.changed:
        changed = subprocess.run(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        mutants = [mutant for mutant in mutants if mutant.file in changed]
    if not mutants:
        fail("no bug matches")
    reasons = {mutant.name: stale(ROOT, mutant) for mutant in mutants}
    for name, reason in reasons.items():
        if reason:
            print(f"{name}: {reason}", file=sys.stderr)
    if any(reasons.values()):
        fail(f"{args.list.name}: {sum(map(bool, reasons.values()))} of {len(mutants)} bugs no longer fit the code")
    if args.check:
        print(f"{len(mutants)} bugs fit the code")
        return

    copy = Copy(args.tree.resolve())
    copy.refresh()
    copy.configure()
    print("building without a bug", flush=True)
    built = copy.build_programs({mutant.program for mutant in mutants}, args.jobs)
    if built.returncode != 0:
        fail("the build fails without a bug:\n" + built.stdout[-2000:])
    verdicts = read_log(args.log)
    left = [mutant for mutant in mutants if mutant.name not in verdicts]
    print("running the tests without a bug", flush=True)
    seconds = {mutant.name: copy.seconds_without(mutant) for mutant in left}

    for number, mutant in enumerate(left, len(mutants) - len(left) + 1):
        start = time.monotonic()
        verdict, seen = try_mutant(copy, mutant, seconds[mutant.name], args.jobs)
        verdicts[mutant.name] = verdict
        print(f"{number:3}/{len(mutants)}  {verdict:<8}  {mutant.name:<50}  {time.monotonic() - start:4.0f} s  {mutant.program} {seen}", flush=True)
        if verdict == "survived":
            print(f"{'':19}{mutant.effect}", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps({"name": mutant.name, "verdict": verdict}) + "\n")

    verdicts = {mutant.name: verdicts[mutant.name] for mutant in mutants}
    count = {verdict: list(verdicts.values()).count(verdict) for verdict in ("noticed", "timeout", "survived", "invalid")}
    valid = len(mutants) - count["invalid"]
    share = 100 * (count["noticed"] + count["timeout"]) / max(1, valid)
    print(f"{count['noticed'] + count['timeout']} of {valid} bugs noticed ({share:.0f} %), {count['timeout']} of them by a time limit; "
          f"{count['survived']} survived, {count['invalid']} invalid")
    sys.exit(0 if share >= args.at_least and not count["invalid"] else 1)


if __name__ == "__main__":
    main()
