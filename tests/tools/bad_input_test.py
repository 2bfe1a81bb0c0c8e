"""Every mistake is one line that says what and where, and a non-zero exit code; no files or processes stay."""
import shutil
import socket
import unittest

from tool import ToolTest, free_port


class ConfigurationTest(ToolTest):
    """What is wrong with the configuration is found before any rank is started."""

    def test_mistakes(self):
        triple = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
        for config, *parts in (
                ({"train_batch_sise": 12}, "config.json:1: train_batch_sise", 'did you mean "train_batch_size"?', "found 12", "expected"),
                ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", 'did you mean "stage"?'),
                ({"amp": {"enabled": True}}, "amp", "does not do"),
                ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
                 "zero_optimization.offload_optimizer.nvme_path", "is missing", "expected a folder"),
                ({"trainer": {"output_dir": "nul\0x"}}, "NUL character"),
                ({"train_batch_size": "many"}, 'train_batch_size: found "many"', "expected an integer"),
                ({"zero_optimization": {"stage": 7}}, "stage: found 7", "from 0 to 3"),
                ({"optimizer": {"type": "Adan"}}, "optimizer.type", '"Adan"', '"AdamW"', "did you mean"),
                ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "bf16.enabled"),
                (triple, "train_batch_size 30", "8 x gradient_accumulation_steps 2 x world size 2 = 32", "would do"),
                ({"train_batch_size": 13}, "train_batch_size 13", "12 or 14 would do"),
                ('{"train_batch_size": 4,\n "train_batch_size": 8}', "config.json:2", "train_batch_size", "twice"),
                ('{"train_batch_size": 4} and more', "config.json:1", "found 'and", "after the end"),
                ('{"train_batch_size": 4', "config.json:1", "ends too early"),
                ('{"train_batch_size": }', "config.json:1"),
                ("", "config.json", "is empty", "expected a JSON object"),
                ("[1]", "config.json", "found [1]", "expected an object"),
                ("[" + "1," * 200_000 + "1]", "more than 100000 values")):
            with self.subTest(parts=parts):
                name = self.write("config.json", config if isinstance(config, str) else self.config(**config))
                self.assert_one_error(self.run_tool("train", name, "--nproc", 2), *parts)

    def test_files_and_overrides(self):
        good = self.write("config.json", self.config())
        (self.folder / "binary.json").write_bytes(bytes(range(256)))
        for args, *parts in (
                (("binary.json",), "binary.json:1:1"),
                (("no.json", "-n", "2"), "no.json: cannot be opened", "No such file"),
                ((self.folder, "-n", "2"), f"{self.folder}: is a folder"),
                (("", "-n", "2"), "CONFIG is empty"),
                ((good, "--set", "zero_optimization.stag=3"), "--set: zero_optimization.stag", 'did you mean "stage"?'),
                ((good, "-n", "2", "--set", "zero_optimization.stage=9"), "stage: found 9"),
                ((good, "--set", "zero_optimization.stage"), "--set zero_optimization.stage: expected PATH=VALUE"),
                ((good, "--set"), "--set", "required")):
            with self.subTest(args=args):
                self.assert_one_error(self.run_tool("train", *args), *parts)

    def test_a_folder_for_state_that_cannot_be_made(self):
        offload = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc/none"}}
        outcome = self.run_tool("train", self.write("config.json", self.config(zero_optimization=offload)))
        self.assertEqual(outcome.code, 1, outcome)
        for part in ("/proc/none", "nvme_path"):
            self.assertIn(part, outcome.err, outcome)

    def test_all_mistakes_of_a_file_in_its_order(self):
        name = self.write("config.json", """{
  "trainer": {"epoch": 3, "output_dir": "run"},
  "train_batch_size": 12,
  "zero_optimization": {"stage": 7},
  "optimizer": {"params": {"lr": "fast"}}
}""")
        outcome = self.run_tool("train", name, "--nproc", 2, "--set", "bf16.enabled=2")
        self.assertEqual(outcome.code, 1, outcome)
        starts = ["config.json:2: trainer.epoch: unknown key", "config.json:4: zero_optimization.stage: found 7",
                  'config.json:5: optimizer.params.lr: found "fast"', "--set: bf16.enabled: found 2"]
        lines = outcome.err.splitlines()
        self.assertEqual(len(lines), len(starts), outcome)
        for line, start in zip(lines, starts):
            self.assertTrue(line.startswith("error: " + start), line)
            self.assertLess(len(line), 250, line)
        self.assertEqual(outcome.out, "")

    def test_long_values_and_many_mistakes_are_told_in_short(self):
        long, many = "k" * 3_000_000, {f"k{i}": i for i in range(50_000)}
        for config, parts in ((self.config(**{long: 1}), ("kkk", "bytes more", "unknown key")),
                              (self.config(model={"type": long}), ("model.type", "kkk")),
                              (self.config(trainer={"output_dir": "run", **many}), ("trainer.k0: unknown key", "at least 180 more errors")),
                              (self.config(zero_optimization={"stage": 9, **many}), ("zero_optimization.k", "more errors")),
                              (self.config(optimizer={"type": "AdamW", "param_groups": [{"macht": "x"}] * 45_000}), ("param_groups[0].macht: unknown key",))):
            name = self.write("config.json", config)
            outcome = self.run_tool("train", name)
            self.assertLess(outcome.seconds, 60, "it takes time that grows with the square")
            self.assertEqual((outcome.code, outcome.out), (1, ""))
            self.assertLess(len(outcome.err), 10_000)
            self.assertLessEqual(len(outcome.err.splitlines()), 21)
            for part in parts:
                self.assertIn(part, outcome.err)


