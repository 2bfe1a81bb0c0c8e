"""What arrives at a real MLflow tracking server."""
import base64
import json
import tempfile
import time
import unittest

import mlflow_server
from mlflow_server import MlflowServer, params_of
from monitor_testing import MonitorTest

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgZGIGAAAOAAfXb+R4AAAAAElFTkSuQmCC")  # of one pixel


@unittest.skipIf(mlflow_server.MISSING, mlflow_server.REASON)
class MlflowTest(MonitorTest):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_mlflow_", ignore_cleanup_errors=True))
        cls.server = MlflowServer(folder)
        cls.addClassCleanup(cls.server.stop)

    def setUp(self):
        super().setUp()
        self.experiment = f"an experiment / of {self.id()}"
        self.config = {"mlflow": {"enabled": True, "tracking_uri": self.server.uri + "/", "experiment_name": self.experiment}}

    def send(self, *calls, **run):
        _, warnings = self.monitor(self.config, *calls, **run)
        self.assertEqual(warnings, [])

    def test_a_run(self):
        before = time.time() * 1e3
        results = self.folder / "all results.json"
        results.write_text('{"eval_accuracy": 0.5}')
        picture = self.folder / "picture.png"
        picture.write_bytes(PNG)
        self.send(["params", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}, "fp16": {"enabled": False}}],
                  ["scalars", 10, {"train/loss": 0.3125, "eval/f1 (macro)": 1e-300}], ["scalars", 20, {"train/loss": "nan"}],
                  ["scalars", 30, {"train/loss": 1}], ["image", "val/mask", 7, 1, 1, [1, 2, 3]], ["histogram", "weights", 1, [1.0]],
                  ["sample", "samples/predictions", 8, str(picture)], ["text", "samples/text", 8, "größe"],
                  ["artifact", str(results)], ["close", "FINISHED"])
        run, = self.server.runs(self.experiment)
        self.assertEqual((run["info"]["status"], run["info"]["run_name"]), ("FINISHED", "the run"))
        self.assertLessEqual(before - 1, run["info"]["start_time"])
        self.assertLessEqual(run["info"]["start_time"], run["info"]["end_time"])
        self.assertEqual(params_of(run), {"optimizer.type": "AdamW", "optimizer.params.lr": "0.001",
                                          "optimizer.params.betas": "[0.9,0.999]", "fp16.enabled": "false"})
        loss = self.server.history(run, "train/loss")
        self.assertEqual([(step, value) for step, value, _ in loss], [(10, 0.3125), (20, "NaN"), (30, 1)])
        for _, _, when in loss:
            self.assertTrue(before - 1 <= when <= time.time() * 1e3 + 1)
        self.assertEqual([value for _, value, _ in self.server.history(run, "eval/f1 _macro_")], [1e-300])
        self.assertEqual(json.loads(self.server.artifact(run, "all results.json")), {"eval_accuracy": 0.5})
        self.assertEqual(self.server.artifact(run, "images/val_mask_7.png")[:4], b"\x89PNG")
        self.assertEqual(self.server.artifact(run, "images/samples_predictions_8.png"), picture.read_bytes())
        self.assertEqual(self.server.artifact(run, "texts/samples_text_8.txt").decode(), "größe")
        self.assertEqual((self.folder / "run" / "mlflow_run_id").read_text(), run["info"]["run_id"])

    def test_a_picture_again(self):
        """Of one name and step: the last one counts."""
        pictures = [self.folder / f"{number}.png" for number in range(3)]
        for number, picture in enumerate(pictures):
            picture.write_bytes(PNG + bytes([number]))
        self.send(*[["sample", "samples/a", 1, str(picture)] for picture in pictures], ["image", "mask", 1, 1, 1, [1, 2, 3]],
                  ["image", "mask", 1, 2, 1, [1, 2, 3, 4, 5, 6]], ["close", "FINISHED"])
        run, = self.server.runs(self.experiment)
        self.assertEqual(run["info"]["status"], "FINISHED")
        self.assertEqual(self.server.artifact(run, "images/samples_a_1.png"), pictures[-1].read_bytes())
        self.assertEqual(int.from_bytes(self.server.artifact(run, "images/mask_1.png")[16:20], "big"), 2, "the width")

    def test_other_ends(self):
        begun = ["await", str(self.folder / "run" / "mlflow_run_id")]  # by then the server has the run
        for end in ([["close", "FAILED"]], [["close", "KILLED"]], []):  # the last one is never closed
            self.monitor(self.config, ["scalars", 1, {"a": 1}], begun, *end)
        give_up = time.monotonic() + 120
        # A run that has failed waits for 1.5 s; what comes later comes by itself.
        while (found := [run["info"]["status"] for run in self.server.runs(self.experiment)]) != ["FAILED", "KILLED", "FAILED"]:
            self.assertLess(time.monotonic(), give_up, found)
            time.sleep(0.1)

    def test_more_than_fits_into_a_request(self):
        long = "ü" * 7000
        params = {f"section {i}": {"key": i} for i in range(110)}  # 100 fit
        self.send(["params", {**params, "long": long, "list": [{"x": 1}, {"x": "a"}], "strange*name": 1}],
                  *[["scalars", step, {f"m{i}": step + i for i in range(60)}] for step in range(20)], ["close", "FINISHED"])  # 1,000 fit
        run, = self.server.runs(self.experiment)
        sent = params_of(run)
        self.assertEqual(len(sent), 114)
        self.assertEqual((sent["section 109.key"], sent["list.1.x"], sent["strange_name"]), ("109", "a", "1"))
        self.assertEqual(sent["long"], long[:6000])
        self.assertEqual([value for _, value, _ in self.server.history(run, "m59")], [step + 59 for step in range(20)])

    def test_a_resumed_run_goes_on(self):
        self.send(["params", {"a": 1, "steps": 10}], ["scalars", 1, {"loss": 3}], ["scalars", 2, {"loss": 2}], ["close", "KILLED"])
        self.send(["params", {"a": 1, "steps": 20, "new": 5}], ["scalars", 3, {"loss": 1}], ["close", "FINISHED"], resumed_after=2)
        run, = self.server.runs(self.experiment)
        self.assertEqual(run["info"]["status"], "FINISHED")
        self.assertEqual(params_of(run), {"a": "1", "steps": "10", "new": "5"})
        self.assertEqual([value for _, value, _ in self.server.history(run, "loss")], [3, 2, 1])
        (self.folder / "run" / "mlflow_run_id").write_text("no such run")
        self.send(["scalars", 3, {"loss": 1}], ["close", "FINISHED"], resumed_after=2)
        self.send(["scalars", 1, {"loss": 1}], ["close", "FINISHED"])  # not resumed
        self.assertEqual(len(self.server.runs(self.experiment)), 3)

    def test_the_environment_names_server_and_experiment(self):
        environment = {"MLFLOW_TRACKING_URI": self.server.uri, "MLFLOW_EXPERIMENT_NAME": self.experiment}
        self.monitor({"mlflow": {"enabled": True, "run_name": "mine"}}, ["scalars", 1, {"a": 1}], ["close", "FINISHED"], env=environment)
        self.assertEqual([run["info"]["run_name"] for run in self.server.runs(self.experiment)], ["mine"])

    def test_a_deleted_experiment_is_a_warning(self):
        self.send(["close", "FINISHED"])
        self.server.call("experiments/delete", {"experiment_id": self.server.experiment(self.experiment)})
        _, warnings = self.monitor(self.config, ["scalars", 1, {"a": 1}], ["close", "FINISHED"])
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn(f"the experiment '{self.experiment}' is deleted; expected it to be restored, or another name", warnings[0])

    def test_an_artifact_that_is_not_there_costs_nothing_else(self):
        _, warnings = self.monitor(self.config, ["artifact", "no/such/file"], ["scalars", 1, {"a": 1}], ["close", "FINISHED"])
        self.assertEqual(warnings, ["warning: mlflow: the artifact 'no/such/file' is no file that can be read; the run does not wait for it"])
        run, = self.server.runs(self.experiment)
        self.assertEqual((run["info"]["status"], len(self.server.history(run, "a"))), ("FINISHED", 1))


if __name__ == "__main__":
    unittest.main()
