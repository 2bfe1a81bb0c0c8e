"""What the tests of monitors share: a folder for each, and the program that does with monitors what it is told."""
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import mlflow_server

ROOT = Path(__file__).resolve().parents[2]
MONITOR_SCRIPT = os.environ.get("MONITOR_SCRIPT", str(ROOT / "build" / "monitor_script"))


class MonitorTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_monitor_", ignore_cleanup_errors=True)))

    def write_script(self, config, calls, **run):
        run = {"name": "the run", "folder": str(self.folder / "run"), **run}
        Path(run["folder"]).mkdir(exist_ok=True)
        (self.folder / "script.json").write_text(json.dumps({"config": config, "run": run, "calls": calls}))

    def environment(self, changes):
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith("MLFLOW_") and not name.lower().endswith("_proxy")}
        return {**environment, "TESSERA_PYTHON": mlflow_server.feeding_python(self.folder), **(changes or {})}

    def run_script(self, config, calls, env=None, **run):
        self.write_script(config, calls, **run)
        return subprocess.run([MONITOR_SCRIPT, self.folder / "script.json"], capture_output=True, text=True, timeout=300, env=self.environment(env))

    def monitor(self, config, *calls, env=None, **run):
        """(the seconds of every call, the warnings)"""
        result = self.run_script(config, calls, env, **run)
        self.assertEqual(result.returncode, 0, result.stderr)
        seconds = [float(line.split()[1]) for line in result.stdout.splitlines()]
        self.assertEqual(len(seconds), len(calls))
        return seconds, result.stderr.splitlines()
