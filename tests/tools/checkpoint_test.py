"""Checkpoints through the command: resuming, exporting, starting from weights, inspecting. Ranks are processes here."""
import json
import shutil
import struct
import unittest

from tool import ToolTest


def read_safetensors(path):
    """name -> (dtype, shape, bytes), by the format's description."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: (entry["dtype"], tuple(entry["shape"]), data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]])
            for name, entry in header.items()}


class CheckpointTest(ToolTest):
    def run_config(self, name, max_steps, **changes):
        """`name` is the folder; 16 steps an epoch, dropout and mirrored images on."""
        trainer = {"max_steps": max_steps, "save_every_epochs": 0, "save_every_steps": 10, "output_dir": name, "device": "cpu",
                   "eval_batch_size": 16}
        config = self.config(trainer=trainer, checkpoint={"fsync": False}, **changes)
        config["model"]["dropout"] = 0.5
        config["data"]["flip"] = True
        return self.write(f"{name}.json", config)

    def train(self, config, ranks, *args):
        outcome = self.run_tool("train", config, "--nproc", ranks, *args)
        self.assert_succeeded(outcome)
        return outcome

    def fails(self, *args):
        """The error of a run that must fail."""
        outcome = self.run_tool("train", *args)
        self.assertEqual(outcome.code, 1, outcome)
        self.assert_nothing_runs()
        for kept in self.tmp.glob("tessera_*"):  # the logs of its ranks
            shutil.rmtree(kept)
        return outcome.err

    def consolidated(self, folder, tag):
        """The weights after a step, as consolidate writes them."""
        out = self.folder / f"{folder}_{tag}.safetensors"
        outcome = self.run_tool("consolidate", f"{folder}/checkpoints", out, "--tag", tag)
        self.assertEqual(outcome.code, 0, outcome)
        return read_safetensors(out)

    def check_resumed(self, ranks, stage, precision):
        """24 steps at a stretch; 20 steps, then 4 more by another process: same losses and weights, mid-epoch."""
        changes = {"zero_optimization": {"stage": stage}, **precision}
        self.train(self.run_config("whole", 24, **changes), ranks)
        self.train(self.run_config("parts", 20, **changes), ranks)
        outcome = self.train(self.run_config("parts", 24, **changes), ranks, "--resume")
        self.assertIn("resuming after step 20, from parts/checkpoints/global_step20", outcome.out)
        self.assertEqual(self.losses("whole"), self.losses("parts"))
        self.assertEqual(len(self.losses("parts")), 24)
        self.assertEqual(self.consolidated("whole", "global_step24"), self.consolidated("parts", "global_step24"))

    def test_resumed_run_is_the_uninterrupted_one(self):
        for stage in range(4):
            with self.subTest(stage=stage):
                self.check_resumed(2, stage, {})

    def test_resumed_in_bf16_and_fp16(self):
        for precision in ("bf16", "fp16"):
            with self.subTest(precision=precision):
                self.check_resumed(2, 3, {precision: {"enabled": True}})

    def test_resumed_from_an_asynchronous_save(self):
        self.train(self.run_config("whole", 24), 2)
        parts = self.run_config("parts", 20)
        self.train(parts, 2, "--set", "checkpoint.async=true")
        self.train(self.run_config("parts", 24), 2, "--resume")
        self.assertEqual(self.losses("whole"), self.losses("parts"))

    def test_another_number_of_ranks_and_stage_goes_on(self):
        self.train(self.run_config("run", 20, zero_optimization={"stage": 3}), 3)
        outcome = self.train(self.run_config("run", 24, zero_optimization={"stage": 1}), 2, "--resume")
        self.assertIn("resuming after step 20", outcome.out)
        self.assertEqual(len(self.losses("run")), 24)

    def test_nothing_to_resume(self):
        for begun in (False, True):
            if begun:
                (self.folder / "run" / "checkpoints").mkdir(parents=True)
            outcome = self.run_tool("train", self.run_config("run", 20), "--nproc", 2, "--resume")
            self.assertEqual(outcome.code, 1, outcome)
            self.assertIn("run/checkpoints: has no file" if begun else "trainer.output_dir run has no checkpoints", outcome.err)

    def files_of(self, folder):
        """name -> bytes of all files below a folder."""
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in (self.folder / folder).rglob("*") if path.is_file()}

    def test_resuming_a_finished_run_changes_nothing(self):
        config = self.run_config("run", 20)
        self.train(config, 2)
        before = self.files_of("run")
        outcome = self.train(config, 2, "--resume")
        self.assertIn("\nalready finished after 20 steps (1.25 epochs); to continue training, raise ", outcome.out)
        self.assertRegex(outcome.out, r"\nmodel    run/model.safetensors \(loss \d\.\d+ at step \d+\)\n")
        self.assertNotIn("training ", outcome.out.split("resuming after")[1])
        self.assertEqual(self.files_of("run"), before)
        (self.folder / "run" / "model.safetensors").unlink()
        self.train(config, 2, "--resume")
        self.assertEqual(self.files_of("run"), before)  # the model is there again
        self.train(self.run_config("run", 24), 2, "--resume")
        self.assertEqual(len(self.losses()), 24)

    def test_a_run_killed_after_its_last_checkpoint_is_brought_to_its_end(self):
        config = self.run_config("run", 20)
        self.train(config, 2)
        whole, metrics = self.results(), self.lines_of_metrics()
        for name in ("all_results.json", "model.safetensors"):
            (self.folder / "run" / name).unlink()
        before = self.checkpoints()
        shutil.copytree(self.folder / "run/checkpoints/global_step10", self.folder / "run/checkpoints/global_step2.tmp-0123456789abcdef")
        self.train(config, 2, "--resume")
        self.assertEqual(self.checkpoints(), before)  # no later save will clean up
        for key in ("eval_loss", "eval_accuracy", "eval_samples", "train_steps"):
            self.assertEqual(self.results()[key], whole[key])
        self.assertEqual(self.lines_of_metrics(), metrics)
        self.assertTrue((self.folder / "run" / "model.safetensors").exists())

    def checkpoints(self, folder="run"):
        return sorted(path.name for path in (self.folder / folder / "checkpoints").iterdir())

    def test_a_new_run_takes_the_place_of_a_finished_one(self):
        self.train(self.run_config("run", 30), 2)
        self.train(self.run_config("run", 10, seed=7), 2)
        self.assertEqual(self.checkpoints(), ["global_step10", "latest"])
        self.assertEqual(len(self.losses()), 10)

    def test_a_new_run_that_saves_nothing_leaves_the_checkpoints_before_it_aside(self):
        """An old run is not resumed as a new one, and a start that fails changes no file."""
        self.train(self.run_config("run", 20), 2)
        before, kept = self.files_of("run"), self.checkpoints()
        self.assertIn("nowhere.safetensors", self.fails(self.run_config("run", 20), "--nproc", 2, "--init", "nowhere.safetensors"))
        self.assertEqual(self.files_of("run"), before)
        self.train(self.run_config("run", 5), 2, "--set", "trainer.save_every_steps=0")
        self.assertEqual(self.checkpoints(), ["previous"])
        self.assertEqual(sorted(path.name for path in (self.folder / "run/checkpoints/previous").iterdir()), kept)
        self.assertIn("run/checkpoints", self.fails(self.run_config("run", 20), "--nproc", 2, "--resume"))
        self.assertEqual(self.run_tool("inspect", "run/checkpoints/previous", "--verify").code, 0)
        self.train(self.run_config("run", 10), 2)
        self.assertEqual(self.checkpoints(), ["global_step10", "latest"])

    def test_an_unfinished_run_is_not_discarded_by_mistake(self):
        config = self.run_config("run", 20)
        self.train(config, 2)
        (self.folder / "run" / "all_results.json").unlink()  # as if it had been killed
        before = self.files_of("run")
        said = self.fails(config, "--nproc", 2)
        self.assertEqual(len(said.splitlines()), 1, said)
        for part in ("error: trainer.output_dir: run has checkpoints of a run that has not finished (the last: global_step20)",
                     "--resume", "trainer.overwrite_output_dir=true"):
            self.assertIn(part, said)
        self.assertEqual(self.files_of("run"), before)
        self.train(self.run_config("run", 10), 2, "--set", "trainer.overwrite_output_dir=true")
        self.assertEqual(self.checkpoints(), ["global_step10", "latest"])

    def test_exports_the_best(self):
        outcome = self.train(self.run_config("run", 20), 2)
        self.assertRegex(outcome.out, r"\nmodel    run/model.safetensors \(loss \d\.\d+ at step \d+\)\n")
        step = int(outcome.out.split("at step ")[1].split(")")[0])
        self.assertEqual(read_safetensors(self.folder / "run" / "model.safetensors"), self.consolidated("run", f"global_step{step}"))

    def test_starts_from_weights(self):
        """A run from exported weights evaluates as the run that exported them did."""
        self.train(self.run_config("first", 20), 2)
        first = self.results("first")
        config = self.run_config("second", 1, optimizer={"type": "SGD", "params": {"lr": 0.0}}, zero_optimization={"stage": 3})
        self.train(config, 2, "--init", "first/model.safetensors")
        best = min(record["eval_loss"] for record in self.lines_of_metrics("first") if "eval_loss" in record)
        self.assertAlmostEqual(self.results("second")["eval_loss"], best, places=6)
        self.assertEqual(first["eval_samples"], self.results("second")["eval_samples"])

    def test_weights_of_another_model(self):
        self.train(self.run_config("first", 10), 2)
        config = self.run_config("second", 1)
        outcome = self.run_tool("train", config, "--nproc", 2, "--set", "model.hidden=17", "--init", "first/model.safetensors")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertIn("first/model.safetensors: does not fit the model: ", outcome.err)
        self.assertIn("in the file, [17", outcome.err)

    def test_weights_under_other_names(self):
        """As another framework's wrapper names them, and with a head of another size."""
        self.train(self.run_config("first", 10), 1)
        tensors = read_safetensors(self.folder / "first" / "model.safetensors")
        names = sorted(tensors)
        head = next(name for name in names if tensors[name][1] == (10,))[:-len("bias")]  # the layer that gives ten scores

        def write(name, renamed):
            header, data, at = {}, b"", 0
            for tensor, (dtype, shape, content) in renamed.items():
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
                data, at = data + content, at + len(content)
            text = json.dumps(header).encode()
            (self.folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)

        def evaluated(*args):
            config = self.run_config("second", 1, optimizer={"type": "SGD", "params": {"lr": 0.0}}, zero_optimization={"stage": 3})
            shutil.rmtree(self.folder / "second", ignore_errors=True)
            outcome = self.run_tool("train", config, "--nproc", 2, *args)
            self.assertEqual(outcome.code, 0, outcome)
            return self.results("second")["eval_loss"], outcome.err

        best = evaluated("--init", "first/model.safetensors")[0]
        write("wrapped.safetensors", {f"module.{name}": tensor for name, tensor in tensors.items()})
        config = self.run_config("second", 1)
        error = self.fails(config, "--init", "wrapped.safetensors")
        self.assertEqual(len(error.splitlines()), 1)
        for part in ("does not fit the model: conv1.weight: not in the file; ", f"the file holds {len(names)} tensors (module.{names[0]}, ",
                     f"the model {len(names)} ({names[0]}, ",
                     'the file\'s begin with "module.", the model\'s don\'t', "--init-prefix OLD=NEW", "--init-ignore GLOB"):
            self.assertIn(part, error)
        self.assertEqual(evaluated("--init", "wrapped.safetensors", "--init-prefix", "module.="), (best, ""))

        write("other_head.safetensors", {name: (("F32", (3,), b"\0" * 12) if name == head + "bias" else tensor) for name, tensor in tensors.items()
                                         if name != head + "weight"} | {"pooler.weight": ("F32", (1,), b"\0" * 4)})
        error = self.fails(config, "--init", "other_head.safetensors")
        self.assertIn(head + "bias: [3] in the file, [10] in the model", error)
        loss, warning = evaluated("--init", "other_head.safetensors", "--init-ignore", head + "*", "--init-ignore", "pooler.*")
        self.assertNotEqual(loss, best, "the head is a new one")
        self.assertIn(f"other_head.safetensors: these stay as they were: {head}", warning)
        self.assertIn("not in the file", warning)
        self.assertIn("[3] in the file, [10] in the model", warning)
        self.assertIn("--init-prefix x: expected OLD=NEW", self.fails(config, "--init", "other_head.safetensors", "--init-prefix", "x"))
        self.assertIn("expected --init FILE too", self.fails(config, "--init-ignore", "x"))

    def test_weights_that_are_not_safetensors(self):
        config = self.run_config("run", 1)
        (self.folder / "hub").mkdir()
        for name, start, said in (("pytorch_model.bin", b"PK\3\4\0\0\x08\x08" + b"\0" * 99, "is not safetensors: it begins as what torch.save writes"),
                                  ("old.bin", b"\x80\x02\x8a\x0al\xfc\x9cF" + b"\0" * 99, "is not safetensors: it begins as what torch.save writes"),
                                  ("hub/pytorch_model.bin", b"PK\3\4\0\0\x08\x08" + b"\0" * 99, "the zip archive is damaged"),
                                  ("model.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 99, "is not safetensors: it is an HDF5 file"),
                                  ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\n" + b"\0" * 99, "git lfs pull")):
            (self.folder / name).write_bytes(start)
            with self.subTest(name):
                error = self.fails(config, "--init", "hub" if name.startswith("hub/") else name)
                self.assertTrue(error.startswith(f"error: {name}: "), error)
                self.assertIn(said, error)
                self.assertNotRegex(error, r"\d{15}")

    def test_folders_of_a_run_are_taken_alike(self):
        self.train(self.run_config("run", 20), 2)
        last = "run/checkpoints/global_step20"
        for folder in ("run", "run/", "run/checkpoints", "run/checkpoints/", last, last + "/"):
            with self.subTest(folder):
                shown = json.loads(self.run_tool("inspect", folder, "--json", "--verify").out)
                self.assertEqual((shown["path"], shown["tag"], shown["verified"]["ok"]), (last, "global_step20", True))
                outcome = self.run_tool("consolidate", folder, "out.safetensors")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertIn(f"from {last}\n", outcome.out)
                outcome = self.run_tool("eval", folder)
                self.assert_succeeded(outcome)
                weights = "run/model.safetensors" if folder.rstrip("/") == "run" else last
                self.assertIn(f"model    {weights}\n", outcome.out)
        for folder in ("run", "run/checkpoints", "run/checkpoints/global_step10"):
            self.assertEqual(json.loads(self.run_tool("inspect", folder, "--tag", "global_step10", "--json").out)["global_steps"], 10)
        outcome = self.run_tool("inspect", last, "--tag", "global_step10")
        self.assertEqual((outcome.code, len(outcome.err.splitlines())), (1, 1), outcome)
        self.assertIn("--tag global_step10: found the folder of the checkpoint global_step20 beside it", outcome.err)
        shutil.copytree(self.folder / last, self.folder / "alone")  # a checkpoint by itself has no run
        (self.folder / "alone" / "latest").write_text("global_step20\n")
        self.assertIn("has no config.json", self.run_tool("eval", "run/checkpoints/latest").err)

    def test_resumes_a_checkpoint_by_its_tag(self):
        """The run continues from there, and what was saved later has no effect."""
        self.train(self.run_config("run", 30), 2)
        whole, results = self.losses("run"), self.results("run")
        config = self.run_config("run", 30)
        for tag in ("global_step10", "run/checkpoints/global_step10"):
            with self.subTest(tag):
                outcome = self.train(config, 2, "--resume", tag)
                self.assertIn("resuming after step 10, from run/checkpoints/global_step10", outcome.out)
                self.assertEqual(self.losses("run"), whole)
                self.assertEqual(self.results("run")["eval_loss"], results["eval_loss"])
        self.assertIn("has no checkpoint global_step7; it has global_step10, ", self.fails(config, "--nproc", 2, "--resume", "global_step7"))
        shutil.copytree(self.folder / "run", self.folder / "other")
        self.assertIn("expected one of this run's, in run/checkpoints", self.fails(config, "--resume", "other/checkpoints/global_step10"))
        outcome = self.run_tool("train", "--resume", config, "--nproc", 2)  # the word after it is CONFIG
        self.assert_succeeded(outcome)
        self.assertIn("already finished", outcome.out)
        shutil.rmtree(self.folder / "run/checkpoints/global_step30")
        self.train(config, 2, "--resume=global_step20")
        self.assertEqual(self.losses("run"), whole)

    def test_begins_with_what_another_program_has_saved(self):
        """As the run that goes on by itself: the same samples, losses and weights to the bit. Nothing is drawn at random here."""
        still = {"model": {"type": "fashion_mnist_cnn", "channels": 4, "hidden": 16, "dropout": 0.0}, "gradient_clipping": 0.5,
                 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4}}}

        def run(name, ranks, stage, *args):
            config = json.loads((self.folder / self.run_config(name, 30)).read_text())
            config.update(still, zero_optimization={"stage": stage})
            config["model"] = still["model"]
            return self.train(self.write(f"{name}.json", config), ranks, *args)

        run("whole", 2, 1)
        whole = self.losses("whole")
        for number, (form, ranks, stage) in enumerate((("universal", 2, 3), ("dcp", 2, 1), ("universal", 2, 2))):
            source = self.folder / f"{form}{number}"
            self.assertEqual(self.run_tool("convert", "whole", source, "--to", form, "--tag", "global_step20").code, 0)
            with self.subTest(form, ranks=ranks, stage=stage):
                outcome = run(f"here{number}", ranks, stage, "--resume", f"./{source.name}")
                self.assertIn("resuming after step 20, from ./" + source.name, outcome.out)
                self.assertEqual(self.losses(f"here{number}"), whole[20:])
                self.assertEqual(self.consolidated(f"here{number}", "global_step30"), self.consolidated("whole", "global_step30"))
        # Another batch, and the number of epochs in place of that of steps: the rest of the second epoch, after 240 samples.
        outcome = self.run_tool("train", "here0.json", "--resume", "universal0", "--set", "trainer.output_dir=epochs", "--set", "trainer.max_steps=0",
                                "--set", "trainer.epochs=2", "--set", "train_batch_size=24")
        self.assert_succeeded(outcome)
        rates = [record["learning_rate"] for record in self.lines_of_metrics("epochs") if "loss" in record]
        self.assertEqual(len(rates), 6)  # of the 8 of an epoch
        self.assertTrue(all(a > b for a, b in zip(rates, rates[1:])) and rates[-2] > 0, rates)
        # Values of the configuration count; those that the source had are said. One without a difference says nothing.
        self.assertNotIn("as the configuration has it", outcome.err)
        outcome = self.run_tool("train", "here0.json", "--resume", "./dcp1", "--set", "trainer.output_dir=values", "--set", "trainer.max_steps=21",
                                "--set", "optimizer.params.weight_decay=0.25", "--set", "optimizer.params.betas=[0.8, 0.999]")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertRegex(outcome.err, r"dcp1: param group 0: weight_decay: it was [0-9.]+, and is 0.25, as the configuration has it")
        self.assertIn("dcp1: param group 0: betas: it was [0.9,0.999], and is [0.8,0.999], as the configuration has it", outcome.err)
        self.assertEqual(outcome.err.count("as the configuration has it"), 2)
        # The new run is one of its own: it is resumed without the source, and does not discard another.
        shutil.rmtree(source)
        self.assertIn("already finished", run("here2", 2, 2, "--resume").out)
        (self.folder / "here0/all_results.json").unlink()
        self.assertIn("trainer.overwrite_output_dir=true", self.fails("here0.json", "--nproc", 2, "--resume", "./dcp1"))
        error = self.fails("here0.json", "--nproc", 2, "--resume", "./dcp1", "--set", "trainer.max_steps=20", "--set", "trainer.output_dir=short")
        self.assertIn("trainer.max_steps: the run ends after step 20, and ./dcp1 is of step 20; expected more", error)
        outcome = self.run_tool("train", "here0.json", "--init", "./dcp1", "--set", "trainer.output_dir=init", "--set", "optimizer.params.lr=0",
                                "--set", "optimizer.params.weight_decay=0", "--set", "scheduler.params.warmup_max_lr=0")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(self.consolidated("init", "global_step30"), self.consolidated("whole", "global_step20"))
        # One with the weights alone, and one that does not fit.
        self.assertEqual(self.run_tool("convert", "whole", "weights.pt", "--to", "pt").code, 0)
        outcome = self.run_tool("train", "here0.json", "--resume", "weights.pt", "--set", "trainer.output_dir=weights", "--set", "trainer.max_steps=3")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("weights.pt: states of the optimizer: there are none that can be told by parameter", outcome.err)
        self.assertIn("--init", self.fails("here0.json", "--resume", "./dcp1", "--set", "model.hidden=17", "--set", "trainer.output_dir=other"))

    def test_the_model_of_another_configuration_is_not_resumed(self):
        self.train(self.run_config("run", 10), 1)
        error = self.fails(self.run_config("run", 20), "--resume", "--set", "model.hidden=17")
        self.assertIn("tessera consolidate", error)
        self.assertIn("--init", error)
        self.assertNotRegex(error, "strict|load_optimizer_states")
        error = self.fails(self.run_config("run", 20), "--resume", "--set", "optimizer.type=SGD")
        self.assertIn("--init", error)
        self.assertNotRegex(error, "strict|load_optimizer_states")

    def test_inspect(self):
        self.train(self.run_config("run", 10, zero_optimization={"stage": 2}), 2)
        outcome = self.run_tool("inspect", "run/checkpoints", "--verify")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("saved by    2 ranks at ZeRO stage 2\n", outcome.out)
        self.assertRegex(outcome.out, r"verified: \d+ blocks, ")
        shown = json.loads(self.run_tool("inspect", "run/checkpoints", "--json").out)
        self.assertEqual((shown["global_steps"], shown["world_size"], shown["optimizer"]), (10, 2, "AdamW"))
        damaged = self.folder / "run" / "checkpoints" / "global_step10" / "rank_00001.h5"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        outcome = self.run_tool("inspect", "run/checkpoints", "--verify")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertIn("damaged: rank_00001.h5", outcome.out)
        outcome = self.run_tool("train", self.run_config("run", 20), "--nproc", 2, "--resume")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertIn("rank_00001.h5", outcome.err)

    def test_a_folder_that_cannot_be_written_does_not_stop_training(self):
        config = self.run_config("run", 20)
        (self.folder / "run").mkdir()
        (self.folder / "run" / "checkpoints").write_text("in the way")
        outcome = self.run_tool("train", config, "--nproc", 2)
        self.assertIn("no checkpoint at step 10, training continues and the next save is tried again: ", outcome.err)
        self.assertEqual(len(self.losses("run")), 20)
        self.assertEqual(outcome.code, 1, outcome)  # the last one fails
        self.assertIn("run/checkpoints", outcome.err)


if __name__ == "__main__":
    unittest.main()
