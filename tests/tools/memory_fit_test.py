"""`tessera memory --fit`: what it proposes is trained here, and the kernel says how much memory that took."""
import json
import os
import re
import shutil
import subprocess
import unittest

from terminal import render, run_on_terminal
from tool import ROOT, TESSERA, TIMEOUT_S, ToolTest

# A GPT with 5 million parameters: 80 MB of state in fp32 with AdamW.
MODEL = {"type": "gpt", "dim": 256, "layers": 6, "heads": 4, "vocabulary": 512, "sequence": 32}
# What a setting that was measured must leave free at least (fit_command.cc, reserve_of).
RESERVE_MB = 25


class FitTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.write("c.json", self.gpt())

    def gpt(self, **changes):
        config = self.config(model=MODEL, data={"type": "text", "path": str(ROOT / "LICENSE"), "test_fraction": 0.05, "sample_bytes": 8},
                             train_batch_size=None, train_micro_batch_size_per_gpu=4, zero_optimization={"unit_numel": 300_000})
        # One thread: on a busy machine several of them wait for each other in each small operator.
        config["trainer"].update(eval_batch_size=4, num_threads=1)
        config.update(changes)
        return config

    def fit(self, *args, config="c.json"):
        outcome = self.run_tool("memory", "--fit", config, *args)
        self.assert_succeeded(outcome)
        self.assertLessEqual(max(map(len, outcome.out.splitlines())), 80, outcome.out)
        return outcome.out

    def chosen(self, name="c_fit.json"):
        return json.loads((self.folder / name).read_text())

    def train(self, *args):
        """`tessera train` with one rank and 6 steps: its largest resident set by the kernel, as the only child of a process, in MB,
        and its losses."""
        args = [*args, "--set", "trainer.max_steps=6"]
        script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True);"
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        done = subprocess.run(["python3", "-c", script, TESSERA, "train", *map(str, args)], cwd=self.folder, check=True, capture_output=True,
                              text=True, env=self.environment(), timeout=TIMEOUT_S)
        losses = self.losses()
        shutil.rmtree(self.folder / "run")
        return int(done.stdout) * 1024 / 1e6, losses

    def rows(self, out):
        rows = []
        for line in out.splitlines():
            match = re.match(r"(all in memory|optimizer on disk|parameters on disk too) +(\d)  (\w+) +(\d+)x(\d+) +(>?)(\d+) +(\S+)$", line)
            if match:
                place, stage, policy, micro, others, above, mb, step = match.groups()
                rows.append({"place": place, "stage": int(stage), "policy": policy, "micro": int(micro), "times": int(others),
                             "above": above == ">", "MB": int(mb), "step": step})
        self.assertGreater(len(rows), 0, out)
        return rows

    def test_what_fits_as_it_is_stays_as_it_is(self):
        out = self.fit("--memory", "8GB")
        self.assertIn("Why: nothing costs less, and it fits.", out)
        found = self.chosen()
        self.assertEqual(found["zero_optimization"], {"unit_numel": 300_000, "stage": 0})
        self.assertEqual(found["activation_checkpointing"], {"policy": "none"})
        self.assert_succeeded(self.run_tool("train", "c.json"))
        expected = self.losses()
        shutil.rmtree(self.folder / "run")
        self.assert_succeeded(self.run_tool("train", "c_fit.json"))
        self.assertEqual(self.losses(), expected)

    def refused(self, *args):
        """The one line of a limit that nothing fits into."""
        outcome = self.run_tool("memory", "--fit", "c.json", *args)
        self.assertEqual(outcome.code, 1, outcome)
        self.assertEqual(len(outcome.err.splitlines()), 1, outcome)
        self.assertFalse((self.folder / "c_fit.json").exists())
        self.assertEqual(list(self.tmp.iterdir()), [])
        self.assert_nothing_runs()
        return outcome

    def test_the_least_limit_that_an_error_names_is_enough(self):
        as_it_is, _ = self.train("c.json")
        found = re.search(r"error: --memory 100MB: no setting fits; the least limit that was found is (\d+)MB \(parameters on disk too", self.refused("--memory", "100MB").err)
        least = int(found[1])
        self.assertLess(least, as_it_is - 30, "there is something to choose")
        self.check_proposal(least)

    def test_a_limit_that_excludes_the_configuration_as_it_is(self):
        self.check_proposal(round(self.train("c.json")[0] - 5))

    def check_proposal(self, limit):
        """What is proposed is trained within the limit, with evaluation and checkpoints, to the bits of the configuration."""
        out = self.fit("--memory", f"{limit}MB")
        chosen = re.search(r": ([\d.]+) MB of [\d.]+ MB, measured", out.replace("\n ", ""))
        self.assertLessEqual(float(chosen[1]) + RESERVE_MB, limit)
        self.assertLessEqual(sum(row["step"] != "-" for row in self.rows(out)), 5, "what the formulas exclude is not tried")
        found = self.chosen()
        self.assertIn("offload_optimizer", found["zero_optimization"])
        peak, losses = self.train("c_fit.json")
        self.assertLessEqual(peak, limit)
        self.assertEqual(found["train_batch_size"], 4)
        # The order of sums depends on the micro-batch, and nothing else changes a bit.
        same = [f"{key}={found[key]}" for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")]
        self.assertEqual(losses, self.train("c.json", *(word for one in same for word in ("--set", one)))[1])

    def test_ranks_share_the_memory(self):
        out = self.fit("--nproc", 2, "--memory", "8GB", "--set", "zero_optimization.stage=1")
        self.assertIn("Memory of 2 ranks on this host", out)
        found = self.chosen()
        self.assertEqual(found["train_batch_size"], 8)
        self.assertEqual(found["zero_optimization"]["stage"], 1)
        self.assert_succeeded(self.run_tool("train", "c_fit.json", "--nproc", 2))

    def test_a_trial_ends_at_its_limit_on_all_ranks(self):
        """The hidden flags by which the command starts the ranks of a trial: each ends with success, and a file says how much one had."""
        for ranks in (1, 2):
            folder = self.folder / f"trial{ranks}"
            folder.mkdir()
            outcome = self.run_tool("launch", "-n", ranks, "--", TESSERA, "memory", "c.json", "--trial-fit", "--trial-folder", folder,
                                    "--trial-limit", 60_000_000)
            self.assert_succeeded(outcome)
            self.assertEqual([(path.name, path.read_text()) for path in folder.iterdir() if path.name != "run"], [("struck", "60000000")])

    def test_an_allocation_that_fails_is_a_setting_that_does_not_fit(self):
        self.write("c.json", self.gpt(model={**MODEL, "vocabulary": 200_000}, train_micro_batch_size_per_gpu=4))
        script = 'ulimit -v 1350000; exec "$@"'
        done = subprocess.run(["bash", "-c", script, "-", TESSERA, "memory", "--fit", "c.json", "--memory", "8GB", "--no-disk"], cwd=self.folder,
                              capture_output=True, text=True, env=self.environment(), timeout=TIMEOUT_S)
        self.assertRegex(done.stdout, r"all in memory +0  none +4x1 +- +failed\n")
        self.assertRegex(done.stderr, r"^error: --memory 8GB: no setting fits; each that was tried grew, ran out of memory, or was ended at ")

    def test_the_formula_alone_says_that_nothing_fits(self):
        outcome = self.refused("--memory", "10MB", "--no-disk")
        self.assertRegex(outcome.err, r"^error: --memory 10MB: no setting fits; model state alone needs \d+MB \(.*\)\n$")
        self.assertTrue(all(row["step"] == "-" for row in self.rows(outcome.out)), "nothing was tried")

    def small_disk(self, megabytes):
        """A file system of that size, or a skipped test where none may be mounted."""
        image, folder = self.folder / "image", self.folder / "disk"
        image.write_bytes(b"")
        os.truncate(image, megabytes << 20)
        folder.mkdir()
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode != 0:
                self.skipTest(f"{command[0]} is not possible here")
        self.addCleanup(subprocess.run, ["umount", str(folder)], check=True)
        return folder

    def test_the_disk_is_too_small(self):
        disk = self.small_disk(16)
        said = self.refused("--memory", "100MB", "--disk", disk).err
        self.assertRegex(said, r"^error: --memory 100MB: no setting fits; .* and state on disk needs [\d.]+ MB in \S+/disk, which has [\d.]+ MB free\n$")

    def test_state_in_memory_is_no_state_on_disk(self):
        if not os.path.ismount("/dev/shm"):
            self.skipTest("no file system in memory here")
        self.assert_one_error(self.run_tool("memory", "c.json", "--fit", "--disk", "/dev/shm/x"), "--disk /dev/shm/x", "tmpfs")

    def test_the_file_keeps_what_was_written(self):
        text = json.dumps(self.gpt()).replace('"train_micro_batch_size_per_gpu"', '// a comment\n "per_device_train_batch_size"', 1)
        self.write("c.json", text)
        self.fit("--memory", "4GB", "--set", "optimizer.params.lr=0.5", "--output", "new.json")
        found = self.chosen("new.json")
        self.assertEqual(found["optimizer"], {"type": "AdamW", "params": {"lr": 0.5}})
        self.assertEqual((found["model"], found["train_micro_batch_size_per_gpu"]), (MODEL, 4))
        self.assertNotIn("per_device_train_batch_size", found)
        self.assertEqual(list(found)[:3], ["model", "data", "trainer"], "in the order of the file")

    def test_on_a_terminal(self):
        columns = 80
        process, written = run_on_terminal(lambda **streams: self.start("memory", "--fit", "c.json", "--memory", "8GB", **streams), columns, TIMEOUT_S)
        self.assertEqual(process.returncode, 0, written)
        self.assertIn(b"trial 1: all in memory, stage 0", written)
        lines = [line for line in render(written, columns) if line]
        self.assertTrue(lines[0].startswith("Memory of 1 rank"), lines)
        self.assertFalse(any("trial" in line for line in lines), lines)
        self.assertEqual(len(self.rows("\n".join(lines))), 1)


if __name__ == "__main__":
    unittest.main()
