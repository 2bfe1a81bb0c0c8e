"""Training runs that are killed at random moments and resumed, again and again, until they are done.

    make soak ARGS="--kills 200 --seed 1"

After each kill: no process is left, `latest` verifies, no temporary folder but the one of the unfinished save, nothing on the
disk that state is offloaded to. The next start takes another ZeRO stage, synchronous or asynchronous saves, with or without
fsync, state in memory or on disk, another policy of activation_checkpointing. Each run has one of KINDS. A run that has come to its end this
way must equal the uninterrupted one to the bit: exported model, weights of the last step, every loss. Needs the
standard library only, and one core; a seed draws the same plan again, though not the same microseconds.
"""
import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import MARKER, ROOT, TESSERA, make_data, process_environment  # noqa: E402

MAX_STEPS, SAVE_EVERY = 64, 2  # 16 steps an epoch
KEEP_LAST = 2
OPTIMIZER, BOTH = ("offload_optimizer",), ("offload_optimizer", "offload_param")
OFFLOADS = {0: [()], 1: [(), OPTIMIZER], 2: [(), OPTIMIZER], 3: [(), OPTIMIZER, BOTH]}  # by stage
# Precision and optimizer. Muon orthogonalises whole matrices; AdamW8bit and Adafactor run on whole parameters.
KINDS = ("fp32", "bf16", "fp32 Muon", "bf16 AdamW8bit", "fp32 Adafactor")
POLICIES = ("none", "none", "cheap", "block", "offload")
LIMIT_S = 300.0  # of one start
RUN_FILES = {"config.json", "run_id", "metrics.jsonl", "trainer_state.json", "checkpoints", "model.safetensors", "all_results.json"}
LOCK = ".lock"  # a killed run leaves it, and it stops no later run


class Fault(Exception):
    """A check has failed."""


def expect(condition, *what):
    if not condition:
        raise Fault(" ".join(map(str, what)))


def names(folder):
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


class Run:
    """One output folder: a command to start it, and what is in it."""

    place = ("--nproc", 2)  # where the ranks are
    sameness = "the same bits"  # as an undisturbed one

    def __init__(self, base, name, kind):
        self.base, self.folder, self.kind = base, base / name, kind
        self.checkpoints = self.folder / "checkpoints"
        self.tmp, self.disk = base / "tmp", base / "disk"
        self.tmp.mkdir(exist_ok=True)
        self.disk.mkdir(exist_ok=True)
        self.marker = uuid.uuid4().hex

    def environment(self):
        return {**os.environ, "TMPDIR": str(self.tmp), MARKER: self.marker}

    def start(self, stage=2, asynchronous=False, fsync=False, offloads=(), policy="none", resume=False, flags=()):
        settings = {
            "data.path": self.base / "data", "data.flip": "true", "model.channels": 8, "model.hidden": 32, "model.dropout": 0.3,
            "trainer.output_dir": self.folder, "trainer.device": "cpu", "trainer.epochs": "null", "trainer.max_steps": MAX_STEPS,
            "trainer.eval_batch_size": 51, "trainer.save_every_epochs": 0, "trainer.save_every_steps": SAVE_EVERY,
            "train_batch_size": 12, "steps_per_print": 1, "zero_optimization.stage": stage,
            "checkpoint.async": str(asynchronous).lower(), "checkpoint.fsync": str(fsync).lower(),
            "checkpoint.keep_last": KEEP_LAST}
        for section in offloads:
            settings |= {f"zero_optimization.{section}.{key}": value
                         for key, value in (("device", "nvme"), ("nvme_path", self.disk), ("buffer_count", 1))}
        if policy != "none":
            settings |= {"activation_checkpointing.policy": policy, "activation_checkpointing.nvme_path": self.disk}
        precision, _, optimizer = self.kind.partition(" ")
        if precision == "bf16":
            settings["bf16.enabled"] = "true"
        if optimizer:
            settings["optimizer"] = json.dumps({"type": optimizer, "params": {"lr": 3e-3, "weight_decay": 0.01},
                                                "param_groups": [{"match": ["*.bias"], "weight_decay": 0.0}]})
        args = [TESSERA, "train", ROOT / "configs/fashion_mnist.json", *self.place]
        for key, value in settings.items():
            args += ["--set", f"{key}={value}"]
        args += ["--resume"] if resume else []
        args += flags
        self.log = open(self.base / "log", "w+", encoding="utf-8", errors="replace")
        return subprocess.Popen(list(map(str, args)), env=self.environment(), stdin=subprocess.DEVNULL, stdout=self.log,
                                stderr=subprocess.STDOUT, cwd=self.base, start_new_session=True)

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def tool(self, *args):
        """A command that must succeed."""
        done = subprocess.run([TESSERA, *map(str, args)], env=self.environment(), capture_output=True, text=True, cwd=self.base)
        expect(done.returncode == 0, args, "failed:", done.stdout, done.stderr)
        return done.stdout

    def processes(self):
        """The processes with this run's marker: pid -> environment."""
        found = {}
        for entry in names("/proc"):
            if entry.isdigit() and (environment := process_environment(entry)).get(MARKER) == self.marker:
                found[int(entry)] = environment
        return found

    def kill(self, pids):
        for pid in pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass

    def latest(self):
        path = self.checkpoints / "latest"
        return int(path.read_text().strip().removeprefix("global_step")) if path.exists() else 0

    def temporary(self):
        return [name for name in names(self.checkpoints) if ".tmp" in name]

    def num_records(self):
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def losses(self):
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]

    def results(self):
        """The test results of the last weights, without times."""
        results = json.loads((self.folder / "all_results.json").read_text())
        return {key: results.get(key) for key in ("train_steps", "eval_loss", "eval_accuracy", "eval_samples")}

    def weights(self):
        """(bytes of the exported model, bytes of the last step's weights)"""
        out = self.base / "last.safetensors"
        self.tool("consolidate", self.checkpoints, out, "--tag", f"global_step{MAX_STEPS}")
        return (self.folder / "model.safetensors").read_bytes(), out.read_bytes()


