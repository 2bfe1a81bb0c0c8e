"""Saving, loading and consolidating: Tessera beside DeepSpeed and torch.distributed.checkpoint, same model, same machine, in turns.

    .deps/venv/bin/python benchmarks/peers/checkpoint.py [--size 33m|110m] [--repeats 5] [--rounds 2] [--folder DIR]

Prints one table, medians in seconds; --json FILE keeps every number.

full   one file with the whole model in fp32, made on rank 0: consolidate, zero_to_fp32, dcp_to_torch_save (which
       converts the optimizer's state too)
plain  as many bytes written by each rank, plainly: what the disk needs
MB     of the checkpoint, in files
Only "with fsync" is on the disk when a save returns; the others, and all peers, leave that to the kernel.
"""
import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import ranks
import results

MODES = {"nosync": "without fsync", "fsync": "with fsync", "async": "asynchronous"}
COLUMNS = {"save": "save_s", "load": "load_s", "full": "consolidate_s", "plain": "plain_write_s"}


def rows(args, folder):
    """(name, command) of every row."""
    for stage in (2, 3):
        for mode, name in MODES.items():
            yield f"Tessera stage {stage}, {name}", ranks.own("checkpoint_rank", folder, args.size, stage, mode, args.repeats)
    for stage in (2, 3):
        yield f"DeepSpeed stage {stage}", ranks.peer("checkpoint_peer.py", "deepspeed", folder, args.size, stage, args.repeats)
    yield "torch.distributed.checkpoint (FSDP2)", ranks.peer("checkpoint_peer.py", "dcp", folder, args.size, 0, args.repeats)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="33m", choices=("33m", "110m"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="each row is measured in every round, so that noise hits all alike")
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
    parser.add_argument("--json", metavar="FILE", help="where the numbers go")
    return parser.parse_args()


def main():
    args = parse_arguments()
    base = Path(tempfile.mkdtemp(prefix="checkpoint_bench_", dir=args.folder))
    commands = dict(rows(args, base / "work"))
    commands = {name: commands[name] for name in results.chosen(args.only, commands)}

    def measure(name):
        shutil.rmtree(base / "work", ignore_errors=True)
        return ranks.run(2, commands[name])[0]

    try:
        rounds = ranks.take_turns(commands, args.rounds, measure)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    measured = {name: {key: sum((run.get(key, []) for run in runs), []) for key in COLUMNS.values()}
                for name, runs in rounds.items()}
    print(f"GPT {args.size}, 2 ranks, fp32, AdamW; medians of {args.repeats * args.rounds}; seconds\n")
    print(f"{'':38}" + "".join(f"{column:>8}" for column in COLUMNS) + f"{'MB':>8}")
    for name, result in measured.items():
        cells = [f"{statistics.median(seconds):8.3f}" if seconds else f"{'':8}" for seconds in result.values()]
        print(f"{name:38}{''.join(cells)}{rounds[name][-1]['bytes'] / 1e6:8.0f}")
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "rounds": rounds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
