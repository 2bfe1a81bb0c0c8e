"""The ways to train: Tessera's and Python's, one after another, with the same model, data and settings; minutes and test accuracy.

    make methods ARGS="--epochs 3 --only tessera-stage2 ddp --seeds 42 43 44"
    .deps/venv/bin/python -B benchmarks/methods/methods.py --list

A result is kept in FOLDER/results.jsonl as soon as it is there, and --resume goes on after the last. docs/performance.md says what is
measured; --write puts the table into it.
"""
import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rows import HERE, ROOT, ROWS
from table import COMMAND, Table

sys.path.append(str(HERE.parent / "peers"))
import machine  # noqa: E402
from document import replace_table, surroundings  # noqa: E402
from ranks import RanksFailed, report  # noqa: E402

CORES = machine.num_cores()
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
REASON = re.compile(r"error: .*|(?:\w+\.)*(?!ChildFailed)\w*(?:Error|Exception): .+")


def read_recipe(args):
    """The configuration as plain JSON. Its comments stand on lines of their own."""
    try:
        recipe = json.loads(re.sub(r"^\s*//.*$", "", args.config.read_text(encoding="utf-8"), flags=re.MULTILINE))
        trainer = recipe["trainer"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {args.config}: cannot be read as a run's configuration: {error!r}") from error
    schedule, params = recipe.get("scheduler", {}), recipe.get("scheduler", {}).get("params", {})
    if not (recipe.get("optimizer", {}).get("type") == "AdamW" and schedule.get("type") == "WarmupDecayLR" and params.get("warmup_type") == "linear"
            and not params.get("warmup_min_lr") and recipe.get("gradient_accumulation_steps", 1) == 1 and trainer.get("dataloader_drop_last", True)
            and not any(recipe.get(key, {}).get("enabled") for key in ("fp16", "bf16", "torch_autocast"))):
        raise SystemExit(f"error: {args.config}: expected AdamW, a linear WarmupDecayLR down to 0, fp32, no accumulation and drop_last: "
                         "Python's ways have no other")
    trainer.update(device="cpu", overwrite_output_dir=True)
    if args.max_steps:
        trainer.pop("epochs", None)
        trainer["max_steps"] = args.max_steps
    elif args.epochs:
        trainer.pop("max_steps", None)
        trainer["epochs"] = args.epochs
    return recipe


def start(command, processes, log):
    """Seconds the command took. Every process has its share of the cores; nothing is fetched from the network."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, CORES // processes)), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
                   "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.perf_counter()
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              check=False)
    wall_s = time.perf_counter() - began
    if done.returncode != 0:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        reasons = [match.group() for line in lines if (match := REASON.search(line))]
        raise RanksFailed(f"exit code {done.returncode}: {(reasons or lines or ['no output'])[-1]} (all of it: {log})")
    return wall_s


class Runs:
    """The runs of one recipe: owns FOLDER with the initial weights of each seed, logs, and results.jsonl."""

    def __init__(self, recipe, folder, resume):
        self.recipe, self.folder, self.vocab = recipe, folder, {}
        self.results_file = folder / "results.jsonl"
        self.key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and self.results_file.exists():
            self.results_file.rename(folder / "results.previous.jsonl")

    def done(self):
        """What this recipe has: {(row, seed): result}. A line cut short by the end of a run does not count."""
        results = {}
        for line in self.results_file.read_text(encoding="utf-8").splitlines() if self.results_file.exists() else []:
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            if result["recipe"] == self.key:
                results[result["row"], result["seed"]] = result
        return results

    def write_recipe(self, name, seed):
        path = self.folder / f"{name}.json"
        recipe = {**self.recipe, "seed": seed, "trainer": {**self.recipe["trainer"], "output_dir": str(self.folder / name)}}
        path.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        return str(path)

    def weights(self, seed):
        """What all rows of a seed start from, as Hugging Face's model initialises itself; and the vocabulary they share."""
        path, log = self.folder / f"weights_{seed}.safetensors", self.folder / f"weights_{seed}.log"
        if seed not in self.vocab:
            recipe = self.write_recipe(f"weights_{seed}", seed)
            start([sys.executable, str(HERE / "ways.py"), "initial_weights", recipe, str(path)], 1, log)
            self.vocab[seed] = report(log.read_text(encoding="utf-8"))["vocab_sha256"]
        return str(path)

    def measure(self, row, seed):
        name = f"{row.name}_{seed}"
        log, run_folder = self.folder / f"{name}.log", self.folder / name
        marker = run_folder / ".methods"
        if run_folder.exists() and not marker.exists():
            raise RanksFailed(f"{run_folder} is there and not of this benchmark; expected another --folder")
        shutil.rmtree(run_folder, ignore_errors=True)
        run_folder.mkdir()
        marker.touch()
        files = {"{recipe}": self.write_recipe(name, seed), "{weights}": self.weights(seed)}
        wall_s = start([files.get(word, word) for word in row.command], row.processes, log)
        result = self.own_result(run_folder, seed) if row.is_ours else report(log.read_text(encoding="utf-8", errors="replace"))
        if result is None:
            raise RanksFailed(f"reported nothing (its output: {log})")
        shutil.rmtree(run_folder, ignore_errors=True)
        result = {"row": row.name, "seed": seed, "recipe": self.key, "wall_s": wall_s, **result}
        with self.results_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        return result

    def own_result(self, folder, seed):
        """From the files that the command leaves."""
        if hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest() != self.vocab[seed]:
            raise RanksFailed(f"{folder / 'vocab.txt'} is not Python's vocabulary of the same texts")
        results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return {"train_s": results["train_runtime"], "test_accuracy": results["test_accuracy"],
                "validation_accuracy": max(record["eval_accuracy"] for record in records if "eval_accuracy" in record),
                "losses": [record["loss"] for record in records if "loss" in record]}


def about(recipe, seeds):
    """The header: what was trained, on what."""
    cpu = machine.cpu_name()
    length = recipe["trainer"].get("max_steps")
    length = f"{length} steps" if length else f"{recipe['trainer']['epochs']} epochs"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions(PACKAGES).items())
    return (f"{length}, batch {recipe['train_batch_size']}, seed{'s' * (len(seeds) > 1)} {' '.join(map(str, seeds))}; "
            f"{CORES} cores{f' of {cpu}' if cpu else ''}; {versions}.")


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'found "{text}", expected a whole number of at least 1')
    return int(text)


