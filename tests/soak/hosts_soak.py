"""Two hosts under `tessera train --hostfile --max-restarts`, which lose ranks, their power and the cable between them at random moments.

    make soak-hosts ARGS="--kills 100 --seed 1"

The hosts are those of tests/hosts/testbed.py: network namespaces with sshd. The launcher is on n1; rank 0 is on either. A fault is:
  - a rank killed, crashed, or stopped (the other one ends after comm.timeout_s, or after --rendezvous-timeout)
  - host n2 killed: all its processes at once, with what was in its memory; its sshd is there again some seconds later
  - the cable pulled, or what one host sends is lost: for about a second, and nothing may happen; or for longer than the time-outs, and the
    ranks of both hosts must end
  - the launcher killed, after which the same command and --resume go on
Two runs in three need both hosts: they must equal the undisturbed run to the bit, as in restart_soak.py. The third, --nnodes 1:2, goes on
without n2 when that is lost, and must equal it but for rounding. After each fault there must be one line that names the cause, and after
each run nothing may be left on any host: no process, no folder in memory, no log. Needs root, for the namespaces, and OpenSSH.
"""
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "hosts")]
import crash_soak  # noqa: E402
import restart_soak  # noqa: E402
import testbed  # noqa: E402
from crash_soak import carry_out, expect  # noqa: E402
from restart_soak import memory_folders  # noqa: E402

FAULTS = {"a rank killed": 6, "a rank crashed": 2, "a rank hung": 2, "host n2 killed": 5, "the cable pulled for a moment": 3,
          "the cable pulled": 2, "the launcher killed": 2}
OF_ONE_RANK = ("a rank killed", "a rank crashed", "the launcher killed")
MOMENT_S, LONG_S = (0.2, 1.2), (8.0, 30.0)
RESTART_WITHIN_S = {"the cable pulled": 120.0}
ROUNDING = 1e-5
# What a line that names the cause says. {rank}: the victim, or that of n2.
CAUSES = {"a rank killed": r"rank {rank} of \d failed first: SIGKILL", "a rank crashed": r"rank {rank} of \d failed first: SIGSEGV",
          "a rank hung": r"rank {rank} (of \d )?has not|rank {rank} is |rank {rank} of \d failed first: SIGKILL",
          "host n2 killed": r"ssh to n2 failed|rank {rank} is gone", "the cable pulled": r"ssh to n2 failed|rank \d is gone|rank \d (of \d )?has not|cannot be reached"}


class Run(crash_soak.Run):
    bed = None
    flags = ["--set", "trainer.num_threads=1"]

    def environment(self):
        return {**super().environment(), **self.bed.environment(), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments, flags=(), **options):
        return super().start(*arguments, flags=[*self.flags, *flags], **options)

    def spread(self, hosts, flags):
        """On these hosts, in this order."""
        self.hosts = hosts
        (self.base / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
        self.place = ["--hostfile", self.base / "hosts", "--launcher-args", f"-F {self.bed.folder}/ssh_config"]
        self.flags = [*self.flags, *flags]


class Elastic(Run):
    """Each rank draws numbers of its own, so nothing that is drawn."""
    sameness = "the same but for rounding"
    flags = [*Run.flags, "--set", "model.dropout=0", "--set", "data.flip=false"]


class Soak(restart_soak.Soak):
    make_run = Run
    gone_within_s = 60.0  # a connection that was cut off notices late that it is closed
    backends = ("auto", "gloo")

    def __init__(self, base, seed, num_kills):
        bed_folder = base / "bed"
        bed_folder.mkdir()
        Run.bed = self.bed = testbed.Testbed(bed_folder)
        self.bed.start_sshd()
        super().__init__(base, seed, num_kills)
        self.expected["elastic"] = self.undisturbed(Elastic(base, "whole_elastic", "fp32"))
        self.whole_s *= 2  # ranks are there later than on one host
        self.restore_at = self.return_at = self.restore = None
        self.processes_before = set(testbed.processes())

    def end(self):
        self.bed.end()

    def new_run(self, number):
        is_elastic = number % 3 == 2
        run = (Elastic if is_elastic else Run)(self.base, f"run_{number}", ("fp32", "bf16")[number % 3 == 1])
        hosts = ["n1", "n2"] if self.source.random() < 0.5 else ["n2", "n1"]
        run.spread(hosts, ["--nnodes", "1:2"] if is_elastic else [])
        return run

    # ---------------------------------------------------------------------------------------------- faults

    def num_ranks(self, run):
        return 1 if "without host" in run.output() else 2

    def choose(self, run):
        kinds = {kind: weight for kind, weight in FAULTS.items() if self.num_ranks(run) == 2 or kind in OF_ONE_RANK}
        return self.source.choices(list(kinds), kinds.values())[0]

    def carry_out(self, kind, run, process):
        ranks = self.ranks_of(run)
        if len(ranks) < self.num_ranks(run):
            return False
        self.said_before, self.restarts_before = len(run.output()), self.num_restarts(run)
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
                os.kill(pid, restart_soak.SIGNALS.get(kind, signal.SIGKILL))
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

    @staticmethod
    def num_restarts(run):
        return len(re.findall(r"restart \d+ of 1000", run.output()))

    def await_restart(self, run, process, kind, restarts):
        """Counts from the fault on: a host that has been killed may need several starts."""
        if kind == "the cable pulled for a moment":
            return self.await_progress(run, process)
        begin = time.monotonic()
        while process.poll() is None:
            self.repair()
            if self.num_restarts(run) > self.restarts_before:
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
        expect(self.num_restarts(run) == self.restarts_before, "a moment without the cable has ended the ranks:", run.output())
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


def main():
    if reason := testbed.enter():
        print(f"error: {reason}")
        return 1
    soak, seconds = carry_out(Soak, __doc__.splitlines()[0], "tessera_hosts_soak_")
    soak.end()
    print(", ".join(f"{number} {what}" for what, number in soak.counts.items()))
    for kind in FAULTS:
        if times := [took for one, took in soak.seconds if one == kind]:
            print(f"{kind}: it goes on after {statistics.median(times):.2f} s (median), at most {max(times):.2f} s")
    print(f"runs without a host differ by rounding, at most {soak.worst['rounding']:.1e}; nothing was left behind "
          f"{soak.worst['seconds until nothing is left']:.1f} s after a run's end, at most\n{seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
