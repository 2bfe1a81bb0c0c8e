"""Training runs that are disturbed at random moments, again and again, until they are done.

    make soak ARGS="crashes --faults 200 --seed 1"

crashes   a rank, all of it, or the launcher is killed; the next start resumes, at another ZeRO stage, with synchronous or asynchronous saves,
          with or without fsync, state in memory or on disk, another policy of activation_checkpointing, another kind of numbers and optimizer
restarts  under --max-restarts, over shared memory or Gloo, half of the runs with a checkpoint in memory after each step: ranks are killed, crash,
          hang (SIGSTOP; the others end after comm.timeout_s, or after --rendezvous-timeout), or cannot write to the disk for a while
damage    under --max-restarts: both ranks are stopped, `latest`, a manifest, a file or a folder of a checkpoint on disk, or the one in memory, is
          flipped, cut, emptied or removed, and the ranks are killed; there is always one left that is whole
alone     ranks by hand, without a launcher, over Gloo: one is killed, and each of the others must end by itself within 30 s, with an error
hosts     two hosts (tests/support/hosts.py): ranks, host n2 and the launcher are killed, the cable is pulled; a third of the runs goes on without
          n2. A cable that is out for about a second ends nothing; out for longer, the ranks of both hosts must end. Needs root, and OpenSSH.

FAULTS is the table of them. After each fault nothing may be left that should not be: no process, no folder in memory, no temporary folder but
the one of the unfinished save, nothing on the disk that state is offloaded to; `latest` verifies. A run that has come to its end this way must
equal the undisturbed one to the bit (exported model, weights of the last step, every loss), or but for rounding where it lost a host. Needs the
standard library only, and one core; a seed draws the same plan again, though not the same microseconds.
"""
import argparse
import collections
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tools", "support")]
import hosts as testbed  # noqa: E402
from tool import MARKER, ROOT, TESSERA, free_port, make_data, process_environment  # noqa: E402

MAX_STEPS, SAVE_EVERY, STEPS_PER_EPOCH = 64, 2, 16
KEEP_LAST = 2
OPTIMIZER, BOTH = ("offload_optimizer",), ("offload_optimizer", "offload_param")
OFFLOADS = {0: [()], 1: [(), OPTIMIZER], 2: [(), OPTIMIZER], 3: [(), OPTIMIZER, BOTH]}  # by stage
# Precision and optimizer. Muon orthogonalises whole matrices; AdamW8bit and Adafactor run on whole parameters.
KINDS = ("fp32", "bf16", "fp32 Muon", "bf16 AdamW8bit", "fp32 Adafactor")
POLICIES = ("none", "none", "cheap", "block", "offload")
LIMIT_S = 300.0  # of one start
BOUND_S = 30.0  # of ranks without a launcher, after one of them was killed
TIMEOUT_S = 5  # comm.timeout_s
RESTARTS = ["--max-restarts", "1000", "--save-grace", "5", "--rendezvous-timeout", "10", "--set", f"comm.timeout_s={TIMEOUT_S}"]
RUN_FILES = {"config.json", "run_id", "metrics.jsonl", "trainer_state.json", "checkpoints", "model.safetensors", "all_results.json"}
LOCK = ".lock"  # a killed run leaves it, and it stops no later run
ROUNDING = 1e-5

