"""The command line: help and version. tests/messages has mistyped commands and options."""
import re
import unittest

from tool import ROOT, ToolTest


class CommandLineTest(ToolTest):
    def test_version(self):
        outcome = self.run_tool("--version")
        self.assert_succeeded(outcome)
        project = re.search(r"project\(tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
        self.assertEqual(outcome.out, project.group(1) + "\n")

    def test_help_fits_a_terminal(self):
        for command, parts in (((), ("train", "eval", "predict", "launch", "consolidate", "convert", "inspect", "memory", "--version")),
                               (("consolidate",), ("DIR", "OUT", "--max-shard-size SIZE", "zero_to_fp32")),
                               (("convert",), ("SRC", "DST", "--to FORMAT", "--tag TAG", "--dtype TYPE")),
                               (("train",), ("CONFIG", "--set KEY=VALUE", "-n, --nproc, --nproc-per-node N", "--resume [TAG|PATH]", "--init-prefix OLD=NEW", "--init-ignore GLOB")),
                               (("eval",), ("RUN", "--tag TAG", "--set KEY=VALUE", "-n, --nproc")),
                               (("predict",), ("RUN", "--text TEXT", "--file FILE", "--json")),
                               (("inspect",), ("DIR", "--tag TAG", "--verify", "--json")),
                               (("memory",), ("--stages LIST", "--simulate-world N", "--estimate", "--fit CONFIG", "--memory SIZE", "-o, --output FILE", "--out DIR")),
                               (("launch",), ("--master-port PORT", "--log-dir DIR", "-- PROGRAM ARGS"))):
            with self.subTest(command=command):
                outcome = self.run_tool(*command, "--help")
                self.assert_succeeded(outcome)
                for part in parts:
                    self.assertIn(part, outcome.out)
                self.assertLessEqual(max(map(len, outcome.out.splitlines())), 80, outcome)
                self.assertNotRegex(outcome.out, r" \n|--\w+_")


if __name__ == "__main__":
    unittest.main()
