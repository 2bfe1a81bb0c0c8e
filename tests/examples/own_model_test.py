"""docs/own_model.md works: its files are written to a folder, its commands run there, and their output agrees with the page."""
import json
import os
import re
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import ROOT, TESSERA, ToolTest  # noqa: E402

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
        (self.bin / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -B "$@"\n', encoding="utf-8")
        (self.bin / "python").chmod(0o755)

    def walk(self, model, folder, *last_commands):
        """Runs the commands of one section, and these; the last prints the Python model's results for the test set, which are the training's.
        Returns what the first one, the export, says on stderr."""
        blocks = [block for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if f"{model}.json" in block]
        self.assertEqual(len(blocks), 1)
        shown = []
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1}
        for command in [*blocks[0].splitlines(), *last_commands]:
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