# What happens, and how often in each scenario.
FAULTS = {
    "a rank killed": {"crashes": 1, "restarts": 8, "alone": 1, "hosts": 6},
    "both ranks killed": {"restarts": 2},
    "everything killed": {"crashes": 1},
    "a rank crashed": {"restarts": 3, "hosts": 2},
    "a rank hung": {"restarts": 2, "hosts": 2},
    "a rank cannot write": {"restarts": 3},
    "a checkpoint damaged": {"damage": 1},
    "the launcher killed": {"crashes": 1, "restarts": 2, "hosts": 2},
    "host n2 killed": {"hosts": 5},
    "the cable pulled for a moment": {"hosts": 3},
    "the cable pulled": {"hosts": 2},
}
SIGNALS = {"a rank crashed": signal.SIGSEGV, "a rank hung": signal.SIGSTOP}  # else SIGKILL
OF_ONE_RANK = ("a rank killed", "a rank crashed", "the launcher killed")  # possible where a host is lost
MOMENT_S, LONG_S = (0.2, 1.2), (8.0, 30.0)
RESTART_WITHIN_S = {"the cable pulled": 120.0}  # else 60
# What a line that names the cause says on two hosts. {rank}: the victim, or that of n2.
CAUSES = {"a rank killed": r"rank {rank} of \d failed( first)?: SIGKILL", "a rank crashed": r"rank {rank} of \d failed( first)?: SIGSEGV",
          "a rank hung": r"rank {rank} (of \d )?has not|rank {rank} is |rank {rank} of \d failed( first)?: SIGKILL",
          "host n2 killed": r"ssh to n2 failed|rank {rank} is gone",
          "the cable pulled": r"ssh to n2 failed|rank \d is gone|rank \d (of \d )?has not|cannot be reached|no route to MASTER_ADDR=n[12]$"}


class Failed(Exception):
    """A check has failed."""


def expect(condition, *what):
    if not condition:
        raise Failed(" ".join(map(str, what)))


def memory_folders():
    return set(Path("/dev/shm").glob("tessera_memory_*"))


def names(folder):
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


