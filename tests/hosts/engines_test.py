"""The code of docs/spark_and_ray.md as it stands, under the real Spark, the real Ray and horovodrun: the SGD and MLflow job of
Databricks' tutorial through the Python package, and `tessera train`. Losses and weights are those of `tessera launch -n 2`, to the bit.

    engines_test.py [TEST...]        TESSERA names the program; what is not installed is skipped, by `make test-hosts` installed
"""
import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tools"), str(HERE.parent / "monitor")]
import mlflow_server  # noqa: E402
from mlflow_server import MlflowServer, params_of  # noqa: E402
from tool import ROOT, TESSERA, ToolTest, free_port, make_data  # noqa: E402

SKIPPED = 77
PAGE = (ROOT / "docs" / "spark_and_ray.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
MISSING = [f"{name} (requirements.txt [engines])" for name in ("pyspark", "ray", "pandas", "pyarrow", "horovod") if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("java") else ["java (Debian package default-jre-headless)"]
MISSING += [mlflow_server.REASON] if mlflow_server.MISSING else []


def blocks(heading):
    section = re.search(rf"^##+ {heading}\n(.*?)(?=^##+ |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


(JOB,) = blocks("A function that trains")
SPARK, SPARK_COMMAND = blocks("Spark's TorchDistributor")
RAY, RAY_COMMAND = blocks("Ray Train")
RAY_TASKS = """
import ray, subprocess
@ray.remote
def host(index):
    return subprocess.run([{tessera!r}, "train", "/data/config.json", "--nnodes", "2", "--node-rank", str(index), "--nproc", "1",
                           "--master-addr", "127.0.0.1", "--master-port", "{port}"]).returncode
assert ray.get([host.remote(index) for index in range(2)]) == [0, 0]
"""
# Horovod's launcher is Python, and starts ranks over Gloo without a library of its own. But it first asks the one that is built for each framework
# (TensorFlow, PyTorch, MXNet) whether that has Gloo. None is built here, so that question alone is answered for it.
HOROVODRUN = """
from horovod.runner import launch
if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
"""


def once(make):
    """The result of a method without arguments, for all tests."""
    made = []

    @functools.wraps(make)
    def made_before(self):
        if not made:
            made.append(make(self))
        return made[0]
    return made_before


class EnginesTest(ToolTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.images = make_data(cls.shared / "images", num_train=640)
        cls.server = MlflowServer(tempfile.mkdtemp(dir=cls.shared))
        cls.addClassCleanup(cls.server.stop)

    def setUp(self):
        super().setUp()
        self.ray = tempfile.mkdtemp(prefix="ray")  # short: there are sockets in it
        self.addCleanup(shutil.rmtree, self.ray, ignore_errors=True)

    def environment(self, **changes):
        base = {name: value for name, value in super().environment().items() if not re.match(r"SPARK_|PYSPARK_|RAY_|MLFLOW_|(?i:.*_proxy)$", name)}
        return {**base, "PATH": f"{BIN}:{base['PATH']}", "HOME": str(self.folder), "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": self.server.uri,
                "SPARK_LOCAL_IP": "127.0.0.1", "RAY_TMPDIR": self.ray, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONDONTWRITEBYTECODE": "1",
                **{name: str(value) for name, value in changes.items()}}

    def run_script(self, name, code, *before):
        """Runs the page's code, with the paths of this test in place of the page's."""
        for shown, real in (("/data/fashion", self.images), ("/data/config.json", self.folder / f"{name}.json"), ("/models", self.folder)):
            code = code.replace(shown, str(real))
        script = self.write(f"{name}_script.py", code)  # ray.py would be what `import ray` finds
        program, *words = [*before, sys.executable, script] if not before or before[0] != "spark-submit" else [*before, script]
        outcome = self.run_tool(*words, program=shutil.which(program, path=f"{BIN}:{os.environ['PATH']}"))
        self.assertEqual(outcome.code, 0, outcome)
        self.assert_ended()
        return outcome

    def assert_ended(self, seconds=20):
        give_up = time.monotonic() + seconds  # Ray's daemons notice that the program has ended
        while (left := self.marked()) and time.monotonic() < give_up:
            time.sleep(0.1)
        self.assertEqual(list(left), [], "processes were left behind")

    def remove_new(self, folder):
        """At the end, what the test has made in a folder that may have been there before."""
        before = set(folder.glob("*"))

        def remove():
            for path in set(folder.glob("*")) - before:
                shutil.rmtree(path)
            if not before:
                shutil.rmtree(folder, ignore_errors=True)
        self.addCleanup(remove)

    def weights(self, folder):
        """The checkpoint as one file, read by the command."""
        name = f"{folder}.safetensors"
        outcome = self.run_tool("consolidate", folder, name)
        self.assertEqual(outcome.code, 0, outcome)
        return (self.folder / name).read_bytes()

    def job_runs(self):
        return self.server.runs("fashion")

    def logged(self, run):
        self.assertEqual(run["info"]["status"], "FINISHED")
        return [(step, value) for step, value, _ in self.server.history(run, "loss")]

    @once
    def expected_job(self):
        """The job's losses and weights under `tessera launch`; on one rank the losses are the same but for rounding."""
        for name, *launcher in (("alone",), ("expected", TESSERA, "launch", "-n", 2, "--")):
            self.run_script(name, f'{JOB}\ntrain("/data/fashion", "/models/{name}")\n', *launcher)
        alone, run = self.job_runs()[-2:]
        self.assertEqual([params_of(one)["ranks"] for one in (alone, run)], ["1", "2"])
        losses = self.logged(run)
        self.assertEqual([step for step, _ in losses], list(range(1, 11)))
        self.assertLess(losses[-1][1], losses[0][1])
        for (_, one), (_, two) in zip(self.logged(alone), losses):
            self.assertAlmostEqual(one, two, places=5)
        return losses, self.weights("expected")

    def check_job(self, expected, *folders):
        """The last jobs that ran, one for each folder."""
        runs = self.job_runs()[-len(folders):]
        for run, folder in zip(runs, folders):
            with self.subTest(folder=folder):
                self.assertEqual(params_of(run), {"lr": "0.05", "ranks": "2"})
                self.assertEqual(self.logged(run), expected[0])
                self.assertEqual(self.weights(folder), expected[1])

    def write_config(self, name):
        config = self.config(mlflow={"enabled": True, "tracking_uri": self.server.uri, "experiment_name": name}, zero_optimization={"stage": 2})
        config["trainer"].update(output_dir=str(self.folder / f"run_{name}"), num_threads=1)
        self.write(f"{name}.json", config)

    @once
    def expected_command(self):
        self.write_config("trained")
        outcome = self.run_tool("train", "trained.json", "--nproc", 2)
        self.assertEqual(outcome.code, 0, outcome)
        losses = self.losses("run_trained")
        self.assertEqual(len(losses), 5)
        return losses

    def check_command(self, name):
        self.assertEqual(self.losses(f"run_{name}"), self.expected_command())
        (run,) = self.server.runs(name)
        self.assertEqual(self.logged_by_command(run), [loss for loss, _ in self.losses(f"run_{name}")])

    def logged_by_command(self, run):
        self.assertEqual(run["info"]["status"], "FINISHED")
        return [value for _, value, _ in self.server.history(run, "train/loss")]

    # ------------------------------------------------------------------------------------------------- Spark

    def test_spark(self):
        """On the driver, and a rank a task, in one process of Spark and on two workers."""
        expected = self.expected_job()
        show = "\nprint('last loss', last_loss)\n"
        outcome = self.run_script("local", JOB + SPARK + show, "spark-submit", "--master", "local[2]")
        self.check_job(expected, "single_node", "distributed")
        self.assertIn(f"last loss {expected[0][-1][1]!r}", outcome.out)
        shutil.rmtree(self.folder / "distributed")
        on_workers = "".join(line for line in SPARK.splitlines(keepends=True) if "on_the_driver" not in line)
        self.remove_new(Path(importlib.util.find_spec("pyspark").origin).parent / "work")  # where such workers run
        self.run_script("cluster", JOB + on_workers + show, "spark-submit", "--master", "local-cluster[2,1,1024]")
        self.check_job(expected, "distributed")

    def test_command_under_spark(self):
        self.write_config("spark")
        on_workers = "".join(line for line in SPARK.splitlines(keepends=True) if ".run(train" not in line)
        self.run_script("spark", on_workers + SPARK_COMMAND, "spark-submit", "--master", "local[2]")
        self.check_command("spark")

    # --------------------------------------------------------------------------------------------------- Ray

    def test_ray(self):
        expected = self.expected_job()
        outcome = self.run_script("ray", JOB + RAY + "\nprint('last loss', last_loss)\n")
        self.check_job(expected, "ray")
        self.assertIn(f"last loss {expected[0][-1][1]!r}", outcome.out)
        (kept,) = (path for path in (self.folder / "ray_results").glob("*/checkpoint_*") if path.is_dir())  # Ray's copy
        shutil.copytree(kept, self.folder / "kept")
        self.assertEqual(self.weights("kept"), expected[1])

    def test_command_under_ray(self):
        self.write_config("ray")
        self.run_script("ray", RAY.partition("\n\n")[0] + "\n" + RAY_COMMAND)
        self.check_command("ray")

    def test_command_in_plain_ray_tasks(self):
        self.write_config("tasks")
        self.run_script("tasks", RAY_TASKS.format(tessera=TESSERA, port=free_port()))
        self.check_command("tasks")

    # --------------------------------------------------------------------------------------------- horovodrun

    def run_horovodrun(self, *command):
        outcome = self.run_tool(self.write("horovodrun.py", HOROVODRUN), "--gloo", "-np", 2, *command, program=sys.executable)
        self.assertEqual(outcome.code, 0, outcome)
        self.assert_ended()

    def test_horovodrun(self):
        expected = self.expected_job()
        code = f'{JOB}\ntrain("/data/fashion", "/models/horovod")\n'.replace("/data/fashion", str(self.images)).replace("/models", str(self.folder))
        self.run_horovodrun(sys.executable, self.write("train.py", code))
        self.check_job(expected, "horovod")

    def test_command_under_horovodrun(self):
        self.write_config("horovod")
        self.run_horovodrun(TESSERA, "train", "horovod.json")
        self.check_command("horovod")


if __name__ == "__main__":
    if MISSING:
        print(f"skipped: not installed: {', '.join(MISSING)}; `make test-hosts` installs it")
        sys.exit(1 if os.environ.get("TESSERA_TEST_HOSTS_REQUIRED") else SKIPPED)
    unittest.main(verbosity=2)
