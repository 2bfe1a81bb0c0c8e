"""Trains by frameworks that know DeepSpeed, on two CPU ranks, with Tessera and without: the numbers must be the same.

    make test-peers FRAMEWORKS=1
    .deps/venv/bin/python tests/peers/frameworks_suite.py [--only REGEX]

Lightning's Trainer, with a checkpoint from which it goes on, and TRL's SFT, DPO and GRPO, at stages 2 and 3 beside the framework's own DDP.
Exit code 1: numbers differ by more than 1e-5, or a program has failed; 2: a framework is not installed.
"""
import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time

import suite

PROGRAMS = {"Lightning": ("lightning", "lightning_fit.py", ()), "TRL SFT": ("trl", "trl_train.py", ("sft",)),
            "TRL DPO": ("trl", "trl_train.py", ("dpo",)), "TRL GRPO": ("trl", "trl_train.py", ("grpo",))}


def numbers(script, words, strategy):
    """What a program prints, and its seconds. Raises RuntimeError with its last line."""
    command = [sys.executable, str(suite.HERE / "programs" / script), *words, strategy]
    if script != "lightning_fit.py":  # Lightning starts its ranks itself
        command = [str(suite.BUILD / "tessera"), "launch", "-n", "2", "--", *command]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera_frameworks_") as folder:
        done = subprocess.run([*command, folder], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
                              env=suite.environment_with({}))
    found = re.search(r"numbers (\[.*?\])", done.stdout)
    if done.returncode != 0 or found is None:
        said = [line for line in done.stdout.splitlines() if "Error" in line] or done.stdout.splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else ''}"[:300])
    return json.loads(found.group(1)), time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names")
    given = parser.parse_args()
    programs = {name: how for name, how in PROGRAMS.items() if re.search(given.only, name)}
    missing = sorted({package for package, _, _ in programs.values() if importlib.util.find_spec(package) is None})
    if missing:
        print(f"error: {', '.join(missing)} not installed in {sys.prefix}; expected them: {sys.executable} -m pip install {' '.join(missing)}")
        return 2
    failed = False
    for name, (_, script, words) in programs.items():
        expected, _ = numbers(script, words, "ddp")
        for stage in ("2", "3"):
            try:
                found, seconds = numbers(script, words, stage)
            except RuntimeError as error:
                failed = True
                print(f"{name}, stage {stage}: failed: {error}", flush=True)
                continue
            largest = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
            failed |= not largest <= 1e-5
            print(f"{name}, stage {stage}: {len(found)} numbers, largest difference to DDP {largest:.1e}, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