class TaskTest(ToolTest):
    """Mistakes that ranks find: two of them say it once, and so does one alone."""

    def test_mistakes(self):
        name = self.write("config.json", self.config())
        images, labels = "train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
        for folder in ("cut", "foreign", "folder"):
            shutil.copytree(self.data, self.folder / folder)
        (self.folder / "cut" / images).write_bytes((self.data / images).read_bytes()[:5000])
        (self.folder / "foreign" / labels).write_bytes(b"<!DOCTYPE html>\n" * 20)
        (self.folder / "folder" / images).unlink()
        (self.folder / "folder" / images).mkdir()
        self.write("taken", "")
        for ranks, change, *parts in (
                (1, "model.type=resnet50", "model.type", '"resnet50"', "known: fashion_mnist_cnn"),
                (2, "data.type=fashion_mnits", "data.type", '"fashion_mnits"', 'did you mean "fashion_mnist"?'),
                (2, "model.chanels=3", "model.chanels", 'did you mean "channels"?'),
                (1, "model.channels=-3", "model.channels", "found -3", "expected an integer"),
                (1, "data.path=/nowhere", "/nowhere/train-images", "not found", "data.path", "dataset-fashion-mnist"),
                (2, "data.path=/nowhere", "/nowhere/train-images", "not found", "data.path", "dataset-fashion-mnist"),
                (2, "data.path=cut", f"cut/{images}", "truncated"),
                (1, "data.path=foreign", f"foreign/{labels}", "another kind of file", "expected an IDX file"),
                (2, "data.path=folder", f"folder/{images}", "directory"),
                (2, "train_batch_size=1000", "train_batch_size", "1000", "203"),
                (1, "trainer.output_dir=taken", "trainer.output_dir", "taken", "cannot be written"),
                (2, "trainer.output_dir=taken/run", "trainer.output_dir", "taken/run", "cannot be written"),
                (2, "comm.backend=nccl", "comm.backend", "nccl", "CPU")):
            with self.subTest(change, ranks=ranks):
                self.assert_one_error(self.run_tool("train", name, "--nproc", ranks, "--set", change), *parts)
        self.assertEqual((self.folder / "taken").read_text(), "")


