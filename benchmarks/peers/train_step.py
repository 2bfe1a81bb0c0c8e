"""A training step: Tessera beside DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed, same model, same data, in turns.

    .deps/venv/bin/python benchmarks/peers/train_step.py [--size 33m|110m] [--precision fp32|bf16] [--accumulation 1]
        [--ranks 2] [--steps 10] [--rounds 3] [--only REGEX] [--json FILE] [--write]

Everybody starts from one file of weights and trains on one file of tokens, on CPU with one thread a rank, with AdamW
(all peers: torch's fused one) and clipping at norm 1. In bf16, DDP and ZeroRedundancyOptimizer keep fp32 weights and
run under autocast; the others keep bf16 weights and fp32 masters. Peers have their default settings, but for views into
buckets in DDP, which are faster. FSDP2 and DeepSpeed (stages 2 and 3) reduce in every micro-step, as Tessera does.
DeepSpeed's stage 0 can sum bf16 gradients only in bf16, so that its loss is further off.

ms       median over all rounds of a step of the slowest rank
ratio    to the ranks that train side by side without communication: median over the rounds, each with its own
MiB      the most a rank holds in a step, over what it held before it had a model: private memory and its share of
         shared memory, libraries left out; the mean over the ranks
loss     the largest difference to DDP's loss (mean over the ranks) in any step

[What a rank reports] {"step_ms": [...], "losses": [...], "mib": x, "resident_mib": y, "received_bytes": z}: losses of the warm-up too, and of
the two steps after the timed ones in which memory is sampled. resident_mib is how much VmHWM has grown, set-up included;
it counts shared pages in full, and only --json shows it.

--write puts the results into docs/peers.json, draws docs/peers.svg from it (chart.py) and replaces the table of
docs/performance.md.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import chart
import document
import ranks
import results

PERFORMANCE = chart.ROOT / "docs" / "performance.md"
NUM_BATCHES = 8  # per rank, in turns: so that the loss falls, and errors show
FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}


def rows(args, folder):
    """name, (stage, command) of every row."""
    arguments = (folder, args.size, args.steps)
    for name, way in ((results.BASE, "plain"), (results.REFERENCE, "ddp"), (results.ZERO_REDUNDANCY, "zero_redundancy"),
                      (results.FSDP2, "fsdp2")):
        yield name, (0, ranks.peer("train_step_peer.py", way, *arguments))
    for stage in range(4):
        yield results.deepspeed(stage), (stage, ranks.peer("train_step_peer.py", "deepspeed", *arguments))
    yield results.TESSERA_ALONE, (0, ranks.own("step_rank", "alone", *arguments))
    for stage in range(4):
        yield results.tessera(stage), (stage, ranks.own("step_rank", "together", *arguments))


def config(args, stage):
    """What Tessera and DeepSpeed read; the other peers take their numbers from it."""
    from peer import MICRO_BATCH
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH[args.size],
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
        "bf16": {"enabled": args.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }


def write_weights_and_tokens(args, folder):
    """Returns the number of parameters."""
    import torch
    from peer import MICRO_BATCH, SHAPES, Gpt
    from safetensors.torch import save_file
    torch.manual_seed(1)
    shape = SHAPES[args.size]
    model = Gpt(*shape)
    save_file(model.state_dict(), folder / "weights.safetensors")
    tokens = torch.randint(shape[3], (NUM_BATCHES, args.ranks, MICRO_BATCH[args.size], shape[4] + 1))
    tokens.numpy().tofile(folder / "tokens.bin")
    return sum(parameter.numel() for parameter in model.parameters())


def measure(args, folder, stage, command):
    """One round of one row; a step takes as long as its slowest rank."""
    (folder / "ds_config.json").write_text(json.dumps(config(args, stage)), encoding="utf-8")
    reports = ranks.run(args.ranks, command)
    return results.rounded({
        "step_ms": [max(times) for times in zip(*(report["step_ms"] for report in reports))],
        "losses": [statistics.fmean(losses) for losses in zip(*(report["losses"] for report in reports))],
        **{key: statistics.fmean(report[key] for report in reports) for key in ("mib", "resident_mib")},
    })


def check_first_losses(args, measured):
    """Before the first update all rows have the same weights and data, and so the same loss."""
    first = {name: rounds[0]["losses"][0] for name, rounds in measured.items()}
    if first and max(first.values()) - min(first.values()) > FIRST_LOSS_TOLERANCE[args.precision]:
        raise SystemExit(f"error: these don't train the same model, their first losses differ: {first}")


def print_table(args, table):
    print(f"GPT {args.size}, {args.ranks} ranks, {args.precision}, accumulation {args.accumulation}; "
          f"{args.rounds} rounds of {args.steps} steps\n")
    print(f"{'':36}{'ms':>9}{'ratio':>9}{'MiB':>9}{'loss':>12}")
    for name, row in table.items():
        cells = [("ms", "9.1f"), ("ratio", "9.3f"), ("mib", "9.0f"), ("loss", "12.1e")]
        print(f"{name:36}" + "".join(" " * int(form.split(".")[0]) if row[key] is None else f"{row[key]:{form}}" for key, form in cells))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="33m", choices=("33m", "110m"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps a step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="timed ones, in each round")
    parser.add_argument("--rounds", type=int, default=3, help="each row is measured in every round, so that noise hits all alike")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
    parser.add_argument("--write", action="store_true", help="puts them into docs/: peers.json, peers.svg, the table of performance.md")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write: found --only; expected all rows in a document")
    return args


def tessera_version():
    return subprocess.run([str(ranks.BUILD / "tessera"), "--version"], capture_output=True, text=True, check=True).stdout.strip()


def main():
    args = parse_arguments()
    if args.write:
        document.surroundings(PERFORMANCE, results.COMMAND)  # before minutes of runs
    with tempfile.TemporaryDirectory(prefix="train_step_bench_") as name:
        folder = Path(name)
        num_parameters = write_weights_and_tokens(args, folder)
        chosen = {name: row for name, row in rows(args, folder) if re.search(args.only, name)}
        measured = ranks.take_turns(chosen, args.rounds, lambda name: measure(args, folder, *chosen[name]))
    check_first_losses(args, measured)
    settings = {key: getattr(args, key) for key in ("size", "precision", "accumulation", "ranks", "steps", "rounds")}
    found = results.results({**settings, "parameters": num_parameters}, measured, tessera_version())
    print_table(args, found["table"])
    if args.json:
        args.json.write_text(results.text(found), encoding="utf-8")
    if args.write:
        if missing := set(chosen) - set(measured):
            sys.exit(f"error: --write: no results of {', '.join(sorted(missing))}; expected all rows in a document")
        chart.RESULTS.write_text(results.text(found), encoding="utf-8")
        chart.PICTURE.write_text(chart.draw(found), encoding="utf-8")
        document.replace_table(PERFORMANCE, results.COMMAND, results.markdown(found))


if __name__ == "__main__":
    main()
