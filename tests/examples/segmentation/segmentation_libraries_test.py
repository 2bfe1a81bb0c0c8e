"""The segmentation example beside what it follows: its U-Net, losses and gradients beside PyTorch's, its image files and resizing
beside Pillow's.

The path comes from ctest: SEGMENTATION_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

TOOL = os.environ["SEGMENTATION_TOOL"]


def tool(*args, **options):
    return subprocess.run([TOOL, *map(str, args)], capture_output=True, check=True, **options).stdout


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs, middle=None):
        super().__init__()
        middle = middle or outputs
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, middle, 3, padding=1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, inputs, outputs, bilinear):
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(inputs, outputs, inputs // 2)
        else:
            self.up = nn.ConvTranspose2d(inputs, inputs // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(inputs, outputs)

    def forward(self, x, skip):
        x = self.up(x)
        rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class OutConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    """The shape and the names of milesial/Pytorch-UNet, whose depth is 4 and whose width is 64."""

    def __init__(self, in_channels, num_classes, base_channels, depth, bilinear):
        super().__init__()
        self.depth = depth
        factor = 2 if bilinear else 1
        width = [base_channels << level for level in range(depth + 1)]
        self.inc = DoubleConv(in_channels, width[0])
        for i in range(1, depth + 1):
            setattr(self, f"down{i}", Down(width[i - 1], width[i] // (factor if i == depth else 1)))
        for i in range(1, depth + 1):
            setattr(self, f"up{i}", Up(width[depth - i + 1], width[depth - i] // (1 if i == depth else factor), bilinear))
        self.outc = OutConv(width[0], num_classes)

    def forward(self, x):
        levels = [self.inc(x)]
        for i in range(1, self.depth + 1):
            levels.append(getattr(self, f"down{i}")(levels[-1]))
        x = levels[-1]
        for i in range(1, self.depth + 1):
            x = getattr(self, f"up{i}")(x, levels[self.depth - i])
        return self.outc(x)


def loss_of(logits, target):
    """Cross-entropy and Dice loss of Pytorch-UNet's train.py and dice_score.py, for one micro-batch."""
    classes = logits.shape[1]
    if classes == 1:
        cross_entropy = F.binary_cross_entropy_with_logits(logits.squeeze(1), target.float())
        probabilities, truth = torch.sigmoid(logits.squeeze(1)), target.float()
    else:
        cross_entropy = F.cross_entropy(logits, target)
        probabilities, truth = F.softmax(logits, dim=1), F.one_hot(target, classes).permute(0, 3, 1, 2).float()
    dice = (2 * (probabilities * truth).sum() + 1e-6) / (probabilities.sum() + truth.sum() + 1e-6)
    return cross_entropy + 1 - dice


class FolderTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_segmentation_")))


class UNetTest(FolderTest):
    def compare(self, shape, **options):
        torch.manual_seed(5)
        model = UNet(**options)
        for name, buffer in model.named_buffers():  # as after some training
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        safetensors.torch.save_file(model.state_dict(), self.folder / "weights.safetensors")
        images = torch.rand(shape)
        target = torch.randint(0, max(options["num_classes"], 2), (shape[0], *shape[2:]))
        (self.folder / "input").write_bytes(images.numpy().tobytes())
        (self.folder / "target").write_bytes(target.numpy().tobytes())
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        job = dict(options, weights=str(self.folder / "weights.safetensors"), input=str(self.folder / "input"),
                   target=str(self.folder / "target"), shape=list(shape), out=str(out))
        (self.folder / "job.json").write_text(json.dumps(job))
        names = tool("unet", self.folder / "job.json", text=True).split()
        self.assertEqual(sorted(names), sorted(model.state_dict()))
        self.assertEqual([name for name in names if name in dict(model.named_parameters())], [name for name, _ in model.named_parameters()])

        def close(name, expected, tolerance=1e-5):
            found = torch.from_numpy(np.fromfile(out / name, np.float32)).view(expected.shape)
            self.assertLess((found - expected.detach().float()).abs().max().item(), tolerance, name)

        model.eval()
        with torch.no_grad():
            close("eval", model(images))
        model.train()
        logits = model(images)
        loss = loss_of(logits, target)
        loss.backward()
        close("train", logits)
        close("loss", loss)
        for name, parameter in model.named_parameters():
            close(name, parameter.grad, 1e-5 * max(1, parameter.grad.abs().max().item()))
        for name, buffer in model.named_buffers():
            close(name, buffer)

    def test_two_classes_transposed_convolutions(self):
        self.compare((2, 3, 32, 48), in_channels=3, num_classes=2, base_channels=8, depth=4, bilinear=False)

    def test_one_class_bilinear_odd_sizes(self):
        self.compare((2, 1, 37, 51), in_channels=1, num_classes=1, base_channels=8, depth=3, bilinear=True)

    def test_many_classes_odd_sizes(self):
        self.compare((3, 3, 23, 18), in_channels=3, num_classes=5, base_channels=4, depth=2, bilinear=False)


