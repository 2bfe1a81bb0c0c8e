"""docs/peers.json: what train_step.py has measured, on which machine; and its numbers as Markdown.

    {"date", "machine", "versions", "settings", "table": {row: {"ms", "ratio", "mib", "loss"}}, "rounds": {row: [...]}}

`table` is summarised from `rounds`, which keeps every timed step: see train_step.py.
"""
import datetime
import json
import re
import statistics

import document
import machine

COMMAND = "make bench-peers"  # whose tables of docs/performance.md and README.md these are
BASE, REFERENCE, TESSERA_ALONE = "no communication", "DDP", "Tessera, 1 rank, no communication"
ZERO_REDUNDANCY, FSDP2 = "ZeroRedundancyOptimizer + DDP", "FSDP2"
PACKAGES = ("torch", "deepspeed")
COLUMNS = [("ms", "ms", ".1f"), ("ratio", "ratio", ".3f"), ("MiB", "mib", ".0f"), ("loss", "loss", ".1e")]
FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}


def deepspeed(stage):
    return f"DeepSpeed stage {stage}"


def tessera(stage):
    return f"Tessera stage {stage}"


def chosen(pattern, rows):
    """The rows that --only names. Ends the program where there is none."""
    found = [row for row in rows if re.search(pattern, row)]
    if not found:
        raise SystemExit(f"error: --only {pattern}: no row has such a name; expected one of: {'; '.join(rows)}")
    return found


def joined(reports, times=("step_ms",), means=("mib", "resident_mib")):
    """One round of one row, as it is kept, of what its ranks report: a step takes as long as its slowest rank, and other numbers are means over
    the ranks. To microseconds, hundredths of a MiB, losses to 1e-7."""
    return {**{key: [round(max(ms), 3) for ms in zip(*(report[key] for report in reports))] for key in times},
            "losses": [round(statistics.fmean(losses), 7) for losses in zip(*(report["losses"] for report in reports))],
            **{key: round(statistics.fmean(report[key] for report in reports), 2) for key in means}}


def check_first_losses(measured, precision="fp32"):
    """Before the first update all rows, {name: rounds}, have the same weights and data, and so the same loss."""
    first = {name: rounds[0]["losses"][0] for name, rounds in measured.items()}
    if first and max(first.values()) - min(first.values()) > FIRST_LOSS_TOLERANCE[precision]:
        raise SystemExit(f"error: these don't train the same model, their first losses differ: {first}")


def median(rounds, key="step_ms"):
    """Of all steps."""
    return statistics.median(ms for measured in rounds for ms in measured[key])


def minimum(rounds):
    """Of all steps."""
    return min(ms for measured in rounds for ms in measured["step_ms"])


def largest_difference(rounds, reference):
    """Of the losses of any step; None without a reference."""
    return round(max(abs(a - b) for a, b in zip(rounds[0]["losses"], reference[0]["losses"])), 7) if reference else None


def summary(rounds, base, reference):
    """The numbers of a row; None for what needs a counterpart that is missing. Lists by round of this row, of the ranks that
    do not communicate, and of the row whose losses are the reference."""
    def ratio():
        return round(statistics.median(statistics.median(mine["step_ms"]) / statistics.median(its["step_ms"])
                                       for mine, its in zip(rounds, base)), 4)

    return {
        "ms": round(median(rounds), 3),
        "ratio": ratio() if base else None,
        "mib": round(statistics.median(measured["mib"] for measured in rounds), 2),
        "loss": largest_difference(rounds, reference),
    }


def table(measured):
    """{row: its summary} of {row: rounds}. A rank alone trains on fewer samples, so its losses differ."""
    return {name: summary(rounds, measured.get(BASE), None if name in (BASE, TESSERA_ALONE) else measured.get(REFERENCE))
            for name, rounds in measured.items()}


def stamp(tessera_version, packages=PACKAGES):
    """When, on what and with what something is measured."""
    return {"date": datetime.date.today().isoformat(), "machine": machine.describe(),
            "versions": {"tessera": tessera_version, **machine.versions(packages)}}


def results(settings, measured, tessera_version):
    return {**stamp(tessera_version), "settings": settings, "table": table(measured), "rounds": measured}


def text(found):
    """As JSON with one line per row or round, for readers and short diffs."""
    def lines(value, depth):
        if not isinstance(value, dict) or depth == 0:
            return json.dumps(value, ensure_ascii=False)
        inner = ",\n".join(f"{' ' * (3 - depth)}{json.dumps(key)}: {lines(item, depth - 1)}" for key, item in value.items())
        return "{\n" + inner + "\n" + " " * (2 - depth) + "}"
    return lines(found, 2) + "\n"


def training(found):
    """What was trained, and how often it was timed: one sentence."""
    settings = found["settings"]
    micro_steps = f", {settings['accumulation']} micro-steps" if settings["accumulation"] > 1 else ""
    return (f"GPT of {settings['parameters'] / 1e6:.1f} million parameters, {settings['precision']}{micro_steps}, {settings['ranks']} ranks; "
            f"medians of {settings['rounds']} round{'s' * (settings['rounds'] > 1)} of {settings['steps']} steps.")


def surroundings(found):
    """Machine, versions and date: one sentence."""
    host = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (f"{host['cores']} cores of {host['cpu'] or 'an unnamed processor'}, {host['memory_gib']:.0f} GiB, {host['system']}; "
            f"{versions}; {found['date']}.")


def short_markdown(found):
    """The table of README.md: the ways that shard, beside DDP."""
    columns = [REFERENCE, FSDP2, *map(deepspeed, (2, 3)), *map(tessera, (2, 3))]
    rows = {"time of a step, DDP = 1": ("ms", lambda value: f"{value / found['table'][REFERENCE]['ms']:.2f}"),
            "memory of a rank, MiB": ("mib", lambda value: f"{value:.0f}")}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, (key, shown) in rows.items():
        lines.append(f"| {label} | {' | '.join(shown(found['table'][name][key]) for name in columns)} |")
    return "\n".join([*lines, "", surroundings(found)]) + "\n"


def markdown(found):
    """The table of docs/performance.md."""
    return f"{training(found)}\n{surroundings(found)}\n\n" + document.markdown_table("", found["table"], COLUMNS)
