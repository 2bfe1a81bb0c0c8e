"""One script, started in every way that there is: plainly, by torchrun, by the command, in a notebook.

A program whose start is not what a test is about is a fork of the warm process: an import of torch takes seconds.
"""
import io
import json
import os
import re
import sys
import unittest
from contextlib import redirect_stdout
from pathlib import Path

from ranks import PROGRAMS, TESSERA, RanksTest, free_port, python

SCRIPT = PROGRAMS / "train_script.py"
NOTEBOOK = """
import sys
sys.path.insert(0, sys.argv[1])
import tessera, train_script
import json; print(json.dumps(tessera.launch(train_script.train, nproc=2)))
def tensors(count):
    import torch
    tessera.comm.barrier()
    return [torch.full((3,), float(i)) for i in range(count)]
for count in (1, 20):
    found = tessera.launch(tensors, args=(count,), nproc=2)
    assert [tensor.tolist() for tensor in found] == [[float(i)] * 3 for i in range(count)], found
def both_groups(torch_is_first):
    import torch
    if not torch_is_first:
        tessera.comm.init_distributed()
    torch.distributed.init_process_group("gloo")
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, torch.distributed.get_rank())
    return ranks, tessera.comm.all_gather(tessera.comm.get_rank())
for torch_is_first in (True, False):
    assert tessera.launch(both_groups, args=(torch_is_first,), nproc=2) == ([0, 1], [0, 1])
def bad(number): raise KeyError(number)
try:
    tessera.launch(bad, args=(7,), nproc=2)
except tessera.Error as error:
    assert "failed: Traceback" in str(error) and "KeyError: 7" in str(error), error
try:
    tessera.launch(lambda: lambda: 1, nproc=2)
except tessera.Error as error:
    assert "TypeError: launch(): rank 0's function returned <function" in str(error) and "cannot be pickled" in str(error), error
def fails_alone(culprit):
    tessera.comm.barrier()
    if tessera.comm.get_rank() == culprit:
        raise KeyError("mine")
    tessera.comm.barrier()
for culprit in (0, 1, 2):
    try:
        tessera.launch(fails_alone, args=(culprit,), nproc=3)
    except tessera.Error as error:
        assert str(error).startswith(f"rank {culprit} failed: ") and "KeyError: 'mine'" in str(error), error
def dies():
    import os
    os._exit(3)
try:
    tessera.launch(dies, nproc=2)
except tessera.Error as error:
    assert "its process ended with exit code 3" in str(error), error
"""

NOTEBOOKS_RANKS = """
import os, signal, sys, time, tessera, torch
from torch.utils.data import DataLoader
def computes():
    torch.set_num_threads(2)
    return torch.ones(1 << 20).add(1).sum().item(), sum(batch.sum().item() for batch in DataLoader(torch.arange(4.0), num_workers=1))
torch.set_num_threads(2)
assert computes() == tessera.launch(computes) == (2.0 * 2**20, 6.0)
def exits():
    tessera.comm.barrier()
    sys.exit()
os.environ.update(SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_NTASKS="1")  # srun has started the notebook
assert tessera.launch(exits) is None
def saves():
    signal.signal(signal.SIGTERM, lambda *_: None)
    tessera.comm.barrier()
    if tessera.comm.get_rank() == 1:
        raise KeyError("mine")
    time.sleep(90)
begin = time.monotonic()
try:
    tessera.launch(saves)
except tessera.Error as error:
    assert "KeyError: 'mine'" in str(error) and time.monotonic() - begin < 60, error
reader, writer = os.pipe()
def stays():
    os.write(writer, b"x")
    time.sleep(90)
notebook = os.fork()
if notebook == 0:
    tessera.launch(stays)
os.close(writer)
assert os.read(reader, 1) + os.read(reader, 1) == b"xx"
os.kill(notebook, signal.SIGKILL)
begin = time.monotonic()
assert os.read(reader, 1) == b"" and time.monotonic() - begin < 60, "its ranks have ended, too"
print("done")
"""


TORCH_GROUP = """
import sys, tessera, torch
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
tessera.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2})
"""


BOTH_GROUPS = """
import os, sys, tessera, torch
if sys.argv[1] == "after":
    tessera.comm.init_distributed()
torch.distributed.init_process_group("gloo")
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
assert total.item() == 3 == tessera.comm.all_reduce(tessera.comm.get_rank() + 1, "sum")
torch.distributed.destroy_process_group()
if sys.argv[1] == "before":  # torch's own store; torchrun's and Tessera's still have the first group's addresses
    tessera.comm.barrier()  # or rank 1 could reach the store that rank 0 is about to close
    torch.distributed.init_process_group("gloo")  # it may be made again
    torch.distributed.barrier()  # a rank that ends early would refuse the other's connection
tessera.comm.destroy()
assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ or sys.argv[2] == "torchrun"
print("done")
"""