class Run:
    """One output folder: a command to start it, and what is in it."""

    place = ("--nproc", 2)  # where the ranks are
    settings = {}  # more of them
    variables = {}  # of the environment
    sameness = "the same bits"  # as an undisturbed one
    lacks_saves = False  # some could not be written
    log_name = "log"

    def __init__(self, base, name, kind):
        self.base, self.folder, self.kind = base, base / name, kind
        self.checkpoints = self.folder / "checkpoints"
        self.tmp, self.disk = base / "tmp", base / "disk"
        self.tmp.mkdir(exist_ok=True)
        self.disk.mkdir(exist_ok=True)
        self.marker = uuid.uuid4().hex
        self.memory = set()  # folders of checkpoints in memory

    def environment(self):
        return {**os.environ, "TMPDIR": str(self.tmp), MARKER: self.marker, **self.variables}

    def start(self, stage=2, asynchronous=False, fsync=False, offloads=(), policy="none", resume=False, flags=()):
        settings = {
            "data.path": self.base / "data", "data.flip": "true", "model.channels": 8, "model.hidden": 32, "model.dropout": 0.3,
            "trainer.output_dir": self.folder, "trainer.device": "cpu", "trainer.epochs": "null", "trainer.max_steps": MAX_STEPS,
            "trainer.eval_batch_size": 51, "trainer.save_every_epochs": 0, "trainer.save_every_steps": SAVE_EVERY,
            "train_batch_size": 12, "steps_per_print": 1, "zero_optimization.stage": stage,
            "checkpoint.async": str(asynchronous).lower(), "checkpoint.fsync": str(fsync).lower(),
            "checkpoint.keep_last": KEEP_LAST, **self.settings}
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
        self.log = self.base / self.log_name
        with open(self.log, "wb") as log:
            return subprocess.Popen(list(map(str, args)), env=self.environment(), stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=subprocess.STDOUT, cwd=self.base, start_new_session=True)

    def output(self):
        return self.log.read_text("utf-8", "replace")

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
        self.memory |= {Path(environment["TESSERA_MEMORY_DIR"]) for environment in found.values() if "TESSERA_MEMORY_DIR" in environment}
        return found

    def ranks(self):
        """Process ids by rank, of those that are `tessera`."""
        found = {}
        for pid, environment in self.processes().items():
            try:
                if "RANK" in environment and Path(f"/proc/{pid}/comm").read_text().strip() == "tessera":
                    found[int(environment["RANK"])] = pid
            except OSError:
                pass  # it has ended
        return found

    def num_restarts(self):
        return len(re.findall(r"restart \d+ of 1000", self.output()))

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
    """When a start is to be disturbed; due() is asked again and again."""

    def __init__(self, run, source, whole_s):
        self.run, self.kind = run, source.choices(("time", "step", "save", "end"), self.weights(run))[0]
        self.begin, self.last_temporary, self.saves = time.monotonic(), set(run.temporary()), 0
        self.at = self.begin + source.uniform(0, (0.6 if run.latest() else 0.4) * whole_s) if self.kind == "time" else None
        self.records = run.num_records() + source.randint(1, 7)
        self.saves_before = source.randint(1, 4)
        self.delay = source.uniform(0, {"time": 0, "step": 0.05, "save": 0.02, "end": 0.3}[self.kind])

    @staticmethod
    def weights(run):
        """A first start is to be disturbed before its first checkpoint more often, and not every run to end at once."""
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
    """Ranks that are started again by their launcher, or, in a subclass, by this program."""

    scenario = "restarts"
    are_restarted = True
    make_run = Run
    kinds = KINDS[:2]
    backends = ("shm", "gloo")
    gone_within_s = 10.0

    def __init__(self, base, seed, num_faults):
        self.base, self.source, self.num_faults = base, random.Random(seed), num_faults
        self.counts, self.worst, self.seconds = collections.Counter(), collections.Counter(), []
        make_data(base / "data")
        self.expected = {kind: self.undisturbed(self.make_run(base, f"whole_{kind.replace(' ', '_')}", kind)) for kind in self.kinds}

    def undisturbed(self, run):
        """What the run must equal."""
        begin = time.monotonic()
        process = run.start()
        expect(process.wait(LIMIT_S) == 0, run.output())
        self.whole_s = time.monotonic() - begin
        return *run.weights(), run.losses(), run.results()

    def new_run(self, number):
        return self.make_run(self.base, f"run_{number}", self.kinds[number % len(self.kinds)])

    def enough(self):
        return self.counts["faults"] >= self.num_faults

    def go(self):
        number = 0
        while not self.enough():
            run = self.new_run(number)
            number += 1
            while not self.start_and_disturb(run):
                pass
            self.check_finished(run)
            shutil.rmtree(run.folder)
            print(f"run {number} ({run.kind}): {run.sameness} after {self.counts['faults']} faults in all", flush=True)

    def start(self, run):
        flags = [*RESTARTS, "--set", f"comm.backend={self.source.choice(self.backends)}", "--set",
                 f"trainer.save_in_memory_every_steps={self.source.randrange(2)}"]
        return run.start(self.source.randrange(4), self.source.random() < 0.5, resume=run.latest() > 0, flags=flags)

    def start_and_disturb(self, run):
        """Whether the run came to its end; else it is to be started again."""
        process, restarts = self.start(run), 0
        while process.poll() is None and not self.enough():
            moment = Moment(run, self.source, self.whole_s)
            while not moment.due() and process.poll() is None:
                expect(time.monotonic() - moment.begin < LIMIT_S, "it hangs:", run.output())
                time.sleep(0.001)
            if process.poll() is not None:
                break
            kind = self.choose(run)
            if not self.carry_out(kind, run, process):
                continue
            if kind == "the launcher killed" or not self.are_restarted:
                code = process.wait(LIMIT_S)
                self.expect_gone(run)
                self.check_end(run, kind, code)
                self.forget_logs(run)
                return code == 0
            restarts = self.await_restart(run, process, kind, restarts)
        process.wait(LIMIT_S)
        self.expect_gone(run)
        if process.returncode == 1 and run.lacks_saves and run.latest() < MAX_STEPS:  # the last one could not be written
            self.forget_logs(run)
            return False
        expect(process.returncode == 0, "it failed:", run.output())
        self.counts["restarts from memory"] += run.output().count("from /dev/shm/tessera_memory_")
        self.forget_logs(run)
        return True

    @staticmethod
    def forget_logs(run):
        """The launcher keeps those of failures; one that was killed cannot remove its own."""
        shutil.rmtree(run.tmp)
        run.tmp.mkdir()

    # ------------------------------------------------------------------------------------------------------ faults

    def choose(self, run):
        weights = {kind: weights[self.scenario] for kind, weights in FAULTS.items() if self.scenario in weights and self.is_possible(kind, run)}
        return self.source.choices(list(weights), weights.values())[0]

    def is_possible(self, kind, run):
        return True

    def carry_out(self, kind, run, process):
        """False: there was nobody to meet."""
        ranks = run.ranks()
        if len(ranks) < 2 and kind not in ("the launcher killed", "everything killed"):
            return False
        victims = {"the launcher killed": [process.pid], "both ranks killed": ranks.values(),
                   "everything killed": run.processes(), "a rank cannot write": [ranks.get(1)]}.get(kind) or [ranks[self.source.randrange(2)]]
        num_met = 0
        for pid in victims:
            try:
                if kind == "a rank cannot write":
                    self.deny_disk(run, pid)
                else:
                    os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
                num_met += 1
            except ProcessLookupError:
                pass  # it has ended
        if num_met:
            self.count_fault(kind, run)
        return num_met > 0

    def deny_disk(self, run, pid):
        """No file of the rank grows beyond 4 kB for a while, as on a full disk: saves fail, training goes on."""
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        said, begin = run.output().count("no checkpoint at step"), time.monotonic()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, most))
        run.lacks_saves = True
        while run.output().count("no checkpoint at step") == said and time.monotonic() - begin < 1 and run.latest() < MAX_STEPS:
            time.sleep(0.002)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        self.counts["saves that failed"] += run.output().count("no checkpoint at step") - said

    def count_fault(self, kind, run):
        self.counts["faults"] += 1
        self.counts[kind] += 1
        self.counts["while saving"] += bool(run.temporary())
        self.counts["before the first checkpoint"] += not run.latest()
        self.counts["at the end"] += run.latest() == MAX_STEPS

    def await_restart(self, run, process, kind, restarts):
        """Until the ranks have been started again, or all of it has ended (the victim had done its work)."""
        begin = time.monotonic()
        while process.poll() is None and kind != "a rank cannot write":
            said = run.num_restarts()
            if said > restarts:
                self.seconds.append((kind, time.monotonic() - begin))
                return said
            expect(time.monotonic() - begin < 60, "no restart 60 s after", kind, run.output())
            time.sleep(0.005)
        return restarts

    # ------------------------------------------------------------------------------------------------------ checks

    def expect_gone(self, run):
        begin = time.monotonic()
        while left := run.processes():
            expect(time.monotonic() - begin < self.gone_within_s, "left behind:", left.keys())
            time.sleep(0.01)
        left = [folder for folder in run.memory if folder.exists()]
        expect(not left, "left in memory:", left)

    def check_end(self, run, kind, code):
        """What a start has left that does not go on by itself."""

    def check_finished(self, run):
        self.counts["runs"] += 1
        model, last, losses, results = self.expected[run.kind]
        expect(run.losses() == losses, "losses differ:", [(a, b) for a, b in zip(run.losses(), losses) if a != b][:3])
        found_model, found_last = run.weights()
        expect(found_last == last, "the weights of the last step differ")
        if not run.lacks_saves:  # else the best may be lacking
            expect(run.results() == results, "results differ:", run.results(), results)
            expect(found_model == model, "the exported models differ")
        expect(set(names(run.folder)) == RUN_FILES, "the run's folder has", names(run.folder))
        expect(not run.temporary(), "left over:", run.temporary())
        expect("previous" not in names(run.checkpoints), "what a start before the first checkpoint had put aside is left over")
        whole = [name for name in names(run.checkpoints) if name != "latest"]
        expect(len(whole) <= KEEP_LAST + 1, "keep_last and the best, but there are", whole)

    def report(self):
        for kind in FAULTS:
            if times := [took for one, took in self.seconds if one == kind]:
                print(f"{kind}: it goes on after {statistics.median(times):.2f} s (median), at most {max(times):.2f} s")


