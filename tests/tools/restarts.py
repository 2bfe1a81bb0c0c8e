"""Runs whose ranks die in the middle of training and are started again: what the tests of it have in common."""
import contextlib
import hashlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

from tool import NOISE, TIMEOUT_S, ToolTest

NUM_STEPS = 40
NO_DROPOUT = {"type": "fashion_mnist_cnn", "channels": 4, "hidden": 16, "dropout": 0}  # of which each rank draws its own


class Restarts(ToolTest):
    def setUp(self):
        super().setUp()
        self.memory_folders = set()
        self.num_recorded = 0  # steps, when a rank was killed the last time

    def start(self, *args, **options):
        """At a lower priority: on a busy machine, too, a test notices a step before the run has ended."""
        return super().start(*args, preexec_fn=lambda: os.nice(5), **options)

    def configure(self, name, **changes):
        """A run of 40 steps with a checkpoint every 4, in a folder of the same name. Batches of 12 of 203 samples: a step ends no
        epoch evenly."""
        trainer = {"max_steps": NUM_STEPS, "eval_batch_size": 16, "output_dir": name, "device": "cpu", "save_every_steps": 4, "num_threads": 1,
                   "load_best_at_end": False, **changes.pop("trainer", {})}
        return self.write(f"{name}.json", self.config(trainer=trainer, zero_optimization={"stage": 2}, **changes))

    def trained_once(self, name, *flags, **changes):
        """A run of this name, which a class trains once for each setting."""
        config = self.configure(name, **changes)
        kept = self.shared / hashlib.sha256(repr((name, flags, changes)).encode()).hexdigest()
        if not kept.exists():
            self.assert_succeeded(self.run_tool("train", config, *flags))
            (self.folder / name).rename(kept)
        shutil.copytree(kept, self.folder / name)

    def undisturbed(self, *flags, **changes):
        """All of its checkpoints stay."""
        self.trained_once("undisturbed", *flags, checkpoint={"keep_last": 0, "fsync": False}, **changes)
        self.check_complete("undisturbed")

    def ranks(self):
        found = {}
        for pid, environment in self.marked().items():
            with contextlib.suppress(OSError):  # it has just died
                if "RANK" in environment and Path(f"/proc/{pid}/comm").read_text().strip() == "tessera":
                    found[int(environment["RANK"])] = pid
        return found

    def parent(self, pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def kill_at(self, process, rank, num_steps, number=signal.SIGKILL, with_launcher=False):
        """Kills a rank once the run has a record of so many steps, and of one more than when a rank was killed before: it has gone on.
        `with_launcher`: what ends it is the end of its host's launcher."""
        self.wait_for_steps(process, max(num_steps, self.num_recorded + 1))
        self.memory_folders |= {environment["TESSERA_MEMORY_DIR"] for environment in self.marked().values() if "TESSERA_MEMORY_DIR" in environment}
        give_up = time.monotonic() + TIMEOUT_S
        while rank not in (ranks := self.ranks()):  # those before have just died
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), give_up, f"there is no rank {rank}")
            time.sleep(0.005)
        os.kill(self.parent(ranks[rank]) if with_launcher else ranks[rank], number)
        while number == signal.SIGKILL and ranks[rank] in self.ranks().values():
            self.assertLess(time.monotonic(), give_up, f"rank {rank} does not die")
            time.sleep(0.005)
        self.num_recorded = self.count_steps()

    def largest_difference(self):
        """Of a loss or gradient norm from that of the undisturbed run, relative."""
        pairs = zip(self.losses("run"), self.losses("undisturbed"), strict=True)
        return max(abs(a - b) / b for one, other in pairs for a, b in zip(one, other))

    def check_left_nothing(self, outcome):
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assert_nothing_runs()
        self.assertEqual([folder for folder in self.memory_folders if os.path.exists(folder)], [])
        for folder in self.tmp.glob("tessera_*"):  # logs of a failure are kept where they say more, and are named
            self.assertIn(str(folder), outcome.err)
            shutil.rmtree(folder)
        self.assertEqual(list(self.tmp.iterdir()), [])

    def check_same(self, outcome):
        """The run came to its end, as the undisturbed one to the bit, and left nothing."""
        self.assertEqual(outcome.code, 0, outcome)
        self.check_complete("run")
        self.assertEqual(self.losses("run"), self.losses("undisturbed"))
        self.assertEqual(self.digest("run"), self.digest("undisturbed"))
        self.check_left_nothing(outcome)

    def check_complete(self, folder):
        """All steps are there, once each."""
        steps = [record["step"] for record in self.lines_of_metrics(folder) if "loss" in record]
        self.assertEqual(steps, list(range(1, NUM_STEPS + 1)))

    def digest(self, folder):
        return hashlib.sha256((self.folder / folder / "model.safetensors").read_bytes()).hexdigest()

    def resumed_at(self, outcome):
        return [int(step) for step in re.findall(r"resuming after step (\d+)", outcome.out)]

    def check_fewer(self, most, killed, ranks, disturbed=None, **changes):
        """One of `most` hosts with a rank each is lost; the run goes on with fewer, on the same samples: losses and gradient norms of all
        steps are those of the undisturbed run but for rounding. `disturbed`: changes of this run alone. The hosts are this one: a
        stand-in for ssh runs the command here, and the end of it by a signal is a connection that broke."""
        changes["model"] = NO_DROPOUT
        self.undisturbed("--nproc", most, **changes)
        self.write("hosts", "".join(f"127.0.0.{host + 1} slots=1\n" for host in range(most)))
        (self.folder / "bin").mkdir()
        ssh = self.folder / "bin" / "ssh"
        ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\n"$@"\ncode=$?\n[ $code -le 128 ] || exit 255\nexit $code\n')
        ssh.chmod(0o755)
        process = self.start("train", self.configure("run", **changes, **(disturbed or {})), "--hostfile", "hosts", "--nnodes", f"1:{most}",
                             env={"PATH": f"{ssh.parent}:{os.environ['PATH']}"})
        self.kill_at(process, killed, 10, with_launcher=True)
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertRegex(outcome.err, rf"restart 1 of \d: {ranks} ranks? instead of {most}, without host 127\.0\.0\.{killed + 1}\b")
        self.check_complete("run")
        before, after = self.losses("undisturbed"), self.losses("run")
        start = self.resumed_at(outcome)[0]
        self.assertEqual(after[:start], before[:start])
        self.assertLess(self.largest_difference(), 1e-5)
        self.check_left_nothing(outcome)
        return outcome
