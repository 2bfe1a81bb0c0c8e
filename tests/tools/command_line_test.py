"""The command line: help, version, and mistyped commands and options."""
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

    def test_underscores_of_torchrun(self):
        outcome = self.run_tool("launch", "--nproc_per_node", 2, "--master_port", 0, "--", "true")
        self.assert_succeeded(outcome)

    def test_mistakes(self):
        name = self.write("config.json", self.config())
        for args, *parts in (
                ((), "no command was given", "train or eval or predict or launch"),
                (("trian", name), "unknown command 'trian'", 'did you mean "train"?'),
                (("--verison",), "unknown option '--verison'", 'did you mean "--version"?'),
                (("train",), "train: CONFIG is required", "tessera train --help"),
                (("train", name, "second.json"), "train: unexpected 'second.json'"),
                (("train", name, "--nporc", "2"), "train: unexpected '--nporc'", 'did you mean "--nproc"?'),
                (("train", name, "--nproc"), "train: --nproc", "missing"),
                (("train", name, "--epochs", "3"), "train: unexpected '--epochs'; a key of the configuration is given by --set trainer.epochs=3"),
                (("train", name, "--learning_rate=5e-5"), "--set optimizer.params.lr=5e-5"),
                (("train", name, "--per-device-train-batch-size", "4"), "--set train_micro_batch_size_per_gpu=4"),
                (("train", name, "--stage", "3", "--nproc", "2"), "--set zero_optimization.stage=3"),
                (("train", name, "--fp16"), "--set fp16=true"),
                (("eval", "run", "--device", "cpu"), "eval: unexpected '--device'", "--set trainer.device=cpu"),
                (("train", name, "--resume_from_checkpoint", "x"), "unexpected '--resume_from_checkpoint': here it is --resume, or --resume TAG"),
                (("train", name, "--num_processes", "2"), "here it is --nproc on the command line"),
                (("launch", "-n", "2", "--epochs", "3"), "launch: unexpected '--epochs'; expected: tessera launch"),
                (("inspect", "run", "--verfy"), 'did you mean "--verify"?'),
                (("launch", "-n", "2"), "no program was given", "-- PROGRAM"),
                (("launch", "-n", "2", "true"), "unexpected 'true'", "-- PROGRAM"),
                (("launch", "-n", "x", "--", "true"), "--nproc x", "expected 1 to 4096 ranks"),
                (("launch", "-n", "2", "--", "/no/such/program"), "/no/such/program", "No such file")):
            with self.subTest(args=args):
                self.assert_one_error(self.run_tool(*args), *parts)


if __name__ == "__main__":
    unittest.main()
