"""What trainer.save_in_memory_every_steps costs, and how long a killed rank keeps a run: on one host, and on two network namespaces over ssh.

    .deps/venv/bin/python benchmarks/hosts/restart.py [--rates 1gbit,10gbit] [--config configs/gpt_33m.json] [--steps 8] [--rounds 2]

Two ranks. The link between the hosts is limited in both directions (tc tbf). Needs root, and sshd for two hosts.

step      ms between two steps' lines, without saves; median over all rounds
save      what a save in memory after each step adds to that
restart   s from SIGKILL of rank 1 to the line "resuming", which the ranks print when they have loaded the checkpoint
lost      steps that were done and are repeated
"""
import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]
import hosts  # noqa: E402

TESSERA = os.environ.get("TESSERA", str(ROOT / "build" / "tessera"))
STEP, RESUMED = re.compile(r"step (\d+)/"), re.compile(r"resuming after step (\d+), from /dev/shm/")


class Setting:
    """Where two ranks run."""

    def __init__(self, folder, bed, rate):
        self.folder, self.bed, self.rate = folder, bed, rate
        self.name = "1 host x 2 ranks" if rate is None else f"2 hosts x 1 rank, {rate}/s"
        (folder / "pair").write_text("n1 slots=1\nn2 slots=1\n")
        if rate is not None:
            for host in hosts.ADDRESSES:
                hosts.run(*bed.on(host), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")

    def start(self, args, every, steps):
        where = ["--nproc", 2] if self.rate is None else ["--hostfile", "pair", "--launcher-args", f"-F {self.folder}/ssh_config"]
        keys = {"trainer.max_steps": steps, "trainer.output_dir": f"{self.folder}/run", "trainer.overwrite_output_dir": "true",
                "trainer.save_in_memory_every_steps": every, "trainer.num_threads": 1, "trainer.device": "cpu", "steps_per_print": 1}
        command = [TESSERA, "train", args.config, *where, "--max-restarts", 1, *(f"--set={key}={value}" for key, value in keys.items())]
        return subprocess.Popen(list(map(str, command)), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ms_a_step(self, args, every):
        times, said = [], ""
        with self.start(args, every, args.steps + 2) as process:
            for line in process.stdout:
                said += line
                if STEP.match(line):
                    times.append(time.monotonic())
        if process.returncode != 0:
            sys.exit(said)
        return [1000 * (b - a) for a, b in zip(times[1:], times[2:])]  # the first gap has what is made once

    def restart(self, args):
        killed = done = resumed = None
        said = ""
        with self.start(args, 1, args.steps + 2) as process:
            for line in process.stdout:
                said += line
                if (step := STEP.match(line)) and not killed:
                    done = int(step[1])
                    if done == args.steps // 2 + 1:
                        os.kill(rank_1(), signal.SIGKILL)
                        killed = time.monotonic()
                elif killed and (found := RESUMED.match(line)):
                    resumed, after = time.monotonic() - killed, int(found[1])
        if process.returncode != 0 or resumed is None:
            sys.exit(said)
        return resumed, done - after


def rank_1():
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and b"\0RANK=1\0" in b"\0" + Path(f"/proc/{entry}/environ").read_bytes():
                return int(entry)
        except OSError:
            pass
    sys.exit("rank 1 does not run")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1gbit,10gbit", help="of a host's link, as tc writes them; empty: one host only")
    parser.add_argument("--config", default=str(ROOT / "configs" / "gpt_33m.json"), type=os.path.abspath)
    parser.add_argument("--steps", type=int, default=8, help="timed ones, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restart_bench_") as name:
        bed = hosts.Testbed(name)
        bed.start_sshd()
        os.environ.update(bed.environment())
        print(f"{'':28}{'step':>9}{'save':>9}{'restart':>9}{'lost':>6}", flush=True)
        for rate in [None, *filter(None, args.rates.split(","))]:
            setting = Setting(Path(name), bed, rate)
            times = {0: [], 1: []}
            for _ in range(args.rounds):
                for every, found in times.items():
                    found += setting.ms_a_step(args, every)
            restarts = [setting.restart(args) for _ in range(args.rounds)]
            plain, saving = (statistics.median(found) for found in times.values())
            print(f"{setting.name:28}{plain:6.0f} ms{saving - plain:6.0f} ms{statistics.median(s for s, _ in restarts):7.2f} s"
                  f"{max(lost for _, lost in restarts):6}", flush=True)
        bed.end()


if __name__ == "__main__":
    if reason := hosts.enter():
        sys.exit(reason)
    main()
