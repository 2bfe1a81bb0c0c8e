"""Trainings that one library has begun and saved, and another continues: what other libraries have saved at stages 0 to 3 of Tessera and on other
numbers of ranks, and what `tessera convert` makes of Tessera's by FSDP2, DeepSpeed and Tessera itself.

    make test-peers CONTINUED=1                      # DeepSpeed 0.19.8 must be installed, or in PYTHONPATH
    .deps/venv/bin/python tests/peers/continued_suite.py [--only REGEX]

The library that has begun goes on, too, and the losses must be its, which are about 4: within 3e-6, in bf16 within 2e-2, with moments of 8 bits (a value between two
codes may be rounded either way) within 1e-5. Exit code 1: they are not, or a program has failed; 2: a library is not installed.
"""
import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import suite

LIMIT = {"fp32": 3e-6, "bf16": 2e-2, "8 bits": 1e-5}
# By optimizer, DeepSpeed's stages. Its stage 3 reads the states of Adam alone, and gives all groups the options of the first.
CONVERTED = {"AdamW": (1, 2, 3), "groups": (1, 2), "AMSGrad": (1, 2), "SGD": (1, 2), "Adagrad": (1, 2), "configuration": (1, 2, 3)}
# What writes (LIBRARY:STAGE:DTYPE), its ranks, model, optimizer ("A to B": another class goes on), what goes on (after "TARGET >" of a conversion), its
# ranks. "here" is Tessera at all stages.
ROWS = [
    *(("deepspeed:" + writer, world, model, optimizer, "here", more) for writer, world, model, optimizer, more in (
        ("0", 2, "gpt2", "groups", 1), ("1", 2, "gpt2", "groups", 3), ("1", 1, "net", "groups", 2), ("2", 3, "gpt2", "groups", 2), ("2", 2, "bert", "groups", 1),
        ("2", 1, "lora", "groups", 3), ("2", 2, "net", "SGD", 3), ("3", 2, "gpt2", "groups", 1), ("3", 3, "net", "groups", 2), ("3", 2, "bert", "groups", 3),
        ("3", 1, "net", "groups", 2), ("1:bf16", 2, "gpt2", "groups", 1), ("3:bf16", 2, "gpt2", "groups", 2))),
    ("fsdp2", 2, "gpt2", "groups", "here", 3),
    ("fsdp2", 3, "net", "SGD", "here", 2),
    ("fsdp2", 1, "bert", "groups", "here", 2),
    ("accelerate", 2, "gpt2", "groups", "here", 1),
    ("accelerate", 1, "lora", "groups", "here", 3),
    ("plain", 2, "gpt2", "groups", "here", 3),
    ("plain", 3, "bert", "SGD", "here", 1),
    ("plain", 2, "gpt2", "bitsandbytes", "here", 3),
    ("plain", 3, "gpt2", "bitsandbytes to tessera", "here", 2),
    # transformers' Trainer counts one rank on CPUs with the real DeepSpeed, whatever their number: its ranks have the same data.
    *((f"trainer:{stage}", world, "gpt2", "AdamW", "here", 1) for stage, world in ((1, 2), (2, 2), (3, 2), (3, 1))),
    *(("tessera:2", 2, "net", optimizer, how, world) for optimizer, stages in CONVERTED.items() for world in (1, 2)
      for how in ("tessera > tessera:2", *(("dcp > fsdp2", "dcp > fsdp2:flat") if optimizer != "configuration" else ()),
                  *(f"universal > deepspeed:{stage}" for stage in stages))),
]
FROM_STEP = 16  # of the Trainer's 36
HERE = suite.environment_with({})
# The real DeepSpeed, and not ours, which `suite` puts first.
ELSEWHERE = {**HERE, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "GLOO_SOCKET_IFNAME": "lo"}


