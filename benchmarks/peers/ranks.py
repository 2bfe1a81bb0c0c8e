"""Starts a program as the ranks of a group, and returns what they report."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("TESSERA_BUILD_DIR", HERE.parents[1] / "build"))


class RanksFailed(Exception):
    """The launcher's output, when ranks have failed."""


def own(program, *arguments):
    """The command of a program of the build."""
    return [str(BUILD / program), *map(str, arguments)]


def peer(script, *arguments):
    """The command of a worker in this folder."""
    return [sys.executable, str(HERE / script), *map(str, arguments)]


def version():
    return subprocess.run(own("tessera", "--version"), capture_output=True, text=True, check=True).stdout.strip()


def report(text):
    """The last line that is a JSON object; None when there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"'):
            return json.loads(line)
    return None


def run(num_ranks, command):
    """What each rank reports, by rank. One thread each; every program is started in the same way."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory(prefix="peers_") as logs:
        launch = own("tessera", "launch", "-n", num_ranks, "--log-dir", logs, "--", *command)
        done = subprocess.run(launch, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RanksFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
        others = [Path(logs, f"rank_{rank:05}.log").read_text(encoding="utf-8") for rank in range(1, num_ranks)]
    reports = [report(text) for text in (done.stdout, *others)]
    if failed := [found["error"] for found in reports if found and "error" in found]:
        raise RanksFailed(f"{' '.join(command)}: {failed[0]}")
    return reports


def take_turns(rows, num_rounds, measure):
    """{row: measure(row)'s results by round}. Rows take turns, so that a busy machine disturbs all alike; one that fails is
    left out and named."""
    measured = {row: [] for row in rows}
    for turn in range(num_rounds):
        for row in list(measured):
            print(f"round {turn + 1} of {num_rounds}: {row}", file=sys.stderr)
            try:
                measured[row].append(measure(row))
            except RanksFailed as error:
                print(f"{row} is left out: {error}", file=sys.stderr)
                del measured[row]
    return measured
