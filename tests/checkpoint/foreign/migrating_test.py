"""Every command of docs/migrating.md runs as it stands there, on checkpoints that have the page's names, and writes the source's tensors.

The path of the command comes from ctest, TESSERA, beside TRAINERS_TOOL. Runs with the Python of .deps/venv.
"""
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import types
import unittest
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import trainer_test
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from trainers_testing import TrainersTest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from tool import make_data  # noqa: E402

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")
warnings.filterwarnings("ignore")


def commands_of(heading):
    """The words of each line of a section's shell blocks."""
    (text,) = re.findall(rf"^## {re.escape(heading)}\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def tessera(folder, *arguments):
    result = subprocess.run([os.environ["TESSERA"], *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssertionError(f"tessera {shlex.join(map(str, arguments))}\n{result.stdout}{result.stderr}")
    return result.stdout


class MigratingTest(TrainersTest):
    def run_page(self, heading, source):
        """{what a command writes: its tensors by name} of a section's three commands; the first one's output has `source`."""
        commands = commands_of(heading)
        self.assertEqual([command[0] for command in commands], ["tessera"] * 3)
        outputs = [tessera(self.folder, *command[1:]) for command in commands]
        if source:
            self.assertEqual(commands[0][1], "inspect")
            self.assertIn(source, outputs[0])
            commands = commands[1:]
        return {command[3]: self.tensors(self.folder / command[3]) for command in commands}

    def tensors(self, path):
        if (path / ".metadata").exists():
            dcp_to_torch_save(path, self.folder / "dcp.pt")
            return torch.load(self.folder / "dcp.pt", weights_only=True)["model"]
        if path.is_dir() or path.suffix == ".h5":
            tessera(self.folder, "consolidate", path, "read.safetensors")
            path = self.folder / "read.safetensors"
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)

    def assert_tensors(self, found, expected, dtype=None):
        """All that is found, and all that is expected but second names of tied parameters, which a file may leave out."""
        for name, tensor in found.items():
            want = expected[name].to(dtype) if dtype and expected[name].is_floating_point() else expected[name]
            self.assertTrue(torch.equal(tensor.to(want.dtype), want), name)
        self.assertEqual({tensor.data_ptr() for name, tensor in expected.items() if name not in found} -
                         {expected[name].data_ptr() for name in found}, set())

    def assert_page(self, heading, source, expected, num_written=2):
        written = self.run_page(heading, source)
        self.assertEqual(len(written), num_written)
        for tensors in written.values():
            self.assert_tensors(tensors, expected)

    def test_deepspeed(self):
        (self.folder / "runs").mkdir()
        with mock.patch.dict("sys.modules"):  # what the next line imports makes modules called deepspeed; transformers is not to find them
            import deepspeed_test
            run, writer = deepspeed_test.Run(2), deepspeed_test.DeepSpeed()
            writer.folder = self.folder
            writer.folder_of(writer.zero3_files(run)).rename(self.folder / "runs" / "ds")
        expected = {**run.values["fp32"], **run.frozen, **run.buffers, "head.weight": run.values["fp32"]["embed.weight"]}
        self.assert_page("DeepSpeed", "DeepSpeed", expected)

    def test_fsdp(self):
        model, optimizer = trainer_test.trained()
        dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
                 checkpoint_id=self.folder / "runs" / "fsdp" / "step-1000", no_dist=True)
        self.assert_page("FSDP and torchtitan", "torch.distributed.checkpoint", model.state_dict())

    def test_trainer(self):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2))
        rows = [{"input_ids": torch.randint(0, 31, (8,))} for _ in range(4)]
        arguments = transformers.TrainingArguments(output_dir=str(self.folder / "output"), max_steps=2, save_steps=2, report_to=[], use_cpu=True,
                                                   per_device_train_batch_size=2, disable_tqdm=True)
        transformers.Trainer(model, arguments, train_dataset=[{**row, "labels": row["input_ids"]} for row in rows]).train()
        (self.folder / "output" / "checkpoint-2").rename(self.folder / "output" / "checkpoint-500")
        self.assert_page("Accelerate and the HF Trainer", "Hugging Face Trainer", model.state_dict())

    def test_accelerate(self):
        model, optimizer = trainer_test.trained()
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        accelerator.save_state(str(self.folder / "output" / "checkpoint-500"))
        self.assert_page("Accelerate and the HF Trainer", "Accelerate", model.state_dict())

    def test_lightning(self):
        _, _, state = trainer_test.Lightning().state()
        torch.save(state, self.folder / "epoch=3.ckpt")
        self.assert_page("Lightning, and files of torch.save", "Lightning", state["state_dict"])

    def test_torch_save(self):
        model, optimizer = trainer_test.trained()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.folder / "epoch=3.ckpt")
        self.assert_page("Lightning, and files of torch.save", "torch.save", model.state_dict())

    def test_what_is_left_out_of_a_model_is_said(self):
        model, optimizer = trainer_test.trained()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, self.folder / "one.pt")
        self.assertIn("note: left out: one.pt: rng", tessera(self.folder, "consolidate", "one.pt", "model.safetensors"))

    def test_a_loss_scale_goes_on(self):
        """Also through a checkpoint of Tessera's. A format without a place for it says so."""
        model, optimizer = trainer_test.trained()
        scaler = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler}, self.folder / "one.pt")
        tessera(self.folder, "convert", "one.pt", "own", "--to", "tessera")
        for source in ("one.pt", "own"):
            with self.subTest(source):
                tessera(self.folder, "convert", source, f"{source}_universal", "--to", "universal")
                self.assertEqual(self.read("universal", self.folder / f"{source}_universal")["loss_scaler"]["cur_scale"], 512.0)
                self.assertIn("the loss scale is left out: give it to torch.amp.GradScaler(init_scale=512",
                              tessera(self.folder, "convert", source, f"{source}_dcp", "--to", "dcp"))

    def test_numbers_that_are_too_large_are_an_error(self):
        torch.save({"w": torch.tensor([1e300, 1.0], dtype=torch.float64)}, self.folder / "wide.pt")
        self.assertIn("1 elements of fp64 are too large for fp32", self.assert_fails("consolidate", "wide.pt", "model.safetensors", "--dtype", "bf16"))
        self.assertFalse((self.folder / "model.safetensors").exists())

    def test_numbers_of_fp64_that_are_rounded_are_said(self):
        torch.save({"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}, self.folder / "wide.pt")
        for target in ("tessera", "safetensors", "universal"):
            self.assertIn("the precision of fp64: 1 tensor is rounded to fp32: w\n", tessera(self.folder, "convert", "wide.pt", f"out_{target}", "--to", target))
        torch.save({"w": torch.ones(2)}, self.folder / "narrow.pt")
        self.assertNotIn("fp64", tessera(self.folder, "convert", "narrow.pt", "out_narrow", "--to", "tessera"))

    def assert_fails(self, *arguments):
        """Returns the only line of the error."""
        result = subprocess.run([os.environ["TESSERA"], *map(str, arguments)], cwd=self.folder, capture_output=True, check=False)
        self.assertEqual(result.returncode, 1, result)
        self.assertEqual(result.stderr.count(b"\n"), 1, result)
        self.assertNotIn(b"\0", result.stderr)
        return result.stderr.decode()

    def test_checksums(self):
        """One byte of a tensor, of each format that is made of torch.save's archives."""
        model, optimizer = trainer_test.trained()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, self.folder / "one.pt")
        (self.folder / "hf").mkdir()
        torch.save(model.state_dict(), self.folder / "hf" / "pytorch_model.bin")
        (self.folder / "hf" / "config.json").write_text("{}")
        dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=self.folder / "dcp", no_dist=True)
        with mock.patch.dict("sys.modules"):
            import deepspeed_test
            run, writer = deepspeed_test.Run(2), deepspeed_test.DeepSpeed()
            writer.folder = self.folder
            part = run.zero12(1)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
            writer.folder_of(writer.zero12_files(run))
        weight = model.state_dict()[next(iter(model.state_dict()))]
        for source, file, tensor, command in (
                ("one.pt", "one.pt", weight, ("consolidate", "one.pt", "new.safetensors")),
                ("hf", "hf/pytorch_model.bin", weight, ("convert", "hf", "new/out", "--to", "tessera")),
                ("dcp", "dcp/__0_0.distcp", weight, ("convert", "dcp", "new/out", "--to", "universal")),
                ("run", "run/global_step14/zero_pp_rank_1_mp_rank_00_optim_states.pt", part, ("convert", "run", "new/out", "--to", "dcp"))):
            with self.subTest(source):
                self.assertRegex(tessera(self.folder, "inspect", source, "--verify"), r"verified: .*the CRC-32 of [1-9]\d* archives as saved")
                data = bytearray((self.folder / file).read_bytes())
                data[data.index(tensor.numpy().tobytes()) + 5] ^= 4
                (self.folder / file).write_bytes(data)
                outcome = subprocess.run([os.environ["TESSERA"], "inspect", source, "--verify"], cwd=self.folder, capture_output=True, text=True, check=False)
                self.assertEqual(outcome.returncode, 1)
                self.assertRegex(outcome.stdout, rf"damaged: .*{Path(file).name}.*CRC-32")
                self.assertIn(Path(file).name, self.assert_fails(*command))
                self.assertEqual(list(self.folder.glob("new*")), [])

    def test_hashes_of_our_safetensors(self):
        """By whatever reads the file, also in several files."""
        tensors = {"a": torch.rand(700, 900), "b": torch.rand(3), "none": torch.zeros(0, 2)}
        torch.save(tensors, self.folder / "one.pt")
        tessera(self.folder, "consolidate", "one.pt", "one.safetensors")
        tessera(self.folder, "consolidate", "one.pt", "many", "--max-shard-size", "1MB")
        for source in ("one.safetensors", "many"):
            file = max((self.folder / source).iterdir(), key=lambda path: path.stat().st_size) if source == "many" else self.folder / source
            self.assertIn("verified", tessera(self.folder, "inspect", source, "--verify"))
            tessera(self.folder, "convert", source, "good.pt", "--to", "pt")
            self.assert_same(torch.load(self.folder / "good.pt"), tensors)
            whole = file.read_bytes()
            data = bytearray(whole)
            data[data.index(tensors["a"].numpy().tobytes()) + 1_500_001] ^= 4
            file.write_bytes(data)
            outcome = subprocess.run([os.environ["TESSERA"], "inspect", source, "--verify"], cwd=self.folder, capture_output=True, text=True, check=False)
            self.assertEqual(outcome.returncode, 1)
            self.assertRegex(outcome.stdout, rf"damaged: .*{file.name}: tensor 'a' is damaged between bytes")
            for command in (("convert", source, "new.pt", "--to", "pt"), ("convert", source, "new", "--to", "tessera"), ("consolidate", source, "new.h5")):
                self.assertIn(f"{file.name}: tensor 'a' is damaged", self.assert_fails(*command))
            self.assertEqual(list(self.folder.glob("new*")), [])
            file.write_bytes(whole)

    def test_a_file_that_is_rewritten_in_place_meanwhile(self):
        """As some trainers write last.ckpt: whoever reads it then has an error or the file, and no signal."""
        path = self.folder / "last.ckpt"
        for zipped in (True, False):
            torch.save({f"w{i}": torch.full((50, 1000), float(i)) for i in range(40)}, path, _use_new_zipfile_serialization=zipped)
            content = path.read_bytes()
            stop = threading.Event()

            def rewrite(content=content, stop=stop):
                while not stop.is_set():
                    with open(path, "wb") as file:  # truncates
                        for begin in range(0, len(content), 1 << 19):
                            file.write(content[begin:begin + (1 << 19)])
                            file.flush()

            writer = threading.Thread(target=rewrite)
            writer.start()
            try:
                codes = [subprocess.run([os.environ["TESSERA"], "inspect", "last.ckpt", *words], cwd=self.folder, capture_output=True, check=False).returncode
                         for _ in range(8) for words in ((), ("--verify",))]
            finally:
                stop.set()
                writer.join()
            self.assertLessEqual(set(codes), {0, 1})

    def test_names_with_control_characters(self):
        torch.save({"../a\0b\x1b\nc": torch.ones(2)}, self.folder / "names.pt")
        self.assertRegex(self.assert_fails("convert", "names.pt", "out", "--to", "universal"), r"'\.\./a\\x00b\\x1b\\x0ac'.*expected a name that is one")
        self.assertIn("../a\\x00b\\x1b\\x0ac", tessera(self.folder, "inspect", "names.pt"))

    def test_two_commands_at_once(self):
        torch.save({f"w{i}": torch.full((300, 1000), float(i)) for i in range(20)}, self.folder / "one.pt")
        words = [os.environ["TESSERA"], "convert", "one.pt", "out", "--to", "tessera"]
        commands = [subprocess.Popen(words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        outcomes = [(*one.communicate(), one.returncode) for one in commands]
        self.assertTrue(any(code == 0 for *_, code in outcomes), outcomes)
        for _, error, code in outcomes:
            self.assertTrue(code == 0 or (code == 1 and "another process is converting a checkpoint into it" in error), outcomes)
        self.assertIn("every hash as saved", tessera(self.folder, "inspect", "out", "--verify"))
        alone = os.open(self.folder / "out", os.O_RDONLY)
        fcntl.flock(alone, fcntl.LOCK_EX)
        self.assertIn("out: another process is converting a checkpoint into it; expected to be alone", self.assert_fails(*words[1:]))
        os.close(alone)

    def test_train_goes_on_without_what_cannot_be_taken_over(self):
        """Of a run of its own, converted, with a schedule that cannot be read: an error, and with the flag a warning."""
        config = {"model": {"type": "fashion_mnist_cnn", "channels": 2, "hidden": 8}, "data": {"type": "fashion_mnist", "path": str(make_data(self.folder / "data"))},
                  "trainer": {"max_steps": 2, "device": "cpu", "output_dir": "first"}, "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}}
        (self.folder / "config.json").write_text(json.dumps(config))
        tessera(self.folder, "train", "config.json")
        tessera(self.folder, "convert", "first/checkpoints", "copy", "--to", "universal")
        (path,) = (self.folder / "copy").rglob("mp_rank_00_model_states.pt")
        saved = torch.load(path, weights_only=False)
        torch.save({**saved, "lr_scheduler": types.SimpleNamespace(a=1)}, path)
        words = ["train", "config.json", "--resume", "copy", "--set", "trainer.max_steps=4", "trainer.output_dir=second"]
        error = self.assert_fails(*words)
        for part in ("lr_scheduler: types.SimpleNamespace", "cannot be taken over", "; --allow-partial-load goes on without"):
            self.assertIn(part, error)
        shutil.rmtree(self.folder / "second", ignore_errors=True)
        outcome = subprocess.run([os.environ["TESSERA"], *words, "--allow-partial-load"], cwd=self.folder, capture_output=True, text=True, check=False)
        self.assertEqual(outcome.returncode, 0, outcome)
        self.assertIn("lr_scheduler: types.SimpleNamespace", outcome.stderr)
        self.assertIn("resuming after step 2, from copy/", outcome.stdout)

    def test_models(self):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2))
        model.save_pretrained(self.folder / "my-model", max_shard_size="2KB")
        written = self.run_page("Models", "Hugging Face model")
        self.assertEqual({name: str(next(iter(one.values())).dtype) for name, one in written.items()},
                         {"model.safetensors": "torch.bfloat16", "my-model-copy.pt": "torch.float32"})
        for name, tensors in written.items():
            self.assert_tensors(tensors, model.state_dict(), torch.bfloat16 if name == "model.safetensors" else None)

    def test_the_way_back(self):
        model, optimizer = trainer_test.trained()
        dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
                 checkpoint_id=self.folder / "source", no_dist=True)
        tessera(self.folder, "convert", "source", "runs/mine", "--to", "tessera")
        self.assert_page("The way back", "", model.state_dict(), num_written=3)


if __name__ == "__main__":
    unittest.main()
