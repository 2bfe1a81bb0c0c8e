"""TensorBoard's own reader finds in our event files what was written, and what torch.utils.tensorboard would have written."""
import io
import random
import time
import unittest

import numpy as np
from monitor_testing import MonitorTest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

UNLIMITED = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0, "compressedHistograms": 0}


def read(folder):
    events = EventAccumulator(str(folder), size_guidance=UNLIMITED)
    events.Reload()
    return events


class TensorboardTest(MonitorTest):
    def setUp(self):
        super().setUp()
        self.config = {"tensorboard": {"enabled": True, "output_path": str(self.folder / "logs"), "job_name": "job"}}
        self.logs = self.folder / "logs" / "job"

    def test_scalars_and_when_they_were_written(self):
        before = time.time()
        _, warnings = self.monitor(self.config, ["scalars", 10, {"train/loss": 0.3125, "train/learning_rate": 1e-3}],
                                   ["sleep", 0.2], ["scalars", 2**40, {"train/loss": "nan"}],
                                   ["scalars", 2**40 + 1, {"train/loss": "-inf"}], ["close", "FINISHED"])
        after = time.time()
        self.assertEqual(warnings, [])
        events = read(self.logs)
        self.assertEqual(events.Tags()["scalars"], ["train/loss", "train/learning_rate"])
        loss = events.Scalars("train/loss")
        self.assertEqual([event.step for event in loss], [10, 2**40, 2**40 + 1])
        np.testing.assert_equal([event.value for event in loss], [0.3125, np.nan, -np.inf])
        self.assertEqual(events.Scalars("train/learning_rate")[0].value, np.float32(1e-3))
        times = [event.wall_time for event in loss]
        self.assertLessEqual(before, times[0])
        self.assertGreater(times[1] - times[0], 0.19)
        self.assertLessEqual(times[-1], after)
        self.assertEqual(len(list(self.logs.iterdir())), 1)
        self.assertRegex(next(self.logs.iterdir()).name, r"^events\.out\.tfevents\.\d{10}\.")

    def test_the_same_scalars_as_torch(self):
        source = random.Random(1)
        values = [(step, source.uniform(-1e3, 1e3)) for step in range(50)]
        self.monitor(self.config, *[["scalars", step, {"a b/c": value}] for step, value in values])
        with SummaryWriter(self.folder / "torch") as writer:
            for step, value in values:
                writer.add_scalar("a b/c", value, step)
        ours, torchs = read(self.logs).Scalars("a b/c"), read(self.folder / "torch").Scalars("a b/c")
        self.assertEqual([(event.step, event.value) for event in ours], [(event.step, event.value) for event in torchs])

    def test_the_same_histograms_as_torch(self):
        generator = np.random.default_rng(3)
        samples = {"normal": generator.normal(0, 1, 5000), "tiny": generator.normal(0, 1e-10, 300), "zero": np.zeros(7),
                   "constant": np.full(4, -2.5), "edges": [0.0, 1e-12, 1e-12 * 1.1, -1e-12, 1e19, -1e19], "wide": generator.lognormal(0, 9, 900)}
        samples = {name: np.asarray(values, np.float32) for name, values in samples.items()}
        self.monitor(self.config, *[["histogram", name, 4, values.tolist()] for name, values in samples.items()])
        with SummaryWriter(self.folder / "torch") as writer:
            for name, values in samples.items():
                writer.add_histogram(name, values.astype(np.float64), 4)
        ours, torchs = read(self.logs), read(self.folder / "torch")
        self.assertEqual(ours.Tags()["histograms"], list(samples))
        for name in samples:
            with self.subTest(name=name):
                (mine,), (other,) = ours.Histograms(name), torchs.Histograms(name)
                self.assertEqual(mine.step, 4)
                mine, other = mine.histogram_value, other.histogram_value
                self.assertEqual((mine.min, mine.max, mine.num), (other.min, other.max, other.num))
                np.testing.assert_allclose((mine.sum, mine.sum_squares), (other.sum, other.sum_squares), rtol=1e-12)
                counted = [[(limit, count) for limit, count in zip(one.bucket_limit, one.bucket) if count > 0] for one in (mine, other)]
                self.assertEqual(counted[0], counted[1])
                # A bucket begins where the one before it ends, so the limit before a count matters too.
                below = [[one.bucket_limit[i - 1] for i in range(1, len(one.bucket)) if one.bucket[i] > 0] for one in (mine, other)]
                self.assertEqual(below[0][-3:], below[1][-3:])

    def test_values_that_are_not_finite_are_not_counted(self):
        self.monitor(self.config, ["histogram", "h", 1, ["nan", 1.5, "inf", -2.5, "-inf"]], ["histogram", "none", 1, ["nan"]])
        events = read(self.logs)
        histogram = events.Histograms("h")[0].histogram_value
        self.assertEqual((histogram.min, histogram.max, histogram.num, histogram.sum), (-2.5, 1.5, 2, -1))
        self.assertEqual(events.Histograms("none")[0].histogram_value.num, 0)

    def test_images_of_any_kind_are_small_and_right(self):
        ramp = np.add.outer(np.arange(64) * 2, np.arange(96)).astype(np.uint8)  # what filters are for
        for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            with self.subTest(mode=mode):
                pixels = np.repeat(ramp[..., None], channels, axis=2)
                self.monitor(self.config, ["image", mode, 7, 96, 64, pixels.reshape(-1).tolist(), channels])
                image, = read(self.logs).Images(mode)
                self.assertEqual((image.step, image.width, image.height), (7, 96, 64))
                decoded = Image.open(io.BytesIO(image.encoded_image_string))
                self.assertEqual(decoded.mode, mode)
                np.testing.assert_array_equal(np.asarray(decoded).reshape(pixels.shape), pixels)
                pillow = io.BytesIO()
                Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(pillow, "png")
                self.assertLess(len(image.encoded_image_string), 1.2 * len(pillow.getvalue()))

    def test_files_to_look_at(self):
        picture, words, broken = self.folder / "step_1.png", self.folder / "step_1.txt", self.folder / "broken.png"
        Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6)).save(picture)
        words.write_bytes("größe ``` \n#not a title\xff".encode("latin-1"))
        broken.write_bytes(b"no picture, but a text that is longer than the header of one")
        _, warnings = self.monitor(self.config, ["sample", "samples/predictions", 3, str(picture)], ["sample", "samples/text", 3, str(words)],
                                   ["sample", "x", 3, str(broken)], ["sample", "y", 3, str(self.folder / "none.png")])
        events = read(self.logs)
        image, = events.Images("samples/predictions")
        self.assertEqual(image.encoded_image_string, picture.read_bytes())
        self.assertEqual((image.step, image.width, image.height), (3, 6, 4))
        text = events.Tensors("samples/text/text_summary")[0].tensor_proto.string_val[0].decode()
        self.assertEqual(text, "````\ngr\ufffd\ufffde ``` \n#not a title\ufffd\n````")
        self.assertEqual(len(warnings), 2)
        self.assertEqual(warnings[0], "warning: monitors: x is left out: found no PNG header; expected a PNG file")
        self.assertRegex(warnings[1], r"^warning: monitors: y is left out: .*none\.png")

    def test_an_image_of_another_size_is_left_out(self):
        _, warnings = self.monitor(self.config, ["image", "x", 1, 2, 2, [0] * 11], ["scalars", 1, {"a": 1}])
        self.assertEqual(warnings, ["warning: monitors: x is left out: found 11 bytes for an image of 2 x 2 pixels and 3 channels; expected 12"])
        self.assertEqual(read(self.logs).Tags()["scalars"], ["a"])

    def test_parameters_are_shown_as_text(self):
        self.monitor(self.config, ["params", {"optimizer": {"params": {"lr": 1e-3}}, "größe": "ü"}])
        events = read(self.logs)
        self.assertEqual(events.PluginTagToContent("text").keys(), {"params/text_summary"})
        text = events.Tensors("params/text_summary")[0].tensor_proto.string_val[0].decode()
        self.assertEqual(text, '```json\n{\n  "optimizer": {\n    "params": {\n      "lr": 0.001\n    }\n  },\n  "größe": "ü"\n}\n```')

    def test_a_resumed_run_takes_back_later_steps(self):
        self.monitor(self.config, *[["scalars", step, {"loss": step}] for step in range(1, 9)])
        time.sleep(1.1)  # TensorBoard reads files in the order of their names, which have seconds
        self.monitor(self.config, *[["scalars", step, {"loss": step + 0.5}] for step in (6, 7)], resumed_after=5)
        self.assertEqual([(event.step, event.value) for event in read(self.logs).Scalars("loss")],
                         [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6.5), (7, 7.5)])
        time.sleep(1.1)
        self.monitor(self.config, ["scalars", 2, {"loss": 9}])
        self.assertEqual([(event.step, event.value) for event in read(self.logs).Scalars("loss")], [(2, 9)])


if __name__ == "__main__":
    unittest.main()
