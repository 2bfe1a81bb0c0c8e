"""What the runners of other projects' tests have in common: pytest on a copy, its outcomes, and the list of those that fail on purpose."""
import json
import os
import queue
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = Path(os.environ.get("TESSERA_BUILD_DIR", ROOT / "build"))


def environment_with(changes):
    """Of a process that finds the package, the commands beside this Python, and with TESSERA_PEER_NAMES tessera.deepspeed as deepspeed."""
    python_path = os.pathsep.join([str(HERE / "site"), str(BUILD / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": python_path,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **changes}


def run(folder, files, environment, only="", jobs=1, options=()):
    """[(test, outcome, message)] of test files in `folder`; the outcome is "passed", "failed" or "skipped". What pytest prints is in
    FOLDER/output*.txt."""
    environment = environment_with(environment)

    def of_file(name):
        slot = slots.get()
        try:
            return run_file(name, slot)
        finally:
            slots.put(slot)

    def run_file(name, slot):
        report = folder / f"report{slot}.xml"
        report.unlink(missing_ok=True)
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short", *options, name]
        begin = time.monotonic()
        with open(folder / f"output{slot}.txt", "a") as output:  # the slot says which ports are its own
            code = subprocess.run([*words, *(["-k", only] if only else [])], cwd=folder, env={**environment, "PYTEST_XDIST_WORKER": f"gw{slot}"},
                                  stdout=output, stderr=subprocess.STDOUT).returncode
        found = _outcomes(report) if report.exists() else [(name, "failed", f"pytest: exit code {code}")]
        counts = Counter(outcome for _, outcome, _ in found)
        print(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {time.monotonic() - begin:.0f} s", flush=True)
        return [(f"{name}::{test}" if test != name else name, outcome, message) for test, outcome, message in found]

    slots = queue.Queue()
    for slot in range(jobs):
        slots.put(slot)
    with ThreadPoolExecutor(jobs) as pool:
        return [result for results in pool.map(of_file, files) for result in results]


def _outcomes(report):
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


def add_arguments(parser):
    """What all runners take."""
    parser.add_argument("source", type=Path, help="the checkout")
    parser.add_argument("--files", default="", help="regular expression: of the files those that match")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--json", type=Path, help="writes the outcomes")


def conclude(results, expected_failures):
    """Prints what has failed, and counts. `expected_failures`: {regular expression of tests: reason}. Returns the exit code, 1 where a test
    has failed that none of them names."""
    reasons = [(re.compile(pattern), reason) for pattern, reason in expected_failures.items()]
    counts, by_reason = Counter(), Counter()
    for test, outcome, message in results:
        reason = next((text for pattern, text in reasons if pattern.search(test)), None)
        if outcome == "failed" and reason is None:
            print(f"failed: {test}: {message}")
        elif outcome == "passed" and reason is not None:
            print(f"passes, though its failure is listed: {test}")
        elif outcome == "failed":
            outcome = "expected to fail"
            by_reason[reason] += 1
        counts[outcome] += 1
    print("\n".join(f"{number:4} expected to fail: {reason}" for reason, number in by_reason.most_common()))
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 1 if counts["failed"] else 0


def write(path, results, folder):
    """The outcomes as JSON, and beside it what pytest has printed."""
    path.write_text(json.dumps(results, indent=1))
    path.with_suffix(".txt").write_text("".join(output.read_text() for output in sorted(folder.glob("output*.txt"))))
