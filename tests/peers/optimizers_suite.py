"""Trains with optimizers of torch and of packages, at stages 0 to 3, beside the same class in one process: the bits must be the same.

    make test-peers OPTIMIZERS=1
    .deps/venv/bin/python tests/peers/optimizers_suite.py [--only REGEX] [--worlds 1,2,3] [--backends shm,gloo] [--json FILE]

Where Tessera has a formula of the class, they must be within 1e-6. Each row has two param groups, a frozen and a tied parameter, three
micro-steps a step, and clipping. The last column says where it ran: on each parameter's owner, on rank 0, or on shards. Exit code 1: a
row has another outcome than the one that is listed here; 2: a package is not installed.
"""
import argparse
import collections
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import suite

OWNERS, RANK_0 = "on the owners", "on rank 0"  # where an update has the bits of one process
SHARDS = "on shards"  # by a formula of Tessera's, within 1e-6
_PACKAGES = {"schedulefree": "schedulefree", "prodigyopt": "prodigyopt", "dadaptation": "dadaptation", "came_pytorch": "came-pytorch",
             "galore_torch": "galore-torch", "bitsandbytes": "bitsandbytes", "adan_pytorch": "adan-pytorch", "grokadamw": "grokadamw",
             "apollo_torch": "apollo-torch", "pytorch_optimizer": "pytorch-optimizer", "heavyball": "heavyball", "muon": "muon-optimizer", "torchao": "torchao",
             "torch_optimizer": "torch-optimizer", "lion_pytorch": "lion-pytorch", "madgrad": "madgrad", "optimi": "torch-optimi", "timm": "timm"}


def _row(name, expected=OWNERS, **more):
    module, _, kind = name.rpartition(".")
    return {"name": name + more.pop("label", ""), "module": module, "class": kind, "expected": expected, **more}


ROWS = [
    *(_row(f"torch.optim.{kind}") for kind in ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")),
    _row("torch.optim.RMSprop", SHARDS),
    _row("torch.optim.Muon", matrices=True),
    _row("torch.optim.Adagrad", SHARDS, label="(maximize)", options={"maximize": True}),
    _row("torch.optim.Adam", SHARDS, label="(amsgrad)", options={"amsgrad": True}),
    _row("torch.optim.AdamW", SHARDS, label="(maximize)", options={"maximize": True}),
    _row("torch.optim.SGD", SHARDS, label="(momentum, maximize)", options={"momentum": 0.9, "maximize": True}),
    _row("torch.optim.LBFGS", "calls a closure", one_group=True),
    _row("torch.optim.SparseAdam", "SparseAdam does not support dense gradients"),
    *(_row(f"schedulefree.{kind}") for kind in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")),
    _row("schedulefree.AdamWScheduleFreeClosure", "calls a closure"),
    _row("prodigyopt.Prodigy", RANK_0, one_group=True),
    _row("dadaptation.DAdaptAdam", RANK_0, one_group=True),
    _row("came_pytorch.CAME", options={"lr": 1e-3}),
    _row("galore_torch.GaLoreAdamW"),
    *(_row(f"bitsandbytes.optim.{kind}") for kind in ("AdamW8bit", "Lion8bit", "PagedAdamW8bit")),
    _row("adan_pytorch.Adan"),
    _row("grokadamw.GrokAdamW", RANK_0),
    _row("apollo_torch.APOLLOAdamW"),
    *(_row(f"pytorch_optimizer.{kind}") for kind in ("SOAP", "ScalableShampoo", "Lion", "AdaBelief", "Ranger", "Fromage")),
    _row("pytorch_optimizer.Adai", RANK_0),
    *(_row(f"torchao.optim.{kind}") for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(_row(f"torch_optimizer.{kind}") for kind in ("A2GradUni", "AdaBound", "Apollo", "NovoGrad", "QHAdam", "Shampoo")),
    _row("torch_optimizer.RAdam", RANK_0),
    _row("lion_pytorch.Lion"),
    _row("madgrad.MADGRAD"),
    *(_row(f"optimi.{kind}", options={"lr": 1e-3}) for kind in ("Adan", "StableAdamW")),
    *(_row(f"timm.optim.{kind}", options={"lr": 1e-3}) for kind in ("Adopt", "LaProp", "Mars", "NvNovoGrad")),
    _row("timm.optim.Lamb", RANK_0, options={"lr": 1e-3}),
]


def run(world, backend, rows):
    """The outcomes by row and stage."""
    with tempfile.TemporaryDirectory(prefix="tessera_optimizers_") as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(rows))
        done = subprocess.run(
            [str(suite.BUILD / "tessera"), "launch", "-n", str(world), "--", sys.executable, "-B", str(suite.HERE / "programs/optimizers_rank.py"),
             backend, "0,1,2,3", str(file)],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=suite.environment_with({"OMP_NUM_THREADS": "1"}))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
    if done.returncode != 0:
        raise SystemExit(f"world {world}, {backend}: exit code {done.returncode} after {len(found)} outcomes: {done.stdout.splitlines()[-1]}")
    return {(one["row"], one["stage"]): one["outcome"] for one in found}


def is_as_expected(row, outcome, world):
    if row["expected"] == OWNERS or (row["expected"] == RANK_0 and world == 1):
        return outcome == "same bits"
    return outcome.startswith("same bits, on rank 0") if row["expected"] == RANK_0 else row["expected"] in outcome


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--worlds", default="1,2,3")
    parser.add_argument("--backends", default="shm,gloo")
    parser.add_argument("--json", type=Path, help="writes the outcomes there")
    given = parser.parse_args()
    rows = [row for row in ROWS if re.search(given.only, row["name"])]
    missing = sorted({row["module"].split(".")[0] for row in rows} - {"torch"})
    missing = [_PACKAGES[name] for name in missing if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {', '.join(missing)} not installed in {sys.prefix}; expected them: {sys.executable} -m pip install --no-deps {' '.join(missing)}")
        return 2
    wrong, outcomes, right = 0, [], collections.Counter()
    for world in map(int, given.worlds.split(",")):
        for backend in given.backends.split(","):
            if world == 1 and backend != given.backends.split(",")[0]:
                continue
            begin = time.monotonic()
            found = run(world, backend if world > 1 else "auto", rows)
            for row in rows:
                for stage in range(4):
                    outcome = found.get((row["name"], stage), "no outcome")
                    outcomes.append({"row": row["name"], "world": world, "backend": backend, "stage": stage, "outcome": outcome})
                    if is_as_expected(row, outcome, world):
                        right[row["name"]] += 1
                    else:
                        wrong += 1
                        print(f"{row['name']}, world {world}, {backend}, stage {stage}: {outcome}; expected {row['expected']}", flush=True)
            print(f"world {world}, {backend}: {len(found)} outcomes, {time.monotonic() - begin:.0f} s", flush=True)
    for row in rows:
        print(f"{row['name']:48} {right[row['name']]:3} as expected: {row['expected']}")
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    print(f"{sum(right.values())} of {len(outcomes)} as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
