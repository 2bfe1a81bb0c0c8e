"""Saving, loading and consolidating: Tessera beside DeepSpeed and torch.distributed.checkpoint, same model, same machine, in turns.

    .deps/venv/bin/python benchmarks/peers/checkpoint.py [--size 33m|110m] [--repeats 5] [--rounds 2] [--folder DIR]

Prints one table (medians; seconds) and saves it as JSON. Peers that are not installed are left out and named.
"""
import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"
FULL_NAMES = {"nosync": "without fsync", "fsync": "with fsync", "async": "asynchronous"}


def environment():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "DS_ACCELERATOR": "cpu"}


def run_tessera(folder, size, stage, mode, repeats):
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([BUILD / "tessera", "launch", "-n", "2", "--", BUILD / "checkpoint_rank", folder, size, str(stage), mode,
                           str(repeats)], env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"Tessera stage {stage} {mode} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_peer(peer, folder, size, stage, repeats):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                           "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", HERE / "checkpoint_peer.py", peer, folder, size,
                           str(stage), str(repeats)], env=environment(), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{peer} stage {stage} failed: {done.stderr[-2000:]}")
    return json.loads(lines[-1][len("RESULT "):])


def rows(installed):
    for stage in (2, 3):
        for mode in ("nosync", "fsync", "async"):
            yield f"Tessera stage {stage}, {FULL_NAMES[mode]}", lambda *a, s=stage, m=mode: run_tessera(a[0], a[1], s, m, a[2])
    if "deepspeed" in installed:
        for stage in (2, 3):
            yield f"DeepSpeed stage {stage}", lambda *a, s=stage: run_peer("deepspeed", a[0], a[1], s, a[2])
    yield "torch.distributed.checkpoint (FSDP2)", lambda *a: run_peer("dcp", a[0], a[1], 0, a[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="33m", choices=("33m", "110m"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="each row is measured in every round, so that noise hits all alike")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", default=None, help="where the numbers go")
    args = parser.parse_args()
    installed = [name for name in ("deepspeed",) if importlib.util.find_spec(name)]
    if "deepspeed" not in installed:
        print("DeepSpeed is not installed and left out: scripts/setup.sh --peers installs it", file=sys.stderr)
    base = Path(args.folder or tempfile.mkdtemp(prefix="checkpoint_bench_"))
    measured = {}
    for _ in range(args.rounds):
        for name, run in rows(installed):
            result = run(base / "work", args.size, args.repeats)
            into = measured.setdefault(name, {})
            for key, value in result.items():
                into.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    shutil.rmtree(base, ignore_errors=True)
    print(f"GPT {args.size}, 2 ranks, fp32, AdamW; medians of {args.repeats * args.rounds}; seconds\n")
    print(f"{'':38}{'save':>8}{'load':>8}{'full':>8}{'plain':>8}{'MB':>8}")
    for name, result in measured.items():
        cells = [statistics.median(result[key]) if result.get(key) else None
                 for key in ("save_s", "load_s", "consolidate_s", "plain_write_s")]
        text = "".join(f"{cell:8.3f}" if cell is not None else f"{'':8}" for cell in cells)
        print(f"{name:38}{text}{result['bytes'][-1] / 1e6:8.0f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"size": args.size, "rows": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
