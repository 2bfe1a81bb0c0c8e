"""`tessera consolidate`: what OUT means, sizes, mistakes, the bar. tests/checkpoint tests what is in the files."""
import json
import os
import re
import shutil
import struct
import subprocess
import unittest
from pathlib import Path

from terminal import render, run_on_terminal
from tool import TESSERA, TIMEOUT_S, ToolTest

CONSOLIDATE_TOOL = os.environ.get("CONSOLIDATE_TOOL", "")
ZERO_TO_FP32 = str(Path(TESSERA).with_name("zero_to_fp32"))


def header(path):
    """Of a safetensors file."""
    content = path.read_bytes()
    return json.loads(content[8:8 + struct.unpack("<Q", content[:8])[0]])


class ConsolidateTest(ToolTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.checkpoints = cls.shared / "checkpoints"
        subprocess.run([CONSOLIDATE_TOOL, "sample", str(cls.checkpoints), "3"], check=True)

    def consolidate(self, *args, program=TESSERA, **options):
        command = ("consolidate",) if program == TESSERA else ()
        return self.run_tool(*command, *args, program=program, **options)

    def test_a_models_own_config_may_lie_beside_its_checkpoints(self):
        folder = self.folder / "checkpoint-5"  # as Hugging Face's Trainer saves
        shutil.copytree(self.checkpoints, folder)
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        self.assert_succeeded(self.consolidate(folder, "m.pt"))
        (folder / "latest").unlink()
        self.assert_succeeded(self.consolidate(folder, "n.pt", "--tag", "step"))
        self.assertEqual((self.folder / "m.pt").read_bytes(), (self.folder / "n.pt").read_bytes())

    def test_the_format_follows_the_ending(self):
        for name, magic in (("m.safetensors", None), ("m.h5", b"\x89HDF"), ("m.hdf5", b"\x89HDF"), ("m.pt", b"PK\3\4"), ("m.bin", b"PK\3\4")):
            outcome = self.consolidate(self.checkpoints, name)
            self.assert_succeeded(outcome)
            self.assertRegex(outcome.out, rf"^{re.escape(name)}: \d+ tensors, [\d.]+k? elements, fp32, from .*/checkpoints/step\n"
                                          r"note: left out: the precision of fp64: 2 tensors are rounded to fp32: frozen.exact, norm.fp64\n$")
            content = (self.folder / name).read_bytes()
            self.assertTrue(content.startswith(magic) if magic else "embedding.weight" in header(self.folder / name))

    def test_or_the_option(self):
        self.assert_succeeded(self.consolidate(self.checkpoints, "weights", "--format", "pt"))
        self.assertTrue((self.folder / "weights").read_bytes().startswith(b"PK\3\4"))
        self.assert_succeeded(self.consolidate(self.checkpoints, "weights.pt", "--format=h5"))
        self.assertTrue((self.folder / "weights.pt").read_bytes().startswith(b"\x89HDF"))

    def test_dtype(self):
        for dtype, word, largest in (("fp32", "F32", None), ("bf16", "BF16", ""),
                                     ("fp16", "F16", r"; expected at most 65,504 \(--dtype bf16 or fp32 hold more\)")):
            outcome = self.consolidate(self.checkpoints, "m.safetensors", "--dtype", dtype)
            self.assertEqual(outcome.code, 0, outcome)
            self.assertEqual(header(self.folder / "m.safetensors")["fc.weight"]["dtype"], word)
            warning = rf"warning: m\.safetensors: \d+ elements are too large for {dtype} and infinite now, first in '[^']+'{largest}\n"
            self.assertRegex(outcome.err, "^$" if largest is None else rf"^{warning}$")

    def test_folders_get_shards(self):
        for number, (args, num_files) in enumerate(((("out/",), 1), (("out",), 1), (("model",), 1), (("out", "--format", "safetensors"), 1),
                                                    (("out", "--max-shard-size", "800"), None), (("new", "--max_shard_size", "0.8KB"), None),
                                                    (("dotted.v2", "--max-shard-size", "5gib"), 1))):
            with self.subTest(args=args, number=number):
                self.assert_succeeded(self.consolidate(self.checkpoints, *args))
                names = sorted(path.name for path in (self.folder / args[0]).iterdir())
                if num_files:
                    self.assertEqual(names, ["model.safetensors"])
                else:
                    self.assertIn("model.safetensors.index.json", names)
                    self.assertGreater(len(names), 3)
                    index = json.loads((self.folder / args[0] / "model.safetensors.index.json").read_text())
                    self.assertEqual(sorted(set(index["weight_map"].values())), names[:-1])

    def test_tag(self):
        outcome = self.consolidate(self.checkpoints, "m.safetensors", "--tag", "step")
        self.assert_succeeded(outcome)
        self.assert_one_error(self.consolidate(self.checkpoints, "n.pt", "-t", "stepp"), "has no checkpoint stepp; it has step")

    def test_zero_to_fp32(self):
        outcome = self.consolidate(self.checkpoints, "pytorch_model.bin", program=ZERO_TO_FP32)
        self.assert_succeeded(outcome)
        self.assertTrue((self.folder / "pytorch_model.bin").exists())
        self.assert_one_error(self.consolidate(self.checkpoints, program=ZERO_TO_FP32), "consolidate: OUT is required")

    def test_mistakes(self):
        (self.folder / "folder.pt").mkdir()
        for args, *parts in (
                ((), "consolidate: DIR is required"),
                ((self.checkpoints,), "OUT is required"),
                ((self.checkpoints, ""), "OUT is empty"),
                (("", "m.pt"), "DIR is empty"),
                (("nowhere", "m.pt"), "no checkpoint directory nowhere"),
                ((self.checkpoints, "m.onnx"), "m.onnx: no format has the ending .onnx", "expected .safetensors, .h5, .pt or .bin"),
                ((self.checkpoints, "m.pt", "--format", "onnx"), "--format onnx: expected safetensors, h5 or pt"),
                ((self.checkpoints, "m.pt", "--dtype", "fp8"), "--dtype fp8: expected fp32, bf16 or fp16"),
                ((self.checkpoints, "m.pt", "--max-shard-size", "1GB"), "m.pt is the name of a file; expected a folder"),
                ((self.checkpoints, "m", "--format", "pt", "--max-shard-size", "1GB"), "only safetensors can be cut into shards"),
                ((self.checkpoints, "folder.pt"), "folder.pt is a folder; expected the name of a file"),
                ((self.checkpoints, "no/such/folder/m.pt"), "no/such/folder/m.pt", "No such file or directory"),
                ((self.checkpoints, "m.pt", "--fromat", "h5"), "unexpected '--fromat'", 'did you mean "--format"?')):
            with self.subTest(args=args):
                self.assert_one_error(self.consolidate(*args), *parts)
        for size in ("0", "-1GB", "5 G B", "1e400GB", "nan", "99999999TB"):
            with self.subTest(size=size):
                self.assert_one_error(self.consolidate(self.checkpoints, "m", f"--max-shard-size={size}"), "expected a size such as 5GB")
        self.assertEqual([path.name for path in self.folder.iterdir() if path.name != "tmp"], ["folder.pt"])

    def test_the_checkpoint_is_not_overwritten(self):
        tag = (self.checkpoints / "latest").read_text().strip()
        before = {path.name: path.read_bytes() for path in (self.checkpoints / tag).iterdir()}
        for name in ("rank_00000.h5", "model.h5"):
            self.assert_one_error(self.consolidate(self.checkpoints, self.checkpoints / tag / name), name, "is a file of a checkpoint")
        self.assertEqual({path.name: path.read_bytes() for path in (self.checkpoints / tag).iterdir()}, before)
        self.assert_one_error(self.consolidate(self.checkpoints, self.checkpoints / "latest", "--format", "pt"), "is a file of the checkpoint", "would be replaced")
        self.assertEqual((self.checkpoints / "latest").read_text().strip(), tag)
        os.mkfifo(self.folder / "pipe.pt")
        self.assert_one_error(self.consolidate(self.checkpoints, "pipe.pt"), "pipe.pt is a FIFO, a socket or a device, which a file would replace")
        self.assertTrue((self.folder / "pipe.pt").is_fifo())

    def test_another_programs_checkpoint_is_not_overwritten(self):
        for form in ("dcp", "universal"):
            self.assertEqual(self.run_tool("convert", self.checkpoints, form, "--to", form).code, 0)
            before = {path: path.read_bytes() for path in (self.folder / form).rglob("*") if path.is_file()}
            for path in {path.name: path for path in before}.values():
                with self.subTest(path):
                    self.assert_one_error(self.consolidate(form, path, "--format", "pt"), "is a file of the checkpoint", "expected another name")
            self.assertEqual({path: path.read_bytes() for path in (self.folder / form).rglob("*") if path.is_file()}, before)
        self.assertEqual(self.consolidate("dcp", "m.safetensors").code, 0)
        self.assertEqual(self.consolidate("m.safetensors", "m.safetensors", "--dtype", "bf16").code, 0)  # the weights alone

    def test_damage_of_a_trainers_folder_is_named(self):
        folder = self.folder / "checkpoint-3"  # its files have the names of those of a run
        folder.mkdir()
        self.assert_succeeded(self.consolidate(self.checkpoints, folder / "model.safetensors"))
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "trainer_state.json").write_text('{"global_step": 3}')
        self.assert_succeeded(self.run_tool("inspect", folder))
        for name, damaged, part in (("model.safetensors", (folder / "model.safetensors").read_bytes()[:-100], "it is truncated"),
                                    ("trainer_state.json", b"{", "is no JSON")):
            whole = (folder / name).read_bytes()
            (folder / name).write_bytes(damaged)
            for command in (("inspect", folder), ("consolidate", folder, "m.pt"), ("convert", folder, "dcp", "--to", "dcp")):
                self.assert_one_error(self.run_tool(*command), f"checkpoint-3/{name}", part)
            (folder / name).write_bytes(whole)

    def test_the_bar_is_gone_at_the_end(self):
        subprocess.run([CONSOLIDATE_TOOL, "layers", str(self.folder / "large"), "2", "12"], check=True)
        process, written = run_on_terminal(lambda **files: self.start("consolidate", "large", "m.pt", **files), 80, TIMEOUT_S)
        self.assertEqual(process.returncode, 0)
        drawn = [part for part in re.split(r"[\r\n]", written.decode()) if part.startswith("consolidate: ")]
        self.assertRegex(drawn[-1], r"^consolidate: 100%\|█+\| (\d+)/\1 \[\d\d:\d\d<00:00, \d+ MB/s\]$")
        for part in drawn:
            self.assertLess(len(part), 80)
        screen = render(written, 80)
        self.assertEqual(len(screen), 3, screen)
        self.assertRegex(screen[0], r"^m\.pt: \d+ tensors, 12M elements, fp32, from large/step$")


if __name__ == "__main__":
    unittest.main()
