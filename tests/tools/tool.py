"""What the tests of the `tessera` command share: tiny data sets, starting the command, and what must be true of its end.

The paths come from ctest: TESSERA (the command), EXAMPLE_MINIMAL (a program), TORCH_DIR (the wheel's folder `torch`).
"""
import gzip
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import unittest
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA", str(ROOT / "build" / "tessera"))
EXAMPLE_MINIMAL = os.environ.get("EXAMPLE_MINIMAL", str(ROOT / "build" / "example_minimal"))

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HEADLESS = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]  # the first words of its command

NUM_TRAIN, NUM_TEST = 203, 101  # primes: they divide by no number of ranks
TIMEOUT_S = 300  # of a command that hangs; beside other work those that measure take minutes
MARKER = "TESSERA_TEST_MARKER"
# Text that must never be printed: crashes of the C++ runtime, libtorch and Python.
NOISE = re.compile(r"terminate called|what\(\)|Traceback|frame #|\[[WEIF]\d{3}|\[rank\d|Sanitizer|Aborted|core dumped")


def write_idx(path, shape, values):
    """An IDX file of unsigned bytes, compressed if the name says so."""
    with (gzip.open(path, "wb", 1) if str(path).endswith(".gz") else open(path, "wb")) as file:
        file.write(struct.pack(">4B", 0, 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + values)


def make_data(folder, num_train=NUM_TRAIN, num_test=NUM_TEST):
    """The four files of Fashion-MNIST with random pixels, the same at every call."""
    folder.mkdir()
    source = random.Random(7)
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", (count, 28, 28), source.randbytes(count * 28 * 28))
        labels = bytes(source.randrange(10) for _ in range(count))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", (count,), labels)
    return folder


def free_port():
    """Below the kernel's range for connections (32768 and up): no connection of another test takes it before its server is there."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


def process_environment(pid):
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


class Outcome:
    """How a command ended: its exit code, what it wrote, how long it took."""

    def __init__(self, args, code, out, err, seconds=0.0):
        self.args, self.code, self.out, self.err, self.seconds = args, code, out, err, seconds

    def __str__(self):
        return f"{self.args}\nexit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class ToolTest(unittest.TestCase):
    """Every test has a folder of its own: the working directory and the temporary files of the processes it starts. Those
    processes have a marker in their environment, so that any that stay behind are found."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.shared = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_tools_", ignore_cleanup_errors=True)))
        cls.data = make_data(cls.shared / "data")

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=self.shared))
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()
        self.marker = uuid.uuid4().hex
        self.addCleanup(self.kill_marked)

    # ------------------------------------------------------------------------------------------- starting

    def config(self, **changes):
        """The configuration of a run of a few steps; a change of None removes the key."""
        config = {
            "model": {"type": "fashion_mnist_cnn", "channels": 4, "hidden": 16},
            "data": {"type": "fashion_mnist", "path": str(self.data)},
            "trainer": {"max_steps": 5, "eval_batch_size": 16, "output_dir": "run", "device": "cpu"},
            "train_batch_size": 12,
            "steps_per_print": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        config.update(changes)
        config["trainer"] = {"num_threads": 1, **config["trainer"]}
        return {key: value for key, value in config.items() if value is not None}

    def write(self, name, content):
        """Writes a file into the test's folder: text as it is, anything else as JSON."""
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return name

    def environment(self, **changes):
        ours = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|TESSERA_|OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if not ours.match(name)}
        # Threads of OpenMP that spin while they wait take the cores from each other on a busy machine.
        environment.update(TMPDIR=str(self.tmp), LC_ALL="C.UTF-8", OMP_WAIT_POLICY="passive", **{MARKER: self.marker})
        environment.update({name: str(value) for name, value in changes.items()})
        return environment

    def start(self, *args, env=None, program=TESSERA, **options):
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([program, *map(str, args)], cwd=self.folder, env=self.environment(**(env or {})),
                                text=True, encoding="utf-8", errors="replace", **options)

    def finish(self, process):
        """Waits for the end of the process; the seconds count from here."""
        start = time.monotonic()
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.fail(f"{process.args} has not ended after {TIMEOUT_S} s; its processes:\n" + "\n".join(map(self.describe, self.marked())))
        return Outcome(process.args, process.returncode, out, err, time.monotonic() - start)

    def run_tool(self, *args, env=None, program=TESSERA):
        return self.finish(self.start(*args, env=env, program=program))

    def start_by_hand(self, world_sizes, *args):
        """One process for every entry of `world_sizes`: its index is RANK, its value WORLD_SIZE."""
        port = free_port()
        return [self.start(*args, env={"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                                       "MASTER_PORT": port})
                for rank, size in enumerate(world_sizes)]

    # ------------------------------------------------------------------------------------- looking at it

    def marked(self):
        """The processes this test has started that still run, orphans included: pid -> environment."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                environment = process_environment(entry)
                if environment.get(MARKER) == self.marker:
                    found[int(entry)] = environment
        return found

    @staticmethod
    def describe(pid):
        """What a process is, and where in the kernel each of its threads waits."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            threads = [f"{(task / 'comm').read_text().strip()} in {(task / 'wchan').read_text()}" for task in Path(f"/proc/{pid}/task").iterdir()]
            return f"{pid} {command}: {', '.join(threads)}"
        except OSError as error:
            return f"{pid}: {error}"

    def kill_marked(self):
        for pid in self.marked():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass

    def assert_nothing_runs(self):
        give_up = time.monotonic() + 2
        while (left := self.marked()) and time.monotonic() < give_up:
            time.sleep(0.02)
        self.assertEqual(list(left), [], "processes were left behind")

    def lines_of_metrics(self, folder="run"):
        return [json.loads(line) for line in (self.folder / folder / "metrics.jsonl").read_text().splitlines()]

    def count_steps(self):
        """Those of `run` that are recorded."""
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    def wait_for_steps(self, process, num_steps=3):
        give_up = time.monotonic() + TIMEOUT_S
        while self.count_steps() < num_steps:
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), give_up, "the run does not get there")
            time.sleep(0.005)

    def losses(self, folder="run"):
        """(loss, gradient norm) of every step, as printed to all 17 digits."""
        return [(record["loss"], record["grad_norm"]) for record in self.lines_of_metrics(folder) if "loss" in record]

    def results(self, folder="run"):
        return json.loads((self.folder / folder / "all_results.json").read_text())

    def assert_succeeded(self, outcome):
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.err, "", outcome)
        self.assertNotRegex(outcome.out, NOISE, outcome)
        self.assertEqual(list(self.tmp.glob("tessera_*")), [], "temporary files were left behind")
        self.assert_nothing_runs()

    def error_of(self, *args):
        """The one line of a command that must fail. A run's folder, and the logs of its ranks, may be there."""
        outcome = self.run_tool(*args)
        self.assertEqual(outcome.code, 1, outcome)
        self.assertEqual(len(outcome.err.splitlines()), 1, outcome)
        self.assert_nothing_runs()
        return outcome.err

    def assert_one_error(self, outcome, *parts):
        """Exit code 1 and one `error:` line with these parts in it, for any number of ranks; nothing else, and no logs."""
        self.assertEqual(outcome.code, 1, outcome)
        lines = outcome.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome)
        for part in parts:
            self.assertIn(part, errors[0], outcome)
        self.assertEqual(lines, errors, outcome)
        self.assertEqual(list(self.tmp.glob("tessera_*")), [], outcome)
        self.assertEqual(outcome.out, "", outcome)
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertFalse((self.folder / "run").exists(), "a run folder was left behind")
        self.assert_nothing_runs()
