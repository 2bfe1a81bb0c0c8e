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
    """Each test begins with a copy of one finished run: 20 steps of 2 ranks at stage 3, 16 steps an epoch, with dropout and mirrored images,
    saved asynchronously after steps 10 and 20. tests/engine/checkpoint owns stage x world x precision x optimizer; here are processes,
    their files and their messages."""

    def setUp(self):
        super().setUp()
        if not (self.shared / "run").exists():
            type(self).said = self.train("run", 20, "--set", "checkpoint.async=true").out
            (self.folder / "run").rename(self.shared / "run")
        shutil.copytree(self.shared / "run", self.folder / "run")

    def run_config(self, name, max_steps, stage=3, **changes):
        """`name` is the folder."""
        trainer = {"max_steps": max_steps, "save_every_epochs": 0, "save_every_steps": 10, "output_dir": name, "device": "cpu",
                   "eval_batch_size": 16}
        model = {"type": "fashion_mnist_cnn", "channels": 4, "hidden": 16, "dropout": 0.5}
        data = {"type": "fashion_mnist", "path": str(self.data), "flip": True}
        return self.write(f"{name}.json", self.config(**{"trainer": trainer, "model": model, "data": data, "checkpoint": {"fsync": False},
                                                         "zero_optimization": {"stage": stage}, **changes}))

    def train(self, name, max_steps, *args, ranks=2, **changes):
        outcome = self.run_tool("train", self.run_config(name, max_steps, **changes), "--nproc", ranks, *args)
        self.assert_succeeded(outcome)
        return outcome

    def consolidated(self, folder, tag):
        """The weights after a step, as consolidate writes them."""
        out = self.folder / f"{folder}_{tag}.safetensors"
        outcome = self.run_tool("consolidate", f"{folder}/checkpoints", out, "--tag", tag)
        self.assertEqual(outcome.code, 0, outcome)
        return read_safetensors(out)

    def files_of(self, folder):
        """name -> bytes of all files below a folder."""
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in (self.folder / folder).rglob("*") if path.is_file()}

    def checkpoints(self, folder="run"):
        return sorted(path.name for path in (self.folder / folder / "checkpoints").iterdir())

    # ------------------------------------------------------------------------------------------------ resuming

    def test_resumed_run_is_the_uninterrupted_one(self):
        """24 steps at a stretch, saved while it waits; 20 steps, then 4 more by other processes: same losses and weights, mid-epoch."""
        self.train("whole", 24)
        outcome = self.train("run", 24, "--resume")
        self.assertIn("resuming after step 20, from run/checkpoints/global_step20", outcome.out)
        self.assertEqual(self.losses("whole"), self.losses("run"))
        self.assertEqual(len(self.losses("run")), 24)
        self.assertEqual(self.consolidated("whole", "global_step24"), self.consolidated("run", "global_step24"))

    def test_resuming_a_finished_run_changes_nothing(self):
        before = self.files_of("run")
        outcome = self.train("run", 20, "--resume")
        self.assertIn("\nalready finished after 20 steps (1.25 epochs); to continue training, raise ", outcome.out)
        self.assertRegex(outcome.out, r"\nmodel    run/model.safetensors \(loss \d\.\d+ at step \d+\)\n")
        self.assertNotIn("training ", outcome.out.split("resuming after")[1])
        self.assertEqual(self.files_of("run"), before)

    def test_a_run_killed_after_its_last_checkpoint_is_brought_to_its_end(self):
        whole, metrics, before, model = self.results(), self.lines_of_metrics(), self.checkpoints(), self.folder / "run" / "model.safetensors"
        content = model.read_bytes()
        for path in (model, self.folder / "run" / "all_results.json"):
            path.unlink()
        shutil.copytree(self.folder / "run/checkpoints/global_step10", self.folder / "run/checkpoints/global_step2.tmp-0123456789abcdef")
        self.train("run", 20, "--resume")
        self.assertEqual(self.checkpoints(), before)  # no later save will clean up
        for key in ("eval_loss", "eval_accuracy", "eval_samples", "train_steps"):
            self.assertEqual(self.results()[key], whole[key])
        self.assertEqual(self.lines_of_metrics(), metrics)
        self.assertEqual(model.read_bytes(), content)

    def test_resumes_a_checkpoint_by_its_tag(self):
        """The run continues from there, and what was saved later has no effect."""
        whole, results = self.losses("run"), self.results("run")
        config = self.run_config("run", 20)
        outcome = self.train("run", 20, "--resume", "global_step10")
        self.assertIn("resuming after step 10, from run/checkpoints/global_step10", outcome.out)
        self.assertEqual(self.losses("run"), whole)
        self.assertEqual(self.results("run")["eval_loss"], results["eval_loss"])
        self.assertIn("has no checkpoint global_step7; it has global_step10, ", self.error_of("train", config, "--resume", "global_step7"))
        shutil.copytree(self.folder / "run", self.folder / "other")
        self.assertIn("expected one of this run's, in run/checkpoints",
                      self.error_of("train", config, "--resume", "other/checkpoints/global_step10"))
        outcome = self.run_tool("train", "--resume", config, "--nproc", 2)  # the word after it is CONFIG
        self.assert_succeeded(outcome)
        self.assertIn("already finished", outcome.out)
        shutil.rmtree(self.folder / "run/checkpoints/global_step20")
        self.train("run", 20, "--resume=run/checkpoints/global_step10")
        self.assertEqual(self.losses("run"), whole)

    def test_the_model_of_another_configuration_is_not_resumed(self):
        config = self.run_config("run", 30)
        for change in ("model.hidden=17", "optimizer.type=SGD"):
            error = self.error_of("train", config, "--resume", "--set", change)
            for part in ("tessera consolidate", "--init"):
                self.assertIn(part, error)
            self.assertNotRegex(error, "strict|load_optimizer_states")

    # -------------------------------------------------------------------------------- a new run in the same folder

    def test_a_new_run_takes_the_place_of_a_finished_one(self):
        """One that saves nothing leaves the checkpoints before it aside: an old run is not resumed as a new one. A start that fails changes
        no file."""
        before, kept = self.files_of("run"), self.checkpoints()
        config = self.run_config("run", 20)
        self.assertIn("nowhere.safetensors", self.error_of("train", config, "--nproc", 2, "--init", "nowhere.safetensors"))
        self.assertEqual(self.files_of("run"), before)
        self.train("run", 5, "--set", "trainer.save_every_steps=0")
        self.assertEqual(self.checkpoints(), ["previous"])
        self.assertEqual(sorted(path.name for path in (self.folder / "run/checkpoints/previous").iterdir()), kept)
        self.assertIn("run/checkpoints", self.error_of("train", self.run_config("run", 20), "--nproc", 2, "--resume"))
        self.assertEqual(self.run_tool("inspect", "run/checkpoints/previous", "--verify").code, 0)
        self.train("run", 10, seed=7)
        self.assertEqual(self.checkpoints(), ["global_step10", "latest"])
        self.assertEqual(len(self.losses()), 10)

    def test_an_unfinished_run_is_not_discarded_by_mistake(self):
        (self.folder / "run" / "all_results.json").unlink()  # as if it had been killed
        before = self.files_of("run")
        said = self.error_of("train", self.run_config("run", 20), "--nproc", 2)
        for part in ("error: trainer.output_dir: run has checkpoints of a run that has not finished (the last: global_step20)",
                     "--resume", "trainer.overwrite_output_dir=true"):
            self.assertIn(part, said)
        self.assertEqual(self.files_of("run"), before)
        self.train("run", 10, "--set", "trainer.overwrite_output_dir=true")
        self.assertEqual(self.checkpoints(), ["global_step10", "latest"])

    # -------------------------------------------------------------------------------------------------- weights

    def test_exports_the_best(self):
        self.assertRegex(self.said, r"\nmodel    run/model.safetensors \(loss \d\.\d+ at step \d+\)\n")
        step = int(self.said.split("at step ")[1].split(")")[0])
        self.assertEqual(read_safetensors(self.folder / "run" / "model.safetensors"), self.consolidated("run", f"global_step{step}"))

    def evaluated(self, *args):
        """The evaluation of a run from weights that it doesn't change, and what it says."""
        config = self.run_config("second", 1, optimizer={"type": "SGD", "params": {"lr": 0.0}})
        shutil.rmtree(self.folder / "second", ignore_errors=True)
        outcome = self.run_tool("train", config, "--nproc", 2, *args)
        self.assertEqual(outcome.code, 0, outcome)
        return self.results("second")["eval_loss"], outcome.err

    def test_starts_from_weights(self):
        """A run from exported weights evaluates as the run that exported them did; also under names of another framework's wrapper, and but
        for a head of another size."""
        model = "run/model.safetensors"
        tensors = read_safetensors(self.folder / model)
        names = sorted(tensors)
        head = next(name for name in names if tensors[name][1] == (10,))[:-len("bias")]  # the layer that gives ten scores

        def write(name, renamed):
            header, data, at = {}, b"", 0
            for tensor, (dtype, shape, content) in renamed.items():
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
                data, at = data + content, at + len(content)
            text = json.dumps(header).encode()
            (self.folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)

        best, said = self.evaluated("--init", model)
        self.assertAlmostEqual(best, min(record["eval_loss"] for record in self.lines_of_metrics() if "eval_loss" in record), places=6)
        self.assertEqual((said, self.results("second")["eval_samples"]), ("", self.results()["eval_samples"]))
        write("wrapped.safetensors", {f"module.{name}": tensor for name, tensor in tensors.items()})
        self.assertEqual(self.evaluated("--init", "wrapped.safetensors", "--init-prefix", "module.="), (best, ""))
        write("other_head.safetensors", {name: (("F32", (3,), b"\0" * 12) if name == head + "bias" else tensor) for name, tensor in tensors.items()
                                         if name != head + "weight"} | {"pooler.weight": ("F32", (1,), b"\0" * 4)})
        loss, warning = self.evaluated("--init", "other_head.safetensors", "--init-ignore", head + "*", "--init-ignore", "pooler.*")
        self.assertNotEqual(loss, best, "the head is a new one")
        for part in (f"other_head.safetensors: these stay as they were: {head}", "not in the file", "[3] in the file, [10] in the model"):
            self.assertIn(part, warning)

        config = self.run_config("second", 1)
        for args, *parts in (
                (("wrapped.safetensors",), "does not fit the model: conv1.weight: not in the file; ",
                 f"the file holds {len(names)} tensors (module.{names[0]}, ", f"the model {len(names)} ({names[0]}, ",
                 'the file\'s begin with "module.", the model\'s don\'t', "--init-prefix OLD=NEW", "--init-ignore GLOB"),
                (("other_head.safetensors",), head + "bias: [3] in the file, [10] in the model"),
                ((model, "--set", "model.hidden=17"), f"{model}: does not fit the model: ", "in the file, [17"),
                (("other_head.safetensors", "--init-prefix", "x"), "--init-prefix x: expected OLD=NEW")):
            error = self.error_of("train", config, "--init", *args)
            for part in parts:
                self.assertIn(part, error)
        self.assertIn("expected --init FILE too", self.error_of("train", config, "--init-ignore", "x"))

    def test_weights_that_are_not_safetensors(self):
        config = self.run_config("second", 1)
        (self.folder / "hub").mkdir()
        for name, start, said in (("old.bin", b"\x80\x02\x8a\x0al\xfc\x9cF" + b"\0" * 99, "is not safetensors: it begins as what torch.save writes"),
                                  ("hub/pytorch_model.bin", b"PK\3\4\0\0\x08\x08" + b"\0" * 99, "the zip archive is damaged"),
                                  ("model.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 99, "is not safetensors: it is an HDF5 file"),
                                  ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\n" + b"\0" * 99, "git lfs pull")):
            (self.folder / name).write_bytes(start)
            with self.subTest(name):
                error = self.error_of("train", config, "--init", "hub" if name.startswith("hub/") else name)
                self.assertTrue(error.startswith(f"error: {name}: "), error)
                self.assertIn(said, error)
                self.assertNotRegex(error, r"\d{15}")

    # -------------------------------------------------------------------------------------------- what there is

    def test_folders_of_a_run_are_taken_alike(self):
        last = "run/checkpoints/global_step20"
        for folder in ("run", "run/", "run/checkpoints", "run/checkpoints/", last, last + "/"):
            with self.subTest(folder):
                shown = json.loads(self.run_tool("inspect", folder, "--json").out)
                self.assertEqual((shown["path"], shown["tag"]), (last, "global_step20"))
        for folder, weights in (("run/", "run/model.safetensors"), ("run/checkpoints", last), (last, last)):
            with self.subTest(folder):
                outcome = self.run_tool("consolidate", folder, "out.safetensors")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertIn(f"from {last}\n", outcome.out)
                outcome = self.run_tool("eval", folder)
                self.assert_succeeded(outcome)
                self.assertIn(f"model    {weights}\n", outcome.out)
        for folder in ("run", "run/checkpoints", "run/checkpoints/global_step10"):
            self.assertEqual(json.loads(self.run_tool("inspect", folder, "--tag", "global_step10", "--json").out)["global_steps"], 10)
        self.assertIn("--tag global_step10: found the folder of the checkpoint global_step20 beside it",
                      self.error_of("inspect", last, "--tag", "global_step10"))
        shutil.copytree(self.folder / last, self.folder / "alone")  # a checkpoint by itself has no run
        for folder in ("alone", "run/checkpoints/latest"):
            self.assertIn("has no config.json", self.error_of("eval", folder))

    def test_a_folder_whose_name_is_not_utf8(self):
        """JSON has U+FFFD for the byte; what is read and written is in the folder itself."""
        name, shown = "caf\udce9", "caf\ufffd"
        self.train("latin1", 10, "--set", f"trainer.output_dir={name}")
        state = json.loads((self.folder / name / "trainer_state.json").read_text(encoding="utf-8"))
        self.assertEqual(state["best_model_checkpoint"], f"{shown}/checkpoints/global_step10")
        outcome = self.run_tool("inspect", name, "--json")
        self.assert_succeeded(outcome)
        self.assertEqual(json.loads(outcome.out)["path"], f"{shown}/checkpoints/global_step10")
        self.assert_succeeded(self.run_tool("eval", name))
        results = json.loads((self.folder / name / "eval_results.json").read_text(encoding="utf-8"))
        self.assertEqual(results["model"], f"{shown}/model.safetensors")
        self.assertEqual(self.run_tool("convert", name, f"{name}.dcp", "--to", "dcp").code, 0)
        outcome = self.run_tool("train", "latin1.json", "--resume", f"./{name}.dcp", "--set", "trainer.max_steps=11", "--set", "trainer.output_dir=next")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn(f"resuming after step 10, from ./{shown}.dcp", outcome.out)

    def test_inspect(self):
        outcome = self.run_tool("inspect", "run/checkpoints", "--verify")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("saved by    2 ranks at ZeRO stage 3\n", outcome.out)
        self.assertRegex(outcome.out, r"verified: \d+ blocks, ")
        shown = json.loads(self.run_tool("inspect", "run/checkpoints", "--json", "--verify").out)
        self.assertEqual((shown["global_steps"], shown["world_size"], shown["optimizer"], shown["verified"]["ok"]), (20, 2, "AdamW", True))
        damaged = self.folder / "run" / "checkpoints" / "global_step20" / "rank_00001.h5"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        for flags in ([], ["--json"]):
            outcome = self.run_tool("inspect", "run/checkpoints", "--verify", *flags)
            self.assertEqual(outcome.code, 1, outcome)
            self.assertIn('"ok": false' if flags else "damaged: rank_00001.h5", outcome.out)
        self.assertIn("rank_00001.h5", self.error_of("train", self.run_config("run", 30), "--nproc", 2, "--resume"))

    def test_a_folder_that_cannot_be_written_does_not_stop_training(self):
        shutil.rmtree(self.folder / "run" / "checkpoints")
        (self.folder / "run" / "checkpoints").write_text("in the way")
        outcome = self.run_tool("train", self.run_config("run", 20), "--nproc", 2)
        self.assertIn("no checkpoint at step 10, training continues and the next save is tried again: ", outcome.err)
        self.assertEqual(len(self.losses("run")), 20)
        self.assertEqual(outcome.code, 1, outcome)  # the last one fails
        self.assertIn("run/checkpoints", outcome.err)
        missed = [self.run_tool("train", self.run_config("run", 20), "--set", "trainer.eval_every_steps=10", "--set", f"trainer.best_is={best}").err
                  for best in ("least", "greatest")]
        self.assertEqual(sorted("step 10, the best so far, has no checkpoint" in err for err in missed), [False, True],
                         "said where the second evaluation is no better alone")

    # ----------------------------------------------------------------------------------- files of other programs

    def test_begins_with_what_another_program_has_saved(self):
        """As the run that goes on by itself: the same samples, losses and weights to the bit. Nothing is drawn at random here."""
        shutil.rmtree(self.folder / "run")
        still = {"model": {"type": "fashion_mnist_cnn", "channels": 4, "hidden": 16, "dropout": 0.0}, "gradient_clipping": 0.5,
                 "data": {"type": "fashion_mnist", "path": str(self.data)}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4}}}
        self.train("whole", 20, stage=1, **still)
        whole = self.losses("whole")
        for number, (form, stage) in enumerate((("universal", 3), ("dcp", 1))):
            source = f"{form}{number}"
            self.assertEqual(self.run_tool("convert", "whole", source, "--to", form, "--tag", "global_step10").code, 0)
            with self.subTest(form, stage=stage):
                outcome = self.train(f"here{number}", 20, "--resume", f"./{source}", stage=stage, **still)
                self.assertIn(f"resuming after step 10, from ./{source}", outcome.out)
                self.assertEqual(self.losses(f"here{number}"), whole[10:])
                self.assertEqual(self.consolidated(f"here{number}", "global_step20"), self.consolidated("whole", "global_step20"))
        # Another batch, and the number of epochs in place of that of steps: the rest of the epoch, after 120 samples.
        outcome = self.run_tool("train", "here0.json", "--resume", "universal0", "--set", "trainer.output_dir=epochs", "--set", "trainer.max_steps=0",
                                "--set", "trainer.epochs=1", "--set", "train_batch_size=24")
        self.assert_succeeded(outcome)
        rates = [record["learning_rate"] for record in self.lines_of_metrics("epochs") if "loss" in record]
        self.assertEqual(len(rates), 3)  # of the 8 of an epoch
        self.assertTrue(all(a > b for a, b in zip(rates, rates[1:])) and rates[-2] > 0, rates)
        # Values of the configuration count; those that the source had are said. One without a difference says nothing.
        self.assertNotIn("as the configuration has it", outcome.err)
        outcome = self.run_tool("train", "here0.json", "--resume", "./dcp1", "--set", "trainer.output_dir=values", "--set", "trainer.max_steps=11",
                                "--set", "optimizer.params.weight_decay=0.25", "--set", "optimizer.params.betas=[0.8, 0.999]")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertRegex(outcome.err, r"dcp1: param group 0: weight_decay: it was [0-9.]+, and is 0.25, as the configuration has it")
        self.assertIn("dcp1: param group 0: betas: it was [0.9,0.999], and is [0.8,0.999], as the configuration has it", outcome.err)
        self.assertEqual(outcome.err.count("as the configuration has it"), 2)
        # The new run is one of its own: it is resumed without the source, and does not discard another.
        (self.folder / "dcp1").rename(self.folder / "away")
        self.assertIn("already finished", self.train("here1", 20, "--resume", stage=1, **still).out)
        (self.folder / "away").rename(self.folder / "dcp1")
        (self.folder / "here0/all_results.json").unlink()
        for args, *parts in (
                (("--nproc", 2), "trainer.overwrite_output_dir=true"),
                (("--set", "trainer.max_steps=10", "--set", "trainer.output_dir=short"),
                 "trainer.max_steps: the run ends after step 10, and ./dcp1 is of step 10; expected more"),
                (("--set", "model.hidden=17", "--set", "trainer.output_dir=other"), "--init")):
            error = self.error_of("train", "here0.json", "--resume", "./dcp1", *args)
            for part in parts:
                self.assertIn(part, error)
        outcome = self.run_tool("train", "here0.json", "--init", "./dcp1", "--set", "trainer.output_dir=init", "--set", "optimizer.params.lr=0",
                                "--set", "optimizer.params.weight_decay=0", "--set", "scheduler.params.warmup_max_lr=0")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(self.consolidated("init", "global_step20"), self.consolidated("whole", "global_step10"))
        # One with the weights alone.
        self.assertEqual(self.run_tool("convert", "whole", "weights.pt", "--to", "pt").code, 0)
        outcome = self.run_tool("train", "here0.json", "--resume", "weights.pt", "--set", "trainer.output_dir=weights", "--set", "trainer.max_steps=3")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("weights.pt: states of the optimizer: there are none that can be told by parameter", outcome.err)


if __name__ == "__main__":
    unittest.main()
