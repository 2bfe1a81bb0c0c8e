"""A tracking server that is dead, silent, busy, slow or something else: one warning, and the run never waits."""
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mlflow_server import free_port
from monitor_testing import MONITOR_SCRIPT, ROOT, MonitorTest

CALLS = [["params", {"a": 1}], *[["scalars", step, {"loss": step}] for step in range(1, 51)]]


class Recorder(ThreadingHTTPServer):
    """Answers like a tracking server that has one run; `behave(number of the request)` may sleep, and returns a status."""
    daemon_threads = True

    def __init__(self, behave, body=None, silent_at="no such path"):
        self.behave, self.body, self.silent_at = behave, body, silent_at
        self.lock, self.received = threading.Lock(), []  # (path, body, authorization)
        super().__init__(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def values(self, metric):
        batches = [json.loads(body) for path, body, _ in self.received if path.endswith("log-batch")]
        return [one["value"] for batch in batches for one in batch.get("metrics", []) if one["key"] == metric]

    def statuses(self):
        return [json.loads(body)["status"] for path, body, _ in self.received if path.endswith("runs/update")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        with self.server.lock:
            self.server.num_requests = getattr(self.server, "num_requests", 0) + 1
            number = self.server.num_requests
        status = self.server.behave(number)
        time.sleep(60 if self.path.endswith(self.server.silent_at) else 0)
        if status == 200:
            with self.server.lock:
                self.server.received.append((self.path, body, self.headers.get("Authorization")))
        run = {"info": {"run_id": "7", "artifact_uri": "s3://elsewhere/7"}, "data": {}}
        answer = self.server.body or json.dumps({"experiment": {"experiment_id": "0", "lifecycle_stage": "active"}, "run": run,
                                                 "error_code": "INVALID_PARAMETER_VALUE", "message": "said\nthe server"})
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *args):
        pass


class FailingServerTest(MonitorTest):
    def serve(self, behave, **options):
        server = Recorder(behave, **options)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def send(self, uri, *calls, env=None):
        """The warnings; no call, close() included, waited for as long as a request may take, 30 s."""
        seconds, warnings = self.monitor({"mlflow": {"enabled": True, "tracking_uri": uri}}, *calls, ["close", "FINISHED"], env=env)
        self.assertLess(sum(time for call, time in zip([*calls, ["close"]], seconds) if call[0] not in ("sleep", "await")), 20)
        return warnings

    def await_run(self):
        """A call that waits until the server has said the run's id, whatever it takes to start Python and its library."""
        return ["await", str(self.folder / "run" / "mlflow_run_id")]

    def warned_of(self, warnings, pattern):
        self.assertEqual(len(warnings), 1, warnings)
        self.assertRegex(warnings[0], rf"^warning: mlflow: {pattern}.*; the run does not wait for it$")

    def test_a_dead_port(self):
        uri = f"http://127.0.0.1:{free_port()}"
        self.warned_of(self.send(uri, *CALLS, ["sleep", 0.3], *CALLS), rf"{uri}(: .*Connection.*refused| has not taken everything in time)")

    def test_a_server_that_never_answers(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
            self.warned_of(self.send(uri, *CALLS), f"{uri} has not taken everything in time")

    def test_a_busy_server_gets_everything_later(self):
        server = self.serve(lambda number: {1: 503, 2: 429, 3: 408}.get(number, 200))
        self.warned_of(self.send(server.uri, *CALLS, self.await_run(), *CALLS), rf"{server.uri}: .*503")
        self.assertEqual(server.values("loss"), 2 * list(range(1, 51)))
        self.assertEqual(server.statuses(), ["FINISHED"])

    def test_a_slow_server_gets_everything(self):
        server = self.serve(lambda number: time.sleep(3 if number == 3 else 0) or 200)
        self.assertEqual(self.send(server.uri, *[["scalars", step, {"loss": step}] for step in range(3000)], self.await_run()), [])
        self.assertEqual(server.values("loss"), list(range(3000)))

    def test_what_is_refused_is_left_out(self):
        server = self.serve(lambda number: 400 if number == 3 else 200)  # the parameters, after experiment and run
        self.warned_of(self.send(server.uri, *CALLS, self.await_run()), f"{server.uri}: INVALID_PARAMETER_VALUE: said the server")
        self.assertEqual(server.values("loss"), list(range(1, 51)))

    def test_another_kind_of_server(self):
        for body in ("<html>", '{"run": 5}'):
            with self.subTest(body=body):
                server = self.serve(lambda number: 200, body=body)
                self.assertEqual(len(self.send(server.uri, *CALLS)), 1)
                self.assertEqual(server.values("loss"), [])

    def test_a_store_of_artifacts_that_needs_more(self):
        server = self.serve(lambda number: 200)
        self.warned_of(self.send(server.uri, ["artifact", __file__], ["scalars", 1, {"loss": 1}], self.await_run()),
                       f"{server.uri}: ModuleNotFoundError: No module named 'boto3'")
        self.assertEqual(server.values("loss"), [1])

    def test_authentication(self):
        for environment, header in (({"MLFLOW_TRACKING_TOKEN": "abc"}, "Bearer abc"),
                                    ({"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}, "Basic dTpw")):
            server = self.serve(lambda number: 200)
            self.send(server.uri, ["scalars", 1, {"loss": 1}], self.await_run(), env=environment)
            self.assertEqual({authorization for _, _, authorization in server.received}, {header})

    def test_a_variable_counts_or_is_said(self):
        server = self.serve(lambda number: time.sleep(4 if number == 1 else 0) or 200)
        said, *warnings = self.send(server.uri, ["scalars", 1, {"loss": 1}], self.await_run(), env={
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_RUN_ID": "abc", "MLFLOW_RUN_NAME": "mine"})
        self.assertEqual(said, "warning: mlflow: MLFLOW_RUN_ID, MLFLOW_RUN_NAME of the environment: not read; expected mlflow.experiment_name "
                         "and mlflow.run_name in the configuration, or MLFLOW_EXPERIMENT_NAME")
        self.warned_of(warnings, rf"{server.uri}: .*timed out")
        self.assertEqual(server.values("loss"), [1])

    def test_an_environment_that_names_no_store(self):
        _, warnings = self.monitor({"mlflow": {"enabled": True}}, *CALLS, ["close", "FINISHED"], env={"MLFLOW_TRACKING_URI": "nonsense://x"})
        self.warned_of(warnings, "(.*nonsense|nonsense://x has not taken everything in time)")

    def test_a_failure_is_said_first(self):
        server = self.serve(lambda number: 200, silent_at="log-batch")
        self.monitor({"mlflow": {"enabled": True, "tracking_uri": server.uri}}, self.await_run(), *CALLS, ["close", "FAILED"])
        self.assertEqual(server.statuses(), ["FAILED"])

    def test_an_empty_variable_counts_as_unset(self):
        """MLflow's library, which a module stands for, reads it as it is imported."""
        (self.folder / "mlflow.py").write_text("import os\nopen('seen', 'w').write(os.environ['MLFLOW_DISABLE_TELEMETRY'])\nraise ImportError('mine')\n")
        records = self.folder / "records"
        for given, expected in (("", "true"), ("false", "false")):
            records.mkdir(exist_ok=True)
            (records / "events.jsonl").touch()
            done = subprocess.run([sys.executable, "-B", ROOT / "monitor" / "mlflow_feed.py"], input=json.dumps({"folder": str(records)}) + "\n",
                                  env=self.environment({"PYTHONPATH": str(self.folder), "MLFLOW_DISABLE_TELEMETRY": given}), cwd=self.folder,
                                  capture_output=True, text=True, timeout=60, check=True)
            self.assertEqual((done.stdout, (self.folder / "seen").read_text()), ("ready\nwarning ImportError: mine\n", expected))

    def test_without_the_library(self):
        bare = self.folder / "python"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
        bare.chmod(0o755)
        for python, why in ((bare, f"{bare} has none"), ("/no/such/python", "/no/such/python cannot be started: No such file or directory")):
            result = self.run_script({"mlflow": {"enabled": True}}, [*CALLS, ["close", "FINISHED"]], env={"TESSERA_PYTHON": str(python)})
            self.assertEqual((result.returncode, result.stderr),
                             (1, f"error: mlflow: expected Python with MLflow's library (pip install mlflow-skinny); {why}: "
                                 "TESSERA_PYTHON names another one\n"))

    def test_a_run_that_is_killed_has_failed(self):
        server = self.serve(lambda number: 200)
        temporary = self.folder / "temporary"
        temporary.mkdir()
        self.write_script({"mlflow": {"enabled": True, "tracking_uri": server.uri}}, [*CALLS, self.await_run(), ["sleep", 1000]])
        with subprocess.Popen([MONITOR_SCRIPT, self.folder / "script.json"], env=self.environment({"TMPDIR": str(temporary)})) as run:
            while not (self.folder / "run" / "mlflow_run_id").exists():
                time.sleep(0.05)
            run.send_signal(signal.SIGKILL)
        while server.statuses() != ["FAILED"] or list(temporary.iterdir()):
            time.sleep(0.05)
        self.assertEqual(server.values("loss"), list(range(1, 51)))


if __name__ == "__main__":
    unittest.main()
