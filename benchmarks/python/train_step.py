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
import gc  # noqa: E402
import importlib.util  # noqa: E402
import logging  # noqa: E402
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
import results  # noqa: E402
import step_peer  # noqa: E402

COMMAND = "make bench-python"
PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
LAYER_STEPS = 3
COLUMNS = [("min", "min", ".1f"), ("median", "median", ".1f"), ("ratio", "ratio", ".3f"), ("MiB", "mib", ".0f"), ("layer ms", "layer_ms", ".2f"),
           ("layer %", "layer_percent", ".2f"), ("loss", "loss", ".1e")]


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
    idle = step_peer.Idle()
    torch.manual_seed(1)
    model = ways.MODELS[model_name]()
    num_batches = step_peer.WARM_UP_STEPS + args.steps + step_peer.MEMORY_STEPS + LAYER_STEPS
    batches = iter([ways.batch_of(model_name, rank, i) for i in range(num_batches)])
    training = make(model, ways.MICRO_BATCH[model_name])
    report = step_peer.measure(training, batches, args.steps, idle, step_peer.Device("cpu"), barrier)
    report["layer"] = layer.layer_ms(training.engine, ways.loss_of, batches) if backend else []
    barrier()
    return report


def joined(reports):
    """Of the ranks of one row."""
    layers = [[round(part, 4), round(whole, 3)] for report in reports for part, whole in report["layer"]]
    return {**results.joined(reports, means=("mib",)), "layer": layers}


def measure_all(args):
    """{model: {row: rounds}}. A row that fails is left out and named."""
    rows = ways.rows(importlib.util.find_spec("deepspeed") is not None)
    names = {f"{model} {row}": (model, row) for model in ways.MODELS for row in rows}
    chosen = [names[name] for name in results.chosen(args.only, names)]
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
    fastest = results.minimum(rounds)
    parts = [part for measured in rounds for part, _ in measured["layer"]]
    return {"min": fastest, "median": round(results.median(rounds), 3), "ratio": round(fastest / results.minimum(reference), 4) if reference else None,
            "mib": round(statistics.median(measured["mib"] for measured in rounds), 1),
            "layer_ms": min(parts) if parts else None, "layer_percent": round(100 * min(parts) / fastest, 3) if parts else None,
            "loss": results.largest_difference(rounds, reference)}


def markdown(found):
    settings = found["settings"]
    num_rounds = max(len(rounds) for rows in found["rounds"].values() for rounds in rows.values())
    lines = [f"{settings['ranks']} ranks, fp32; {num_rounds} rounds of {settings['steps']} steps, in turns.", results.surroundings(found)]
    return "\n".join(lines) + "\n" + "".join("\n" + document.markdown_table(model, rows, COLUMNS) for model, rows in found["table"].items())


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
    for rows in measured.values():
        results.check_first_losses(rows)
    table = {model: {row: summary(rounds, rows.get("DDP")) for row, rounds in rows.items()} for model, rows in measured.items()}
    found = {**results.stamp(ways.tessera.__version__, ("torch", "transformers", "torchvision", "deepspeed")),
             "settings": {key: getattr(args, key) for key in ("minutes", "steps", "ranks", "optimizer")}, "table": table, "rounds": measured}
    for model, rows in table.items():
        print(document.text_table(model, rows, COLUMNS))
    if args.json:
        args.json.write_text(results.text(found), encoding="utf-8")
    if args.write:
        document.replace_table(PERFORMANCE, COMMAND, markdown(found))


if __name__ == "__main__":
    main()
