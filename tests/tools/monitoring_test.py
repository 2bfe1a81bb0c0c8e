"""Training runs with all monitors on, read back with TensorBoard's reader, Python's csv module and a real MLflow server."""
import csv
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "monitor"))

import mlflow_server  # noqa: E402
from mlflow_server import MlflowServer, params_of  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tool import ToolTest  # noqa: E402


class MonitoringTest(ToolTest):
    def environment(self, **changes):
        environment = super().environment(**changes)
        environment["TESSERA_PYTHON"] = mlflow_server.feeding_python(self.folder)
        return {name: value for name, value in environment.items() if not name.startswith("MLFLOW_") and not name.lower().endswith("_proxy")}

    def scalars(self):
        """{name: [(step, value)]} of the run's metrics.jsonl, under the monitors' names"""
        found = {}
        for record in self.lines_of_metrics():
            kind = next((kind for kind in ("eval", "test") if any(name.startswith(kind + "_") for name in record)), "train")
            for name, value in record.items():
                if name != "step":
                    found.setdefault(f"{kind}/{name.removeprefix(kind + '_')}", []).append((record["step"], value))
        return found


def read_events(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def decoded(data):
    """The characters of `data`, each byte that belongs to none as U+FFFD."""
    while data:
        for length in (1, 2, 3, 4):
            try:
                yield data[:length].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            length = 1
            yield "\ufffd"
        data = data[length:]


class MonitorsTest(MonitoringTest):
    def test_histograms_of_the_whole_model(self):
        """The histograms of the ranks' shards add up to the whole model's, the same at each stage."""
        seen = []
        for stage in (3, 0):
            self.assert_succeeded(self.run_tool("train", self.write("config.json", self.config(
                trainer={"max_steps": 4, "histograms_every_steps": 2, "output_dir": f"run{stage}", "device": "cpu"},
                tensorboard={"enabled": True}, zero_optimization={"stage": stage})), "--nproc", 2))
            events = read_events(self.folder / f"run{stage}" / "tensorboard")
            model = load_file(self.folder / f"run{stage}" / "model.safetensors")
            self.assertEqual(sorted(events.Tags()["histograms"]), sorted(f"{kind}/{name}" for kind in ("parameters", "gradients") for name in model))
            for name, tensor in model.items():
                self.assertEqual([event.step for event in events.Histograms("gradients/" + name)], [2, 4])
                last = events.Histograms("parameters/" + name)[-1].histogram_value
                values = tensor.double()
                self.assertEqual((last.num, last.min, last.max), (tensor.numel(), values.min().item(), values.max().item()))
                self.assertAlmostEqual(last.sum_squares, (values * values).sum().item(), delta=1e-9 * last.sum_squares)
                self.assertEqual(sum(last.bucket), tensor.numel())
            # The mean gradient of the batch has the norm that was clipped by and reported.
            gradients = {name: events.Histograms("gradients/" + name)[-1].histogram_value for name in model}
            squares = sum(gradient.sum_squares for gradient in gradients.values())
            reported = self.lines_of_metrics(f"run{stage}")
            norm = next(record["grad_norm"] for record in reported if record["step"] == 4 and "grad_norm" in record)
            self.assertAlmostEqual(math.sqrt(squares), norm, delta=1e-5 * norm)
            seen.append(gradients)
        self.assertEqual(seen[0], seen[1])

    def test_files(self):
        """DeepSpeed's sections, and ours, with 2 ranks; the numbers are those of a run without monitors."""
        job = {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}
        name = self.write("config.json", self.config(tensorboard=job, csv_monitor=job, jsonl_monitor={"enabled": True}))
        self.assert_succeeded(self.run_tool("train", name, "--nproc", 2))
        expected = self.scalars()
        self.assertIn("train/loss", expected)
        self.assertIn("eval/accuracy", expected)
        folder = self.folder / "output" / "ds_logs" / "train_bert"
        events = read_events(folder)
        self.assertEqual(sorted(events.Tags()["scalars"]), sorted(expected))
        for scalar, values in expected.items():
            found = [(event.step, event.value) for event in events.Scalars(scalar)]
            self.assertEqual([step for step, _ in found], [step for step, _ in values])
            for (_, value), (_, exact) in zip(found, values):
                self.assertAlmostEqual(value, exact, delta=1e-6 * abs(exact))
            with open(folder / (scalar.replace("/", "_") + ".csv"), newline="") as file:
                rows = list(csv.reader(file))
            self.assertEqual(rows[0], ["step", scalar.rpartition("/")[2]])
            self.assertEqual([(int(step), float(value)) for step, value in rows[1:]], values)
        lines = [json.loads(line) for line in (self.folder / "run" / "jsonl_monitor" / "events.jsonl").read_text().splitlines()]
        self.assertEqual(lines[0]["params"], json.loads((self.folder / "run" / "config.json").read_text()))
        self.assertEqual(lines[-1]["status"], "FINISHED")
        losses = self.losses()
        self.assert_succeeded(self.run_tool("train", self.write("config.json", self.config()), "--nproc", 2))
        self.assertEqual(self.losses(), losses)

    def test_what_the_task_draws(self):
        (self.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        name = self.write("config.json", self.config(
            model={"type": "gpt", "dim": 16, "layers": 1, "heads": 2, "vocabulary": 256, "sequence": 16},
            data={"type": "text", "path": "text.txt", "prompt": "the", "sample_bytes": 24, "test_fraction": 0.3},
            trainer={"max_steps": 4, "eval_every_steps": 2, "eval_batch_size": 4, "output_dir": "run", "device": "cpu"}, tensorboard={"enabled": True}))
        self.assert_succeeded(self.run_tool("train", name, "--nproc", 2))
        drawn = read_events(self.folder / "run" / "tensorboard").Tensors("samples/text/text_summary")
        self.assertEqual([event.step for event in drawn], [2, 4])
        for event in drawn:
            written = (self.folder / "run" / "samples" / f"step_{event.step:08}.txt").read_bytes()
            self.assertEqual(len(written), 3 + 24)
            shown = event.tensor_proto.string_val[0].decode()
            fence = re.match("`{3,}", shown)[0]
            self.assertEqual(shown, f"{fence}\n{''.join(decoded(written))}\n{fence}")


@unittest.skipIf(mlflow_server.MISSING, mlflow_server.REASON)
class MlflowTrainingTest(MonitoringTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_mlflow_", ignore_cleanup_errors=True))
        cls.server = MlflowServer(folder)
        cls.addClassCleanup(cls.server.stop)

    def setUp(self):
        super().setUp()
        self.mlflow = {"enabled": True, "tracking_uri": self.server.uri, "experiment_name": self.id()}

    def run_of_this(self):
        run, = self.server.runs(self.id())
        return run

    def test_a_run(self):
        name = self.write("config.json", self.config(mlflow=self.mlflow, trainer={"max_steps": 5, "output_dir": "run", "device": "cpu", "name": "r"}))
        self.assert_succeeded(self.run_tool("train", name, "--nproc", 2))
        run = self.run_of_this()
        self.assertEqual((run["info"]["status"], run["info"]["run_name"]), ("FINISHED", "r"))
        for scalar, values in self.scalars().items():
            self.assertEqual([(step, value) for step, value, _ in self.server.history(run, scalar)], values)
        params = params_of(run)
        self.assertEqual((params["train_batch_size"], params["optimizer.type"], params["model.channels"]), ("12", "AdamW", "4"))
        self.assertEqual(json.loads(self.server.artifact(run, "all_results.json")), self.results())

    def test_a_rank_is_killed(self):
        launcher = self.start("train", self.write("config.json", self.config(
            trainer={"max_steps": 1000000, "output_dir": "run", "device": "cpu"}, mlflow=self.mlflow)), "--nproc", 2)
        self.wait_for_steps(launcher)
        while not (self.folder / "run" / "mlflow_run_id").exists():  # it is made beside training
            self.assertIsNone(launcher.poll(), "the run has ended")
            time.sleep(0.05)
        rank_1, = (pid for pid, environment in self.marked().items() if environment.get("RANK") == "1")
        os.kill(rank_1, signal.SIGKILL)
        self.assertEqual(self.finish(launcher).code, 137)
        self.assertEqual(self.run_of_this()["info"]["status"], "FAILED")


if __name__ == "__main__":
    unittest.main()