class RanksTest(ToolTest):
    """Wrong numbers, ports and groups."""

    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config())

    def refused(self, *flags):
        return self.run_tool("train", self.name, *flags)

    def test_flags(self):
        """Those of a launcher count for one rank too."""
        self.write("taken", "")
        self.write("env", "A=1\nRANK=3\n")
        for flags, *parts in (
                *((("--nproc", value), f"--nproc {value or chr(39) * 2}", "expected 1 to 4096 ranks")
                  for value in ("0", "-1", "5000", "abc", "2.5", "", "99999999999")),
                (("-n", "2", "--master-port", "70000"), "--master-port 70000", "65535"),
                (("-n", "2", "--master-port", "http"), "--master-port http", "65535"),
                (("-n", "2", "--save-grace", "soon"), "--save-grace soon", "seconds"),
                (("-n", "2", "--save-grace", "nan"), "--save-grace nan", "seconds"),
                (("-n", "2", "--log-dir", "taken"), "--log-dir taken"),
                (("--env-file", "nope"), "--env-file nope"), (("--bind-core-list", "9999"), "core 9999"),
                (("--log-dir", "config.json"), "--log-dir config.json"), (("--tee=x",), "--tee"), (("--tee=9:9",), "--tee 9:9"),
                (("--include", "x"), "--include"), (("--node-rank", "7"), "--node-rank 7"),
                (("--master-port", "99999"), "--master-port 99999"), (("--init", ""), "--init: is empty"),
                (("--log-dir", ""), "--log-dir: is empty"), (("--master-addr", ""), "--master-addr: is empty"),
                (("--resume", ""), "--resume is empty"),
                (("--env-file", "env"), "env:2: RANK is set by the launcher"), (("--env-file", "."), "is a folder")):
            with self.subTest(flags=flags):
                self.assert_one_error(self.refused(*flags), *parts)
        (self.folder / "empty").mkdir()
        for folder in ("empty", "absent"):
            self.assert_one_error(self.refused("--resume", "--set", f"trainer.output_dir={folder}"), f"trainer.output_dir {folder} has no checkpoints")
            self.assertEqual(list(self.folder.glob(f"{folder}/*")), [], "nothing was written")

    def test_port_in_use(self):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            self.assert_one_error(self.refused("-n", "2", "--master-port", port), f"port {port}", "in use",
                                  "--master-port")
            by_hand = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.assert_one_error(self.run_tool("train", self.name, env=by_hand), f":{port}", "in use", "MASTER_PORT")

    def test_variables(self):
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 23456}
        for variables, *parts in (
                ({"WORLD_SIZE": 2}, "RANK is not set", "WORLD_SIZE"),
                ({"RANK": 0}, "WORLD_SIZE is not set", "RANK"),
                ({"RANK": 2, "WORLD_SIZE": 2, **there}, "RANK=2", "expected 0 to 1"),
                ({"RANK": "x", "WORLD_SIZE": 2, **there}, "RANK='x'", "integer"),
                ({"RANK": 0, "WORLD_SIZE": 0, **there}, "WORLD_SIZE=0", "expected 1"),
                ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR is not set"),
                ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set")):
            with self.subTest(variables=variables):
                self.assert_one_error(self.run_tool("train", self.name, env=variables), *parts)
        inside = {"RANK": 0, "WORLD_SIZE": 2, **there}
        self.assert_one_error(self.run_tool("train", self.name, "--nproc", 3, env=inside), "--nproc 3", "WORLD_SIZE=2")

    def test_configurations_differ(self):
        """Ranks started by hand with other commands: the same error on both, before anything is written."""
        port = free_port()
        by_hand = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = [self.start("train", self.name, "--set", f"seed={7 + rank}", "--set", f"trainer.max_steps={5 + rank}", env={"RANK": rank, "LOCAL_RANK": rank, **by_hand})
                     for rank in range(2)]
        for outcome in [self.finish(process) for process in processes]:
            self.assert_one_error(outcome, "seed is 7 on rank 0, but 8 on rank 1", "trainer.max_steps is 5 on rank 0, but 6 on rank 1",
                                  "expected the same on all ranks")

    def test_world_sizes_differ(self):
        for process in self.start_by_hand([2, 3], "train", self.name):
            self.assert_one_error(self.finish(process), "WORLD_SIZE differs", "2 on rank 0", "3 on rank 1")


if __name__ == "__main__":
    unittest.main()
