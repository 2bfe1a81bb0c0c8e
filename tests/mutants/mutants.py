"""Puts realistic bugs into a copy of the project, one at a time, and reports which of them the tests notice.

The bugs are edits in mutants.toml (the format stands at its top). For each one the copy is edited, the tests it names are
built and run, and the edit is taken back. A bug that no test notices is a test that is missing.

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
import subprocess
import sys
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
    tests: str  # a regular expression: how the names of ctest's tests begin

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


if os.environ.get("TESSERA_TORCH"):
    fail("TESSERA_TORCH: bugs are put into a build with the default torch; expected no TESSERA_TORCH")


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

    def tests(self):
        """By ctest's name: the built programs that its command line and environment mention; none: all that is built."""
        found = self.run(["ctest", "--test-dir", str(self.build), "-C", "Hosts", "--show-only=json-v1"], check=True).stdout
        prefix = str(self.build) + "/"
        programs = {}
        for test in json.loads(found[found.index("{"):])["tests"]:
            words = list(test.get("command", []))
            for entry in test.get("properties", []):
                if entry["name"] == "ENVIRONMENT":
                    words += [pair.partition("=")[2] for pair in entry["value"]]
            built = {word[len(prefix):] for word in words if word.startswith(prefix)}
            # The folder of the Python package is made by many targets.
            programs[test["name"]] = set() if any((self.build / name).is_dir() for name in built) else built
        return programs

    def build_targets(self, targets, jobs):
        return self.run(["ninja", "-C", str(self.build), "-j", str(jobs), *sorted(targets)])

    def run_tests(self, names, timeout_s):
        """The first entry of ctest that fails, or None; whether it was by its time limit; and what ctest printed."""
        pattern = "^(" + "|".join(re.escape(name) for name in names) + ")$"
        output = self.run(["ctest", "--test-dir", str(self.build), "-C", "Hosts", "--stop-on-failure", "--output-on-failure",
                           "--timeout", str(timeout_s), "-R", pattern],
                          env={**os.environ, "GTEST_FAIL_FAST": "1"}).stdout
        for line in output.splitlines():
            failed = re.search(r"Test +#\d+: (\S+) .*\*\*\*(\S+)", line)
            if failed and failed[2] not in ("Skipped",):
                return failed[1], failed[2].startswith("Timeout"), output
        return None, False, output


def seconds_of(output):
    """{name of an entry of ctest: how long it took}"""
    return {name: float(seconds) for name, seconds in re.findall(r"Test +#\d+: (\S+) .* ([\d.]+) sec", output)}


def limit_s(seconds):
    """A test that hangs with a bug is ended once it has taken twice as long as without one, and a little more."""
    return 20 + 2 * seconds


def read_log(path):
    """What a run that was stopped has written: ({entry of ctest: seconds without a bug}, {bug: verdict})."""
    seconds, verdicts = {}, {}
    for entry in map(json.loads, path.read_text().splitlines()) if path and path.exists() else ():
        if "seconds" in entry:
            seconds = entry["seconds"]
        else:
            verdicts[entry["name"]] = entry["verdict"]
    return seconds, verdicts


def add_to_log(path, entry):
    if path:
        with path.open("a") as log:
            log.write(json.dumps(entry) + "\n")


def failed_check(output):
    """The test inside of an entry of ctest that failed, of GoogleTest or unittest; or ""."""
    found = re.search(r"\[  FAILED  \] (\S+?),? |^(?:FAIL|ERROR): (\S+)|(\S+) FAILS", output, re.MULTILINE)
    return next(filter(None, found.groups())) if found else ""


def try_mutant(copy, mutant, programs, seconds, args):
    """(verdict, by which test): the tests are built and run one by one, until one fails."""
    names = [name for name in programs if re.match(mutant.tests, name)]
    if not names:
        return "invalid", f"no test's name begins with {mutant.tests}"
    path = copy.tree / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied_to(before))
    try:
        # The quickest first: a bug is mostly noticed by the test next to it.
        for name in sorted(names, key=lambda name: (name.startswith(("tools_", "examples_")), name)):
            built = copy.build_targets(programs[name], args.jobs)
            if built.returncode != 0:
                errors = [line for line in built.stdout.splitlines() if "error" in line]
                return "invalid", "does not compile: " + (errors or ["?"])[0]
            failed, late, output = copy.run_tests([name], limit_s(seconds[name]))
            if failed:
                return ("timeout" if late else "noticed"), f"{failed} {failed_check(output)}".strip()
        return "survived", ", ".join(names)
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
    print("building everything without a bug", flush=True)
    built = copy.build_targets([], args.jobs)
    if built.returncode != 0:
        fail("the build fails without a bug:\n" + built.stdout[-2000:])
    programs = copy.tests()  # now: ctest names programs that are there
    seconds, verdicts = read_log(args.log)
    needed = {name for name in programs if any(re.match(mutant.tests, name) for mutant in mutants)}
    if not needed <= seconds.keys():
        print(f"running the {len(needed)} tests in question", flush=True)
        failed, _, output = copy.run_tests(sorted(needed), timeout_s=600)
        if failed:
            fail(f"{failed} fails without a bug:\n{output[-4000:]}")
        seconds = seconds_of(output)
        add_to_log(args.log, {"seconds": seconds})

    for number, mutant in enumerate(mutants, 1):
        if mutant.name in verdicts:
            continue
        start = time.monotonic()
        verdict, by = try_mutant(copy, mutant, programs, seconds, args)
        verdicts[mutant.name] = verdict
        print(f"{number:3}/{len(mutants)}  {verdict:<8}  {mutant.name:<45}  {time.monotonic() - start:4.0f} s  {by}", flush=True)
        if verdict == "survived":
            print(f"{'':19}{mutant.effect}", flush=True)
        add_to_log(args.log, {"name": mutant.name, "verdict": verdict, "by": by})

    verdicts = {mutant.name: verdicts[mutant.name] for mutant in mutants}
    count = {verdict: list(verdicts.values()).count(verdict) for verdict in ("noticed", "timeout", "survived", "invalid")}
    valid = len(mutants) - count["invalid"]
    share = 100 * (count["noticed"] + count["timeout"]) / max(1, valid)
    print(f"{count['noticed'] + count['timeout']} of {valid} bugs noticed ({share:.0f} %), {count['timeout']} of them by a time limit; "
          f"{count['survived']} survived, {count['invalid']} invalid")
    sys.exit(0 if share >= args.at_least and not count["invalid"] else 1)


if __name__ == "__main__":
    main()