class Crashes(Soak):
    """No launcher starts the ranks again: the same command and --resume do."""

    scenario = "crashes"
    are_restarted = False
    kinds = KINDS

    def start(self, run):
        source = self.source
        stage = source.randrange(4)
        offloads = source.choice(OFFLOADS[stage])
        self.counts["starts with state on disk"] += bool(offloads)
        self.step, self.before = run.latest(), run.temporary()
        return run.start(stage, source.random() < 0.5, source.random() < 0.5, offloads, source.choice(POLICIES), resume=self.step > 0)

    def check_end(self, run, kind, code):
        if code == 0:
            return
        if kind == "a rank killed":
            expect(code == 137 and "SIGKILL" in run.output(), code, run.output())
        expect(not names(run.disk), "left on the disk:", names(run.disk))
        left = run.temporary()
        self.worst["temporary folders"] = max(self.worst["temporary folders"], len(left))
        expect(len([name for name in left if not name.startswith("latest.tmp-")]) <= 1, "temporary folders pile up:", left)
        if run.latest() != self.step:
            stayed = set(self.before) & set(left)
            expect(not stayed, "a save has left what was there before it:", stayed)
        whole = [name for name in names(run.checkpoints) if name not in left + ["latest", "previous"]]
        expect(all(name.removeprefix("global_step").isdigit() for name in whole), whole)
        self.worst["checkpoints"] = max(self.worst["checkpoints"], len(whole))
        odd = set(names(run.folder)) - RUN_FILES - {LOCK}
        self.worst["other files"] = max(self.worst["other files"], len(odd))
        expect(len(odd) <= 2, "files pile up:", odd)
        expect(len(names(run.tmp)) <= 1, "log folders of one launch:", names(run.tmp))
        if run.latest():
            expect(run.latest() >= self.step, "latest went back from", self.step, "to", run.latest())
            run.tool("inspect", run.checkpoints, "--verify")
            self.counts["verified"] += 1
        else:
            expect(self.step == 0, "latest is gone")


