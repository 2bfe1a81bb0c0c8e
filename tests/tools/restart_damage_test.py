"""`latest`, a manifest, a file or a folder of the run's checkpoints is damaged while its ranks die: a restart takes the newest one that is
whole, in memory or on disk, and says so. --resume by hand never takes another one by itself."""
import os
import shutil
import signal
import unittest
from pathlib import Path

from restarts import Restarts

SAVES = {"save_every_steps": 4}


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at if at >= 0 else len(content) + at] ^= 1
    path.write_bytes(content)


# What is done to the checkpoints' folder and the newest checkpoint in it, and a part of the line that says so.
DAMAGES = {
    "latest names another": (lambda folder, tag: flip(folder / "latest", 0), r"checkpoints/latest: names flobal_step\d+, which is not there"),
    "latest is no name": (lambda folder, tag: (folder / "latest").write_bytes(b"\0\xff\n"), "checkpoints/latest: does not name a checkpoint"),
    "latest is empty": (lambda folder, tag: (folder / "latest").write_bytes(b""), "checkpoints/latest: does not name a checkpoint"),
    "latest is long": (lambda folder, tag: (folder / "latest").write_bytes(b"x" * 100_000), "checkpoints/latest: does not name a checkpoint"),
    "latest is gone": (lambda folder, tag: (folder / "latest").unlink(), "checkpoints/latest: is not there"),
    "manifest flipped": (lambda folder, tag: flip(folder / tag / "manifest.json", -500), r"global_step\d+/manifest.json"),
    "manifest's head flipped": (lambda folder, tag: flip(folder / tag / "manifest.json", 5), r"global_step\d+/manifest.json"),
    "manifest cut": (lambda folder, tag: os.truncate(folder / tag / "manifest.json", 700), r"global_step\d+/manifest.json"),
    "manifest empty": (lambda folder, tag: os.truncate(folder / tag / "manifest.json", 0), r"global_step\d+/manifest.json"),
    "manifest gone": (lambda folder, tag: (folder / tag / "manifest.json").unlink(), r"global_step\d+: is no whole checkpoint"),
    "file flipped": (lambda folder, tag: flip(folder / tag / "rank_00001.h5", -2000), r"rank_00001.h5: block 0 .* is damaged"),
    "file cut": (lambda folder, tag: os.truncate(folder / tag / "rank_00000.h5", 100), "rank_00000.h5: found 100 bytes"),
    "file gone": (lambda folder, tag: (folder / tag / "rank_00001.h5").unlink(), "rank_00001.h5: cannot be read"),
    "folder gone": (lambda folder, tag: shutil.rmtree(folder / tag), r"checkpoints/latest: names global_step\d+, which is not there"),
}

ALL = os.environ.get("RESTART_DAMAGES") == "all"
ON_DISK = DAMAGES if ALL else ("latest is no name", "file flipped", "folder gone")
IN_MEMORY = ("latest is empty", "latest is gone", "manifest flipped", "folder gone") if ALL else ("manifest flipped",)


