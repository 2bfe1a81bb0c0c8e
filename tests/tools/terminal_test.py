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
        self.assertEqual(render(b"a\r\nb\x1b[A\rxyz", 80), ["xyz", "b"])
        self.assertEqual(render(b"abc\r\ndef\x1b[A\ra\x1b[K", 80), ["a", "def"])
        self.assertEqual(render(b"abc\r\ndef\x1b[A\r\x1b[Jnew\r\n", 80), ["new", ""])
        with self.assertRaises(ValueError):
            render(b"\x1b[2K", 80)


class TerminalTest(ToolTest):
    def train(self, *args, TERM="xterm", columns=COLUMNS, **variables):
        name = self.write("config.json", self.config(
            trainer={"max_steps": 40, "eval_every_steps": 10, "eval_batch_size": 4, "output_dir": "run", "device": "cpu"}))
        process, written = run_on_terminal(
            lambda **files: self.start("train", name, *args, env={"TERM": TERM, **variables}, **files), columns, TIMEOUT_S)
        self.assertEqual(process.returncode, 0, written.decode())
        self.assert_nothing_runs()
        return written

    def check(self, written):
        text = written.decode()
        drawn = [part for part in re.split(r"[\r\n]", re.sub(r"\x1b\[[AJK]", "", text)) if re.match(r"(train|evaluate): ", part)]
        self.assertTrue(any(part.startswith("train: ") for part in drawn))
        self.assertTrue(any(part.startswith("evaluate: ") for part in drawn))
        for part in drawn:
            self.assertLess(len(part), COLUMNS, part)  # the last column stays free
        self.assertNotIn("\nstep ", text)  # the bar shows it

        screen = render(written, COLUMNS)
        bars = [line for line in screen if re.match(r"(train|evaluate): ", line)]
        self.assertEqual(len(bars), 1, screen)
        self.assertRegex(bars[0], r"^train: 100%\|.*\| 40/40 \[\d\d:\d\d<00:00, \d.*samples/s, loss=\d.*, lr=.*\]$")
        evaluations = [line for line in screen if line.startswith("epoch ")]
        self.assertEqual(len(evaluations), 6, screen)  # every 10 steps, and after 16 and 32: the epochs
        for line in evaluations:
            self.assertRegex(line, r"^epoch \d\.\d\d \| eval accuracy 0\.\d{4} \| eval loss \d\.\d{4} \| 101 samples in .* s$")
        self.assertEqual(screen[-1], "")  # the shell's prompt starts on a line of its own
        self.assertEqual(screen[-3:-1], ["files    run/{config.json, metrics.jsonl, trainer_state.json, all_results.json,", "         checkpoints/}"])
        self.assertGreater(screen.index(evaluations[-1]), 0)

    def test_two_ranks(self):
        """An evaluation's bar is in the place of the training's."""
        written = self.train("--nproc", "2", "--set", "zero_optimization.stage=3")
        self.check(written)
        self.assertIn("█", written.decode())
        screens = [render(written[:match.end()], COLUMNS) for match in re.finditer(rb"\revaluate: [^\r\n]*\]", written)]
        self.assertGreaterEqual(len(screens), 12)  # at the begin and at the end of each evaluation
        for screen in screens:  # the training's last one stays
            self.assertEqual([line for line in screen if line.startswith("train: ") and not line.startswith("train: 100%")], [], screen)
            self.assertRegex(screen[-1], r"^evaluate: .*samples/s\]$")

    def test_without_utf8_or_control_sequences(self):
        written = self.train(LC_ALL="C", TERM="dumb")
        self.check(written)
        self.assertTrue(written.isascii())
        self.assertIn(b"#", written)
        self.assertNotIn(b"\x1b", written)

    def test_log_lines_stand_above_the_bar(self):
        written = self.train("--set", "fp16.enabled=true", "--set", "fp16.initial_scale_power=30")
        self.assertIn(b"\r\x1b[J", written)
        skipped = [line for line in render(written, 10000) if "overflow" in line or "skip" in line.split("samples/s")[0]]
        self.assertGreaterEqual(len(skipped), 2)
        for line in skipped:
            self.assertNotRegex(line, "train:|evaluate:")

    def test_a_narrow_terminal(self):
        """Lines are wrapped between words by the command, never by the terminal."""
        written = self.train("--set", "scheduler.type=StepLR", "--set", "scheduler.params.step_size=1", "--set", "scheduler.params.gamma=0.1",
                             "-n", 2, columns=60)
        screen = render(written, 60)
        self.assertEqual(screen, render(written, 10000))
        words = " ".join(" ".join(screen).split())
        for text in ("warning: scheduler.params.step_size: found 1, which counts optimizer steps: long before the last of 40 the learning rate is 0;",
                     "fashion_mnist: 203 training and 101 test samples, 40 steps", "101 samples in ", "training loss ",
                     "files run/{config.json, metrics.jsonl, trainer_state.json, all_results.json, checkpoints/}"):
            self.assertIn(text, words)
        bars = [line for line in screen if line.startswith("train: ")]
        self.assertRegex(bars[0], r"^train: 100%\|.*40/40")
        changes = ("trainer.output_dir=again", "data.path=/nowhere at all/in a long way")
        flags = ("-n", 2, *(word for change in changes for word in ("--set", change)))
        _, written = run_on_terminal(lambda **files: self.start("train", "config.json", *flags, **files), 60, TIMEOUT_S)
        screen = render(written, 60)
        self.assertEqual(screen, render(written, 10000))
        self.assertGreater(len(screen), 2)
        self.assertTrue(screen[0].startswith("error: /nowhere"), screen)
        self.assertEqual(sum("error:" in line for line in screen), 1, screen)


if __name__ == "__main__":
    unittest.main()
