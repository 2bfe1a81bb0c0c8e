"""Trains five steps by Tessera, converts the checkpoint, and goes on for five by FSDP2, DeepSpeed and Tessera itself: the losses must be the same.

    make test-peers CONVERT=1                        # DeepSpeed 0.19.8 must be installed, or in PYTHONPATH
    .deps/venv/bin/python tests/peers/convert_suite.py [--only REGEX] [--command 'PROGRAM … {source} {output} {target}']

Each optimizer trains at stage 2 on two ranks, in fp32, with a schedule, a tied and a frozen parameter. The others go on with one rank and
with two. Exit code 1: a loss differs by more than 1e-6 (of DeepSpeed's stages, those that its loaders read), or a program has failed; 2: a
package is not installed.
"""
import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import suite

MOST = 1e-6
# By optimizer, DeepSpeed's stages. Its stage 3 reads the states of Adam alone, and gives all groups the options of the first.
OPTIMIZERS = {"AdamW": (1, 2, 3), "AdamW, two groups": (1, 2), "AdamW, amsgrad": (1, 2), "SGD": (1, 2), "Adagrad": (1, 2),
              "AdamW of the configuration": (1, 2, 3)}


def losses(world, framework, given, folder):
    """Raises RuntimeError with the program's last lines."""
    program = [str(suite.HERE / "programs/convert_rank.py"), framework, json.dumps(given)]
    if framework == "tessera":
        words = [str(suite.BUILD / "tessera"), "launch", "-n", str(world), "--", sys.executable, "-B", *program]
    else:
        words = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *program]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
                          env=suite.environment_with({"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}))
    found = re.search(r"^losses (\[.*\])$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        said = [line for line in done.stdout.splitlines() if "Error" in line and "ChildFailed" not in line] or done.stdout.splitlines()[-1:]
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(said)[:300]}")
    return json.loads(found.group(1))


def rows(optimizer):
    """(what goes on, its world, the target, the framework, what its program is told)"""
    for world in (1, 2):
        yield f"Tessera, resaved, stage 2, {world} ranks", world, "tessera", "tessera", {"stage": 2, "save": None}
        for flatten in (False, True) if optimizer != "AdamW of the configuration" else ():
            yield f"FSDP2{', flattened' * flatten}, {world} ranks", world, "dcp", "fsdp2", {"flatten": flatten}
        for stage in OPTIMIZERS[optimizer]:
            yield f"DeepSpeed, stage {stage}, {world} ranks", world, "universal", "deepspeed", {"stage": stage}


def check(optimizer, command, only, folder):
    """Returns whether all went well."""
    first = {"optimizer": optimizer, "stage": 2, "load": None, "save": "checkpoints", "begin": 0, "end": 5}
    losses(2, "tessera", first, folder)
    expected = losses(2, "tessera", {**first, "load": "checkpoints", "save": None, "begin": 5, "end": 10}, folder)
    for target in ("tessera", "dcp", "universal"):
        words = [word.format(source="checkpoints", output=target, target=target) for word in shlex.split(command)]
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    well = True
    for name, world, target, framework, more in rows(optimizer):
        if not re.search(only, f"{optimizer}: {name}"):
            continue
        try:
            found = losses(world, framework, {"optimizer": optimizer, "load": target, "begin": 5, "end": 10, **more}, folder)
        except RuntimeError as error:
            well = False
            print(f"{optimizer}: {name}: failed: {error}", flush=True)
            continue
        largest = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        well &= largest <= MOST
        print(f"{optimizer}: {name}: largest difference {largest:.1e}", flush=True)
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of rows")
    parser.add_argument("--command", default=f"{suite.BUILD / 'tessera'} convert {{source}} {{output}} --to {{target}}", help="what converts")
    given = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        print(f"error: deepspeed not installed in {sys.prefix}; expected it: {sys.executable} -m pip install deepspeed==0.19.8")
        return 2
    well = True
    for optimizer in OPTIMIZERS:
        if not any(re.search(given.only, f"{optimizer}: {name}") for name, *_ in rows(optimizer)):
            continue
        with tempfile.TemporaryDirectory(prefix="tessera_convert_") as folder:
            well &= check(optimizer, given.command, given.only, Path(folder))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
