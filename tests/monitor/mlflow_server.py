"""A real MLflow tracking server for tests: `mlflow server` of PyPI on a free port, with a sqlite store in a folder."""
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import free_port  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["mlflow", "flask", "flask_cors", "sqlalchemy", "alembic", "gunicorn", "fastapi"]
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
REASON = f"{', '.join(MISSING)} of requirements.txt [mlflow] not installed in {sys.prefix} (scripts/setup.sh --python)"


def feeding_python(folder):
    """What TESSERA_PYTHON is to name: forks of a process that has imported MLflow's library, where ctest has started one."""
    warm = os.environ.get("TESSERA_WARM")
    if not warm:
        return sys.executable
    script = Path(folder, "warm_python")
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(str(ROOT / "tests/python/warm.py"))} {shlex.quote(warm)} run "$@"\n')
    script.chmod(0o755)
    return str(script)


class MlflowServer:
    def __init__(self, folder):
        self.uri = f"http://127.0.0.1:{free_port()}"
        self.log = Path(folder, "server.log")
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "GUNICORN_"))}
        environment.update(HOME=str(folder), MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        # As docs/monitoring.md has it, on a port and in a folder of its own.
        page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
        variable, options = re.search(r"^(\w+=\S+) mlflow server --port 5000 (.*) &$", page, re.MULTILINE).groups()
        environment.update([variable.split("=")])
        command = [sys.executable, "-m", "mlflow", "server", "--port", self.uri.rpartition(":")[2], "--workers", "1",
                   "--backend-store-uri", f"sqlite:///{folder}/mlflow.sqlite", "--artifacts-destination", str(Path(folder, "artifacts")),
                   *shlex.split(options)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        give_up = time.monotonic() + 90
        while not self.is_up():
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.stop()
                raise RuntimeError("mlflow server does not start:\n" + self.log.read_text()[-3000:])
            time.sleep(0.1)

    def is_up(self):
        try:
            return self.opener.open(self.uri + "/health", timeout=5).status == 200
        except OSError:
            return False

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def call(self, path, body=None, **query):
        """What GET, or POST of `body`, answers."""
        url = f"{self.uri}/api/2.0/mlflow/{path}" + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return json.loads(self.opener.open(request, timeout=30).read())

    def experiment(self, name):
        return self.call("experiments/get-by-name", experiment_name=name)["experiment"]["experiment_id"]

    def runs(self, experiment):
        """The runs of an experiment, the oldest first."""
        found = self.call("runs/search", {"experiment_ids": [self.experiment(experiment)], "max_results": 100})
        return sorted(found.get("runs", []), key=lambda run: run["info"]["start_time"])

    def history(self, run, metric):
        """[(step, value, time in ms)]"""
        values = self.call("metrics/get-history", run_id=run["info"]["run_id"], metric_key=metric).get("metrics", [])
        return [(int(value.get("step", 0)), value["value"], int(value["timestamp"])) for value in values]

    def artifact(self, run, name):
        root = run["info"]["artifact_uri"].removeprefix("mlflow-artifacts:/")
        url = f"{self.uri}/api/2.0/mlflow-artifacts/artifacts/{root}/{urllib.parse.quote(name)}"
        return self.opener.open(url, timeout=30).read()


def params_of(run):
    return {param["key"]: param["value"] for param in run["data"].get("params", [])}
