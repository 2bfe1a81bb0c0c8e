"""A training step of a GPT, of Tessera and others, same model, same data, in turns.

    .deps/venv/bin/python benchmarks/peers/train_step.py peers|hosts|stages [--size small|33m|110m] [--precision fp32|bf16] [--accumulation 1]
        [--steps 10] [--rounds 3] [--only REGEX] [--write]

On CPU with one thread a rank, with AdamW (all peers: torch's fused one) and clipping at norm 1. A rank is step_rank.cc or step_peer.py. Each row
is measured once in every round. In bf16, DDP and ZeroRedundancyOptimizer keep fp32 weights and run under autocast; the others keep bf16 weights
and fp32 masters. Peers have their default settings, but for views into buckets in DDP, which are faster. FSDP2 and DeepSpeed (stages 2 and 3)
reduce in every micro-step, as Tessera does. DeepSpeed's stage 0 can sum bf16 gradients only in bf16, so that its loss is further off.

peers [--ranks 2] [--json FILE]: beside DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed. All start from one file of weights and train on one file of
tokens. --write puts the results into docs/peers.json, draws docs/peers.svg from it (chart.py) and replaces the
tables of README.md and docs/performance.md.

ms       median over all rounds of a step of the slowest rank
ratio    to the ranks that train side by side without communication: median over the rounds, each with its own
MiB      the most a rank holds in a step, over what it held before it had a model: private memory and its share of
         shared memory, libraries left out; the mean over the ranks
loss     the largest difference to DDP's loss (mean over the ranks) in any step

hosts [--hosts 2,4] [--rates 1gbit,10gbit] [--ranks-a-host 2]: on several hosts, which are network namespaces joined by veth, hybrid communication beside
plain Gloo, DDP and FSDP2. The link of a host is limited in both directions (tc tbf). All ranks share the machine's cores, so that a step computes for
as long as it would on hosts with that many cores in all: what differs between the rows is what they send, and how much of it they hide. --write adds
the rows of the settings that were measured to docs/hosts.json, and writes the table of docs/performance.md from it.

to DDP    ms, divided by DDP's
MB        that a host receives from others in a step, as its network interface counts it; the mean over the hosts
formula   for Tessera: 4 bytes x parameters x (sums + gathers) x (1 - 1 / hosts), times the ranks of a host where each of them fetches its own
          (gathers between hosts: MiCS has a group a host, and gathers what it has summed over the hosts; hpZ gathers once)

stages [--ranks 2] [--set PATH=VALUE]: every stage beside libtorch alone, in C++ on ranks that do not communicate (plain), and the engine on such ranks
(alone).

step, min   median and minimum over all rounds of a step of the slowest rank; its phases: medians
CPU         time of all threads of a rank; a busy machine disturbs it little
state       MB (1e6 bytes) of parameters, gradients, masters and optimizer state of a rank
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import chart
import document
import peer
import ranks
import results

sys.path.append(str(chart.ROOT / "tests" / "support"))
import hosts  # noqa: E402

PERFORMANCE, HOSTS = chart.ROOT / "docs" / "performance.md", chart.ROOT / "docs" / "hosts.json"
NUM_BATCHES = 8  # per rank, in turns: so that the loss falls, and errors show
PORT, LIMIT_S = 29519, 540
HOSTS_COMMAND = "make bench-hosts"
HOSTS_COLUMNS = [("ms", "ms", ".0f"), ("to DDP", "to_ddp", ".2f"), ("MB", "mb", ".1f"), ("formula", "formula_mb", ".1f"), ("loss", "loss", ".1e")]
PHASES = ("step_ms", "forward_ms", "backward_ms", "update_ms", "cpu_ms")
STAGES_COLUMNS = [("step", "step_ms", ".1f"), ("min", "min", ".1f"), ("x plain", "x_plain", ".3f"), ("forward", "forward_ms", ".1f"),
                  ("backward", "backward_ms", ".1f"), ("update", "update_ms", ".1f"), ("CPU", "cpu_ms", ".1f"), ("x plain", "cpu_x_plain", ".3f"),
                  ("state, MB", "state_mb", ".1f"), ("MiB", "mib", ".1f")]


# ------------------------------------------------------------------------------------------ for all commands


def arguments_of_ranks(args):
    """What step_rank and step_peer.py have in common, but for the ways."""
    shape = dict(zip(("dim", "layers", "heads", "vocabulary", "sequence"), peer.SHAPES[args.size]))
    values = {**shape, "micro-batch": peer.MICRO_BATCH[args.size], "accumulation": args.accumulation, "precision": args.precision,
              "steps": args.steps, "device": "cpu"}
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def write_weights_and_tokens(args, folder):
    """(the number of parameters, the arguments of a rank that takes these files)."""
    import torch
    from safetensors.torch import save_file
    torch.manual_seed(1)
    shape = peer.SHAPES[args.size]
    model = peer.Gpt(*shape)
    weights, tokens = folder / "weights.safetensors", folder / "tokens.bin"
    save_file(model.state_dict(), weights)
    torch.randint(shape[3], (NUM_BATCHES, args.ranks, peer.MICRO_BATCH[args.size], shape[4] + 1)).numpy().tofile(tokens)
    return sum(parameter.numel() for parameter in model.parameters()), ["--weights", weights, "--tokens", tokens]


def measure_rows(args, rows, run, **joined):
    """{row: rounds} of those of {row: command} that --only chooses. `run(command)` returns what each rank reports."""
    measured = ranks.take_turns(results.chosen(args.only, rows), args.rounds, lambda name: results.joined(run(rows[name]), **joined))
    results.check_first_losses(measured, args.precision)
    return measured


# ------------------------------------------------------------------------------------------------------ peers


def peers(args):
    if args.write:
        for page in (PERFORMANCE, chart.README):
            document.surroundings(page, results.COMMAND)  # before minutes of runs
    with tempfile.TemporaryDirectory(prefix="train_step_bench_") as name:
        num_parameters, files = write_weights_and_tokens(args, Path(name))
        common = [*arguments_of_ranks(args), *files, "--ways"]
        ways = {results.BASE: "plain", results.REFERENCE: "ddp", results.ZERO_REDUNDANCY: "zero_redundancy", results.FSDP2: "fsdp2",
                **{results.deepspeed(stage): f"deepspeed_{stage}" for stage in range(4)}}
        rows = {row: ranks.peer("step_peer.py", *common, way) for row, way in ways.items()}
        ways = {results.TESSERA_ALONE: "alone", **{results.tessera(stage): f"stage_{stage}" for stage in range(4)}}
        rows.update({row: ranks.own("step_rank", *common, way) for row, way in ways.items()})
        measured = measure_rows(args, rows, lambda command: ranks.run(args.ranks, command))
    settings = {key: getattr(args, key) for key in ("size", "precision", "accumulation", "ranks", "steps", "rounds")}
    found = results.results({**settings, "parameters": num_parameters}, measured, ranks.version())
    print(results.training(found))
    print(document.text_table("", found["table"], results.COLUMNS))
    if args.json:
        args.json.write_text(results.text(found), encoding="utf-8")
    if args.write:
        if missing := set(rows) - set(measured):
            sys.exit(f"error: --write: no results of {', '.join(sorted(missing))}; expected all rows in a document")
        chart.RESULTS.write_text(results.text(found), encoding="utf-8")
        chart.write(found)
        document.replace_table(PERFORMANCE, results.COMMAND, results.markdown(found))


# ------------------------------------------------------------------------------------------------------ hosts


def hosts_rows(args, common):
    rows = {results.REFERENCE: ranks.peer("step_peer.py", *common, "--ways", "ddp"), results.FSDP2: ranks.peer("step_peer.py", *common, "--ways", "fsdp2")}
    for backend in ("gloo", "hybrid"):
        ways = {f"stage {stage}": [f"stage_{stage}"] for stage in (0, 2, 3)}
        if backend == "gloo":  # a host that shares memory has a second copy in any case
            ways["hpZ"] = ["stage_3", "--set", f"zero_optimization.zero_hpz_partition_size={args.ranks_a_host}"]
        ways["MiCS"] = ["stage_3", "--set", f"zero_optimization.mics_shard_size={args.ranks_a_host}"]
        for name, way in ways.items():
            rows[f"Tessera {backend}, {name}"] = ranks.own("step_rank", *common, "--backend", backend, "--ways", *way)
    return rows


def run_on_hosts(args, machines, command):
    """What each rank reports, by rank."""
    processes = []
    for rank in range(args.ranks):
        environment = {**hosts.rank_environment(rank, args.ranks, machines, PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        host = machines[rank * len(machines) // args.ranks]
        processes.append(host.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode != 0:
            raise ranks.RanksFailed(f"exit code {process.returncode}\n{errors[-2000:]}")
    return [ranks.report(text) for text, _ in outputs]


def formula_mb(name, parameters, num_hosts, ranks_a_host, micro_steps):
    """None for a peer."""
    if not name.startswith("Tessera"):
        return None
    sums = micro_steps if re.search("stage [23]|hpZ", name) else 1
    gathers = 2 * micro_steps if name == "Tessera gloo, stage 3" else 1
    passes = sums + gathers
    each_fetches = "gloo" in name and "MiCS" not in name
    return round(4e-6 * parameters * passes * (1 - 1 / num_hosts) * (ranks_a_host if each_fetches else 1), 1)


def hosts_table(args, measured, parameters, num_hosts):
    reference = measured.get(results.REFERENCE)
    return {name: {"ms": round(results.median(rounds), 1), "to_ddp": round(results.median(rounds) / results.median(reference), 3) if reference else None,
                   "mb": round(statistics.fmean(found["received_bytes"] for found in rounds) / args.steps / 1e6, 1),
                   "formula_mb": formula_mb(name, parameters, num_hosts, args.ranks_a_host, args.accumulation),
                   "loss": results.largest_difference(rounds, reference)} for name, rounds in measured.items()}


def measure_on_hosts(args, num_hosts, rate, network):
    """(the table, the number of parameters)."""
    args.ranks = num_hosts * args.ranks_a_host
    machines = [hosts.Host(index, network) for index in range(num_hosts)]
    try:
        for host in machines:
            host.limit(rate)
        with tempfile.TemporaryDirectory(prefix="hosts_bench_") as name:
            parameters, files = write_weights_and_tokens(args, Path(name))
            rows = hosts_rows(args, [*arguments_of_ranks(args), *files])
            measured = measure_rows(args, rows, lambda command: run_on_hosts(args, machines, command), means=("received_bytes",))
    finally:
        for host in machines:
            host.end()
    return hosts_table(args, measured, parameters, num_hosts), parameters


def hosts_markdown(found):
    lines = f"GPT of {found['parameters'] / 1e6:.1f} million parameters, fp32, medians of the steps.\n"
    for title, setting in found["settings"].items():
        lines += f"\n{results.surroundings(setting)}\n\n{document.markdown_table(title, setting['rows'], HOSTS_COLUMNS)}"
    return lines


def on_hosts(args):
    hosts.own_network()
    if args.write:
        document.surroundings(PERFORMANCE, HOSTS_COMMAND)  # before minutes of runs
    tables = {}
    for network, (num_hosts, rate) in enumerate((int(count), rate) for count in args.hosts.split(",") for rate in args.rates.split(",")):
        title = f"{num_hosts} hosts x {args.ranks_a_host} ranks, {rate}/s, {args.rounds * args.steps} steps"
        if args.accumulation > 1:
            title += f" of {args.accumulation} micro-steps"
        tables[title], parameters = measure_on_hosts(args, num_hosts, rate, network)
        print(document.text_table(title, tables[title], HOSTS_COLUMNS), flush=True)
    if args.write:
        settings = json.loads(HOSTS.read_text(encoding="utf-8"))["settings"] if HOSTS.exists() else {}
        settings.update({title: {**results.stamp(ranks.version()), "rows": table} for title, table in tables.items()})
        found = {"parameters": parameters, "settings": settings}
        HOSTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        document.replace_table(PERFORMANCE, HOSTS_COMMAND, hosts_markdown(found))


# ------------------------------------------------------------------------------------------------------ stages


def stages(args):
    # With the engine's default unit size the small model would be one or two units, and nothing would overlap.
    keys = [*(["zero_optimization.unit_numel=500000"] if args.size == "small" else []), *args.set]
    common = [*arguments_of_ranks(args), *(word for key in keys for word in ("--set", key)), "--ways"]
    rows = {way: ranks.own("step_rank", *common, way) for way in ("plain", "alone", *(f"stage_{stage}" for stage in range(4)))}
    measured = measure_rows(args, rows, lambda command: ranks.run(args.ranks, command), times=PHASES, means=("mib", "state_bytes"))
    table, plain = {}, measured.get("plain")
    for name, rounds in measured.items():
        row = {key: results.median(rounds, key) for key in PHASES}
        row["min"] = results.minimum(rounds)
        row["x_plain"], row["cpu_x_plain"] = (row[key] / results.median(plain, key) if plain else None for key in ("step_ms", "cpu_ms"))
        row["state_mb"], row["mib"] = rounds[0]["state_bytes"] / 1e6, statistics.median(found["mib"] for found in rounds)
        table[name] = row
    print(f"GPT {args.size}, {args.ranks} ranks, {args.precision}, accumulation {args.accumulation}; {args.rounds} rounds of {args.steps} steps; ms")
    print(document.text_table("", table, STAGES_COLUMNS))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="peers|hosts|stages")
    for name, run, size, steps, rounds in (("peers", peers, "33m", 10, 3), ("hosts", on_hosts, "33m", 3, 1), ("stages", stages, "small", 5, 5)):
        command = commands.add_parser(name)
        command.set_defaults(run=run, write=False, precision="fp32")
        command.add_argument("--size", default=size, choices=peer.SHAPES)
        command.add_argument("--accumulation", type=int, default=1, help="micro-steps a step")
        command.add_argument("--steps", type=int, default=steps, help="timed ones, in each round")
        command.add_argument("--rounds", type=int, default=rounds, help="each row is measured in every round, so that noise hits all alike")
        command.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
        if name == "hosts":
            command.add_argument("--hosts", default="2,4", help="numbers of hosts")
            command.add_argument("--rates", default="1gbit,10gbit", help="of a host's link, as tc writes them")
            command.add_argument("--ranks-a-host", type=int, default=2)
            command.add_argument("--write", action="store_true", help="puts the rows into docs/hosts.json and docs/performance.md")
        else:
            command.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
            command.add_argument("--ranks", type=int, default=2)
        if name == "peers":
            command.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
            command.add_argument("--write", action="store_true", help="puts them into docs/: peers.json, peers.svg, the tables of performance.md and README.md")
        if name == "stages":
            command.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="overrides a key of the engine's configuration")
    args = parser.parse_args()
    if args.write and args.only and args.run is peers:
        parser.error("--write: found --only; expected all rows in a document")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    arguments.run(arguments)