class ImageTest(FolderTest):
    def decode(self, path, palette="colours"):
        size, _, data = tool("decode", path, palette).partition(b"\n")
        width, height, channels = map(int, size.split())
        array = np.frombuffer(data, np.uint8).reshape(height, width, channels)
        return array[:, :, 0] if channels == 1 else array

    def pixels(self, *shape):
        return np.random.default_rng(3).integers(0, 256, shape, np.uint8)

    def test_png_of_every_mode(self):
        path = self.folder / "image.png"
        images = {
            "L": Image.fromarray(self.pixels(13, 17)), "RGB": Image.fromarray(self.pixels(13, 17, 3)),
            "RGBA": Image.fromarray(self.pixels(13, 17, 4)), "1": Image.fromarray(self.pixels(13, 17)).convert("1"),
            "P": Image.fromarray(self.pixels(13, 17, 3)).quantize(11)}
        for mode, image in images.items():
            with self.subTest(mode=mode):
                self.assertEqual(image.mode, mode)
                image.save(path)
                expected = np.asarray(image.convert({"1": "L", "P": "RGB"}.get(mode, mode)))
                np.testing.assert_array_equal(self.decode(path), expected)
        np.testing.assert_array_equal(self.decode(path, "indices"), np.asarray(Image.open(path)))
        images["P"].save(path, transparency=2)
        np.testing.assert_array_equal(self.decode(path), np.asarray(Image.open(path).convert("RGBA")))
        Image.fromarray(self.pixels(13, 17, 2), "LA").save(path)
        np.testing.assert_array_equal(self.decode(path), np.asarray(Image.open(path).convert("RGBA")))

    def test_png_that_we_write(self):
        path = self.folder / "image.png"
        for channels in (1, 3, 4):
            pixels = self.pixels(9, 14, channels)
            tool("encode", 14, 9, channels, path, input=pixels.tobytes())
            with Image.open(path) as image:
                image.verify()
            np.testing.assert_array_equal(np.asarray(Image.open(path)), pixels[:, :, 0] if channels == 1 else pixels)

    def test_jpeg(self):
        path = self.folder / "image.jpg"
        smooth = np.asarray(Image.fromarray(self.pixels(5, 6, 3)).resize((61, 47), Image.BICUBIC))
        for options in ({}, {"progressive": True}, {"subsampling": 0, "quality": 98}, {"quality": 20}):
            for image in (Image.fromarray(smooth), Image.fromarray(smooth).convert("L")):
                with self.subTest(mode=image.mode, **options):
                    image.save(path, **options)
                    difference = self.decode(path).astype(int) - np.asarray(Image.open(path)).astype(int)
                    self.assertLessEqual(np.abs(difference).max(), 2)  # versions of libjpeg-turbo

    def test_resizing_is_pillows(self):
        for folder in ("images", "masks"):
            (self.folder / folder).mkdir()
        smooth = Image.fromarray(self.pixels(9, 7, 3)).resize((63, 45), Image.BICUBIC)
        mask = Image.fromarray((self.pixels(9, 7) > 128).astype(np.uint8) * 255).resize((63, 45), Image.NEAREST)
        smooth.save(self.folder / "images" / "a.png")
        mask.save(self.folder / "masks" / "a_mask.png")
        for scale in (1.0, 0.5, 0.31):
            with self.subTest(scale=scale):
                size, _, data = tool("sample", self.folder / "images", self.folder / "masks", scale, 0).partition(b"\n")
                width, height = map(int, size.split())
                self.assertEqual((width, height), (int(63 * scale), int(45 * scale)))
                values = np.frombuffer(data, np.uint8)
                image = values[:3 * width * height].reshape(3, height, width).transpose(1, 2, 0)
                difference = image.astype(int) - np.asarray(smooth.resize((width, height), Image.BILINEAR)).astype(int)
                self.assertLessEqual(np.abs(difference).max(), 1)
                np.testing.assert_array_equal(values[3 * width * height:].reshape(height, width) * 255,
                                              np.asarray(mask.resize((width, height), Image.NEAREST)))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
