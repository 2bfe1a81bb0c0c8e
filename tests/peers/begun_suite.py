"""Trainings that another library has begun and saved, continued by an engine at stages 0 to 3 and on other numbers of ranks.

    make test-peers BEGUN=1
    .deps/venv/bin/python tests/peers/begun_suite.py [--only REGEX] [--json FILE]

The other library goes on, too, and the losses must be within 1e-6 of its, in bf16 within 2e-2, with moments of 8 bits (a value
between two codes may be rounded either way) within 1e-5. Exit code 1: they are not, or a program has
failed; 2: a library is not installed.
"""
import argparse
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

LIMIT = {"fp32": 1e-6, "bf16": 2e-2, "8 bits": 1e-5}
# Writer, ranks that write, model, optimizer ("A to B": another class goes on), ranks that continue.
ROWS = [
    *(("deepspeed:" + str(stage), world, model, "AdamW", more)
      for stage, world, model, more in ((1, 2, "gpt2", 3), (1, 1, "norms", 2), (2, 3, "gpt2", 2), (2, 2, "bert", 1), (2, 1, "lora", 3),
                                        (3, 2, "gpt2", 1), (3, 3, "norms", 2), (3, 2, "bert", 3), (3, 1, "norms", 2), (0, 2, "gpt2", 1))),
    ("deepspeed:2", 2, "norms", "SGD", 3),
    ("deepspeed:1:bf16", 2, "gpt2", "AdamW", 1),
    ("deepspeed:3:bf16", 2, "gpt2", "AdamW", 2),
    ("fsdp2", 2, "gpt2", "AdamW", 3),
    ("fsdp2", 3, "norms", "SGD", 2),
    ("fsdp2", 1, "bert", "AdamW", 2),
    ("accelerate", 2, "gpt2", "AdamW", 1),
    ("accelerate", 1, "lora", "AdamW", 3),
    ("plain", 2, "gpt2", "AdamW", 3),
    ("plain", 3, "bert", "SGD", 1),
    *(("plain", world, "gpt2", optimizer, more) for optimizer, world, more in (("bitsandbytes", 2, 3), ("bitsandbytes to tessera", 3, 2))),
    # transformers' Trainer counts one rank on CPUs with the real DeepSpeed, whatever their number: its ranks have the same data.
    *((f"trainer:{stage}", world, "gpt2", "AdamW", 1) for stage, world in ((1, 2), (2, 2), (3, 2), (3, 1))),
]
FROM_STEP = 16  # of the Trainer's 36


def numbers(command, environment):
    """What a program prints. Raises RuntimeError with its last line."""
    with tempfile.TemporaryDirectory(prefix="tessera_begun_") as folder:
        done = subprocess.run(list(map(str, command)), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
                              env=environment)
    found = re.search(r"numbers (.*)", done.stdout)
    if done.returncode != 0 or found is None:
        said = [line for line in done.stdout.splitlines() if "Error" in line] or done.stdout.splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else ''}"[:400])
    return json.JSONDecoder().raw_decode(found.group(1))[0]  # other ranks may have written behind it


def run(row, folder):
    writer, world, model, optimizer, more = row
    dtype = writer.split(":")[2] if writer.count(":") == 2 else "fp32"
    programs = suite.HERE / "programs"
    here_too = suite.environment_with({})
    # The real DeepSpeed, and not ours, which `suite` puts first.
    elsewhere = {**here_too, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
    if writer.startswith("trainer"):
        return apart_of_trainer(writer.split(":")[1], launch, more, folder / "out", here_too, elsewhere), LIMIT[dtype]
    there = numbers([*launch, programs / "begin_elsewhere.py", writer, model, optimizer.split()[0], folder], elsewhere)
    saved = folder / "checkpoint.pt" if writer == "plain" else folder
    here = numbers([suite.BUILD / "tessera", "launch", "-n", more, "--", sys.executable, "-B", programs / "continue_here.py", model, optimizer.split()[-1], saved,
                    dtype, 0, 1, 2, 3], here_too)
    return max(abs(a - b) for losses in here.values() for a, b in zip(there, losses, strict=True)), LIMIT["8 bits" if optimizer.startswith("bitsandbytes") else dtype]


def apart_of_trainer(stage, launch, more, folder, here_too, elsewhere):
    """The Trainer on DeepSpeed, and from one of its checkpoints on at stages 1 to 3 here: losses, norms and rates by step."""
    program = suite.HERE / "programs" / "trainer_begun.py"
    there = numbers([*launch, program, "deepspeed", stage, folder, ""], elsewhere)
    apart = 0.0
    for other in (1, 2, 3):
        here = numbers([suite.BUILD / "tessera", "launch", "-n", more, "--", sys.executable, "-B", program, "tessera", other, folder,
                        folder / f"checkpoint-{FROM_STEP}"], here_too)
        if sorted(here) != sorted(there):
            raise RuntimeError(f"steps {sorted(here)}; expected {sorted(there)}")
        after = [step for step in there if int(step) > FROM_STEP]  # those before are in the checkpoint's own log
        apart = max(apart, *(abs(a - b) / max(abs(b), 1e-6) for step in after for a, b in zip(here[step], there[step], strict=True)))
    return apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of rows")
    parser.add_argument("--json", help="file for the outcomes")
    given = parser.parse_args()
    rows = [row for row in ROWS if re.search(given.only, " ".join(map(str, row)))]
    missing = {row[0].split(":")[0].replace("trainer", "deepspeed") for row in rows} - {"fsdp2", "plain"}
    missing |= {row[3].split()[0] for row in rows} - {"AdamW", "SGD"}
    missing = sorted(name for name in missing if importlib.util.find_spec(name) is None)
    if missing:
        print(f"error: {', '.join(missing)} not installed in {sys.prefix}; expected them: {sys.executable} -m pip install {' '.join(missing)}")
        return 2
    outcomes, failed = [], False
    for row in rows:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tessera_begun_") as folder:
            try:
                apart, limit = run(row, Path(folder))
                outcome, failed = f"{apart:.1e}", failed or not apart <= limit
            except RuntimeError as error:
                outcome, failed = str(error), True
        outcomes.append([*row, outcome])
        print(f"{row[0]:18} {row[1]} ranks  {row[2]:6} {row[3]:6} on {row[4]}  {outcome}  ({time.monotonic() - begin:.0f} s)", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(outcomes, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
