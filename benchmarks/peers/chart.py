"""Draws docs/peers.svg, the picture of README.md, and writes its table, from docs/peers.json, which train_step.py --write has measured.

    python3 -B benchmarks/peers/chart.py

Needs no packages. The colours are Okabe and Ito's, which the colour-blind tell apart, and those
of a light page stand in attributes, which every program draws; a style sheet has what changes on a dark page.
"""
import json
from pathlib import Path
from xml.sax.saxutils import escape

import document
import results

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURE, README = ROOT / "docs" / "peers.json", ROOT / "docs" / "peers.svg", ROOT / "README.md"

WIDTH, LEFT, RIGHT, TOP = 960, 24, 24, 104
ROW_HEIGHT, BAR_HEIGHT, STAGE_GAP = 21, 15, 15
NAMES_END = 336  # where a row's name ends
# Each panel: where the numbers end, where the bars begin, where the longest one ends.
PANELS = {"ms": (384, 392, 632, "Time of a step, ms"), "mib": (688, 696, 936, "Memory of a rank, MiB")}

# What each stage divides among the ranks, and its rows: the row's key, its name here, its colour.
PYTORCH, DEEPSPEED, TESSERA = "#56b4e9", "#e69f00", "#0072b2"
STAGES = [
    ("nothing sharded", [(results.REFERENCE, "DDP", PYTORCH)]),
    ("optimizer state sharded", [(results.ZERO_REDUNDANCY, "ZeroRedundancyOptimizer", PYTORCH)]),
    ("+ gradients", []),
    ("+ parameters", [(results.FSDP2, "FSDP2", PYTORCH)]),
]

# The colour on a light page and on a dark one, and the other attributes. `line` is stroked, the others are filled.
INK, FAINT = ("#1f2328", "#f0f6fc"), ("#59636e", "#9198a1")
LOOKS = {
    "page": (("#ffffff", "#0d1117"), ""),
    "title": (INK, 'font-size="18" font-weight="600"'),
    "text": (INK, 'font-size="13"'),
    "strong": (INK, 'font-size="13" font-weight="600"'),
    "name": (INK, 'font-size="13" text-anchor="end"'),
    "ours": (INK, 'font-size="13" font-weight="600" text-anchor="end"'),
    "faint": (FAINT, 'font-size="12"'),
    "line": (FAINT, 'stroke-width="1.5" stroke-dasharray="4 3"'),
}


def look(name):
    (light, _), attributes = LOOKS[name]
    return f'class="{name}" {"stroke" if name == "line" else "fill"}="{light}"' + (f" {attributes}" if attributes else "")


def words(x, y, name, text):
    return f'<text x="{x:.1f}" y="{y:.1f}" {look(name)}>{escape(text)}</text>'


def line(x1, y1, x2, y2):
    return f'<line {look("line")} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def stages(table):
    """(what is sharded, [(row, name, colour)]) of the four stages, with what was measured."""
    for stage, (sharded, rows) in enumerate(STAGES):
        rows = [*rows, (results.deepspeed(stage), "DeepSpeed", DEEPSPEED), (results.tessera(stage), "Tessera", TESSERA)]
        yield sharded, [row for row in rows if row[0] in table]


def draw(found):
    """The picture as SVG, of results as results.py has them."""
    table = found["table"]
    largest = {key: max(row[key] for name, row in table.items() if name != results.TESSERA_ALONE) for key in PANELS}

    def bar_end(key, value):
        _, begin, end, _ = PANELS[key]
        return begin + (end - begin) * value / largest[key]

    out, y = [], TOP
    for stage, (sharded, rows) in enumerate(stages(table)):
        out += [words(LEFT, y + 12, "strong", f"stage {stage}"), words(LEFT, y + 29, "faint", sharded)]
        for row, name, colour in rows:
            kind = "ours" if colour == TESSERA else "name"
            out.append(words(NAMES_END, y + 12, kind, name))
            for key, (numbers_end, begin, _, _) in PANELS.items():
                value = table[row][key]
                out += [words(numbers_end, y + 12, kind, f"{value:,.0f}"),
                        f'<rect fill="{colour}" x="{begin}" y="{y}" width="{bar_end(key, value) - begin:.1f}" height="{BAR_HEIGHT}"/>']
            y += ROW_HEIGHT
        y += STAGE_GAP
    bottom = y - STAGE_GAP
    for key, (_, begin, _, heading) in PANELS.items():
        out.append(words(begin, TOP - 14, "strong", heading))
        if results.BASE in table:
            x = bar_end(key, table[results.BASE][key])
            out.append(line(x, TOP - 4, x, bottom))
    y = bottom + 24
    if results.BASE in table:
        base = table[results.BASE]
        out += [line(LEFT, y - 4, LEFT + 24, y - 4),
                words(LEFT + 32, y, "text", f"the same training in {found['settings']['ranks']} processes that do not communicate: "
                                            f"{base['ms']:,.0f} ms, {base['mib']:,.0f} MiB")]
        y += 22
    out.append(words(LEFT, y, "faint", results.surroundings(found)))
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" font-family="sans-serif">',
            "<style>@media(prefers-color-scheme:dark){",
            *(f".{name}{{{'stroke' if name == 'line' else 'fill'}:{dark}}}" for name, ((_, dark), _) in LOOKS.items()),
            f'}}</style>\n<rect {look("page")} width="100%" height="100%"/>',
            words(LEFT, 32, "title", "A training step beside DDP, FSDP2 and DeepSpeed: shorter is better"),
            words(LEFT, 54, "faint", results.training(found))]
    return "\n".join([*head, *out, "</svg>"]) + "\n"


def write(found):
    """What README.md shows of the results. Throws as document.surroundings does."""
    PICTURE.write_text(draw(found), encoding="utf-8")
    document.replace_table(README, results.COMMAND, results.short_markdown(found))


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text(encoding="utf-8")))
