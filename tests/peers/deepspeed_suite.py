"""Runs DeepSpeed's own unit tests, of what its users call, on CPU ranks against tessera.deepspeed.

    make test-peers DEEPSPEED=folder                      # of a checkout of https://github.com/deepspeedai/DeepSpeed
    .deps/venv/bin/python tests/peers/deepspeed_suite.py DEEPSPEED [--only REGEX] [--json FILE]

Nothing of the tests is changed: they are copied, and their processes find tessera.deepspeed as deepspeed (site/sitecustomize.py). Ranks
start as DeepSpeed's tests start them. deepspeed_suite.json lists the test files, and those of their tests that fail on purpose, with the
reason. Exit code 1: another test has failed.
"""
import argparse
import ast
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 60  # of a test


def imported_names(sources):
    """{module: [names]}: what test modules import of deepspeed, anywhere in them."""
    names = defaultdict(set)
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
                names[node.module].update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("deepspeed."):
                        names[alias.name].update(())
    return {module: sorted(found) for module, found in sorted(names.items())}


def run(tests, files, only, work, jobs):
    """[(test, outcome, message)]: "passed", "failed", "skipped"."""
    sources = [tests / name for name in files] + [path for path in (tests / "unit").rglob("*.py") if not path.name.startswith("test_")]
    environment = {**os.environ, "TESSERA_PEER_NAMES": json.dumps(imported_names(sources)), "LOCAL_SIZE": "4", "OMP_NUM_THREADS": "1",
                   "DS_UNITTEST_TIMEOUT": str(TIMEOUT_S), "HF_HUB_OFFLINE": "1", "DS_DISABLE_REUSE_DIST_ENV": "1", "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{ROOT / 'build' / 'python'}"}
    def of_file(name):
        slot = slots.get()
        try:
            return run_file(name, slot)
        finally:
            slots.put(slot)

    def run_file(name, slot):
        report = work / f"report{slot}.xml"
        report.unlink(missing_ok=True)
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short", name]
        begin = time.monotonic()
        with open(work / f"output{slot}.txt", "a") as output:  # the slot says which ports are its own
            code = subprocess.run([*words, *(["-k", only] if only else [])], cwd=tests, env={**environment, "PYTEST_XDIST_WORKER": f"gw{slot}"},
                                  stdout=output, stderr=subprocess.STDOUT).returncode
        found = outcomes(report) if report.exists() else [(name, "failed", f"pytest: exit code {code}")]
        counts = Counter(outcome for _, outcome, _ in found)
        print(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {time.monotonic() - begin:.0f} s", flush=True)
        return [(f"{name}::{test}" if test != name else name, outcome, message) for test, outcome, message in found]

    slots = queue.Queue()
    for slot in range(jobs):
        slots.put(slot)
    with ThreadPoolExecutor(jobs) as pool:
        return [result for results in pool.map(of_file, files) for result in results]


def outcomes(report):
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        test = ".".join([case.get("classname", "").rpartition(".")[2], case.get("name")])
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if problem is not None:
            lines = [line for line in (problem.text or "").splitlines() if line.startswith("E ")]
            found.append((test, "failed", (lines[-1][1:].strip() if lines else problem.get("message", "")).replace("\x1b", "")[:300]))
        else:
            found.append((test, "skipped" if case.find("skipped") is not None else "passed", ""))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--files", default="", help="regular expression: of the files those that match")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--jobs", type=int, default=2, help="files at once")
    parser.add_argument("--json", type=Path, help="writes the outcomes")
    given = parser.parse_args()
    if not (given.source / "tests" / "unit" / "common.py").is_file():
        sys.exit(f"error: {given.source}: has no tests/unit/common.py; expected a checkout of DeepSpeed")
    listed = json.loads((HERE / "deepspeed_suite.json").read_text())
    files = [name for name in listed["files"] if re.search(given.files, name)]
    with tempfile.TemporaryDirectory(prefix="tessera_peers_") as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(given.source / "tests", tests)
        results = run(tests, files, given.only, Path(folder), given.jobs)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))
            given.json.with_suffix(".txt").write_text("".join(path.read_text() for path in sorted(Path(folder).glob("output*.txt"))))
    reasons = [(re.compile(pattern), reason) for pattern, reason in listed["expected_failures"].items()]
    wrong, counts = [], Counter()
    for test, outcome, message in results:
        reason = next((text for pattern, text in reasons if pattern.search(test)), None)
        counts[outcome if outcome != "failed" or reason is None else "expected to fail"] += 1
        if outcome == "failed" and reason is None:
            wrong.append(f"failed: {test}: {message}")
    print("\n".join(wrong))
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