COMMAND = """
import os, tessera, torch
torch.distributed.init_process_group("gloo")
ports = []
for _ in range(3):
    with tessera.comm._port_beside_torch():
        ports.append(os.environ["MASTER_PORT"])
agreed = [None, None]
torch.distributed.all_gather_object(agreed, ports)
assert agreed == [ports, ports] and os.environ["MASTER_PORT"] not in ports, agreed
tessera.run_command("--version")
try:
    tessera.run_command("train", "missing.json")
except tessera.Error as error:
    assert str(error) == "tessera train missing.json: exit code 1; what it said is above", error
tessera.comm.init_distributed()
try:
    tessera.run_command("--version")
except tessera.Error as error:
    assert "after this process has joined the group" in str(error), error
print("done")
"""


DEEPSPEED_SCRIPT = """
import argparse
import deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(2, 2)
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": args.lr}}})
said = [None] * engine.world_size
torch.distributed.all_gather_object(said, (engine.global_rank, args.local_rank, args.lr))
if engine.global_rank == 0:
    print("said", said)
"""

THE_GROUPS_END = """
import atexit, pathlib
def threads_of_gloo():
    return sum(path.read_text() == "pt_gloo_runloop\\n" for path in pathlib.Path("/proc/self/task").glob("*/comm"))
atexit.register(lambda: print("at the end", threads_of_gloo()))  # what is registered later runs before
import tessera.deepspeed, deepspeed, torch
model = torch.nn.Linear(2, 2)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": 2, "optimizer": {"type": "Adam"}})
torch.distributed.all_gather_object([None, None], 1)
print("before", threads_of_gloo())
"""


EMPTY_VARIABLES = """
import os, sys, tempfile, tessera, torch
assert os.environ.pop("TESSERA_CUDA_PLUGIN") == sys.argv[1], "an empty file here"
import tessera.deepspeed, deepspeed
from deepspeed.launcher import runner
assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
home, here = tempfile.mkdtemp(), os.path.realpath(".")
runner.DEEPSPEED_ENVIRONMENT_PATHS[0] = home
for folder in (home, here):
    open(f"{folder}/.deepspeed_env", "w").close()
words = runner.command_of(runner.parse_args(["train.py"]))[0]
assert [word for word in words if word.endswith(".deepspeed_env")] == [f"{os.path.realpath(home)}/.deepspeed_env", f"{here}/.deepspeed_env"], words
mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ.update(mpirun)
try:
    deepspeed.init_distributed(auto_mpi_discovery=False)
except tessera.Error as error:
    assert "RANK is not set" in str(error), error
else:
    raise AssertionError("no error")
for name in mpirun:
    del os.environ[name]
engine = tessera.initialize(model=torch.nn.Linear(2, 2), distributed_port=2345, config={
    "train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": tempfile.mkdtemp()}})[0]
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()  # opens the monitors
found = os.environ["MASTER_PORT"], os.environ["TESSERA_PYTHON"]
assert found == ("2345", sys.executable), found
print("done")
"""


DIFFERENT = """
import sys, tessera, torch
is_first = tessera.comm.get_rank() == 0
calls = {"op": lambda: tessera.comm.all_reduce(torch.ones(2), "mean" if is_first else "sum"),
         "shape": lambda: tessera.comm.all_reduce(torch.ones(2, 3) if is_first else torch.ones(3, 2)),
         "no element": lambda: tessera.comm.all_reduce(torch.ones(0) if is_first else torch.ones(3)),
         "root's shape": lambda: tessera.comm.broadcast(torch.ones(2, 3) if is_first else torch.ones(3, 2))}
try:
    calls[sys.argv[1]]()
except tessera.CommError as error:
    print(error)
else:
    raise AssertionError("no error")
"""


NO_UTF_8 = """
import os, sys, tessera
tessera.comm.init_distributed()
text = "cannot read /data/" + os.fsdecode(b"b\\xff")
tessera._engine.log_warning(text)
if tessera.comm.get_rank() == 1:
    if sys.argv[1] == "exit":
        sys.exit(text)
    raise ValueError(text)
try:
    tessera.comm.barrier()
except tessera.CommError as error:
    assert "cannot read /data/b\\\\udcff" in str(error), error
    print("told", flush=True)
    raise
"""


