"""docs/peers.json, docs/peers.svg and the tables of docs/performance.md and README.md agree, and the picture can be read."""
import itertools
import json
import re
import sys
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
import chart  # noqa: E402
import document  # noqa: E402
import results  # noqa: E402

WIDTH_OF_A_CHARACTER = 0.62  # of the font size: generous for every usual sans-serif font
FOUND = json.loads(chart.RESULTS.read_text(encoding="utf-8"))


class Committed(unittest.TestCase):
    """What is in docs/ is what the command makes."""

    def test_table_is_the_summary_of_the_rounds(self):
        self.assertEqual(FOUND["table"], results.table(FOUND["rounds"]))

    def test_every_row_was_measured_in_every_round(self):
        rows = {results.BASE, results.REFERENCE, results.ZERO_REDUNDANCY, results.FSDP2, results.TESSERA_ALONE,
                *map(results.deepspeed, range(4)), *map(results.tessera, range(4))}
        self.assertEqual(set(FOUND["rounds"]), rows)
        for name, rounds in FOUND["rounds"].items():
            self.assertEqual([len(measured["step_ms"]) for measured in rounds], [FOUND["settings"]["steps"]] * FOUND["settings"]["rounds"], name)

    def test_says_on_what_it_was_measured(self):
        self.assertEqual(set(FOUND), {"date", "machine", "versions", "settings", "table", "rounds"})
        self.assertEqual(set(FOUND["machine"]), {"cpu", "cores", "memory_gib", "system"})
        self.assertEqual(set(FOUND["versions"]), {"tessera", "torch", "deepspeed"})
        self.assertNotRegex(json.dumps({key: FOUND[key] for key in ("machine", "versions", "settings")}).replace("GNU/Linux", ""), r"[/\\]")

    def test_file_is_as_written(self):
        self.assertEqual(chart.RESULTS.read_text(encoding="utf-8"), results.text(FOUND))

    def test_picture_is_drawn_from_it(self):
        self.assertEqual(chart.PICTURE.read_text(encoding="utf-8"), chart.draw(FOUND), "python3 -B benchmarks/peers/chart.py draws it anew")

    def test_tables_of_the_documents_are_made_of_it(self):
        first, last = document.markers(results.COMMAND)
        for page, table in ((ROOT / "docs" / "performance.md", results.markdown(FOUND)), (chart.README, results.short_markdown(FOUND))):
            before, after = document.surroundings(page, results.COMMAND)
            self.assertEqual(page.read_text(encoding="utf-8"), f"{before}{first}\n{table}{last}{after}", "python3 -B benchmarks/peers/chart.py writes README.md's")


class Picture(unittest.TestCase):
    def setUp(self):
        self.text = chart.draw(FOUND)
        self.root = ElementTree.fromstring(self.text)
        self.width, self.height = map(float, self.root.get("viewBox").split()[2:])

    def elements(self, tag):
        return list(self.root.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))

    def boxes(self):
        """(left, top, right, bottom, text) of the words."""
        for element in self.elements("text"):
            size, x, y = (float(element.get(key)) for key in ("font-size", "x", "y"))
            width = len(element.text) * size * WIDTH_OF_A_CHARACTER
            left = x - width if element.get("text-anchor") == "end" else x
            yield left, y - 0.8 * size, left + width, y + 0.2 * size, element.text

    def test_words_overlap_nothing_and_stay_inside(self):
        boxes = list(self.boxes())
        self.assertGreater(len(boxes), 30)
        for left, top, right, bottom, text in boxes:
            self.assertTrue(0 <= left and right <= self.width and 0 <= top and bottom <= self.height, text)
        for a, b in itertools.combinations(boxes, 2):
            self.assertTrue(a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a[4], b[4]))
        for bar in self.bars():
            left, top, width, height = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
            for word in boxes:
                self.assertTrue(word[2] <= left or left + width <= word[0] or word[3] <= top or top + height <= word[1], word[4])

    def bars(self):
        return [rect for rect in self.elements("rect") if rect.get("class") is None]

    def test_bars_are_as_long_as_their_numbers(self):
        stages = list(chart.stages(FOUND["table"]))
        shown = [row for _, rows in stages for row, _, _ in rows]
        self.assertEqual(len(shown), 11)
        widths = [float(bar.get("width")) for bar in self.bars()]
        for index, key in enumerate(chart.PANELS):
            lengths = widths[index::2]
            self.assertEqual(len(lengths), len(shown))
            ratios = [length / FOUND["table"][row][key] for length, row in zip(lengths, shown)]
            for ratio in ratios:
                self.assertAlmostEqual(ratio / ratios[0], 1, delta=0.01)

    def test_colours_are_literal_and_dark_pages_have_their_own(self):
        self.assertNotIn("var(", self.text)
        colours = re.findall(r"(?:fill|stroke)[=:]\"?([^\";}]+)", self.text)
        self.assertGreater(len(colours), 20)
        for colour in colours:
            self.assertRegex(colour, r"^#[0-9a-f]{6}$")
        style = self.elements("style")[0].text
        for element in self.root.iter():
            if element.get("class"):
                self.assertIn(f".{element.get('class')}{{", style)


class Summary(unittest.TestCase):
    def test_numbers(self):
        def measured(step_ms, losses):
            return {"step_ms": step_ms, "losses": losses, "mib": sum(step_ms), "resident_mib": 0}

        rounds = {results.BASE: [measured([10, 20, 30], [1])], results.REFERENCE: [measured([20, 20, 90], [2, 3])],
                  results.tessera(1): [measured([10, 12, 14], [2, 3.5])]}
        table = results.table(rounds)
        self.assertEqual(table[results.tessera(1)], {"ms": 12, "ratio": 0.6, "mib": 36, "loss": 0.5})
        self.assertEqual(table[results.REFERENCE]["ratio"], 1)
        self.assertIsNone(table[results.BASE]["loss"])
        self.assertIsNone(results.table({results.REFERENCE: rounds[results.REFERENCE]})[results.REFERENCE]["ratio"])

    def test_a_round_is_that_of_the_slowest_rank(self):
        reports = [{"step_ms": [1, 4], "update_ms": [2, 1], "losses": [5, 6], "mib": 10}, {"step_ms": [3, 2], "update_ms": [1, 1], "losses": [7, 6], "mib": 20}]
        self.assertEqual(results.joined(reports, times=("step_ms", "update_ms"), means=("mib",)),
                         {"step_ms": [3, 4], "update_ms": [2, 1], "losses": [6, 6], "mib": 15})

    def test_other_models_are_refused(self):
        def rows(loss):
            return {"a": [{"losses": [8.5, 1]}], "b": [{"losses": [loss, 2]}]}

        results.check_first_losses(rows(8.50005))
        results.check_first_losses(rows(8.51), "bf16")
        with self.assertRaisesRegex(SystemExit, "their first losses differ"):
            results.check_first_losses(rows(8.51))

    def test_text_is_json(self):
        self.assertEqual(json.loads(results.text(FOUND)), FOUND)


if __name__ == "__main__":
    unittest.main()
