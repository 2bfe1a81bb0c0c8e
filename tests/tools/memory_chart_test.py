"""The chart of `tessera memory` as headless Chromium draws it, in light and dark. Skips where there is no Chromium."""
import collections
import json
import shutil
import subprocess
import unittest

from tool import ToolTest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 960, 646
PAGE = {"light": (0xFF, 0xFF, 0xFF), "dark": (0x0D, 0x11, 0x17)}
INK = {"light": (0x1F, 0x23, 0x28), "dark": (0xF0, 0xF6, 0xFC)}
# Of tools/memory/memory_chart.cc, by the keys of memory.json.
COLOURS = {"parameters": (0x00, 0x72, 0xB2), "gradients": (0x56, 0xB4, 0xE9), "optimizer": (0xE6, 0x9F, 0x00)}


@unittest.skipUnless(CHROMIUM, "no Chromium on this machine (Debian package chromium)")
class ChartTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.write("c.json", self.config(train_batch_size=None, train_micro_batch_size_per_gpu=4))
        self.assert_succeeded(self.run_tool("memory", "c.json", "--steps", 2, "--nproc", 2, "--out", "m", "--set", "comm.backend=gloo"))
        self.trials = [t for t in json.loads((self.folder / "m" / "memory.json").read_text())["trials"] if t["rank"] == 0]

    def pixels(self, scheme):
        """Rows of (red, green, blue) of a screenshot."""
        from PIL import Image

        picture = self.folder / f"{scheme}.png"
        subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
                        f"--user-data-dir={self.folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}",
                        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", f"--screenshot={picture}",
                        (self.folder / "m" / "memory.svg").as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(picture) as image:
            self.assertEqual(image.size, (WIDTH, HEIGHT))
            data = image.convert("RGB").tobytes()
        pixels = list(zip(data[0::3], data[1::3], data[2::3]))
        return [pixels[row * WIDTH:(row + 1) * WIDTH] for row in range(HEIGHT)]

    def test_bars_are_as_high_as_their_bytes_in_light_and_dark(self):
        for scheme in PAGE:
            with self.subTest(scheme):
                rows = self.pixels(scheme)
                counts = collections.Counter(pixel for row in rows for pixel in row)
                self.assertEqual(counts.most_common(1)[0][0], PAGE[scheme])
                self.assertGreater(counts[INK[scheme]], 300, "words and lines can be read")
                for stage, middle in enumerate(self.middles()):
                    column = [row[middle] for row in rows[64:345]]  # of the bars, above the panels
                    heights = {use: column.count(colour) for use, colour in COLOURS.items()}
                    peak = self.trials[stage]["peak"]
                    for use in COLOURS:  # lines may lie over a bar, hence the delta
                        expected = peak[use] / self.trials[0]["peak"]["optimizer"] * self.unit_height(rows)
                        self.assertAlmostEqual(heights[use], expected, delta=5, msg=(stage, use))

    def middles(self):
        slot = (WIDTH - 64 - 16) / len(self.trials)
        return [round(64 + slot * (index + 0.5)) + 30 for index in range(len(self.trials))]  # beside the number above a bar

    def unit_height(self, rows):
        column = [row[self.middles()[0]] for row in rows[64:345]]
        return column.count(COLOURS["optimizer"])


if __name__ == "__main__":
    unittest.main()