class ByHand(Run):
    """Its ranks are processes without a launcher. Where one is killed before the rendezvous, the others wait for it no longer than 20 s."""

    place = ()
    settings = {"comm.backend": "gloo", "comm.rendezvous_timeout_s": 20, "trainer.num_threads": 1}
    num_ranks = 2

    def start(self, *arguments, **options):
        group = {"WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes_of_ranks, self.logs = [], []
        for rank in range(self.num_ranks):
            self.variables, self.log_name = {**group, "RANK": str(rank)}, f"log_{rank}"
            self.processes_of_ranks.append(super().start(*arguments, **options))
            self.logs.append(self.log)
        return self.processes_of_ranks[0]

    def output(self, rank=0):
        return self.logs[rank].read_text("utf-8", "replace")


class Alone(Soak):
    scenario = "alone"
    are_restarted = False
    make_run = ByHand
    kinds = ("fp32",)

    def new_run(self, number):
        run = super().new_run(number)
        run.num_ranks = self.source.choice((2, 2, 3))
        return run

    def start(self, run):
        return run.start(self.source.randrange(4), self.source.random() < 0.5, resume=run.latest() > 0)

    def carry_out(self, kind, run, process):
        ranks, victim = run.processes_of_ranks, self.source.randrange(run.num_ranks)
        expect(not any(rank.poll() for rank in ranks), "it failed by itself:", [run.output(rank) for rank in range(run.num_ranks)])
        ranks[victim].kill()
        begin = time.monotonic()
        if ranks[victim].wait() == -signal.SIGKILL:  # else it had ended by itself
            self.count_fault(kind, run)
        for number, rank in enumerate(ranks):
            if number != victim:
                self.await_end(run, number, rank, victim, begin)
        return True

    def await_end(self, run, number, rank, victim, begin):
        try:
            code = rank.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            raise Failed(f"rank {number} has not ended {BOUND_S} s after rank {victim} was killed:\n{run.output(number)}") from None
        self.seconds.append(("a rank killed", time.monotonic() - begin))
        if code == 0:
            self.counts["survivors that were done"] += 1
            return
        expect(code == 1, number, "ends with", code, run.output(number))
        blamed = any(f"rank {victim} {what}" in run.output(number) for what in ("is gone", "of ", "has ", "to serve", "has not arrived"))
        self.counts["survivors that name the rank" if blamed else "survivors that say something else"] += 1
        if not blamed:
            print(f"after rank {victim}'s end rank {number} says: {run.output(number).strip().splitlines()[-1:]}", flush=True)

    def check_end(self, run, kind, code):
        if run.latest():
            run.tool("inspect", run.checkpoints, "--verify")

    def check_finished(self, run):
        """Of other numbers of ranks, with other bits."""
        self.counts["runs"] += 1


class DamagedRun(Run):
    def latest(self):
        """The step of the newest folder, as `latest` may be damaged."""
        return max([int(tag.removeprefix("global_step")) for tag in self.tags()], default=0)

    def tags(self):
        return {name for name in names(self.checkpoints) if name.startswith("global_step") and ".tmp" not in name}


class Damage(Soak):
    scenario = "damage"
    make_run = DamagedRun

    def new_run(self, number):
        self.damaged, self.ctimes = set(), {}
        return super().new_run(number)

    def change(self, path):
        """Damages a file. Returns how."""
        size = path.stat().st_size
        how = self.source.choice(("flipped", "cut", "emptied", "removed")) if size else "removed"
        if how == "flipped":
            with open(path, "r+b") as file:
                at = self.source.randrange(size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << self.source.randrange(8))]))
        elif how == "removed":
            path.unlink()
        else:
            os.truncate(path, self.source.randrange(1, size) if how == "cut" and size > 1 else 0)
        return how

    def in_memory(self, ranks):
        environment = process_environment(next(iter(ranks.values())))
        folders = Path(environment.get("TESSERA_MEMORY_DIR", "/nonexistent")).glob("global_step*")
        return sorted(folder for folder in folders if ".tmp" not in folder.name)

    def still_damaged(self, run):
        """Those that were saved anew are whole."""
        self.damaged = {tag for tag in self.damaged & run.tags() if (run.checkpoints / tag).stat().st_ctime_ns == self.ctimes[tag]}
        return self.damaged

    def check_finished(self, run):
        for tag in self.still_damaged(run):  # what a run does not know for a checkpoint it does not delete
            shutil.rmtree(run.checkpoints / tag)
            self.counts["damaged folders left"] += 1
        super().check_finished(run)

    def damage(self, run, ranks):
        """Returns what was damaged; None: nothing may be."""
        whole = sorted(run.tags() - self.still_damaged(run), key=lambda tag: int(tag.removeprefix("global_step")))
        memory = self.in_memory(ranks)
        targets = ["latest"] if whole and (run.checkpoints / "latest").exists() else []
        # Not the checkpoint of an evaluation, which may be the best: without it the last weights are exported.
        if whole and len(whole) + bool(memory) > 1 and int(whole[-1].removeprefix("global_step")) % STEPS_PER_EPOCH:
            targets += ["manifest", "file", "folder"]
        if whole and memory:
            targets += ["memory"]
        if not targets or (run.folder / "all_results.json").exists():  # it has ended, and nothing would be read again
            return None
        what = self.source.choice(targets)
        if what == "latest":
            return f"latest {self.change(run.checkpoints / 'latest')}"
        if what == "memory":
            for folder in memory:
                self.change(folder / self.source.choice(("manifest.json", "rank_00000.h5", "rank_00001.h5")))
            return "in memory"
        folder = run.checkpoints / whole[-1]
        if what == "folder":
            shutil.rmtree(folder)
            return "folder removed"
        how = self.change(folder / ("manifest.json" if what == "manifest" else self.source.choice(("rank_00000.h5", "rank_00001.h5"))))
        self.damaged.add(folder.name)
        self.ctimes[folder.name] = folder.stat().st_ctime_ns
        return f"{what} {how}"

    def carry_out(self, kind, run, process):
        ranks = run.ranks()
        if len(ranks) < 2:
            return False
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)
        what = self.damage(run, ranks)
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
        if what:
            self.count_fault(what, run)
        return True

    def await_restart(self, run, process, kind, restarts):
        restarts = super().await_restart(run, process, kind, restarts)
        for failure in ("no whole checkpoint of this run is left", "no checkpoint of this run can be loaded"):
            expect(failure not in run.output(), "it did not go on:", run.output())
        return restarts

    def expect_gone(self, run):
        super().expect_gone(run)
        self.counts["lines that say what was damaged"] += run.output().count("; the run continues from ")


