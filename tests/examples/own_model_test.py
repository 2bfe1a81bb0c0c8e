"""docs/own_model.md works: its files are written to a folder, its commands run there, and their output agrees with the page."""
import importlib
import json
import multiprocessing
import os
import re
import runpy
import sys
import unittest
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import ROOT, TESSERA, Outcome, ToolTest  # noqa: E402

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
for name in ("h5py", "torch", "torchvision.models.resnet", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"):
    importlib.import_module(name)

PAGE = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")


# What the page says of the ResNet's weights: torchvision's model has them, and the same numbers for the test set.
LOAD_RESNET = """
import h5py
import torch
from safetensors.torch import load_file
from torchvision.models.resnet import BasicBlock, ResNet

model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3).eval()
model.load_state_dict(load_file("runs/resnet/model.safetensors"))
with h5py.File("images.h5") as file:
    images, labels = torch.from_numpy(file["images"][144:]), torch.from_numpy(file["labels"][144:]).long()
with torch.no_grad():
    logits = model(images)
print(f"accuracy {(logits.argmax(1) == labels).float().mean():.4f}, loss {torch.nn.functional.cross_entropy(logits, labels):.6f}")
"""


class OwnModelTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.names = {}
        for _, comment, name, body in re.findall(r"^```(python|json)\n(#|//) (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
            self.assertNotIn(name, self.names)
            self.names[name] = comment
            self.write(name, body)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        (self.bin / "tessera").symlink_to(TESSERA)

    def run_python(self, script):
        """The script in a fork of this process, which has imported what the scripts import: each of them would take seconds for it."""
        def run():
            os.chdir(self.folder)
            sys.path.insert(0, str(self.folder))
            warnings.simplefilter("default")
            with open("out", "w") as out, open("err", "w") as err:
                sys.stdout, sys.stderr = out, err
                os.dup2(err.fileno(), 2)
                sys.argv = [script]
                runpy.run_path(script, run_name="__main__")
        child = multiprocessing.get_context("fork").Process(target=run)
        child.start()
        child.join()
        return Outcome(script, child.exitcode, *((self.folder / name).read_text() for name in ("out", "err")))

    def walk(self, model, folder, *last_commands):
        """Runs the commands of one section, and these; the last prints the Python model's results for the test set, which are the training's.
        Returns what the first one, the export, says on stderr."""
        blocks = [block for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if f"{model}.json" in block]
        self.assertEqual(len(blocks), 1)
        shown = []
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": 1}
        for command in [*blocks[0].splitlines(), *last_commands]:
            if script := re.fullmatch(r"python (\S+)", command):
                outcome = self.run_python(script[1])
            else:
                outcome = self.run_tool("-c", command, program="/bin/sh", env=environment)
            self.assertEqual(outcome.code, 0, outcome)
            shown.append(outcome)
        tessera = self.results(folder)
        *_, accuracy, loss = re.fullmatch(r"(?:goes on .*\n)?(?:accuracy (\S+), )?loss (\S+)\n", shown[-1].out).groups()
        if accuracy:
            self.assertAlmostEqual(float(accuracy), tessera["eval_accuracy"], delta=1e-4)
            self.assertGreater(tessera["eval_accuracy"], 0.9)
        self.assertAlmostEqual(float(loss), tessera["eval_loss"], delta=1e-5)
        losses = [loss for loss, _ in self.losses(folder)]
        self.assertLess(losses[-1], losses[0])
        self.assertEqual((tessera["zero_stage"], tessera["world_size"]), (3, 2))
        return shown[0].err

    def test_bert(self):
        """The page shows the trace's warnings, there are no others except about renamed functions; and the error for a label that cannot be."""
        warned = re.findall(r"(transformers/\S+\.py):\d+: TracerWarning", said := self.walk("bert", "runs/bert"))
        self.assertEqual(sorted(warned), sorted(re.findall(r"^\.\.\./(transformers/\S+\.py):\d+: TracerWarning", PAGE, re.MULTILINE)), said)
        texts = self.folder / "texts.safetensors"
        content = bytearray(texts.read_bytes())
        data = 8 + int.from_bytes(content[:8], "little")
        begin, _ = json.loads(content[8:data])["labels"]["data_offsets"]
        content[data + begin + 31 * 8:data + begin + 32 * 8] = (5).to_bytes(8, "little")
        texts.write_bytes(content)
        error = self.error_of("train", "bert.json", "--set", "trainer.output_dir=again", "--nproc", 1)
        self.assertEqual(error.strip(), re.search(r"^ *(error: texts.*)$", PAGE, re.MULTILINE)[1])

    def test_resnet(self):
        self.write("load_resnet.py", LOAD_RESNET)
        self.walk("resnet", "runs/resnet", "python load_resnet.py")

    def test_gpt2(self):
        self.walk("gpt2", "runs/gpt2")


if __name__ == "__main__":
    unittest.main()
