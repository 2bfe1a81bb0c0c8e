"""`tessera memory`: the table, its files, simulated worlds beside real ones, estimates."""
import json
import signal
import unittest
from pathlib import Path

from terminal import render, run_on_terminal
from tool import NUM_TRAIN, ROOT, TIMEOUT_S, ToolTest

USES = ["parameters", "gradients", "master", "optimizer", "snapshot", "communication", "disk_buffers", "activations", "other"]
STATE = USES[:5]


class MeasuredTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.write("c.json", self.config(train_batch_size=None, train_micro_batch_size_per_gpu=4))

    def memory(self, *args):
        outcome = self.run_tool("memory", "c.json", "--steps", 2, *args)
        self.assert_succeeded(outcome)
        return outcome.out

    def trials(self, *args):
        self.memory("--out", "m", *args)
        return json.loads((self.folder / "m" / "memory.json").read_text())["trials"]

    def test_table(self):
        out = self.memory("--nproc", 2)
        lines = out.splitlines()
        self.assertLessEqual(max(map(len, lines)), 80, out)
        self.assertIn("2 ranks (shm), fp32, AdamW", lines[0])
        self.assertRegex(out, r"\n +stage 0 +stage 1 +stage 2 +stage 3\n")
        self.assertEqual(next(line for line in lines if "difference" in line).split(), ["difference"] + ["0.00", "%"] * 4)
        for label in ("parameters", "gradients", "optimizer state", "activations and temporaries", "= allocator's peak", "a step, ms"):
            self.assertTrue(any(line.startswith(label) for line in lines), label)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["c.json", "tmp"], "no files unless asked for")

    def test_state_is_the_formula_at_every_stage(self):
        for trial in self.trials("--nproc", 2, "--set", "comm.backend=gloo", "--set", "bf16.enabled=true"):
            for use in STATE:
                self.assertEqual(trial["held"][use], trial["formula"][use], (trial["stage"], use))
            self.assertEqual(trial["peak"]["total"], sum(trial["peak"][use] for use in USES))
            self.assertEqual(trial["peak"]["total"], max(max(sum(row[1:]) for row in trial["timeline"]), trial["peak"]["total"]))
            self.assertEqual(list(trial["phases"]), ["forward", "backward", "step"])
            self.assertGreater(trial["step_ms"], 0)
            self.assertGreater(trial["process_peak"], 0)

    def test_files(self):
        out = self.memory("--nproc", 3, "--stages", "0,3", "--out", "a/b")
        folder = self.folder / "a" / "b"
        self.assertIn("in a/b", out)
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["memory.html", "memory.json", "memory_trace.json"])
        trials = json.loads((folder / "memory.json").read_text())["trials"]
        self.assertEqual([(trial["stage"], trial["rank"]) for trial in trials], [(stage, rank) for stage in (0, 3) for rank in range(3)])

    def test_a_folder_whose_name_is_not_utf8(self):
        outcome = self.run_tool("memory", "c.json", "--steps", 1, "--stages", 0, "--compare", "--out", "caf\udce9")
        self.assertEqual(outcome.code, 0, outcome)
        page = (self.folder / "caf\udce9" / "memory.html").read_text(encoding="utf-8")
        self.assertIn("stage 0, optimizer on disk", page)

    def test_a_setting_that_fails_is_left_out_of_the_comparison(self):
        # Twice the micro-batch makes a step of more samples than there are.
        self.write("c.json", self.config(train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=NUM_TRAIN // 2 + 1))
        outcome = self.run_tool("memory", "c.json", "--steps", 1, "--stages", 0, "--compare", "--out", "m")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("warning: --compare: stage 0, recomputation cheap, micro-batch 2: failed, and is left out of the page", outcome.err)
        page = (self.folder / "m" / "memory.html").read_text()
        self.assertIn("stage 0, optimizer on disk", page)
        self.assertNotIn("recomputation cheap, micro-batch 2", page)

    def test_what_was_measured_is_shown_where_a_signal_ends_a_later_stage(self):
        process = self.start("memory", "c.json", "--steps", 1, "--out", "m")
        at_stage_2 = lambda pid: b"--trial-stage\x002" in Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: E731
        while process.poll() is None:
            try:
                if any(map(at_stage_2, self.marked())):
                    process.send_signal(signal.SIGINT)
                    break
            except OSError:  # it has ended meanwhile
                pass
        outcome = self.finish(process)
        self.assertEqual(outcome.code, 128 + signal.SIGINT, outcome)
        self.assertIn("warning: stage 2: not measured; what follows is of the stages before it", outcome.err)
        self.assertRegex(outcome.out, r"\n +stage 0 +stage 1\n")
        trials = json.loads((self.folder / "m" / "memory.json").read_text())["trials"]
        self.assertEqual([trial["stage"] for trial in trials], [0, 1])

    def test_a_simulated_rank_holds_what_a_real_one_does(self):
        changes = ("--stages", "0,3", "--set", "comm.backend=gloo")
        real = self.trials("--nproc", 3, *changes)
        for simulated in self.trials("--simulate-world", 3, "--rank", 2, *changes):
            match = next(t for t in real if (t["stage"], t["rank"]) == (simulated["stage"], 2))
            for use in STATE:
                self.assertEqual(simulated["held"][use], match["held"][use])
            self.assertAlmostEqual(simulated["peak"]["total"] / match["peak"]["total"], 1, delta=0.01, msg=simulated["stage"])

    def test_schedules_that_end_with_the_run(self):
        self.write("c.json", self.config(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}))
        self.memory("--stages", "2")

    def test_a_large_simulated_world(self):
        trials = self.trials("--simulate-world", 1000, "--rank", 999, "--stages", "3")
        self.assertEqual(trials[0]["world_size"], 1000)
        self.assertEqual(trials[0]["model_state"], trials[0]["formula"]["total"])


class OnDiskTest(ToolTest):
    """Two tiers: what is on disk, and what is not."""

    OPTIMIZER = {"offload_optimizer": {"device": "nvme", "nvme_path": "disk", "buffer_count": 1}}
    ALL = {**OPTIMIZER, "offload_param": {"device": "nvme", "nvme_path": "disk", "buffer_count": 2}}
    KINDS = ["parameters", "gradients", "master", "optimizer"]

    def trials(self, zero, *args, **changes):
        self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 16, "hidden": 256}, train_batch_size=None,
                                         train_micro_batch_size_per_gpu=4, zero_optimization={"unit_numel": 50_000, **zero}, **changes))
        outcome = self.run_tool("memory", "c.json", "--steps", 2, "--out", "m", "--set", "comm.backend=gloo", *args)
        self.assert_succeeded(outcome)
        self.out = outcome.out
        return {(t["stage"], t["rank"]): t for t in json.loads((self.folder / "m" / "memory.json").read_text())["trials"]}

    def test_memory_and_disk_hold_what_memory_held(self):
        together = self.trials({}, "--nproc", 2, bf16={"enabled": True})
        for zero, kinds in ((self.OPTIMIZER, ("optimizer", "master")), (self.ALL, ("optimizer", "master", "gradients", "parameters"))):
            with self.subTest(kinds=kinds):
                apart = self.trials(zero, "--nproc", 2, bf16={"enabled": True})
                self.assertEqual({stage for stage, rank in apart}, {3} if zero is self.ALL else {1, 2, 3})
                for key, trial in apart.items():
                    memory, disk = trial["held"], trial["disk"]["held"]
                    for kind in self.KINDS:
                        self.assertEqual(memory[kind] + disk[kind], together[key]["held"][kind], (key, kind))
                        self.assertEqual((memory[kind], disk[kind]), (trial["formula"][kind], trial["disk"]["formula"][kind]), (key, kind))
                        if kind in kinds:
                            self.assertEqual(memory[kind], 0, (key, kind))
                    self.assertEqual(disk["gradients"] > 0, key[0] >= 2, "sharded gradients lie with the optimizer")
                    # Tensors begin at whole pages: at most four a unit, of about 50,000 elements or one layer.
                    self.assertGreaterEqual(trial["disk"]["file"], sum(disk[kind] for kind in self.KINDS))
                    self.assertLessEqual(trial["disk"]["file"], sum(disk[kind] for kind in self.KINDS) + 4096 * 4 * 12)
                    buffer = trial["disk"]["buffers_limit"] / (4 if zero is self.ALL else 2)
                    at_once = 4  # that an update needs: two states, the gradient, the master beside bf16
                    self.assertGreater(trial["peak"]["disk_buffers"], 0)
                    self.assertLessEqual(trial["peak"]["disk_buffers"], max(trial["disk"]["buffers_limit"], at_once * buffer) + 4096 * 104)
                    # What stays in the buffers from one step to the next is neither read nor, at the end, written yet.
                    buffered = trial["disk"]["buffers_limit"]
                    self.assertGreaterEqual(trial["disk"]["written"], disk["optimizer"] - buffered)
                    self.assertGreaterEqual(trial["disk"]["read"], disk["optimizer"] - buffered)
                self.assertEqual(next(iter(together.values()))["peak"]["disk_buffers"], 0)
        self.assertEqual(list((self.folder / "disk").iterdir()), [], "the file has no name, and is gone")

    def test_the_table_the_files_and_the_estimate_have_both(self):
        self.trials(self.ALL, "--nproc", 2)
        self.assertLessEqual(max(map(len, self.out.splitlines())), 80, self.out)
        above, below = self.out.split("on disk, between steps\n")
        self.assertIn("buffers for the disk", above)
        for label in ("parameters", "gradients", "optimizer state", "model state, measured", "  by formula", "the file, by the kernel",
                      "buffers by buffer_count", "read by a step", "written by a step"):
            self.assertTrue(any(line.startswith(label) for line in below.splitlines()), label)
        self.assertEqual(next(line for line in below.splitlines() if "difference" in line).split()[1:], ["0.00", "%"])
        trial = next(t for t in json.loads((self.folder / "m" / "memory.json").read_text())["trials"] if t["rank"] == 1)
        for kind in self.KINDS:
            self.assertEqual(trial["disk"]["held"][kind], trial["disk"]["formula"][kind])
        outcome = self.run_tool("memory", "c.json", "--estimate", "--world", 2)
        self.assert_succeeded(outcome)
        on_cpus = outcome.out.split("on CPU ranks")[1].split("on GPUs")[0]
        last = next(line for line in on_cpus.splitlines() if line.startswith("stage 3")).split()
        self.assertEqual(float(last[4]), 0)
        self.assertAlmostEqual(float(last[5]), trial["disk"]["held"]["total"] / 1e6, delta=0.06)

    def test_recomputed_activations_are_not_held(self):
        self.write("c.json", self.config(model={"type": "gpt", "dim": 64, "layers": 4, "heads": 4, "vocabulary": 256, "sequence": 64},
                                         data={"type": "text", "path": str(ROOT / "LICENSE"), "test_fraction": 0.2},
                                         train_batch_size=None, train_micro_batch_size_per_gpu=16))
        held = {}
        for policy in ("none", "cheap", "block"):
            outcome = self.run_tool("memory", "c.json", "--steps", 1, "--stages", "0", "--out", "m", "--set", f"activation_checkpointing.policy={policy}")
            self.assert_succeeded(outcome)
            held[policy] = json.loads((self.folder / "m" / "memory.json").read_text())["trials"][0]["peak"]["activations"]
            self.assertEqual("activations " + policy in outcome.out, policy != "none", outcome.out)
        self.assertLess(held["cheap"], 0.9 * held["none"])
        self.assertLess(held["block"], 0.7 * held["cheap"])

    def test_on_a_narrow_terminal(self):
        """Two stages beside each other, and then the others."""
        self.write("c.json", self.config(zero_optimization={"stage": 3, **self.OPTIMIZER}))
        process, written = run_on_terminal(lambda **streams: self.start("memory", "c.json", "--steps", 1, **streams), 60, TIMEOUT_S)
        self.assertEqual(process.returncode, 0, written)
        lines = render(written, 60)
        self.assertEqual([line.split().count("stage") for line in lines if line.startswith("   ") and "stage" in line], [2, 2])
        self.assertEqual(sum(line.startswith("model state, measured") for line in lines), 4, lines)


