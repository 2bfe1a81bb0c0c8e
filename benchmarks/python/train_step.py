"""A training step in Python: DDP, FSDP2, DeepSpeed and Tessera, same models, same data, in turns.

    .deps/venv/bin/python benchmarks/python/train_step.py [--minutes 4.5] [--steps 6] [--ranks 2] [--optimizer AdamW|Muon] [--only REGEX] [--json FILE] [--write]

GPT-2 of transformers (7 million parameters, 128 tokens) and ResNet18 of torchvision (11 million, 4 images of 64 x 64), in fp32 on the
CPU with one thread a rank, AdamW and clipping at norm 1. Peers have torch's fused AdamW and their default settings, but for views into
buckets in DDP, which are faster. Each round measures every row once, for a second, so that a busy machine disturbs all alike; rounds go
on until the minutes are over, and at least one is run. The ranks of a row are forked from one process that has imported all of it. On a
busy machine compare the minima.

min, median  ms of a step of the slowest rank, over all rounds
ratio        of the minimum to DDP's
MiB          the most a rank holds in a step, over what it held before it had a model: private memory and its share of shared
             memory, libraries left out; the mean over the ranks, and the median of the rounds
layer        the part of a step that is in Tessera's Python code: neither in C++ nor in the module's forward. The smallest of all steps
loss         the largest difference to DDP's loss (mean over the ranks) in any step. AdamW and batch norm over few samples make last
             bits large in ResNet18: tests/python/programs/ddp_rank.py compares it properly

--write replaces the tables of docs/performance.md.
"""
import os

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # read on import
import argparse  # noqa: E402
import datetime  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402
import logging  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402

import forked  # noqa: E402
import layer  # noqa: E402
import torch  # noqa: E402
import ways  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import document  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
from train_step_peer import own_mib, peak_mib  # noqa: E402

COMMAND = "make bench-python"
PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
WARM_UP_STEPS, MEMORY_STEPS, LAYER_STEPS = 3, 2, 3


def join(backend):
    """Returns the barrier of the group that a row uses."""
    if backend:
        ways.tessera.comm.init_distributed(backend=backend, timeout_s=60)
        return lambda: ways.tessera.comm.barrier("benchmark")
    torch.distributed.init_process_group("gloo")
    return torch.distributed.barrier


def measure(args, model_name, backend, make, rank):
    """One rank of one row in one round."""
    torch.set_num_threads(1)
    barrier = join(backend)
    gc.collect()  # touches what the fork has left shared, before memory is read
    barrier()
    idle = own_mib()
    torch.manual_seed(1)
    model = ways.MODELS[model_name]()
    batches = iter([ways.batch_of(model_name, rank, i) for i in range(WARM_UP_STEPS + args.steps + MEMORY_STEPS + LAYER_STEPS)])
    step, engine = make(model, ways.MICRO_BATCH[model_name])
    losses = [step(next(batches)) for _ in range(WARM_UP_STEPS)]
    barrier()
    step_ms = []
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(step(next(batches)))
        step_ms.append(1e3 * (time.perf_counter() - start))
    peak = peak_mib(lambda: losses.extend(step(next(batches)) for _ in range(MEMORY_STEPS)))
    in_layer = layer.layer_ms(engine, ways.loss_of, batches) if backend else []
    barrier()
    return {"step_ms": step_ms, "losses": losses, "mib": peak - idle, "layer": in_layer}


def joined(reports):
    """Of the ranks of one row; a step takes as long as its slowest."""
    return {"step_ms": [round(max(times), 3) for times in zip(*(report["step_ms"] for report in reports))],
            "losses": [round(statistics.fmean(losses), 7) for losses in zip(*(report["losses"] for report in reports))],
            "mib": round(statistics.fmean(report["mib"] for report in reports), 2),
            "layer": [[round(part, 4), round(whole, 3)] for report in reports for part, whole in report["layer"]]}


def measure_all(args):
    """{model: {row: rounds}}. A row that fails is left out and named."""
    rows = ways.rows(importlib.util.find_spec("deepspeed") is not None)
    chosen = [(model, row) for model in ways.MODELS for row in rows if re.search(args.only, f"{model} {row}")]
    measured = {model: {row: [] for name, row in chosen if name == model} for model in ways.MODELS}
    give_up, longest, turn = time.monotonic() + 60 * args.minutes, 0.0, 0
    while turn == 0 or time.monotonic() + longest < give_up:
        start, turn = time.monotonic(), turn + 1
        for model, row in chosen:
            if row not in measured[model]:
                continue
            print(f"round {turn}: {model}, {row}", file=sys.stderr)
            reports = forked.run(args.ranks, lambda rank, model=model, row=row: measure(args, model, *rows[row], rank))
            if all(reports):
                measured[model][row].append(joined(reports))
            else:
                print(f"{model}, {row} is left out: a rank failed", file=sys.stderr)
                del measured[model][row]
        longest = max(longest, time.monotonic() - start)
    return {model: found for model, found in measured.items() if found}