class Moment:
    """When a start is to be killed; due() is asked again and again."""

    def __init__(self, run, source, whole_s):
        self.run, self.kind = run, source.choices(("time", "step", "save", "end"), self.weights(run))[0]
        self.begin, self.last_temporary, self.saves = time.monotonic(), set(run.temporary()), 0
        self.at = self.begin + source.uniform(0, (0.6 if run.latest() else 0.4) * whole_s) if self.kind == "time" else None
        self.records = run.num_records() + source.randint(1, 7)
        self.saves_before = source.randint(1, 4)
        self.delay = source.uniform(0, {"time": 0, "step": 0.05, "save": 0.02, "end": 0.3}[self.kind])

    @staticmethod
    def weights(run):
        """A first start is to be killed before its first checkpoint more often, and not every run to end at once."""
        if not run.latest():
            return 5, 1, 4, 0
        return 3, 4, 7, int(run.latest() > MAX_STEPS // 2)

    def happens(self):
        if self.kind == "step":
            return self.run.num_records() >= self.records
        if self.kind == "end":
            return self.run.latest() == MAX_STEPS
        now = set(self.run.temporary())
        self.saves += bool(now - self.last_temporary)
        self.last_temporary = now
        return self.saves >= self.saves_before

    def due(self):
        if self.at is None and self.happens():
            self.at = time.monotonic() + self.delay
        return self.at is not None and time.monotonic() >= self.at


class Soak:
    make_run = Run
    gone_within_s = 10.0
    kinds = KINDS[:2]

    def __init__(self, base, seed, num_kills):
        self.base, self.source, self.num_kills = base, random.Random(seed), num_kills
        self.counts = collections.Counter()
        self.worst = collections.Counter()
        make_data(base / "data")
        self.expected = {}
        for kind in self.kinds:
            self.expected[kind] = self.undisturbed(self.make_run(base, f"whole_{kind.replace(' ', '_')}", kind))

    def undisturbed(self, run):
        """What the run must equal."""
        begin = time.monotonic()
        process = run.start()
        expect(process.wait(LIMIT_S) == 0, run.output())
        self.whole_s = time.monotonic() - begin
        return *run.weights(), run.losses(), run.results()

    def go(self):
        number = 0
        while self.counts["kills"] < self.num_kills:
            run = self.make_run(self.base, f"run_{number}", self.kinds[number % len(self.kinds)])
            number += 1
            while self.counts["kills"] < self.num_kills and not self.start_and_kill(run):
                pass
            if self.counts["kills"] >= self.num_kills:  # the last start is not killed
                if run.latest() < MAX_STEPS or not (run.folder / "all_results.json").exists():
                    process = self.start(run)
                    expect(process.wait(LIMIT_S) == 0, run.output())
            self.check_finished(run)
            shutil.rmtree(run.folder)
            print(f"run {number} ({run.kind}): the same bits after {self.counts['kills']} kills in all, "
                  f"{dict(self.counts)}", flush=True)

    def start(self, run):
        source = self.source
        stage = source.randrange(4)
        offloads = source.choice(OFFLOADS[stage])
        self.counts["starts with state on disk"] += bool(offloads)
        return run.start(stage, source.random() < 0.5, source.random() < 0.5, offloads, source.choice(POLICIES), resume=run.latest() > 0)

    def start_and_kill(self, run):
        """Whether the run came to its end before it was killed."""
        step, records, before = run.latest(), run.num_records(), run.temporary()
        moment = Moment(run, self.source, self.whole_s)
        victim = self.source.choice(("rank", "all", "launcher"))
        rank = self.source.randrange(2)
        process = self.start(run)
        while not moment.due() and process.poll() is None:
            expect(time.monotonic() - moment.begin < LIMIT_S, "it hangs:", run.output())
            time.sleep(0.001)
        if process.poll() is None:
            victim = self.kill(run, process, victim, rank)
        else:
            victim = None
        code = process.wait(LIMIT_S)
        self.expect_gone(run)
        if code == 0:
            return True
        expect(victim is not None, "it failed by itself:", run.output())
        if victim == "rank":
            expect(code == 137 and "SIGKILL" in run.output(), code, run.output())
        self.count(run, victim, step, records)
        self.check_folders(run, step, before)
        return False

    def kill(self, run, process, victim, rank):
        processes = run.processes()
        ranks = [pid for pid, environment in processes.items() if environment.get("RANK") == str(rank)]
        if victim == "rank" and not ranks:
            victim = "launcher"  # there are no ranks yet
        run.kill({"rank": ranks, "all": processes, "launcher": [process.pid]}[victim])
        return victim

    def expect_gone(self, run):
        begin = time.monotonic()
        while left := run.processes():
            expect(time.monotonic() - begin < self.gone_within_s, "left behind:", left.keys())
            time.sleep(0.01)

    def count(self, run, victim, step, records):
        self.counts["kills"] += 1
        self.counts[f"of {victim}"] += 1
        if run.temporary():
            self.counts["while saving"] += 1
        elif run.latest() == MAX_STEPS:
            self.counts["at the end"] += 1
        elif run.num_records() == records and run.latest() == step:
            self.counts["while starting"] += 1
        else:
            self.counts["while training"] += 1
        if not run.latest():
            self.counts["before the first checkpoint"] += 1

    def check_folders(self, run, step, before):
        expect(not names(run.disk), "left on the disk:", names(run.disk))
        left = run.temporary()
        self.worst["temporary folders"] = max(self.worst["temporary folders"], len(left))
        expect(len([name for name in left if not name.startswith("latest.tmp-")]) <= 1, "temporary folders pile up:", left)
        if run.latest() != step:
            stayed = set(before) & set(left)
            expect(not stayed, "a save has left what was there before it:", stayed)
        whole = [name for name in names(run.checkpoints) if name not in left + ["latest", "previous"]]
        expect(all(name.removeprefix("global_step").isdigit() for name in whole), whole)
        self.worst["checkpoints"] = max(self.worst["checkpoints"], len(whole))
        odd = set(names(run.folder)) - RUN_FILES - {LOCK}
        self.worst["other files"] = max(self.worst["other files"], len(odd))
        expect(len(odd) <= 2, "files pile up:", odd)
        logs = names(run.tmp)
        expect(len(logs) <= 1, "log folders of one launch:", logs)  # kept after a failure; a killed launcher cannot remove its own
        for name in logs:
            shutil.rmtree(run.tmp / name)
        if run.latest():
            expect(run.latest() >= step, "latest went back from", step, "to", run.latest())
            run.tool("inspect", run.checkpoints, "--verify")
            self.counts["verified"] += 1
        else:
            expect(step == 0, "latest is gone")

    def check_finished(self, run):
        self.counts["runs"] += 1
        model, last, losses, results = self.expected[run.kind]
        expect(run.losses() == losses, "losses differ:", [(a, b) for a, b in zip(run.losses(), losses) if a != b][:3])
        expect(run.results() == results, "results differ:", run.results(), results)
        found_model, found_last = run.weights()
        expect(found_last == last, "the weights of the last step differ")
        expect(found_model == model, "the exported models differ")
        expect(set(names(run.folder)) == RUN_FILES, "the run's folder has", names(run.folder))
        expect(not run.temporary(), "left over:", run.temporary())
        expect("previous" not in names(run.checkpoints), "what a start before the first checkpoint had put aside is left over")
        whole = [name for name in names(run.checkpoints) if name != "latest"]
        expect(len(whole) <= KEEP_LAST + 1, "keep_last and the best, but there are", whole)


class CrashSoak(Soak):
    """Of all kinds."""

    kinds = KINDS


def carry_out(make_soak, description, prefix):
    """Runs make_soak(folder, seed, kills).go() as the command line says. Returns the soak and its seconds; a Fault ends the program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix=prefix))
    begin = time.monotonic()
    soak = None
    try:
        soak = make_soak(base, flags.seed, flags.kills)
        soak.go()
    except Fault as fault:
        print(f"FAILED with --seed {flags.seed}: {fault}\nthe folders are in {base}\n{soak and dict(soak.counts)}")
        sys.exit(1)
    shutil.rmtree(base)
    return soak, time.monotonic() - begin


def main():
    soak, seconds = carry_out(CrashSoak, __doc__.splitlines()[0], "tessera_soak_")
    counts = ", ".join(f"{number} {what}" for what, number in soak.counts.items())
    worst = ", ".join(f"{number} {what}" for what, number in soak.worst.items())
    print(f"{counts}\nat most {worst}\n{seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
