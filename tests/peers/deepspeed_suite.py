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
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import suite

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite.add_arguments(parser)
    parser.add_argument("--jobs", type=int, default=2, help="files at once")
    given = parser.parse_args()
    if not (given.source / "tests" / "unit" / "common.py").is_file():
        sys.exit(f"error: {given.source}: has no tests/unit/common.py; expected a checkout of DeepSpeed")
    listed = json.loads((suite.HERE / "deepspeed_suite.json").read_text())
    files = [name for name in listed["files"] if re.search(given.files, name)]
    with tempfile.TemporaryDirectory(prefix="tessera_peers_") as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(given.source / "tests", tests)
        sources = [tests / name for name in files] + [path for path in (tests / "unit").rglob("*.py") if not path.name.startswith("test_")]
        environment = {"TESSERA_PEER_NAMES": json.dumps(imported_names(sources)), "LOCAL_SIZE": "4", "DS_UNITTEST_TIMEOUT": str(TIMEOUT_S),
                       "DS_DISABLE_REUSE_DIST_ENV": "1"}
        results = suite.run(tests, files, environment, given.only, given.jobs)
        if given.json:
            suite.write(given.json, results, tests)
    return suite.conclude(results, listed["expected_failures"])


if __name__ == "__main__":
    sys.exit(main())