def summary(rounds, reference):
    """A row of the table."""
    times = [ms for measured in rounds for ms in measured["step_ms"]]
    fastest = min(ms for measured in reference for ms in measured["step_ms"]) if reference else None
    parts = [part for measured in rounds for part, _ in measured["layer"]]
    return {"min": min(times), "median": round(statistics.median(times), 3), "ratio": round(min(times) / fastest, 4) if fastest else None,
            "mib": round(statistics.median(measured["mib"] for measured in rounds), 1),
            "layer_ms": min(parts) if parts else None, "layer_percent": round(100 * min(parts) / min(times), 3) if parts else None,
            "loss": max(abs(a - b) for a, b in zip(rounds[0]["losses"], reference[0]["losses"])) if reference else None}


def check_first_losses(measured):
    """Before the first update all rows have the same weights and data, and so the same loss."""
    for model, rows in measured.items():
        first = {row: rounds[0]["losses"][0] for row, rounds in rows.items()}
        if max(first.values()) - min(first.values()) > 1e-4:
            sys.exit(f"error: these don't train the same {model}, their first losses differ: {first}")


CELLS = [("min", "min", ".1f"), ("median", "median", ".1f"), ("ratio", "ratio", ".3f"), ("MiB", "mib", ".0f"), ("layer ms", "layer_ms", ".2f"),
         ("layer %", "layer_percent", ".2f"), ("loss", "loss", ".1e")]


def cells(row):
    return ["" if row[key] is None else f"{row[key]:{form}}" for _, key, form in CELLS]


def print_tables(table):
    for model, rows in table.items():
        print(f"\n{model:28}" + "".join(f"{title:>10}" for title, _, _ in CELLS))
        for name, row in rows.items():
            print(f"{name:28}" + "".join(f"{cell:>10}" for cell in cells(row)))


def markdown(found):
    settings = found["settings"]
    num_rounds = max(len(rounds) for rows in found["rounds"].values() for rounds in rows.values())
    lines = [f"{settings['ranks']} ranks, fp32; {num_rounds} rounds of {settings['steps']} steps, in turns.", results.surroundings(found)]
    for model, rows in found["table"].items():
        lines += ["", f"| {model} | {' | '.join(title for title, _, _ in CELLS)} |", "|---" * (len(CELLS) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cells(row))} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--steps", type=int, default=6, help="timed ones, in each round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--optimizer", choices=("AdamW", "Muon"), default=ways.OPTIMIZER, help="Muon: of matrices, and AdamW of the rest")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose model and name match")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
    parser.add_argument("--write", action="store_true", help="puts the tables into docs/performance.md")
    args = parser.parse_args()
    if args.write and (args.only or args.optimizer != ways.OPTIMIZER):
        parser.error("--write: found --only or --optimizer; expected all rows of AdamW in a document")
    ways.OPTIMIZER = args.optimizer
    return args


def main():
    args = parse_arguments()
    if args.write:
        document.surroundings(PERFORMANCE, COMMAND)  # before minutes of runs
    warnings.simplefilter("ignore")
    ways.transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if importlib.util.find_spec("deepspeed"):
        ways.load_deepspeed()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    measured = measure_all(args)
    check_first_losses(measured)
    table = {model: {row: summary(rounds, rows.get("DDP")) for row, rounds in rows.items()} for model, rows in measured.items()}
    found = {"date": datetime.date.today().isoformat(), "machine": machine.describe(),
             "versions": {"tessera": ways.tessera.__version__, **machine.versions(("torch", "transformers", "torchvision", "deepspeed"))},
             "settings": {key: getattr(args, key) for key in ("minutes", "steps", "ranks", "optimizer")}, "table": table, "rounds": measured}
    print_tables(table)
    if args.json:
        args.json.write_text(results.text(found), encoding="utf-8")
    if args.write:
        document.replace_table(PERFORMANCE, COMMAND, markdown(found))


if __name__ == "__main__":
    main()
