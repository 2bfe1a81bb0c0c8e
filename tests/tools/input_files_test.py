"""A FIFO or a device in place of any file the command reads: one line that names it, at once. And a full or closed standard output, and a limit on
the size of files, are errors too."""
import concurrent.futures
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import time
import unittest

from segmentation_test import write_png
from tool import TESSERA, ToolTest, write_idx

TIMEOUT_S = 30  # for four at once on a busy machine; a command that waits for its input never ends


def write_safetensors(path, tensors):
    """{name: (dtype, shape, bytes)}"""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class InputFilesTest(ToolTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.inputs = inputs = cls.shared / "inputs"
        inputs.mkdir()
        for name, shape in (("train-images-idx3-ubyte", (8, 28, 28)), ("train-labels-idx1-ubyte", (8,)), ("t10k-images-idx3-ubyte", (8, 28, 28)),
                            ("t10k-labels-idx1-ubyte", (8,))):
            write_idx(inputs / name, shape, bytes(8 if len(shape) == 1 else 8 * 28 * 28))
        (inputs / "text.txt").write_text("abcdefg" * 100)
        (inputs / "table.tsv").write_text("".join(f"{'pos' if i % 2 else 'neg'}\tword{i}\n" for i in range(40)))
        (inputs / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
        write_safetensors(inputs / "data.safetensors", {"x": ("F32", [8, 2], bytes(64)), "y": ("I64", [8], bytes(64))})
        (inputs / "data.h5").write_bytes(b"")
        (inputs / "model.pt").write_bytes(b"")
        (inputs / "lines.txt").write_text("a\n")
        (inputs / "init.safetensors").write_bytes(b"")
        for name in ("images", "masks"):
            (inputs / name).mkdir()
            for i in range(4):
                write_png(inputs / name / f"{i}.png", [[(i, i, i)] * 16] * 16)
        text = {"model": {"type": "gpt", "dim": 16, "layers": 1, "heads": 2, "sequence": 16}, "data": {"type": "text", "path": "text.txt"}}
        bert = {"model": {"type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}}
        words = {"type": "labelled_text", "path": "table.tsv", "labels": ["neg", "pos"]}
        script = {"model": {"type": "torchscript", "path": "model.pt", "loss": "cross_entropy"}}
        configs = {
            "idx": {"model": {"type": "fashion_mnist_cnn", "channels": 2, "hidden": 4}, "data": {"type": "fashion_mnist", "path": "."}},
            "text": text,
            "words": {**bert, "data": words},
            "vocab": {**bert, "data": {**words, "tokenizer": "wordpiece", "vocab": "vocab.txt"}},
            "masks": {"model": {"type": "unet", "base_channels": 2, "depth": 1}, "data": {"type": "image_masks", "images": "images", "masks": "masks", "mask_suffix": ""}},
            "tensors": {**script, "data": {"type": "tensors", "path": "data.safetensors", "inputs": ["x"], "target": "y"}},
            "hdf5": {**script, "data": {"type": "tensors", "path": "data.h5", "inputs": ["x"], "target": "y"}},
        }
        for name, config in configs.items():
            trainer = {"max_steps": 2, "save_every_steps": 1, "output_dir": "run", "device": "cpu"}
            (inputs / f"{name}.json").write_text(json.dumps({**config, "trainer": trainer, "train_batch_size": 4, "checkpoint": {"fsync": False},
                                                             "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        subprocess.run([TESSERA, "train", "idx.json"], cwd=inputs, env=environment, check=True, capture_output=True, timeout=120)
        cls.tag = (inputs / "run/checkpoints/latest").read_text().strip()

    def cases(self):
        """(the file that is replaced, the command that reads it)"""
        checkpoint = f"run/checkpoints/{self.tag}"
        cases = [(f"{name}.json", ["train", f"{name}.json"]) for name in ("text",)]
        cases += [(name, ["train", "idx.json"]) for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte")]
        cases += [("text.txt", ["train", "text.json"]), ("table.tsv", ["train", "words.json"]), ("vocab.txt", ["train", "vocab.json"]),
                  ("images/2.png", ["train", "masks.json"]), ("masks/1.png", ["train", "masks.json"]),
                  ("data.safetensors", ["train", "tensors.json"]), ("data.h5", ["train", "hdf5.json"]), ("model.pt", ["train", "tensors.json"]),
                  ("init.safetensors", ["train", "idx.json", "--init", "init.safetensors", "--set", "trainer.output_dir=other"])]
        for name in ("run/checkpoints/latest", f"{checkpoint}/manifest.json", f"{checkpoint}/rank_00000.h5"):
            cases += [(name, ["train", "idx.json", "--resume", "--set", "trainer.max_steps=4"]), (name, ["inspect", "run/checkpoints"]),
                      (name, ["consolidate", "run/checkpoints", "out.safetensors"])]
        cases += [(f"{checkpoint}/model.h5", ["inspect", "run/checkpoints", "--verify"]),
                  (f"{checkpoint}/rank_00000.h5", ["inspect", "run/checkpoints", "--verify"]),
                  ("run/metrics.jsonl", ["train", "idx.json", "--resume", "--set", "trainer.max_steps=4"]),
                  ("run/config.json", ["eval", "run"]), ("run/model.safetensors", ["eval", "run"]),
                  (f"{checkpoint}/manifest.json", ["eval", "run", "--tag", self.tag]), ("lines.txt", ["predict", "run", "--file", "lines.txt"])]
        return cases

    def check(self, number, name, args, kind):
        """What is wrong with how the command ended; empty if nothing is."""
        folder = self.folder / f"{number}_{kind}"
        shutil.copytree(self.inputs, folder)
        path = folder / name
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        start = time.monotonic()
        try:
            done = subprocess.run([TESSERA, *args], cwd=folder, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{kind} as {name}, {args}: still waiting after {time.monotonic() - start:.0f} s"
        finally:
            path.unlink()
            shutil.rmtree(folder)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")] + done.stdout.splitlines()
        named = path.parent.name if name == "run/config.json" else path.name  # "run: has no config.json"
        if done.returncode != 1 or len(done.stderr.splitlines()) > 1 or not any(named in line for line in errors):
            return f"{kind} as {name}, {args}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return ""

    def test_what_is_no_regular_file_is_refused_at_once(self):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(self.check, number, name, args, ("fifo", "zero")[number % 2]) for number, (name, args) in enumerate(self.cases())]
            complaints = [complaint for complaint in (future.result() for future in futures) if complaint]
        self.assertEqual(complaints, [], "\n" + "\n".join(complaints))

    def copy_of_inputs(self):
        folder = self.folder / "copy"
        shutil.copytree(self.inputs, folder)
        return folder

    def fails(self, folder, *args):
        done = subprocess.run([TESSERA, *args], cwd=folder, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(len((done.stderr + done.stdout).splitlines()), 1, done)
        return done.stderr + done.stdout

    def test_a_flipped_bit_of_a_model_is_noticed(self):
        folder = self.copy_of_inputs()
        model = folder / "run/model.safetensors"
        content = model.read_bytes()
        source = random.Random(4)
        for command in (["eval", "run"], ["train", "idx.json", "--init", "run/model.safetensors", "--set", "trainer.output_dir=other"]):
            for bit in (source.randrange(8 * len(content)), 8 * len(content) - 1):
                with self.subTest(command=command, bit=bit):
                    damaged = bytearray(content)
                    damaged[bit // 8] ^= 1 << bit % 8
                    model.write_bytes(damaged)
                    self.assertIn("model.safetensors", self.fails(folder, *command))
        model.write_bytes(content)
        subprocess.run([TESSERA, "eval", "run"], cwd=folder, env=self.environment(), check=True, capture_output=True, timeout=TIMEOUT_S)

    def test_what_was_printed_must_have_been_taken(self):
        for args in (["inspect", "run/checkpoints"], ["inspect", "run/checkpoints", "--json"], ["consolidate", "run/checkpoints", "full.safetensors"],
                     ["eval", "run"], ["memory", "--estimate", "--params", "1e6", "--world", "2"], ["--help"], ["--version"]):
            with self.subTest(args=args):
                with open("/dev/full", "w") as full:
                    done = subprocess.run([TESSERA, *args], cwd=self.inputs, env=self.environment(), stdout=full, stderr=subprocess.PIPE, text=True,
                                          timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, 1, done)
                self.assertIn("error: standard output cannot be written", done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done)
        done = subprocess.run([TESSERA, "inspect", "run/checkpoints"], cwd=self.inputs, env=self.environment(), capture_output=True, timeout=TIMEOUT_S)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_a_limit_of_file_sizes_is_an_error_and_no_signal(self):
        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        for args in (["consolidate", "run/checkpoints", "limited.safetensors"], ["train", "idx.json", "--set", "trainer.output_dir=limited"]):
            with self.subTest(args=args):
                done = subprocess.run([TESSERA, *args], cwd=self.inputs, env=self.environment(), preexec_fn=limited, capture_output=True, text=True,
                                      timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, 1, done)
                self.assertIn("File too large: this process may write files of at most 2000 bytes (ulimit -f", done.stderr)
        self.assertFalse((self.inputs / "limited.safetensors").exists())

    def test_what_a_process_lacks_is_said_in_one_line(self):
        """Under a shell that takes it away: streams, the working folder, /proc, the stack, threads (as a user who is not root)."""
        inspect, write = ["inspect", "run/checkpoints"], ["consolidate", "run/checkpoints", "lacking.pt"]
        unwritten = "standard output cannot be written"
        as_nobody = "exec setpriv --reuid 65534 --regid 65534 --clear-groups"
        cases = [('exec "$@" >&-', inspect, unwritten), ('exec "$@" >&-', write, unwritten), ('exec "$@" <&- >&- 2>&-', write, None),
                 ('exec "$@" >&-', ["train", "idx.json", "--set", "trainer.output_dir=closed"], unwritten),
                 ('mkdir gone; cd gone; rmdir ../gone; exec "$@"', inspect, "the working folder has been removed"),
                 ('ulimit -s 128; exec "$@"', inspect, "the limit of a stack is too low"), ('umount -l /proc; exec "$@"', inspect, "/proc is not mounted"),
                 (f'ulimit -u 1; {as_nobody} "$@"', inspect, "a thread cannot be started: Resource temporarily unavailable: this user may have 1 process")]
        for shell, args, expected in cases:
            needs_root = "umount" in shell or "setpriv" in shell
            if needs_root and os.geteuid() != 0:
                continue
            with self.subTest(shell=shell, args=args):
                wrapped = [*(["unshare", "-m"] if needs_root else []), "bash", "-c", shell, "bash", TESSERA, *args]
                done = subprocess.run(wrapped, cwd=self.inputs, env=self.environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, 1, done)
                self.assertRegex(done.stderr, rf"\Aerror: [^\n]*{expected}[^\n]*\n\Z" if expected else r"\A\Z")
        self.assertNotIn(b"standard output", (self.inputs / "lacking.pt").read_bytes())


if __name__ == "__main__":
    unittest.main()
