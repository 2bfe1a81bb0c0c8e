"""What was measured, as a table of at most 80 columns and as Markdown for a document."""
import statistics
import textwrap

COMMAND = "make methods"  # whose table of a document this is
WIDTH, TITLE_WIDTH = 80, 35
SHOWN_IN_MINUTES_FROM_S = 120


def spread(values, form):
    """Mean and standard deviation; one value alone as it is."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}}"


class Table:
    """`results`: {row: [result of each seed]}; `reasons`: {row: why it has none}. Rows without either are left out."""

    def __init__(self, rows, results, reasons, about):
        self.rows = [row for row in rows if results.get(row.name) or row.name in reasons]
        self.results, self.reasons, self.about = results, reasons, about
        longest = max((result["wall_s"] for row in self.rows for result in results.get(row.name, [])), default=0.0)
        self.unit, self.scale, self.form = ("min", 60, ".2f") if longest >= SHOWN_IN_MINUTES_FROM_S else ("s", 1, ".1f")

    def cells(self, row):
        results = self.results[row.name]
        times = [spread([result[key] / self.scale for result in results], self.form) for key in ("train_s", "wall_s")]
        return [*times, spread([result["test_accuracy"] for result in results], ".4f")]

    def headings(self):
        return [f"training, {self.unit}", f"whole, {self.unit}", "test accuracy"]

    def text(self):
        widths = [14, 14, 17]
        lines = [*textwrap.wrap(self.about, WIDTH), "",
                 " " * TITLE_WIDTH + "".join(f"{heading:>{width}}" for heading, width in zip(self.headings(), widths))]
        for row in self.rows:
            title = f"{row.title:{TITLE_WIDTH}}"
            if self.results.get(row.name):
                lines.append(title + "".join(f"{cell:>{width}}" for cell, width in zip(self.cells(row), widths)))
            if row.name in self.reasons:
                lines.append(title + " " + textwrap.shorten(self.reasons[row.name], WIDTH - TITLE_WIDTH - 1, placeholder=" …"))
        return "\n".join(lines) + "\n"

    def markdown(self):
        lines = [self.about, "", f"| | processes | {' | '.join(self.headings())} | validation accuracy |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            if self.results.get(row.name):
                validation = spread([result["validation_accuracy"] for result in self.results[row.name]], ".4f")
                lines.append(f"| {row.title} | {row.processes} | " + " | ".join([*self.cells(row), validation]) + " |")
            if row.name in self.reasons:
                lines.append(f"| {row.title} | {row.processes} | {self.reasons[row.name].replace('|', '/')} | | | |")
        return "\n".join(lines) + "\n"
