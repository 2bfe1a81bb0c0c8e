"""Sends the records of a training run to MLflow, by MLflow's own library. mlflow_monitor.cc has this text and runs it: python3 mlflow_feed.py

Standard input has one line, a JSON object: the options. It stays open as long as the run lasts. FOLDER/events.jsonl grows meanwhile,
a record a line. Standard output has a line for what the run has to know: "ready", or "missing"; and once "warning TEXT". It ends when
everything was sent.
"""
import contextlib
import importlib.util
import itertools
import json
import os
import re
import select
import shutil
import sys
import time
from pathlib import Path

RETRIES_S = [1, 2, 4, 8, 16, 32, 60]
AFTER_S = 30  # it goes on for so long when the run is over
METRICS_TOGETHER, PARAMS_TOGETHER = 250, 100  # of a server's limits of 1,000 and 100
LONGEST_NAME, LONGEST_VALUE = 250, 6000
TEMPORARY = (408, 429)  # beside 500 and more


class GivenUp(Exception):
    """The run is over, and the server does not answer."""


def accepted(name):
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:LONGEST_NAME]


def flattened(value, path=""):
    """The leaves of an object of any depth: {"optimizer": {"params": {"lr": 1e-3}}} is optimizer.params.lr. Elements of a list of objects
    have their index in the name; any other list is one value."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, dict):
        return {name: leaf for key, item in value.items() for name, leaf in flattened(item, f"{path}.{key}" if path else key).items()}
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return {accepted(path): text[:LONGEST_VALUE]}


def on_one_line(error):
    return " ".join(str(error).split())[:500]


class Feed:
    def __init__(self, options, say):
        self.options, self.say = options, say
        self.folder = Path(options["folder"])
        self.events = open(self.folder / "events.jsonl", "rb")
        self.rest = b""  # of a line that is not complete yet
        self.records, self.status = [], None  # that have been read and not sent; how the run has ended
        self.has_warned = self.is_over = False
        self.known_params = {}

    def warn(self, text):
        if not self.has_warned:
            self.say(f"warning {text}")
        self.has_warned = True

    def wait(self, seconds):
        """Until the time is over, or the run is."""
        if self.is_over:
            time.sleep(min(seconds, 1))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self.is_over, self.over_since = True, time.monotonic()

    def read(self):
        """The records that have come."""
        lines = (self.rest + self.events.read()).split(b"\n")
        self.rest = lines.pop()
        records = [json.loads(line) for line in lines]
        self.status = next((record["status"] for record in records if "status" in record), self.status)
        self.records += records

    def until_done(self, send):
        """Try until the server takes it, and return what it answers; None: it is refused."""
        from mlflow.exceptions import MlflowException
        from requests import RequestException

        for seconds in itertools.chain(RETRIES_S, itertools.repeat(RETRIES_S[-1])):
            try:
                return send()
            except MlflowException as error:
                status, reason = error.get_http_status_code(), on_one_line(error)
            except RequestException as error:
                status, reason = getattr(error.response, "status_code", 500), on_one_line(error)
            except Exception as error:  # noqa: BLE001  an answer of another form, a file that cannot be read, a package that is missing
                status, reason = 400, f"{type(error).__name__}: {on_one_line(error)}"
            self.warn(f"{self.options['shown']}: {re.sub('//[^/@ ]*@', '//', reason).replace(self.options['server'], self.options['shown'])}")
            if status < 500 and status not in TEMPORARY:
                return None
            self.wait(seconds)
            if self.is_over and time.monotonic() > self.over_since + AFTER_S:
                raise GivenUp
        return None

    def begin(self):
        """Make or find the run. Its id; None: the server has refused it."""
        from mlflow import MlflowClient
        from mlflow.entities import RunStatus
        from mlflow.exceptions import MlflowException

        self.client = self.until_done(lambda: MlflowClient(tracking_uri=self.options["server"]))
        if self.client is None:
            return None
        id_file = self.options["id_file"] and Path(self.options["id_file"])
        if id_file and self.options["resume"] and id_file.exists():
            run_id = id_file.read_text(encoding="utf-8")

            def resume():
                try:
                    run = self.client.get_run(run_id)
                    self.client.update_run(run_id, RunStatus.to_string(RunStatus.RUNNING))
                    return run
                except MlflowException as error:
                    if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                        return False
                    raise
            run = self.until_done(resume)
            if run:
                self.known_params = run.data.params
                return run_id
            if run is None:
                return None
        if id_file:
            with contextlib.suppress(OSError):
                id_file.unlink(missing_ok=True)  # of an earlier run
        run = self.until_done(self.create)
        if run is None:
            return None
        try:
            if id_file:
                part = id_file.with_name(f".{id_file.name}.{os.getpid()}")
                part.write_text(run.info.run_id, encoding="utf-8")
                part.replace(id_file)
        except OSError as error:
            self.warn(f"the run's id is not kept: {on_one_line(error)}")
        return run.info.run_id

    def create(self):
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

        name = self.options["experiment"]
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                experiment_id = self.client.create_experiment(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment_id = self.client.get_experiment_by_name(name).experiment_id  # made by another run in the meantime
        elif experiment.lifecycle_stage == "deleted":
            raise MlflowException(f"the experiment {name!r} is deleted; expected it to be restored, or another name", INVALID_PARAMETER_VALUE)
        else:
            experiment_id = experiment.experiment_id
        tags = {"mlflow.source.name": "tessera", "mlflow.source.type": "LOCAL", "mlflow.user": os.environ.get("USER", "")}
        return self.client.create_run(experiment_id, run_name=self.options["run_name"], tags=tags)

    def end(self, run_id, status):
        self.until_done(lambda: self.client.set_terminated(run_id, status))

    def send(self, run_id):
        """Send the records, metrics of several together."""
        from mlflow.entities import Metric, Param

        records, self.records = self.records, []
        metrics = []
        for record in [*records, {}]:
            if "scalars" in record:
                time_ms = int(1e3 * record["time"])
                metrics += [Metric(accepted(name), float(value), time_ms, record["step"]) for name, value in record["scalars"].items()]
            while metrics and (len(metrics) >= METRICS_TOGETHER or "scalars" not in record):
                self.until_done(lambda batch=metrics[:METRICS_TOGETHER]: self.client.log_batch(run_id, metrics=batch))
                del metrics[:METRICS_TOGETHER]
            if "params" in record:
                params = [Param(name, value) for name, value in flattened(record["params"]).items() if name not in self.known_params]
                while params:
                    self.until_done(lambda params=params: self.client.log_batch(run_id, params=params[:PARAMS_TOGETHER]))
                    del params[:PARAMS_TOGETHER]
            if "text" in record:
                self.until_done(lambda record=record: self.client.log_text(run_id, record["text"], record["name"]))
            if "artifact" in record and Path(record["artifact"]).is_file():
                self.until_done(lambda record=record: self.client.log_artifact(run_id, record["artifact"], record["in"]))
                if self.folder / "images" in Path(record["artifact"]).parents:
                    shutil.rmtree(Path(record["artifact"]).parent)
            elif "artifact" in record:
                self.warn(f"the artifact {record['artifact']!r} is no file that can be read")

    def run(self):
        run_id = self.begin()
        has_failed = False
        while run_id:
            is_over = self.is_over
            self.read()  # after it is over: all
            if self.status == "FAILED" and not has_failed:  # first: there are two seconds for it
                self.end(run_id, self.status)
                has_failed = True
            self.send(run_id)
            if self.status or is_over:
                break
            self.wait(0.5)
        if run_id and not has_failed:
            self.end(run_id, self.status or "FAILED")  # the run's process was killed


def main():
    options = json.loads(sys.stdin.readline())
    words = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # MLflow's library writes to both
        os.dup2(nothing, stream)
    missing = importlib.util.find_spec("mlflow") is None
    print("missing" if missing else "ready", file=words)
    if missing:
        return
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # until_done() tries again
    if not os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT"):
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "30"
    if not os.environ.get("MLFLOW_DISABLE_TELEMETRY"):
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

    def say(text):
        with contextlib.suppress(OSError):  # the run is over
            print(text, file=words)
    feed = Feed(options, say)
    try:
        feed.run()
    except GivenUp:
        pass
    except Exception as error:  # noqa: BLE001  what is not MLflow's
        feed.warn(f"{type(error).__name__}: {on_one_line(error)}")
    if feed.is_over:  # else the run has the folder
        shutil.rmtree(options["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()