class EstimateTest(ToolTest):
    def estimate(self, *args):
        outcome = self.run_tool("memory", "--estimate", *args)
        self.assert_succeeded(outcome)
        self.assertLessEqual(max(map(len, outcome.out.splitlines())), 80, outcome.out)
        return outcome.out

    def columns(self, out, column):
        return [line.split()[column] for line in out.splitlines() if line.startswith("stage ")][:4]

    def test_the_zero_papers_table(self):
        out = self.estimate("--params", "7.5e9", "--world", 64)
        self.assertEqual(self.columns(out, -1), ["120.0", "31.4", "16.6", "1.9"], "gradients in bf16: the paper's 16 bytes a parameter")
        self.assertEqual(self.columns(out, -2), ["135.0", "46.4", "16.9", "2.1"], "gradients in fp32, the default: 18 bytes")
        of_thousands = self.estimate("--params", "7e9", "--world", 4096)
        self.assertEqual(self.columns(of_thousands, -2), ["126.0", "42.0", "14.0", "0.031"], "7e9 * 18 bytes / 4096: not 0")

    def test_tiers_of_gpus(self):
        out = self.estimate("--params", "1e9", "--world", 2).split("on GPUs")[1]
        found = {line.split()[1]: line.split()[2:] for line in out.splitlines() if line.startswith("stage ")}
        # bf16 parameters 2 GB, fp32 gradients 4, master and states 12: what is sharded is halved.
        self.assertEqual(found["0"], ["-"] * 6)
        self.assertEqual(found["1"], ["6.0", "6.0"] + ["-"] * 4)
        self.assertEqual(found["2"], ["2.0", "8.0"] + ["-"] * 4)
        self.assertEqual(found["3"], ["1.0", "8.0", "0.0", "9.0", "0.0", "9.0"])
        out = self.estimate("--params", "1e9", "--world", 2, "--precision", "fp32").split("on GPUs")[1]
        found = {line.split()[1]: line.split()[2:] for line in out.splitlines() if line.startswith("stage ")}
        # fp32: masters on the host beside the device's values; where both are on the host they are one.
        self.assertEqual(found["3"], ["2.0", "8.0", "0.0", "8.0", "0.0", "8.0"])

    def test_groups_of_ranks(self):
        def row(*args):
            out = self.estimate("--params", "7.5e9", "--world", 64, *args)
            return next(line.split() for line in out.splitlines() if line.startswith(("mics", "hpz")))
        # Of 15 GB of parameters, 30 of gradients, 30 of masters and 60 of states: an eighth; a 64th, and an eighth of the parameters.
        self.assertEqual(row("--mics-shard-size", 8)[1:7], ["8", "1.9", "3.8", "3.8", "7.5", "16.9"])
        self.assertEqual(row("--hpz-partition-size", 8)[1:7], ["8", "2.1", "0.5", "0.5", "0.9", "4.0"])

    def test_groups_of_ranks_of_a_configuration(self):
        """The estimate equals the measured state, and that of a rank which is measured alone."""
        name = self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 16, "hidden": 256}, train_batch_size=12))
        for key in ("mics_shard_size", "zero_hpz_partition_size"):
            changes = ["--set", "comm.backend=gloo", "--set", f"zero_optimization.{key}=2"]
            held = []
            for ranks in (["--nproc", 4], ["--simulate-world", 4, "--rank", 3]):
                self.assert_succeeded(self.run_tool("memory", name, "--steps", 1, "--out", "m", *ranks, *changes))
                trials = json.loads((self.folder / "m" / "memory.json").read_text())["trials"]
                self.assertEqual({trial["stage"] for trial in trials}, {3}, "the stage at which the key has a meaning")
                for trial in trials:
                    state = {use: trial["held"][use] for use in trial["formula"] if use != "total"}
                    self.assertEqual({**state, "total": sum(state.values())}, trial["formula"], key)
                held.append(trials[-1]["formula"])
            self.assertEqual(*held)
            out = self.estimate(name, "--world", 4, *changes, "--set", "zero_optimization.stage=3")
            shown = next(line.split()[2:7] for line in out.splitlines() if line.startswith(("mics 2", "hpz 2")))
            expected = [held[0][use] / 1e6 for use in ("parameters", "gradients", "master", "optimizer")]
            for number, wanted in zip(shown, [*expected, sum(expected)]):
                self.assertAlmostEqual(float(number), wanted, delta=0.06, msg=(key, out))

    def test_other_optimizers_and_fp32(self):
        out = self.estimate("--params", "1B", "--world", 4, "--precision", "fp32", "--optimizer", "Lion")
        self.assertEqual(self.columns(out, -1), ["12.0", "9.0", "6.0", "3.0"])

    def test_of_a_configuration(self):
        """The estimate equals the measured state of the same model."""
        name = self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 16, "hidden": 256}, train_batch_size=10))
        for changes in (["--set", "bf16.enabled=true"], ["--set", "optimizer.type=SGD", "--set", "data_types.grad_accum_dtype=fp32"], ["--set", "checkpoint.async=true"]):
            changes = [*changes, "--set", "comm.backend=gloo"]
            self.assert_succeeded(self.run_tool("memory", name, "--steps", 1, "--nproc", 2, "--stages", "0,3", "--out", "m", *changes))
            measured = {trial["stage"]: trial["held"] for trial in json.loads((self.folder / "m" / "memory.json").read_text())["trials"]}
            out = self.estimate(name, "--world", 2, *changes)
            self.assertIn("MB (10^6 bytes) a rank on 2 ranks", out)
            lines = {int(line.split()[1]): [float(word) for word in line.split()[2:7]] for line in out.split("The same with")[0].splitlines() if line.startswith("stage ")}
            for stage, held in measured.items():
                expected = [held[use] / 1e6 for use in ("parameters", "gradients", "master", "optimizer")]
                for shown, wanted in zip(lines[stage], [*expected, sum(expected) + held["snapshot"] / 1e6]):
                    self.assertAlmostEqual(shown, wanted, delta=0.06, msg=(changes, stage, out))  # a digit, and padding
                self.assertEqual("copy for checkpoint.async" in out, held["snapshot"] > 0)
        out = self.estimate(name, "--fit", "1GB")
        self.assertRegex(out, r"stage 0 +1 +1 +-\n")
        batch = ["--set", "train_batch_size=16", "--set", "train_micro_batch_size_per_gpu=1"]  # of `train` on 8 ranks
        self.assertEqual(self.estimate(name, "--world", 8, *batch), self.estimate(name, "--world", 8))

    def test_optimizers_of_whole_parameters(self):
        """A parameter's state has one owner, however many ranks there are; the host updates none of them for GPUs."""
        name = self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 16, "hidden": 256}, optimizer={"type": "AdamW8bit"},
                                                train_batch_size=None, train_micro_batch_size_per_gpu=4))
        self.assert_succeeded(self.run_tool("memory", name, "--steps", 1, "--simulate-world", 16, "--stages", 3, "--out", "m"))
        held = json.loads((self.folder / "m" / "memory.json").read_text())["trials"][0]["held"]
        out = self.estimate(name, "--world", 16)
        self.assertAlmostEqual(float(self.columns(out, 5)[3]), held["optimizer"] / 1e6, delta=0.06)
        on_gpus = out.split("on GPUs")[1].splitlines()
        self.assertEqual([line.split()[2:] for line in on_gpus if line.startswith("stage ")], [["-"] * 6] * 4)

    def test_fit(self):
        out = self.estimate("--params", "7.5e9", "--world", 64, "--fit", "80GiB")
        self.assertEqual([line.split()[2:] for line in out.splitlines() if line.startswith("stage ")][-4:],
                         [["-", "1", "-"], ["3", "1", "-"], ["2", "1", "-"], ["2", "1", "1"]])
        self.assertIn("On 64 ranks the smallest stage that fits is 1.", out)


if __name__ == "__main__":
    unittest.main()
