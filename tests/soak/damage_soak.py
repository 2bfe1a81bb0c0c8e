"""Checkpoints that are damaged while the ranks die, under `tessera train --max-restarts`: the run must go on from the newest that is whole.

    make soak-damage ARGS="--kills 40 --seed 1"

At a random moment both ranks are stopped; `latest`, or the manifest, a file or the whole folder of a checkpoint on disk, or the
checkpoint in memory is flipped, cut, emptied or removed; and the ranks are killed. There is always one left that is whole: the one before
on disk, or the one in memory. Each run over shared memory or Gloo, at a random stage, with synchronous or asynchronous saves, half of them
with a checkpoint in memory after each step. It must equal the undisturbed run to the bit. Needs the standard library only.
"""
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import crash_soak  # noqa: E402
import restart_soak  # noqa: E402
from crash_soak import carry_out, expect, names  # noqa: E402

STEPS_PER_EPOCH = 16
CONTINUES = "; the run continues from "


class Run(crash_soak.Run):
    def latest(self):
        """The step of the newest folder, as `latest` may be damaged."""
        return max([int(tag.removeprefix("global_step")) for tag in self.tags()], default=0)

    def tags(self):
        return {name for name in names(self.checkpoints) if name.startswith("global_step") and ".tmp" not in name}


class Soak(restart_soak.Soak):
    make_run = Run

    def new_run(self, number):
        self.damaged, self.ctimes = set(), {}
        return super().new_run(number)

    def choose(self, run):
        return "damage"

    def change(self, path):
        """Damages a file. Returns how."""
        how = self.source.choice(("flipped", "cut", "emptied", "removed"))
        size = path.stat().st_size
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
        environment = crash_soak.process_environment(next(iter(ranks.values())))
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
        ranks = self.ranks_of(run)
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
        self.counts["lines that say what was damaged"] += run.output().count(CONTINUES)


def main():
    soak, seconds = carry_out(Soak, __doc__.splitlines()[0], "tessera_damage_soak_")
    print(", ".join(f"{number} {what}" for what, number in soak.counts.items()))
    print(f"{seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