class RestartDamageTest(Restarts):
    def damage(self, process, what, at):
        """Stops the ranks of `run` after step `at`, damages its newest checkpoint, and kills them."""
        self.wait_for_steps(process, at)
        ranks = list(self.ranks().values())
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        folder = self.folder / "run" / "checkpoints"
        tag = (folder / "latest").read_text().strip()
        what(folder, tag)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        return int(tag.removeprefix("global_step"))

    def check_resumed(self, outcome, said):
        self.check_same(outcome)
        lines = [line for line in outcome.err.splitlines() if "; the run continues from " in line]
        self.assertEqual(len(lines), 1, outcome)
        self.assertRegex(lines[0], "^warning: .*" + said, outcome)
        return lines[0].rpartition("; the run continues from ")[2]

    def test_the_one_before_on_disk(self):
        """Without memory, with two on disk. With overwrite_output_dir a run that took the checkpoints for another's would replace them."""
        self.undisturbed("--nproc", 2)
        keep = {"checkpoint": {"keep_last": 2, "fsync": False}}
        for name in ON_DISK:
            what, said = DAMAGES[name]
            with self.subTest(name):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                config = self.configure("run", trainer={**SAVES, "overwrite_output_dir": True}, **keep)
                process = self.start("train", config, "--nproc", 2, "--max-restarts", 3)
                newest = self.damage(process, what, 14)
                outcome = self.finish(process)
                continued = self.check_resumed(outcome, said)
                expected = newest if name.startswith("latest") else newest - 4
                self.assertEqual(continued, f"run/checkpoints/global_step{expected}")
                self.assertEqual(self.resumed_at(outcome), [expected], outcome)

    def test_the_one_in_memory(self):
        """Only one on disk, which is damaged."""
        self.undisturbed("--nproc", 2)
        keep = {"checkpoint": {"keep_last": 1, "fsync": False}, "trainer": {**SAVES, "save_in_memory_every_steps": 1}}
        for name in IN_MEMORY:
            what, said = DAMAGES[name]
            with self.subTest(name):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                process = self.start("train", self.configure("run", **keep), "--nproc", 2, "--max-restarts", 3)
                self.damage(process, what, 14)
                outcome = self.finish(process)
                self.assertRegex(self.check_resumed(outcome, said), "/dev/shm/tessera_memory_|run/checkpoints/" if name.startswith("latest") else "/dev/shm/tessera_memory_")

    def test_damage_in_memory_as_well(self):
        """What is whole is the one before on disk."""
        self.undisturbed("--nproc", 2)
        keep = {"checkpoint": {"keep_last": 2, "fsync": False}, "trainer": {**SAVES, "save_in_memory_every_steps": 1}}
        process = self.start("train", self.configure("run", **keep), "--nproc", 2, "--max-restarts", 3)

        def both(folder, tag):
            for environment in self.marked().values():
                for manifest in Path(environment.get("TESSERA_MEMORY_DIR", "/nonexistent")).glob("global_step*/manifest.json"):
                    os.truncate(manifest, 300)
            (folder / tag / "manifest.json").unlink()
        newest = self.damage(process, both, 14)
        outcome = self.finish(process)
        continued = self.check_resumed(outcome, r"the latest checkpoint in memory is not used: .*; .*global_step\d+: is no whole checkpoint")
        self.assertEqual(continued, f"run/checkpoints/global_step{newest - 4}")

    def test_nothing_is_left(self):
        """Two attempts, and then a line that says what is wrong."""
        keep = {"checkpoint": {"keep_last": 1, "fsync": False}}
        process = self.start("train", self.configure("run", trainer={**SAVES, "eval_every_epochs": 0}, **keep), "--nproc", 2, "--max-restarts", 50)

        def all_gone(folder, tag):  # the one before is removed after a save
            for one in folder.glob("global_step*"):
                shutil.rmtree(one)
        self.damage(process, all_gone, 14)
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 1, outcome)
        errors = [line for line in outcome.err.splitlines() if "no whole checkpoint of this run is left" in line]
        self.assertRegex(errors[-1], r"^error: trainer.output_dir: .*latest: names global_step\d+, which is not there")
        self.assertLessEqual(len(errors), 2, outcome)

    def test_by_hand_it_is_an_error_that_names_the_others(self):
        config = self.configure("run", trainer={**SAVES, "max_steps": 12}, checkpoint={"keep_last": 3, "fsync": False})
        self.assertEqual(self.run_tool("train", config, "--nproc", 2).code, 0)
        folder = self.folder / "run" / "checkpoints"
        latest = (folder / "latest").read_bytes()
        for content, *ranks in ((b"",), (b"global_stepp12\n",), (None, "--nproc", 2)):
            with self.subTest(content):
                (folder / "latest").unlink(missing_ok=True)
                if content is not None:
                    (folder / "latest").write_bytes(content)
                self.assertRegex(self.error_of("train", config, "--resume", *ranks),
                                 r"error: .*latest.*; complete are global_step4, global_step8, global_step12 "
                                 r".*: --resume global_step12 continues from that one\n")
        (folder / "latest").write_bytes(latest)
        flip(folder / "global_step12" / "manifest.json", -500)
        for tag in ([], ["global_step12"]):
            self.assertRegex(self.error_of("train", config, "--resume", *tag),
                             r"error: .*global_step12/manifest.json.*; complete are global_step4, global_step8 .*: --resume global_step8")
        outcome = self.run_tool("train", config, "--resume", "global_step8")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(self.resumed_at(outcome), [8])

    def test_a_damaged_best_checkpoint_does_not_stop_a_run_at_its_end_again_and_again(self):
        config = self.configure("run", trainer={**SAVES, "max_steps": 32, "load_best_at_end": True}, optimizer={"type": "SGD", "params": {"lr": 0}},
                                checkpoint={"keep_last": 1, "fsync": False})  # so the first evaluation is the best
        self.assertEqual(self.run_tool("train", config).code, 0)
        best = self.folder / "run" / "checkpoints" / "global_step16"
        self.assertTrue(best.is_dir())
        flip(best / "rank_00000.h5", -2000)
        for name in ("all_results.json", "model.safetensors"):  # as a run that was killed before its end
            (self.folder / "run" / name).unlink()
        outcome = self.run_tool("train", config, "--resume")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertRegex(outcome.err, "^warning: the best checkpoint is not used, the last weights are: run/checkpoints/global_step16: rank_00000.h5: block 0 ")
        self.assertTrue((self.folder / "run" / "model.safetensors").exists())

    def test_a_checkpoint_of_another_run_is_refused(self):
        config = {name: self.configure(name, trainer={**SAVES, "max_steps": 8}, checkpoint={"fsync": False}, seed=seed)
                  for name, seed in (("run", 1), ("other", 2))}
        for name in config:
            self.assertEqual(self.run_tool("train", config[name]).code, 0)
        ids = {name: (self.folder / name / "run_id").read_text().strip() for name in config}
        self.assertNotEqual(ids["run"], ids["other"])
        shutil.rmtree(self.folder / "run" / "checkpoints")
        shutil.copytree(self.folder / "other" / "checkpoints", self.folder / "run" / "checkpoints")
        outcome = self.run_tool("train", config["run"], "--resume", "--set", "trainer.max_steps=12")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertRegex(outcome.err, f"error: run/checkpoints/global_step8: was saved by the run {ids['other']}, and this is the folder of the run "
                                      rf"{ids['run']} \(run/run_id\)")
        (self.folder / "run" / "run_id").unlink()  # as the error says, and as in folders of older versions
        outcome = self.run_tool("train", config["run"], "--resume", "--set", "trainer.max_steps=12")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual((self.folder / "run" / "run_id").read_text().strip(), ids["other"])
        outcome = self.run_tool("train", config["run"], "--set", "trainer.overwrite_output_dir=true")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertNotIn((self.folder / "run" / "run_id").read_text().strip(), ids.values())


if __name__ == "__main__":
    unittest.main()
