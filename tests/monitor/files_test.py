"""The files of csv_monitor and jsonl_monitor, and where they lie. With Python's standard library alone."""
import csv
import io
import json
import math
import time
import unittest
from pathlib import Path

from monitor_testing import MonitorTest


class CsvTest(MonitorTest):
    def setUp(self):
        super().setUp()
        self.config = {"csv_monitor": {"enabled": True, "output_path": str(self.folder / "csv"), "job_name": "job"}}

    def content(self, name):
        return (self.folder / "csv" / "job" / name).read_bytes().decode()

    def test_as_pythons_csv_module_writes_them(self):
        """DeepSpeed 0.19.8's csvMonitor.write_events, line by line."""
        values = [(1, 0.1), (2, 1e-5), (3, 123456789.0), (4, 1 / 3), (5, 2.0), (6, 1e22), (7, -0.0), (2**53, math.nan), (9, math.inf),
                  (10, -math.inf)]
        calls = [["scalars", step, {"train/a loss": str(value) if not math.isfinite(value) else value, 'x,"y"': 1}] for step, value in values]
        _, warnings = self.monitor(self.config, *calls)
        self.assertEqual(warnings, [])
        expected = io.StringIO(newline="")
        writer = csv.writer(expected)
        writer.writerow(["step", "a loss"])
        for step, value in values:
            writer.writerow([step, value])
        self.assertEqual(self.content("train_a_loss.csv"), expected.getvalue())
        self.assertEqual(self.content('x,"y".csv').splitlines()[:2], ['step,"x,""y"""', "1,1.0"])

    def test_a_resumed_run_takes_back_later_steps(self):
        self.monitor(self.config, *[["scalars", step, {"loss": step, "old": step}] for step in range(1, 5)])
        with open(self.folder / "csv" / "job" / "loss.csv", "ab") as file:
            file.write(b"5,0.")  # cut off when the run was killed
        self.monitor(self.config, ["scalars", 3, {"loss": 7, "new": 1}], resumed_after=2)
        self.assertEqual(self.content("loss.csv"), "step,loss\r\n1,1.0\r\n2,2.0\r\n3,7.0\r\n")
        self.assertEqual(self.content("new.csv"), "step,new\r\n3,1.0\r\n")
        self.assertEqual(self.content("old.csv"), "step,old\r\n1,1.0\r\n2,2.0\r\n", "without a new value too")

    def test_a_name_with_line_breaks(self):
        for resumed_after, step in ((None, 1), (1, 2)):
            run = {} if resumed_after is None else {"resumed_after": resumed_after}
            self.monitor(self.config, ["scalars", step, {"train/a\nb": step, 'x,\r\n"y"': step}], **run)
        self.assertEqual(self.content("train_a_b.csv"), "step,a_b\r\n1,1.0\r\n2,2.0\r\n")
        self.assertEqual(self.content('x,__"y".csv'), 'step,"x,__""y"""\r\n1,1.0\r\n2,2.0\r\n')

    def test_names_that_share_a_file_or_have_none_are_said_once(self):
        values = {"val/loss": 1, "val_loss": 2, "a\0b": 3, "x" * 260: 4, "y" * 220: 6, "other": 5}
        _, warnings = self.monitor(self.config, ["scalars", 1, values], ["scalars", 2, values])
        self.assertEqual(warnings, ["warning: csv_monitor: the values of val_loss and val/loss are both in val_loss.csv; expected another name",
                                    f"warning: csv_monitor: the values of {'x' * 40}... are left out: its name has 260 bytes; expected at most 220"])
        self.assertEqual(self.content("val_loss.csv"), "step,loss\r\n1,1.0\r\n1,2.0\r\n2,1.0\r\n2,2.0\r\n")
        self.assertEqual(self.content("a_b.csv"), "step,a_b\r\n1,3.0\r\n2,3.0\r\n")
        self.assertEqual(self.content(f"{'y' * 220}.csv"), f"step,{'y' * 220}\r\n1,6.0\r\n2,6.0\r\n")
        self.assertEqual(self.content("other.csv"), "step,other\r\n1,5.0\r\n2,5.0\r\n")

    def test_a_resumed_run_leaves_the_files_of_others(self):
        folder = self.folder / "csv" / "job"
        folder.mkdir(parents=True)
        (folder / "mine.csv").write_text("name,value\n9,9\n")
        (folder / "notes.csv").write_text("step,note\n9,x\n")
        self.monitor(self.config, ["scalars", 3, {"loss": 7}], resumed_after=2)
        self.assertEqual(self.content("mine.csv"), "name,value\n9,9\n")
        self.assertEqual(self.content("notes.csv"), "step,note\n9,x\n")

    def test_a_new_run_starts_anew(self):
        for value in (1, 2):
            self.monitor(self.config, ["scalars", 1, {"loss": value}])
        self.assertEqual(self.content("loss.csv"), "step,loss\r\n1,2.0\r\n")

    def test_a_file_that_cannot_be_written_is_one_warning_and_the_others_go_on(self):
        folder = self.folder / "csv" / "job"
        self.config["jsonl_monitor"] = {"enabled": True, "output_path": str(self.folder / "jsonl")}
        folder.mkdir(parents=True)
        (folder / "loss.csv").mkdir()  # the file cannot be written
        _, warnings = self.monitor(self.config, ["scalars", 1, {"loss": 1}], ["scalars", 2, {"loss": 2}], ["close", "FINISHED"])
        self.assertEqual(len(warnings), 1, warnings)
        self.assertRegex(warnings[0], r"^warning: csv_monitor: .*loss\.csv.*; the run goes on without it$")
        lines = (self.folder / "jsonl" / "run" / "events.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line).get("step") for line in lines], [1, 2, None])


class MlflowIdTest(MonitorTest):
    def test_a_new_run_without_mlflow_takes_the_place_of_one_with(self):
        run = self.folder / "run"
        run.mkdir()
        for resumed_after, expected in ((2, True), (None, False)):
            (run / "mlflow_run_id").write_text("0123")
            self.monitor({}, ["scalars", 3, {"loss": 1}], **({} if resumed_after is None else {"resumed_after": resumed_after}))
            self.assertEqual((run / "mlflow_run_id").exists(), expected)


class JsonlTest(MonitorTest):
    def lines(self):
        return [json.loads(line) for line in (self.folder / "run" / "jsonl_monitor" / "events.jsonl").read_text().splitlines()]

    def test_everything(self):
        before = time.time()
        (self.folder / "run").mkdir()
        self.monitor({"jsonl_monitor": {"enabled": True}}, ["params", {"a": {"b": [1, 2]}}], ["scalars", 3, {"loss": 0.25, "worst": "nan"}],
                     ["histogram", "weights", 3, [0.0, 1.0, 1.0]], ["image", "val/a b", 3, 1, 2, [1, 2, 3, 4, 5, 6]], ["sample", "t", 4, __file__],
                     ["artifact", "x/y.json"],
                     ["close", "KILLED"])
        lines = self.lines()
        for line in lines:
            self.assertTrue(before - 1 <= line.pop("time") <= time.time() + 1)
        histogram = lines.pop(2)
        self.assertEqual(lines, [{"params": {"a": {"b": [1, 2]}}}, {"step": 3, "scalars": {"loss": 0.25, "worst": None}},
                                 {"step": 3, "image": "val/a b", "width": 1, "height": 2, "file": "images/val_a_b_3.png"},
                                 {"step": 4, "text": "t", "content": Path(__file__).read_text()},
                                 {"artifact": "x/y.json"}, {"status": "KILLED"}])
        self.assertEqual((self.folder / "run" / "jsonl_monitor" / "images" / "val_a_b_3.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual([histogram[key] for key in ("step", "histogram", "min", "max", "num", "sum", "sum_squares")],
                         [3, "weights", 0, 1, 3, 2, 2])
        self.assertEqual([count for count in histogram["bucket"] if count], [1, 2])

    def test_a_picture_that_is_a_file_stays_where_it_is(self):
        self.monitor({"jsonl_monitor": {"enabled": True}}, ["image", "one", 1, 1, 1, [1, 2, 3]])
        picture = self.folder / "picture.png"
        (self.folder / "run" / "jsonl_monitor" / "images" / "one_1.png").rename(picture)
        self.monitor({"jsonl_monitor": {"enabled": True}}, ["sample", "samples/a", 2, str(picture)])
        self.assertEqual([line["file"] for line in self.lines() if "image" in line], [str(picture)])
        self.assertEqual(list((self.folder / "run" / "jsonl_monitor" / "images").iterdir()), [])

    def test_a_resumed_run_takes_back_later_steps(self):
        config = {"jsonl_monitor": {"enabled": True}}
        self.monitor(config, *[["scalars", step, {"loss": step}] for step in range(1, 5)])
        self.monitor(config, ["scalars", 3, {"loss": 9}], resumed_after=2)
        self.assertEqual([line["scalars"]["loss"] for line in self.lines() if "scalars" in line], [1, 2, 9])
        self.assertEqual(self.lines()[-1]["status"], "FAILED")  # never closed

    def test_where_the_files_lie(self):
        for section, folder in [({}, "run/jsonl_monitor"), ({"job_name": "j"}, "run/jsonl_monitor/j"), ({"output_path": "out"}, "out/run"),
                                ({"output_path": "out", "job_name": "j"}, "out/j")]:
            with self.subTest(section=section):
                if "output_path" in section:
                    section = {**section, "output_path": str(self.folder / section["output_path"])}
                self.monitor({"jsonl_monitor": {"enabled": True, **section}}, ["close", "FINISHED"])
                self.assertTrue((self.folder / folder / "events.jsonl").exists())


if __name__ == "__main__":
    unittest.main()