def numbers(library, world, program, *words):
    """What a program prints. Raises RuntimeError with its last line."""
    launch = [suite.BUILD / "tessera", "launch", "-n", world, "--", sys.executable, "-B"] if library == "tessera" else \
        [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
    with tempfile.TemporaryDirectory(prefix="tessera_continued_") as folder:
        done = subprocess.run(list(map(str, [*launch, suite.HERE / "programs" / program, *words])), cwd=folder, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=900, check=False, env=HERE if library == "tessera" else ELSEWHERE)
    found = re.search(r"numbers (.*)", done.stdout)
    if done.returncode != 0 or found is None:
        said = [line for line in done.stdout.splitlines() if "Error" in line and "ChildFailed" not in line] or done.stdout.splitlines()[-12:]
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(said)[:400]}")
    return json.JSONDecoder().raw_decode(found.group(1))[0]  # other ranks may have written behind it


def trained(library, world, stages, **given):
    """[the losses of the last steps, by stage]."""
    given = {"dtype": "fp32", "load": None, "save": None, "stages": stages, **given}
    return list(numbers(library, world, "continued_rank.py", library, json.dumps(given)).values())


@functools.cache
def begun(folder, writer, world, model, optimizer):
    """(where it has saved, the losses that follow)."""
    library, stage, dtype = (*writer.split(":"), "", "")[:3]
    path = Path(tempfile.mkdtemp(dir=folder)) / ("checkpoint.pt" if library == "plain" else "checkpoints")
    (losses,) = trained(library, world, [stage], model=model, optimizer=optimizer, dtype=dtype or "fp32", save=str(path))
    return path, losses


@functools.cache
def converted(path, target):
    output = path.parent / target
    subprocess.run([suite.BUILD / "tessera", "convert", path, output, "--to", target], check=True, stdout=subprocess.DEVNULL)
    return output


def run(row, folder):
    """How far the losses are apart, and how far they may be."""
    writer, world, model, optimizer, how, more = row
    if writer.startswith("trainer"):
        return apart_of_trainer(writer.split(":")[1], world, more, Path(tempfile.mkdtemp(dir=folder)) / "out"), LIMIT["fp32"]
    path, there = begun(folder, writer, world, model, optimizer.split()[0])
    dtype = "bf16" if writer.endswith("bf16") else "fp32"
    library, stages = "tessera", [0, 1, 2, 3]
    if how != "here":
        target, _, reader = how.partition(" > ")
        path = converted(path, target)
        library, _, stage = reader.partition(":")
        stages = [stage]
    found = trained(library, more, stages, model=model, optimizer=optimizer.split()[-1], dtype=dtype, load=str(path))
    return (max(abs(a - b) for losses in found for a, b in zip(there, losses, strict=True)),
            LIMIT["8 bits" if optimizer.startswith("bitsandbytes") else dtype])


def apart_of_trainer(stage, world, more, folder):
    """The Trainer on DeepSpeed, and from one of its checkpoints on at stages 1 to 3 here: losses, norms and rates by step."""
    there = numbers("deepspeed", world, "continued_trainer.py", "deepspeed", stage, folder, "")
    apart = 0.0
    for other in (1, 2, 3):
        here = numbers("tessera", more, "continued_trainer.py", "tessera", other, folder, folder / f"checkpoint-{FROM_STEP}")
        if sorted(here) != sorted(there):
            raise RuntimeError(f"steps {sorted(here)}; expected {sorted(there)}")
        after = [step for step in there if int(step) > FROM_STEP]  # those before are in the checkpoint's own log
        apart = max(apart, *(abs(a - b) / max(abs(b), 1e-6) for step in after for a, b in zip(here[step], there[step], strict=True)))
    return apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of rows")
    given = parser.parse_args()
    rows = [row for row in ROWS if re.search(given.only, " ".join(map(str, row)))]
    text = " ".join(map(str, rows)).replace("trainer:", "deepspeed:")
    missing = [name for name in ("accelerate", "bitsandbytes", "deepspeed") if name in text and importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {', '.join(missing)} not installed in {sys.prefix}; expected them: {sys.executable} -m pip install {' '.join(missing)}")
        return 2
    failed = False
    with tempfile.TemporaryDirectory(prefix="tessera_continued_") as folder:
        for row in rows:
            begin = time.monotonic()
            try:
                apart, limit = run(row, folder)
                outcome, failed = f"{apart:.1e}", failed or not apart <= limit
            except RuntimeError as error:
                outcome, failed = str(error), True
            writer, world, model, optimizer, how, more = row
            print(f"{writer} on {world}, {model}, {optimizer}: {how} on {more}: {outcome}  ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