class RunOnHosts(Run):
    bed = None
    settings = {"trainer.num_threads": 1}

    def environment(self):
        return {**super().environment(), **self.bed.environment(), "OMP_NUM_THREADS": "1"}

    def spread(self, hosts, flags):
        """On these hosts, in this order."""
        self.hosts = hosts
        (self.base / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
        self.place = ["--hostfile", self.base / "hosts", "--launcher-args", f"-F {self.bed.folder}/ssh_config", *flags]


class Elastic(RunOnHosts):
    """Each rank draws numbers of its own, so nothing that is drawn."""

    sameness = "the same but for rounding"
    settings = {**RunOnHosts.settings, "model.dropout": 0, "data.flip": "false"}


class Hosts(Soak):
    scenario = "hosts"
    make_run = RunOnHosts
    gone_within_s = 60.0  # a connection that was cut off notices late that it is closed
    backends = ("auto", "gloo")

    def __init__(self, base, seed, num_kills):
        bed_folder = base / "bed"
        bed_folder.mkdir()
        RunOnHosts.bed = self.bed = testbed.Testbed(bed_folder)
        self.bed.start_sshd()
        super().__init__(base, seed, num_kills)
        self.expected["elastic"] = self.undisturbed(Elastic(base, "whole_elastic", "fp32"))
        self.whole_s *= 2  # ranks are there later than on one host
        self.restore_at = self.return_at = self.restore = None
        self.processes_before, self.memory_before = set(testbed.processes()), memory_folders()

    def new_run(self, number):
        is_elastic = number % 3 == 2
        run = (Elastic if is_elastic else RunOnHosts)(self.base, f"run_{number}", ("fp32", "bf16")[number % 3 == 1])
        hosts = ["n1", "n2"] if self.source.random() < 0.5 else ["n2", "n1"]
        run.spread(hosts, ["--nnodes", "1:2"] if is_elastic else [])
        return run

    # ---------------------------------------------------------------------------------------------- faults

    def num_ranks(self, run):
        return 1 if "without host" in run.output() else 2

    def is_possible(self, kind, run):
        return self.num_ranks(run) == 2 or kind in OF_ONE_RANK

    def carry_out(self, kind, run, process):
        ranks = run.ranks()
        if len(ranks) < self.num_ranks(run):
            return False
        self.said_before, self.restarts_before = len(run.output()), run.num_restarts()
        self.victim = run.hosts.index("n2") if kind == "host n2 killed" else self.source.choice(list(ranks))
        if kind == "host n2 killed":
            self.count_fault(kind, run)
            self.kill_n2(run)
        elif kind.startswith("the cable"):
            self.count_fault(kind, run)
            self.pull_cable(*(MOMENT_S if "moment" in kind else LONG_S))
        else:
            pid = process.pid if kind == "the launcher killed" else ranks[self.victim]
            try:
                os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
            except ProcessLookupError:
                return False
            self.count_fault(kind, run)
        return True

    def kill_n2(self, run):
        own = [folder for folder in memory_folders() - self.memory_before if folder.name.endswith(f"_{run.hosts.index('n2')}")]
        self.bed.kill_host("n2")
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)
        self.return_at = time.monotonic() + self.source.uniform(0, 5)

    def pull_cable(self, least_s, most_s):
        host = self.source.choice(("n1", "n2"))
        if self.source.random() < 0.5:
            pull, self.restore = (["ip", "link", "set", "eth0", state] for state in ("down", "up"))
        else:  # what this host sends goes to a network card that is not there
            other = [*({"n1", "n2"} - {host})][0]
            pull = ["ip", "neigh", "replace", testbed.ADDRESSES[other], "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
            self.restore = ["ip", "neigh", "del", testbed.ADDRESSES[other], "dev", "eth0"]
        self.restore = [*self.bed.on(host), *self.restore]
        subprocess.run([*self.bed.on(host), *pull], check=True)
        self.restore_at = time.monotonic() + self.source.uniform(least_s, most_s)

    def repair(self, at_once=False):
        """What is due: the cable, sshd on n2."""
        now = float("inf") if at_once else time.monotonic()
        if self.restore_at is not None and now >= self.restore_at:
            subprocess.run(self.restore, check=True)
            self.restore_at = None
        if self.return_at is not None and now >= self.return_at:
            self.return_at = None
            self.bed.start_sshd_on("n2")

    def await_restart(self, run, process, kind, restarts):
        """Counts from the fault on: a host that has been killed may need several starts."""
        if kind == "the cable pulled for a moment":
            return self.await_progress(run, process)
        begin = time.monotonic()
        while process.poll() is None:
            self.repair()
            if run.num_restarts() > self.restarts_before:
                took = time.monotonic() - begin
                self.seconds.append((kind, took))
                self.check_named(run, kind)
                self.repair(at_once=kind == "host n2 killed")
                # With the cable out a start fails too; the next fault comes when it is in.
                while self.restore_at is not None and process.poll() is None:
                    self.repair()
                    time.sleep(0.005)
                break
            expect(time.monotonic() - begin < RESTART_WITHIN_S.get(kind, 60.0), "no restart in time after", kind, run.output())
            time.sleep(0.005)
        if process.poll() is not None:
            self.repair(at_once=True)
        return restarts

    def await_progress(self, run, process):
        """The run goes on as if nothing had been."""
        begin, records = time.monotonic(), run.num_records()
        while process.poll() is None and (self.restore_at is not None or run.num_records() < records + 2):
            self.repair()
            expect(time.monotonic() - begin < 60, "nothing happens after the cable was out for a moment:", run.output())
            time.sleep(0.005)
        self.repair(at_once=True)
        expect(run.num_restarts() == self.restarts_before, "a moment without the cable has ended the ranks:", run.output())
        self.seconds.append(("the cable pulled for a moment", time.monotonic() - begin))
        return 0

    def check_named(self, run, kind):
        """One line that names the cause."""
        said = run.output()[self.said_before:]
        errors = [line for line in said[:said.index("warning: restart")].splitlines() if line.startswith("error: ")]
        expect(len(errors) == 1 and re.search(CAUSES[kind].format(rank=self.victim), errors[0]),
               f"after {kind} (rank {self.victim}) there is not one line that names it:\n{said}")
        self.counts["failures of one line that names the cause"] += 1

    # ---------------------------------------------------------------------------------------------- checks

    def expect_gone(self, run):
        self.repair(at_once=True)
        begin = time.monotonic()
        while True:
            left = {pid: name for pid, name in testbed.processes().items() if pid not in self.processes_before and name != "sshd"}
            folders = memory_folders() - self.memory_before
            if not left and not folders:
                break
            expect(time.monotonic() - begin < self.gone_within_s, "left behind:", left, folders)
            time.sleep(0.02)
        took = time.monotonic() - begin
        self.worst["seconds until nothing is left"] = max(self.worst["seconds until nothing is left"], took)

    def check_finished(self, run):
        if not isinstance(run, Elastic):
            return super().check_finished(run)
        self.counts["runs"] += 1
        self.counts["runs that lost a host"] += self.num_ranks(run) == 1
        _, _, losses, results = self.expected["elastic"]
        expect([step for step, *_ in run.losses()] == [step for step, *_ in losses], "other steps:", run.losses())
        largest = max(abs(a - b) / abs(b) for one, other in zip(run.losses(), losses) for a, b in zip(one[1:], other[1:]))
        self.worst["rounding"] = max(self.worst["rounding"], largest)
        expect(largest < ROUNDING, "losses differ by", largest)
        expect(run.results()["eval_samples"] == results["eval_samples"], run.results(), results)
        return None

    def report(self):
        self.bed.end()
        super().report()
        print(f"runs without a host differ by rounding, at most {self.worst['rounding']:.1e}; nothing was left behind "
              f"{self.worst['seconds until nothing is left']:.1f} s after a run's end, at most")


def main():
    scenarios = {kind.scenario: kind for kind in (Crashes, Soak, Damage, Alone, Hosts)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=scenarios, nargs="?", default="crashes")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if flags.scenario == "hosts" and (reason := testbed.enter()):
        return f"error: {reason}"
    base, begin, soak = Path(tempfile.mkdtemp(prefix="tessera_soak_")), time.monotonic(), None
    try:
        soak = scenarios[flags.scenario](base, flags.seed, flags.faults)
        soak.go()
    except Failed as failed:
        return f"FAILED with {flags.scenario} --seed {flags.seed}: {failed}\nthe folders are in {base}\n{soak and dict(soak.counts)}"
    soak.report()
    shutil.rmtree(base)
    print(", ".join(f"{number} {what}" for what, number in soak.counts.items()))
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
