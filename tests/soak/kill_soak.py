"""Ranks started by hand, without a launcher, over Gloo: one is killed at a random moment, and each of the others must end by itself.

    make soak-kill ARGS="--kills 200 --seed 1"

No launcher is there to notice: the ranks must, in whatever they wait for (the rendezvous, a collective, a checkpoint that is being saved). Each
must end with an error within 30 s. (If a rank is killed before the rendezvous, the others wait for it until comm.rendezvous_timeout_s,
20 s here.) A killed run is resumed until it is done; then the next one begins. Needs the standard library only.
"""
import collections
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from crash_soak import LIMIT_S, MAX_STEPS, ROOT, SAVE_EVERY, TESSERA, Fault, Moment, Run, carry_out, expect, make_data  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import free_port  # noqa: E402

BOUND_S = 30.0


class ByHand(Run):
    """A run whose ranks are processes without a launcher."""

    def start_ranks(self, num_ranks, stage, asynchronous):
        settings = {
            "data.path": self.base / "data", "model.channels": 8, "model.hidden": 32, "trainer.output_dir": self.folder,
            "trainer.device": "cpu", "trainer.epochs": "null", "trainer.max_steps": MAX_STEPS, "trainer.save_every_steps": SAVE_EVERY,
            "train_batch_size": 12, "steps_per_print": 1, "zero_optimization.stage": stage, "comm.backend": "gloo",
            "comm.rendezvous_timeout_s": 20,
            "checkpoint.async": str(asynchronous).lower(), "checkpoint.keep_last": 2}
        args = [TESSERA, "train", ROOT / "configs/fashion_mnist.json"]
        for key, value in settings.items():
            args += ["--set", f"{key}={value}"]
        args += ["--resume"] if self.latest() else []
        group = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        self.logs = [open(self.base / f"log_{rank}", "w+", encoding="utf-8", errors="replace") for rank in range(num_ranks)]
        return [subprocess.Popen(list(map(str, args)), env={**self.environment(), **group, "RANK": str(rank)}, stdin=subprocess.DEVNULL,
                                 stdout=log, stderr=subprocess.STDOUT, cwd=self.base) for rank, log in enumerate(self.logs)]

    def said(self, rank):
        self.logs[rank].seek(0)
        return self.logs[rank].read()


class Soak:
    def __init__(self, base, seed, num_kills):
        self.base, self.source, self.num_kills = base, random.Random(seed), num_kills
        self.counts, self.seconds = collections.Counter(), []
        make_data(base / "data")
        begin = time.monotonic()
        ranks = ByHand(base, "whole", "fp32").start_ranks(2, 2, False)
        for rank in ranks:
            expect(rank.wait(LIMIT_S) == 0, "a run that was not killed has failed")
        self.whole_s = time.monotonic() - begin

    def go(self):
        number = 0
        while self.counts["kills"] < self.num_kills:
            run = ByHand(self.base, f"run_{number}", "fp32")
            number += 1
            num_ranks = self.source.choice((2, 2, 3))
            while self.counts["kills"] < self.num_kills and not self.start_and_kill(run, num_ranks):
                pass
            shutil.rmtree(run.folder, ignore_errors=True)

    def start_and_kill(self, run, num_ranks):
        """Whether the run ended before it was killed."""
        moment = Moment(run, self.source, self.whole_s)
        victim, step, records = self.source.randrange(num_ranks), run.latest(), run.num_records()
        ranks = run.start_ranks(num_ranks, self.source.randrange(4), self.source.random() < 0.5)
        while not moment.due() and all(rank.poll() is None for rank in ranks):
            expect(time.monotonic() - moment.begin < LIMIT_S, "it hangs:", run.said(0))
            time.sleep(0.001)
        expect(not any(rank.poll() for rank in ranks), "it failed by itself:", [run.said(rank) for rank in range(num_ranks)])
        ranks[victim].send_signal(signal.SIGKILL)
        saving, begin = bool(run.temporary()), time.monotonic()
        if ranks[victim].wait() != -signal.SIGKILL:  # it had ended by itself
            for rank in ranks:
                expect(rank.wait(BOUND_S) == 0, [run.said(r) for r in range(num_ranks)])
            return True
        self.counts["kills"] += 1
        when = ("saving" if saving else "starting" if (run.latest(), run.num_records()) == (step, records) else "training")
        self.counts[f"while {when}"] += 1
        self.counts["of rank 0" if victim == 0 else "of others"] += 1
        for rank, process in enumerate(ranks):
            if rank != victim:
                self.await_end(run, rank, process, victim, begin)
        if run.latest():
            run.tool("inspect", run.checkpoints, "--verify")
        return False

    def await_end(self, run, rank, process, victim, begin):
        try:
            code = process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Fault(f"rank {rank} has not ended {BOUND_S} s after rank {victim} was killed:\n{run.said(rank)}") from None
        self.seconds.append(time.monotonic() - begin)
        if code == 0:
            self.counts["survivors that were done"] += 1
            return
        expect(code == 1, rank, "ends with", code, run.said(rank))
        blamed = any(f"rank {victim} {what}" in run.said(rank) for what in ("is gone", "of ", "has ", "to serve", "has not arrived"))
        self.counts["survivors that name the rank" if blamed else "survivors that say something else"] += 1
        if not blamed:
            print(f"after rank {victim}'s end rank {rank} says: {run.said(rank).strip().splitlines()[-1:]}", flush=True)


def main():
    soak, seconds = carry_out(Soak, __doc__.splitlines()[0], "tessera_kill_soak_")
    print(", ".join(f"{number} {what}" for what, number in soak.counts.items()))
    print(f"seconds from the kill to the end of a survivor: min {min(soak.seconds):.2f}, median {statistics.median(soak.seconds):.2f}, "
          f"max {max(soak.seconds):.2f}; {seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
