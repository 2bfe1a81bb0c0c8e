"""The segmentation example from one command: the same bits at every stage, and pictures of predictions."""
import json
import struct
import unittest
import zlib

from tool import ToolTest, write_idx

NUM_STEPS = 6


def write_png(path, rows):
    """`rows` of (red, green, blue)."""
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    header = struct.pack(">2I5B", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b""))


class SegmentationTest(ToolTest):
    def setUp(self):
        super().setUp()
        items = self.folder / "items"
        items.mkdir()
        square = bytes(200 if 6 <= row < 22 and 6 <= column < 22 else 0 for row in range(28) for column in range(28))
        write_idx(items / "train-images-idx3-ubyte", (80, 28, 28), square * 80)
        write_idx(items / "train-labels-idx1-ubyte", (80,), bytes(80))
        self.name = self.write("config.json", self.config(
            model={"type": "unet", "base_channels": 4, "depth": 2},
            data={"type": "fashion_composites", "path": str(items), "num_images": 40, "size": 32, "max_items": 2,
                  "validation_fraction": 0.3, "flip": True},
            trainer={"max_steps": NUM_STEPS, "eval_every_steps": 4, "eval_every_epochs": 0, "eval_batch_size": 5, "output_dir": "run", "device": "cpu",
                     "metric_for_best": "dice"},
            train_batch_size=8, gradient_clipping=1.0))

    def train(self, folder, *overrides):
        flags = [word for override in (f"trainer.output_dir={folder}", *overrides) for word in ("--set", override)]
        outcome = self.run_tool("train", self.name, "--nproc", 2, *flags)
        self.assert_succeeded(outcome)
        return outcome

    def test_stages_give_the_same_bits(self):
        """With autocast, and running statistics."""
        seen = []
        for stage in (0, 3):
            folder = f"stage{stage}"
            self.train(folder, f"zero_optimization.stage={stage}", "torch_autocast.enabled=true",
                       "zero_optimization.stage3_param_persistence_threshold=0", "zero_optimization.unit_numel=2000")
            results = self.results(folder)
            self.assertEqual((results["eval_samples"], results["zero_stage"]), (12, stage))
            seen.append((self.losses(folder), results["eval_dice"], results["eval_loss"], (self.folder / folder / "model.safetensors").read_bytes()))
        self.assertEqual(len(set(seen[0][0])), NUM_STEPS)
        self.assertEqual(seen[1], seen[0])

    def test_pictures(self):
        outcome = self.train("run", "jsonl_monitor.enabled=true")
        self.assertIn("segmentation: 28 training and 12 validation samples", outcome.out)
        self.assertRegex(outcome.out, r"\neval     dice 0.*, on 12 validation samples\n")
        pictures = sorted((self.folder / "run" / "samples").iterdir())
        self.assertEqual([path.name for path in pictures], ["step_00000004.png", "step_00000006.png"])
        for path in pictures:
            header = path.read_bytes()[:24]
            self.assertEqual((header[:8], struct.unpack(">2I", header[16:])), (b"\x89PNG\r\n\x1a\n", (3 * 168, 4 * 168)))
        told = map(json.loads, (self.folder / "run" / "jsonl_monitor" / "events.jsonl").read_text().splitlines())
        self.assertEqual([(line["step"], line["image"], line["width"], line["file"]) for line in told if "image" in line],
                         [(step, "samples/predictions", 3 * 168, f"run/samples/step_{step:08}.png") for step in (4, 6)])
        self.train("run", "trainer.eval_every_steps=0")
        self.assertEqual([path.name for path in (self.folder / "run" / "samples").iterdir()], ["step_00000006.png"], "an earlier run's are gone")

    def test_a_folder_of_images(self):
        for name in ("images", "masks"):
            (self.folder / name).mkdir()
        for i in range(12):
            is_item = [[i <= row < i + 16 and 4 <= column < 20 for column in range(40)] for row in range(36)]
            write_png(self.folder / "images" / f"{i}.png", [[(220, 200, 60) if item else (20, 4 * i, 90) for item in row] for row in is_item])
            write_png(self.folder / "masks" / f"{i}_mask.png", [[(255, 255, 255) if item else (0, 0, 0) for item in row] for row in is_item])
        data = '{"type": "image_masks", "images": "images", "masks": "masks", "scale": 0.5, "validation_fraction": 0.25}'
        outcome = self.train("good", f"data={data}", "train_batch_size=2")
        self.assertIn("segmentation: 9 training and 3 validation samples", outcome.out)
        self.assertEqual(self.results("good")["eval_samples"], 3)


if __name__ == "__main__":
    unittest.main()
