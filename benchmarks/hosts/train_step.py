"""A training step on several hosts, which are network namespaces joined by veth: hybrid communication beside plain Gloo, DDP and FSDP2, same
model, same data, in turns.

    .deps/venv/bin/python benchmarks/hosts/train_step.py [--hosts 2,4] [--rates 1gbit,10gbit] [--ranks-a-host 2] [--size 33m|110m]
        [--steps 3] [--accumulation 1] [--rounds 1] [--only REGEX] [--write]

The link of a host is limited in both directions (tc tbf). All ranks share the machine's cores, so that a step computes for as long as it
would on hosts with that many cores in all: what differs between the rows is what they send, and how much of it they hide. Model, data and
settings are those of benchmarks/peers/train_step.py, in fp32.

ms        median over all rounds of a step of the slowest rank
to DDP    that, divided by DDP's
MB        that a host receives from others in a step, as its network interface counts it; the mean over the hosts
formula   for Tessera: 4 bytes x parameters x (sums + gathers) x (1 - 1 / hosts), times the ranks of a host where each of them fetches its own
          (gathers between hosts: MiCS has a group a host, and gathers what it has summed over the hosts; hpZ gathers once)
loss      the largest difference to DDP's loss (mean over the ranks) in any step

--write adds the rows of the settings that were measured to docs/hosts.json, and writes the table of docs/performance.md from it.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "peers"), str(ROOT / "tests" / "support")]
import document  # noqa: E402
import hosts  # noqa: E402
import machine  # noqa: E402
import ranks  # noqa: E402
import results  # noqa: E402
import train_step  # noqa: E402

COMMAND = "make bench-hosts"
RESULTS, PERFORMANCE = ROOT / "docs" / "hosts.json", ROOT / "docs" / "performance.md"
REFERENCE, PORT, LIMIT_S = "DDP", 29519, 540
STAGES = (0, 2, 3)


def rows(args, folder):
    """name, (keys of zero_optimization, command) of every row."""
    arguments = (folder, args.size, args.steps)
    yield REFERENCE, ({}, ranks.peer("train_step_peer.py", "ddp", *arguments))
    yield "FSDP2", ({}, ranks.peer("train_step_peer.py", "fsdp2", *arguments))
    for backend in ("gloo", "hybrid"):
        command = ranks.own("step_rank", "together", *arguments, backend)
        for stage in STAGES:
            yield f"Tessera {backend}, stage {stage}", ({"stage": stage}, command)
        if backend == "gloo":  # a host that shares memory has a second copy in any case
            yield f"Tessera {backend}, hpZ", ({"stage": 3, "zero_hpz_partition_size": args.ranks_a_host}, command)
        yield f"Tessera {backend}, MiCS", ({"stage": 3, "mics_shard_size": args.ranks_a_host}, command)


def measure(args, machines, folder, keys, command):
    """One round of one row."""
    config = train_step.config(args, 0)
    config["zero_optimization"].update(keys)
    (folder / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    processes = []
    for rank in range(args.ranks):
        environment = {**hosts.rank_environment(rank, args.ranks, machines, PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        host = machines[rank * len(machines) // args.ranks]
        processes.append(host.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said):
        if process.returncode != 0:
            raise ranks.RanksFailed(f"exit code {process.returncode}\n{errors[-2000:]}")
    reports = [ranks.report(text) for text, _ in said]
    return {"step_ms": [round(max(times), 1) for times in zip(*(report["step_ms"] for report in reports))],
            "losses": [round(statistics.fmean(losses), 7) for losses in zip(*(report["losses"] for report in reports))],
            "mb": round(statistics.fmean(report["received_bytes"] for report in reports) / args.steps / 1e6, 2)}


def formula_mb(name, parameters, num_hosts, ranks_a_host, micro_steps):
    """None for a peer."""
    if not name.startswith("Tessera"):
        return None
    sums = micro_steps if re.search("stage [23]|hpZ", name) else 1
    gathers = 2 * micro_steps if name == "Tessera gloo, stage 3" else 1
    passes = sums + gathers
    each_fetches = "gloo" in name and "MiCS" not in name
    return 4e-6 * parameters * passes * (1 - 1 / num_hosts) * (ranks_a_host if each_fetches else 1)


def summary(measured, parameters, num_hosts, ranks_a_host, micro_steps):
    def median(name):
        return statistics.median(ms for found in measured[name] for ms in found["step_ms"])

    table = {}
    for name, rounds in measured.items():
        reference = measured.get(REFERENCE)
        formula = formula_mb(name, parameters, num_hosts, ranks_a_host, micro_steps)
        table[name] = {"ms": median(name), "to_ddp": round(median(name) / median(REFERENCE), 3) if reference else None,
                       "mb": round(statistics.fmean(found["mb"] for found in rounds), 1), "formula_mb": formula and round(formula, 1),
                       "loss": max(abs(a - b) for a, b in zip(rounds[0]["losses"], reference[0]["losses"])) if reference else None}
    return table


def cells(row):
    return [f"{row['ms']:.0f}", *("" if row[key] is None else f"{row[key]:{form}}" for key, form in
                                  (("to_ddp", ".2f"), ("mb", ".1f"), ("formula_mb", ".1f"), ("loss", ".1e")))]


TITLES = ["ms", "to DDP", "MB", "formula", "loss"]


def markdown(found):
    lines = [f"GPT of {found['parameters'] / 1e6:.1f} million parameters, fp32, medians of the steps."]
    for title, setting in found["settings"].items():
        lines += ["", results.surroundings(setting), "", f"| {title} | {' | '.join(TITLES)} |", "|---" * (len(TITLES) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cells(row))} |" for name, row in setting["rows"].items()]
    return "\n".join(lines) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts")
    parser.add_argument("--rates", default="1gbit,10gbit", help="of a host's link, as tc writes them")
    parser.add_argument("--ranks-a-host", type=int, default=2)
    parser.add_argument("--size", default="33m", choices=("33m", "110m"))
    parser.add_argument("--steps", type=int, default=3, help="timed ones, in each round")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps of a step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
    parser.add_argument("--write", action="store_true", help="puts the rows into docs/hosts.json and docs/performance.md")
    args = parser.parse_args()
    args.precision = "fp32"
    return args


def measure_setting(args, machines, rate):
    """({row: rounds}, the number of parameters)."""
    for host in machines:
        host.limit(rate)
    with tempfile.TemporaryDirectory(prefix="hosts_bench_") as name:
        folder = Path(name)
        parameters = train_step.write_weights_and_tokens(args, folder)
        chosen = {row: what for row, what in rows(args, folder) if re.search(args.only, row)}
        return ranks.take_turns(chosen, args.rounds, lambda row: measure(args, machines, folder, *chosen[row])), parameters


def main():
    args = parse_arguments()
    found = {"settings": {}}
    for number, (num_hosts, rate) in enumerate((int(count), rate) for count in args.hosts.split(",") for rate in args.rates.split(",")):
        args.ranks = num_hosts * args.ranks_a_host
        machines = [hosts.Host(index, number) for index in range(num_hosts)]
        try:
            measured, parameters = measure_setting(args, machines, rate)
        finally:
            for host in machines:
                host.end()
        train_step.check_first_losses(args, measured)
        title = f"{num_hosts} hosts x {args.ranks_a_host} ranks, {rate}/s, {args.rounds * args.steps} steps"
        if args.accumulation > 1:
            title += f" of {args.accumulation} micro-steps"
        table = found["settings"][title] = summary(measured, parameters, num_hosts, args.ranks_a_host, args.accumulation)
        print(f"\n{title:40}" + "".join(f"{column:>10}" for column in TITLES))
        for row, values in table.items():
            print(f"{row:40}" + "".join(f"{cell:>10}" for cell in cells(values)), flush=True)
    if not args.write:
        return
    document.surroundings(PERFORMANCE, COMMAND)
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"settings": {}}
    stamp = results.results({}, {}, train_step.tessera_version())
    for title, table in found["settings"].items():
        before["settings"][title] = {"date": stamp["date"], "machine": machine.describe(), "versions": stamp["versions"], "rows": table}
    found = {"parameters": parameters, "settings": before["settings"]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    document.replace_table(PERFORMANCE, COMMAND, markdown(found))


if __name__ == "__main__":
    hosts.own_network()
    main()