def row_name(text):
    if all(row.name != text for row in ROWS):
        raise argparse.ArgumentTypeError(f'found "{text}", which --list does not name')
    return text


def parse_arguments():
    parser = argparse.ArgumentParser(prog="make methods", description=__doc__.splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, metavar="N", help="default: the configuration's")
    length.add_argument("--max-steps", type=positive, metavar="N", help="a short run, to see that all rows work")
    parser.add_argument("--only", nargs="+", metavar="ROW", type=row_name, help="see --list")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="of several, mean ± standard deviation; default: the recipe's")
    parser.add_argument("--list", action="store_true", help="names the rows")
    parser.add_argument("--resume", action="store_true", help="keeps the results there are, and goes on")
    parser.add_argument("--write", nargs="?", type=Path, const=ROOT / "docs" / "performance.md", metavar="FILE",
                        help="puts the table into docs/performance.md")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "text_classification.json", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "methods", metavar="DIR", help="default: runs/methods")
    return parser.parse_args()


def run_all(runs, rows, seeds, reasons):
    """Every seed runs all rows before the next seed, so that a busy hour disturbs all rows alike. True if none failed."""
    had, ok = runs.done(), True
    for seed in seeds:
        for row in rows:
            missing = [package for package in row.needs if not importlib.util.find_spec(package)]
            if missing:
                reasons[row.name] = f"not run: no Python package {', '.join(missing)} (scripts/setup.sh --peers)"
            elif (row.name, seed) not in had:
                try:
                    result = runs.measure(row, seed)
                    print(f"{row.title:35} seed {seed}: {result['wall_s']:.1f} s, accuracy {result['test_accuracy']:.4f}", flush=True)
                except (RanksFailed, OSError, KeyError, ValueError, TypeError) as error:  # a row may also report something unexpected
                    reasons[row.name], ok = f"failed with seed {seed}: {error}", False
                    print(f"error: {row.name}: {reasons[row.name]}", file=sys.stderr, flush=True)
    return ok


def main():
    args = parse_arguments()
    if args.list:
        print("\n".join(f"{row.name:18}{row.title:36}{row.processes} process{'es' * (row.processes > 1)}" for row in ROWS))
        return 0
    if args.write and args.max_steps:
        raise SystemExit("error: --write: found --max-steps; expected whole runs in a document")
    if args.write:
        try:
            surroundings(args.write, COMMAND)  # before hours of runs
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: --write: {error}") from error
    recipe = read_recipe(args)
    seeds = args.seeds or [recipe["seed"]]
    runs = Runs(recipe, args.folder.resolve(), args.resume)
    reasons = {}
    try:
        ok = run_all(runs, [row for row in ROWS if not args.only or row.name in args.only], seeds, reasons)
    except KeyboardInterrupt:
        print("\nstopped; the same command with --resume goes on", file=sys.stderr)
        return 130
    done = runs.done()
    table = Table(ROWS, {row.name: [done[row.name, seed] for seed in seeds if (row.name, seed) in done] for row in ROWS}, reasons,
                  about(recipe, seeds))
    print("\n" + table.text(), end="")
    if args.write:
        replace_table(args.write, COMMAND, table.markdown())
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