class Launch(RanksTest):
    def launch(self, text, *arguments):
        """What the command says of two ranks of a program."""
        (said,) = self.finish([self.start(TESSERA, "launch", "-n", 2, "--", *self.program(text), *arguments)])
        return said

    def test_what_ranks_ask_for_differently_is_an_error(self):
        for what, parts in (("op", ["all_reduce (mean) of", "all_reduce of"]), ("shape", ["of shape [2, 3]", "of shape [3, 2]"]),
                            ("no element", ['barrier of "all_reduce of shape [0]"', "all_reduce (mean) of"]),
                            ("root's shape", ["of shape [2, 3]", "of shape [3, 2]"])):
            text = self.launch(DIFFERENT, what)
            for part in ["collective 1 differs between ranks", *parts]:
                self.assertIn(part, text)

    def test_a_reason_that_is_no_utf_8_is_told(self):
        for how in ("raise", "exit"):
            ((code, text),) = self.outcome([self.start(TESSERA, "launch", "-n", 2, "--", *self.program(NO_UTF_8), how)], 120)
            self.assertEqual(code, 1, text)
            self.assertIn("told", text)
            self.assertIn("warning: cannot read /data/b\\udcff", text)
            self.assertRegex(text, r"error: rank 1 of 2 failed first: .*cannot read /data/b\\udcff at ")

    def test_the_threads_of_a_group_that_initialize_made_end_before_the_interpreter(self):
        (text,) = self.finish([self.start(TESSERA, "launch", "-n", 2, "--", sys.executable, "-c", THE_GROUPS_END)])
        self.assertRegex(text, "before [1-9]")
        self.assertIn("at the end 0", text)

    def test_the_command_line_of_deepspeed(self):
        (self.folder / "script.py").write_text(DEEPSPEED_SCRIPT)
        command = self.program("import runpy; runpy.run_module('tessera.deepspeed', run_name='__main__', alter_sys=True)")
        self.assertIn("said [(0, 0, 0.5), (1, 1, 0.5)]", self.finish([self.start(*command, "--num_gpus", 2, "script.py", "--lr", 0.5)])[0])
        self.assertIn("said [(0, -1, 0.5)]", self.finish([self.start(*command, "--no_local_rank", "--include", "localhost:0", "-m", "script",
                                                                     "--lr", 0.5)])[0])

    def test_flags_of_deepspeed_that_tessera_launch_has_not(self):
        import tessera.deepspeed.__main__ as deepspeed
        from tessera.deepspeed.launcher import runner
        with redirect_stdout(io.StringIO()) as said:
            deepspeed.main(["--ds_report"])
        self.assertIn("whose interface this is", said.getvalue())
        hosts = self.folder / "hosts"
        hosts.write_text("a slots=2\nb slots=2\n")
        words, changes = runner.command_of(runner.parse_args(["-H", str(hosts), "--num_nodes", "2", "--num_gpus", "2", "-i", "a@b:0,1", "--launcher",
                                                              "OpenMPI", "--master_port", "3000", "--no_python", "--no_local_rank", "run.sh", "--lr", "1"]))
        self.assertEqual(words, ["tessera", "launch", "--hostfile", str(hosts), "--launcher", "openmpi", "--include", "a@b:0,1", "--nproc", "2", "--nnodes",
                                 "2", "--master-port", "3000", "--", "run.sh", "--lr", "1"])
        self.assertEqual(changes, {})
        words, changes = runner.command_of(runner.parse_args(["--num_gpus=1", "--module", "script", "--lr", "0.5"]))
        self.assertEqual(words, ["tessera", "launch", "--nproc", "1", "--", sys.executable, "-u", "-m", "tessera.deepspeed", "-m", "script", "--lr", "0.5"])
        self.assertEqual(changes, {"TESSERA_PASS_LOCAL_RANK": "1"})
        for wrong, expected in ((["--include", "worker-0"], "expected localhost:0,1"), (["--launcher", "mpich"], "expected one of pdsh"),
                                (["--no_ssh", "--node_rank", "0"], "needs --node_rank and --master_addr"),
                                (["--num_gpus", "2", "-i", "localhost:0"], "--num_gpus 2: --include localhost:0 has 1"),
                                (["-H", "missing"], "--hostfile missing: no such file"), (["--no_python"], "needs --no_local_rank"),
                                (["-H", str(hosts), "-i", "a", "-e", "b"], "expected one of the two")):
            with self.assertRaisesRegex(SystemExit, expected):
                runner.command_of(runner.parse_args([*wrong, "script.py"]))

    def test_the_command_as_a_rank(self):
        self.assertRegex(self.launch(COMMAND), r"(?s)^\d+\.\d+\.\d+\nerror: missing.json: .*\ndone\n$")

    def test_a_group_of_torch_that_the_environment_does_not_know_is_an_error(self):
        program = self.program(TORCH_GROUP)
        for code, text in self.outcome([self.start(*program, f"file://{self.folder}/group", rank) for rank in range(2)]):
            self.assertNotEqual(code, 0)
            self.assertIn("CommError: torch.distributed has 2 ranks, but WORLD_SIZE is not set; expected RANK, WORLD_SIZE", text)

    def test_a_group_of_torch_may_be_made_before_or_after(self):
        for order in ("before", "after"):
            self.assertIn("done", self.launch(BOTH_GROUPS, order, "tessera"))
        self.finish([self.start(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), "--no-python",
                                *self.program(BOTH_GROUPS), "after", "torchrun")])

    def result(self, *command):
        (text,) = self.finish([self.start(*command)])
        return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))

    def test_every_way_trains_alike(self):
        alone = self.result(*python(), SCRIPT)
        self.assertEqual(alone["world"], 1)
        ways = [
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), "--no-python", *python(), SCRIPT],
            [TESSERA, "launch", "-n", 2, "--", sys.executable, SCRIPT],
            [sys.executable, "-m", "tessera", "launch", "-n", 2, "--", *python(), SCRIPT],
            [*self.program(NOTEBOOK), PROGRAMS],
        ]
        results = [self.result(*command) for command in ways]
        for result in results:
            self.assertEqual(result, results[0])
            self.assertEqual(result["world"], 2)
            for ours, theirs in zip(result["losses"], alone["losses"]):
                self.assertAlmostEqual(ours, theirs, places=5)

    def test_ranks_of_a_notebook_compute_have_workers_and_end_with_it(self):
        (text,) = self.finish([self.start(*self.program(NOTEBOOKS_RANKS))])
        self.assertIn("done", text)

    def test_an_empty_variable_counts_as_unset(self):
        """The package beside a file that stands for the plugin of CUDA, which a build without CUDA has not."""
        package = self.folder / "site" / "tessera"
        plugin = package / "bin" / "libtessera_cuda.so"
        plugin.parent.mkdir(parents=True)
        plugin.touch()
        for path in (Path(os.environ["BUILD_DIR"]) / "python" / "tessera").iterdir():
            if path.name != "bin":
                (package / path.name).symlink_to(path)
        names = ("MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TESSERA_CUDA_PLUGIN", "TESSERA_PYTHON", "DS_ENV_FILE")
        (text,) = self.finish([self.start(sys.executable, "-c", EMPTY_VARIABLES, plugin, PYTHONPATH=package.parent, **dict.fromkeys(names, ""))])
        self.assertIn("done", text)

    def test_a_read_on_rank_0_alone_is_an_error_soon(self):
        ranks = self.start_ranks(2, "train_script.py", "only_rank_0_reads")
        (code, text), _ = self.outcome(ranks, timeout_s=60)
        self.assertNotEqual(code, 0)
        self.assertRegex(text, re.compile(r"CommError.*rank 1", re.DOTALL))
        self.assertIn("rank 1 waits here", text)

    def test_what_a_process_lacks_is_said_at_the_import(self):
        """The working folder, /proc; streams that are closed are held, so that no file has their numbers. And the package is the build tree's."""
        script = ("import os, sys, tessera; assert os.path.basename(tessera.__file__) == '__init__.py' and tessera.__file__.startswith(sys.argv[1]); "
                  "raise SystemExit(open('/dev/null').fileno() <= 2)")
        for shell, expected in (('mkdir gone; cd gone; rmdir ../gone; exec "$@"', "ImportError: the working folder has been removed"),
                                ('umount -l /proc; exec "$@"', "ImportError: /proc is not mounted"), ('"$@" <&- >&- 2>&-; echo held $?', "held 0")):
            if "umount" in shell and os.geteuid() != 0:
                continue
            ((code, text),) = self.outcome([self.start(*(["unshare", "-m"] if "umount" in shell else []), "bash", "-c", shell, "bash", sys.executable, "-c", script,
                                                       os.environ["BUILD_DIR"])])
            self.assertIn(expected, text.splitlines()[-1])
            self.assertEqual(code, 0 if "held" in expected else 1, text)


if __name__ == "__main__":
    unittest.main()
