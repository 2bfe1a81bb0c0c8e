"""docs/peers.json: what train_step.py has measured, on which machine; and its numbers as Markdown.

    {"date", "machine", "versions", "settings", "table": {row: {"ms", "ratio", "mib", "loss"}}, "rounds": {row: [...]}}

`table` is summarised from `rounds`, which keeps every timed step: see train_step.py.
"""
import datetime
import json
import statistics

import machine

COMMAND = "make bench-peers"  # whose table of docs/performance.md this is
BASE, REFERENCE, TESSERA_ALONE = "no communication", "DDP", "Tessera, 1 rank, no communication"
ZERO_REDUNDANCY, FSDP2 = "ZeroRedundancyOptimizer + DDP", "FSDP2"
PACKAGES = ("torch", "deepspeed")


def deepspeed(stage):
    return f"DeepSpeed stage {stage}"


def tessera(stage):
    return f"Tessera stage {stage}"


def rounded(measured):
    """One round of one row, as it is kept: microseconds, hundredths of a MiB, losses to 1e-7."""
    return {"step_ms": [round(ms, 3) for ms in measured["step_ms"]], "losses": [round(loss, 7) for loss in measured["losses"]],
            "mib": round(measured["mib"], 2), "resident_mib": round(measured["resident_mib"], 2)}


def summary(rounds, base, reference):
    """The numbers of a row; None for what needs a counterpart that is missing. Lists by round of this row, of the ranks that
    do not communicate, and of the row whose losses are the reference."""
    def ratio():
        return round(statistics.median(statistics.median(mine["step_ms"]) / statistics.median(its["step_ms"])
                                       for mine, its in zip(rounds, base)), 4)

    def largest_difference():
        return round(max(abs(a - b) for a, b in zip(rounds[0]["losses"], reference[0]["losses"])), 7)

    return {
        "ms": round(statistics.median(ms for measured in rounds for ms in measured["step_ms"]), 3),
        "ratio": ratio() if base else None,
        "mib": round(statistics.median(measured["mib"] for measured in rounds), 2),
        "loss": largest_difference() if reference else None,
    }


def table(measured):
    """{row: its summary} of {row: rounds}. A rank alone trains on fewer samples, so its losses differ."""
    return {name: summary(rounds, measured.get(BASE), None if name in (BASE, TESSERA_ALONE) else measured.get(REFERENCE))
            for name, rounds in measured.items()}


def results(settings, measured, tessera_version):
    return {"date": datetime.date.today().isoformat(), "machine": machine.describe(),
            "versions": {"tessera": tessera_version, **machine.versions(PACKAGES)}, "settings": settings,
            "table": table(measured), "rounds": measured}


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


def markdown(found):
    """The table of docs/performance.md."""
    lines = [training(found), surroundings(found), "", "| | ms | ratio | MiB | loss |", "|---|---|---|---|---|"]
    for name, row in found["table"].items():
        cells = [f"{row['ms']:.1f}", *("" if row[key] is None else f"{row[key]:{form}}" for key, form in
                                       (("ratio", ".3f"), ("mib", ".0f"), ("loss", ".1e")))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
