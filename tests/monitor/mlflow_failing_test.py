"""A tracking server that is dead, silent, busy, slow or something else: one warning, and the run never waits. With Python's
standard library alone."""
import json
import socket
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mlflow_server import free_port
from monitor_testing import MonitorTest

CALLS = [["params", {"a": 1}], *[["scalars", step, {"loss": step}] for step in range(1, 51)]]


class Recorder(ThreadingHTTPServer):
    """Answers like a tracking server that has one run; `behave(number of the request)` may sleep, and returns a status."""
    daemon_threads = True

    def __init__(self, behave, body=None):
        self.behave, self.body = behave, body
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
        if status == 200:
            with self.server.lock:
                self.server.received.append((self.path, body, self.headers.get("Authorization")))
        run = {"info": {"run_id": "7", "artifact_uri": "s3://elsewhere/7"}, "data": {}}
        answer = self.server.body or json.dumps({"experiment": {"experiment_id": "0", "lifecycle_stage": "active"}, "run": run,
                                                 "message": "said\nthe server"})
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
        self.assertLess(sum(time for call, time in zip([*calls, ["close"]], seconds) if call[0] != "sleep"), 20)
        return warnings

    def test_a_dead_port(self):
        uri = f"http://127.0.0.1:{free_port()}"
        warnings = self.send(uri, *CALLS, ["sleep", 0.3], *CALLS)
        self.assertEqual(len(warnings), 1, warnings)
        self.assertRegex(warnings[0], rf"^warning: mlflow: {uri} does not answer \(.*onnect.*\); the run does not wait for it$")

    def test_a_server_that_never_answers(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
            warnings = self.send(uri, *CALLS)
        self.assertEqual(warnings, [f"warning: mlflow: {uri} has not taken everything in time; the run does not wait for it"])

    def test_a_busy_server_gets_everything_later(self):
        server = self.serve(lambda number: {1: 503, 2: 429, 3: 408}.get(number, 200))
        warnings = self.send(server.uri, *CALLS, ["sleep", 7.5], *CALLS)
        self.assertEqual(warnings, [f"warning: mlflow: {server.uri} refuses experiments/get-by-name: status 503, 'said\\x0athe server'; "
                                    "the run does not wait for it"])
        self.assertEqual(server.values("loss"), 2 * list(range(1, 51)))
        self.assertEqual(server.statuses(), ["FINISHED"])

    def test_a_slow_server_gets_the_newest(self):
        server = self.serve(lambda number: time.sleep(3 if number == 1 else 0) or 200)
        warnings = self.send(server.uri, *[["scalars", step, {"loss": step}] for step in range(3000)])
        self.assertEqual(warnings, [])
        values = server.values("loss")
        self.assertEqual(values, list(range(3000 - len(values), 3000)))
        self.assertTrue(990 <= len(values) <= 1000, len(values))

    def test_what_is_refused_is_left_out(self):
        server = self.serve(lambda number: 400 if number == 3 else 200)  # the parameters, after experiment and run
        warnings = self.send(server.uri, *CALLS)
        self.assertEqual(warnings, [f"warning: mlflow: {server.uri} refuses runs/log-batch: status 400, 'said\\x0athe server'; "
                                    "the run does not wait for it"])
        self.assertEqual(server.values("loss"), list(range(1, 51)))

    def test_another_kind_of_server(self):
        for body, wrong in (("<html>", "with something that is no JSON object"), ("[]", "no JSON object"), ("{}", "without a run's id"),
                            ('{"run": 5}', "json"), ('{"experiment": [], "run": {"info": 1}}', "json")):
            with self.subTest(body=body):
                server = self.serve(lambda number: 200, body=body)
                warnings = self.send(server.uri, *CALLS)
                self.assertEqual(len(warnings), 1, warnings)
                self.assertIn(wrong, warnings[0])
                self.assertEqual(server.values("loss"), [])

    def test_a_server_without_artifacts(self):
        server = self.serve(lambda number: 200)
        warnings = self.send(server.uri, ["artifact", __file__], ["scalars", 1, {"loss": 1}])
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn("does not store artifacts itself (the run's artifact URI is 's3://elsewhere/7')", warnings[0])
        self.assertEqual(server.values("loss"), [1])

    def test_authentication(self):
        for environment, header in (({"MLFLOW_TRACKING_TOKEN": "abc"}, "Bearer abc"),
                                    ({"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}, "Basic dTpw")):
            server = self.serve(lambda number: 200)
            self.send(server.uri, ["scalars", 1, {"loss": 1}], env=environment)
            self.assertEqual({authorization for _, _, authorization in server.received}, {header})

    def test_a_token_in_the_address(self):
        """It goes into each request, and into no warning."""
        server = self.serve(lambda number: 200 if number != 2 else 400)
        for uri in (f"{server.uri}/?token=s3cret", f"http://127.0.0.1:{free_port()}?token=s3cret"):
            warnings = self.send(uri, ["params", {"a": 1}], ["scalars", 1, {"loss": 1}])
            self.assertEqual(len(warnings), 1, warnings)
            self.assertNotIn("s3cret", warnings[0])
        paths = [path for path, _, _ in server.received]
        self.assertTrue(paths and all("token=s3cret" in path for path in paths), paths)
        self.assertIn("/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default&token=s3cret", paths)

    def test_an_environment_that_names_no_server(self):
        _, warnings = self.monitor({"mlflow": {"enabled": True}}, *CALLS, ["close", "FINISHED"], env={"MLFLOW_TRACKING_URI": "sqlite:///x.db"})
        self.assertEqual(warnings, ['warning: mlflow: MLFLOW_TRACKING_URI: found "sqlite:///x.db"; expected the address of a server, '
                                    'http://… or https://…; the run goes on without it'])


if __name__ == "__main__":
    unittest.main()
