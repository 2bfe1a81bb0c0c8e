"""What a run looks like on a terminal of 80 columns: a bar that stays in its line, and a clean screen at the end."""
import re
import unittest

from terminal import render, run_on_terminal
from tool import TIMEOUT_S, ToolTest

COLUMNS = 80


class RenderTest(unittest.TestCase):
    def test_overwrites_and_wraps(self):
        self.assertEqual(render(b"abc\rX\r\nlast", 80), ["Xbc", "last"])
        self.assertEqual(render(b"abcdef", 4), ["abcd", "ef"])
        self.assertEqual(render("▌█\rab".encode(), 4), ["ab"])
        with self.assertRaises(ValueError):
            render(b"\x1b[2K", 80)


class TerminalTest(ToolTest):
    def train(self, *args, **variables):
        name = self.write("config.json", self.config(
            trainer={"max_steps": 40, "eval_every_steps": 10, "eval_batch_size": 4, "output_dir": "run", "device": "cpu"}))
        process, written = run_on_terminal(
            lambda **files: self.start("train", name, *args, env=variables, **files), COLUMNS, TIMEOUT_S)
        self.assertEqual(process.returncode, 0, written.decode())
        self.assert_nothing_runs()
        return written

    def check(self, written):
        text = written.decode()
        drawn = [part for part in re.split(r"[\r\n]", text) if re.match(r"(train|evaluate): ", part)]
        self.assertTrue(any(part.startswith("train: ") for part in drawn))
        self.assertTrue(any(part.startswith("evaluate: ") for part in drawn))
        for part in drawn:
            self.assertLess(len(part), COLUMNS, part)  # the last column stays free
        self.assertNotIn("\nstep ", text)  # the bar says it

        screen = render(written, COLUMNS)
        bars = [line for line in screen if re.match(r"(train|evaluate): ", line)]
        self.assertEqual(len(bars), 1, screen)
        self.assertRegex(bars[0], r"^train: 100%\|.*\| 40/40 \[\d\d:\d\d<00:00, \d.*samples/s, loss=\d.*, lr=.*\]$")
        evaluations = [line for line in screen if line.startswith("epoch ")]
        self.assertEqual(len(evaluations), 6, screen)  # every 10 steps, and after 16 and 32: the epochs
        for line in evaluations:
            self.assertRegex(line, r"^epoch \d\.\d\d \| test accuracy 0\.\d{4} \| test loss \d\.\d{4} \| 101 samples in .* s$")
        self.assertEqual(screen[-1], "")  # the shell's prompt starts on a line of its own
        self.assertRegex(screen[-2], r"^files    run/")
        self.assertGreater(screen.index(evaluations[-1]), 0)

    def test_alone(self):
        written = self.train()
        self.check(written)
        self.assertIn("█", written.decode())

    def test_two_ranks(self):
        self.check(self.train("--nproc", "2", "--set", "zero_optimization.stage=3"))

    def test_without_utf8(self):
        written = self.train(LC_ALL="C")
        self.check(written)
        self.assertTrue(written.isascii())
        self.assertIn(b"#", written)

    def test_error_stands_on_its_own_line(self):
        name = self.write("config.json", self.config())
        _, written = run_on_terminal(
            lambda **files: self.start("train", name, "-n", 2, "--set", "data.path=/nowhere", **files), COLUMNS, TIMEOUT_S)
        screen = render(written, 10000)
        self.assertTrue(screen[0].startswith("error: "), screen)
        self.assertEqual(sum("error:" in line for line in screen), 1, screen)


if __name__ == "__main__":
    unittest.main()
