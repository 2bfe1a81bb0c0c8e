"""Ranks that are killed, crash or hang at random moments under `tessera train --max-restarts`: the run must come to its end by itself.

    make soak-restarts ARGS="--kills 200 --seed 1"

A fault is: a rank or both killed (SIGKILL), a rank that crashes (SIGSEGV), a rank that hangs (SIGSTOP; the others end after
comm.timeout_s, or after --rendezvous-timeout), or the launcher killed, after which the same command and --resume go on. Each run over
shared memory or Gloo, at a random stage, with synchronous or asynchronous saves, half of them with a checkpoint in memory after each
step. It must equal the undisturbed run to the bit: exported model, weights of the last step, every loss. Needs the standard library
only.
"""
import os
import re
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import crash_soak  # noqa: E402
from crash_soak import LIMIT_S, Moment, carry_out, expect  # noqa: E402

TIMEOUT_S = 5
FAULTS = {"a rank killed": 8, "both ranks killed": 2, "a rank crashed": 3, "a rank hung": 2, "the launcher killed": 2}
SIGNALS = {"a rank crashed": signal.SIGSEGV, "a rank hung": signal.SIGSTOP}


def memory_folders():
    return set(Path("/dev/shm").glob("tessera_memory_*"))


class Soak(crash_soak.Soak):
    backends = ("shm", "gloo")

    def __init__(self, base, seed, num_kills):
        super().__init__(base, seed, num_kills)
        self.seconds = []
        self.memory_before = memory_folders()

    def expect_gone(self, run):
        super().expect_gone(run)
        expect(memory_folders() <= self.memory_before, "left in memory:", memory_folders() - self.memory_before)

    def new_run(self, number):
        return self.make_run(self.base, f"run_{number}", self.kinds[number % len(self.kinds)])

    def go(self):
        number = 0
        while self.counts["faults"] < self.num_kills:
            run = self.new_run(number)
            number += 1
            while not self.start_and_disturb(run):
                pass
            self.check_finished(run)
            shutil.rmtree(run.folder)
            print(f"run {number} ({run.kind}): {run.sameness} after {self.counts['faults']} faults in all", flush=True)

    def start_and_disturb(self, run):
        """Whether the run came to its end; else its launcher was killed."""
        flags = ["--max-restarts", "1000", "--save-grace", "5", "--rendezvous-timeout", "10", "--set", f"comm.timeout_s={TIMEOUT_S}", "--set",
                 f"comm.backend={self.source.choice(self.backends)}", "--set",
                 f"trainer.save_in_memory_every_steps={self.source.randrange(2)}"]
        process = run.start(self.source.randrange(4), self.source.random() < 0.5, False, resume=run.latest() > 0, flags=flags)
        restarts = 0
        while process.poll() is None:
            moment = Moment(run, self.source, self.whole_s)
            while not moment.due() and process.poll() is None:
                expect(time.monotonic() - moment.begin < LIMIT_S, "it hangs:", run.output())
                time.sleep(0.001)
            if process.poll() is not None or self.counts["faults"] >= self.num_kills:
                process.wait(LIMIT_S)
                break
            kind = self.choose(run)
            if not self.carry_out(kind, run, process):
                continue
            if kind == "the launcher killed":
                process.wait(LIMIT_S)
                self.expect_gone(run)
                shutil.rmtree(run.tmp)  # the logs, which a killed launcher cannot remove
                run.tmp.mkdir()
                return False
            restarts = self.await_restart(run, process, kind, restarts)
        self.expect_gone(run)
        expect(process.returncode == 0, "it failed:", run.output())
        self.counts["restarts from memory"] += run.output().count("from /dev/shm/tessera_memory_")
        shutil.rmtree(run.tmp)  # logs of failures, which the launcher keeps
        run.tmp.mkdir()
        return True

    def choose(self, run):
        return self.source.choices(list(FAULTS), FAULTS.values())[0]

    def ranks_of(self, run):
        """Process ids by rank."""
        ranks = {}
        for pid, environment in run.processes().items():
            try:
                if "RANK" in environment and Path(f"/proc/{pid}/comm").read_text().strip() == "tessera":
                    ranks[int(environment["RANK"])] = pid
            except OSError:
                pass  # it has ended
        return ranks

    def carry_out(self, kind, run, process):
        """False: there was nobody to meet."""
        ranks = self.ranks_of(run)
        if len(ranks) < 2:
            return False
        victims = [process.pid] if kind == "the launcher killed" else list(ranks.values()) if kind == "both ranks killed" else \
            [ranks[self.source.randrange(2)]]
        for pid in victims:
            try:
                os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
            except ProcessLookupError:
                return False
        self.count_fault(kind, run)
        return True

    def count_fault(self, kind, run):
        self.counts["faults"] += 1
        self.counts[kind] += 1
        self.counts["while saving"] += bool(run.temporary())
        self.counts["before the first checkpoint"] += not run.latest()

    def await_restart(self, run, process, kind, restarts):
        """Until the ranks have been started again, or all of it has ended (the victim had done its work)."""
        begin = time.monotonic()
        while process.poll() is None:
            said = len(re.findall(r"restart \d+ of 1000", run.output()))
            if said > restarts:
                self.seconds.append((kind, time.monotonic() - begin))
                return said
            expect(time.monotonic() - begin < 60, "no restart 60 s after", kind, run.output())
            time.sleep(0.005)
        return restarts


def main():
    soak, seconds = carry_out(Soak, __doc__.splitlines()[0], "tessera_restart_soak_")
    print(", ".join(f"{number} {what}" for what, number in soak.counts.items()))
    for hung in (False, True):
        times = [took for kind, took in soak.seconds if (kind == "a rank hung") == hung]
        if times:
            print(f"seconds from the fault to the restart{', of a rank that hangs' if hung else ''}: median {statistics.median(times):.2f}, "
                  f"max {max(times):.2f}")
    print(f"{seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
