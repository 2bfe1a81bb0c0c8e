"""Memory and time of a step under each policy of `activation_checkpointing`, beside plain PyTorch and torch.utils.checkpoint.

    .deps/venv/bin/python benchmarks/python/activations.py [--gpt 33m 110m] [--micro-batch 8] [--rounds 3] [--autocast] [--only REGEX] [--disk DIR] [--write]

The GPTs of the other benchmarks: one rank, fp32 on the CPU (or bf16 by autocast), SGD. Each way is a process of its own.
They take turns in random order: a step that is not timed, one that is, and the heap goes back to the system, so that the others have
room. Two steps come before.

min, median  ms of a step
x            of the minimum to Tessera's without a policy
repeated     ms of the fastest step in operators that run again, and (read) in waiting for the disk, by the engine's clock
over         what that step takes beyond these, in per cent of the step without a policy
peak         MB allocated at once in a step, beyond what lies there between steps (parameters, gradients), as PyTorch's profiler
             reports it, in a step that is not timed
kept         MB of saved tensors that the last forward kept, by the engine's count
loss         of the last step: all ways train on the same tokens from the same weights

--write replaces the tables of docs/activations.md.
"""
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read on import: the profiler looks for a GPU, and says so
import argparse  # noqa: E402
import ctypes  # noqa: E402
import datetime  # noqa: E402
import multiprocessing  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import tessera  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import document  # noqa: E402
import machine  # noqa: E402
import peer  # noqa: E402
import results  # noqa: E402

COMMAND = "make bench-activations"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "activations.md"
CHUNK_ROWS = 256


class Gpt(peer.Gpt):
    def __init__(self, name, checkpoints=False, chunk_rows=0):
        super().__init__(*peer.SHAPES[name])
        self.checkpoints, self.chunk_rows = checkpoints, chunk_rows

    def forward(self, tokens, target):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        x = self.norm(x)
        if self.chunk_rows:
            return tessera.chunked_cross_entropy(x, self.head.weight, target, chunk_rows=self.chunk_rows)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def plain(name, autocast, checkpoints):
    model = Gpt(name, checkpoints)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(tokens, target):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the engine's gradients stay, too
        return loss.item()

    return step, None


def engine_of(name, options, section, chunk_rows=0):
    engine, *_ = tessera.initialize(model=Gpt(name, chunk_rows=chunk_rows), config={
        "train_micro_batch_size_per_gpu": options.micro_batch, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "torch_autocast": {"enabled": options.autocast}, "activation_checkpointing": section})

    def step(tokens, target):
        loss = engine(tokens, target)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, engine


def ways(name, options):
    """{way: make() -> (step, engine or None)}."""
    def own(chunk_rows=0, **section):
        return lambda: engine_of(name, options, section, chunk_rows)

    found = {"PyTorch": lambda: plain(name, options.autocast, False), "PyTorch, checkpoint": lambda: plain(name, options.autocast, True),
             "none": own(), "cheap": own(policy="cheap"), "block": own(policy="block")}
    layers = peer.SHAPES[name][1]
    found.update({f"block, {blocks} of {layers}": own(policy="block", number_checkpoints=blocks) for blocks in (layers // 4, layers // 2, 3 * layers // 4)})
    if options.disk:
        found["offload"] = own(policy="offload", nvme_path=options.disk)
    found["chunked loss"] = own(CHUNK_ROWS)
    found["chunked loss, block"] = own(CHUNK_ROWS, policy="block")
    return {way: make for way, make in found.items() if re.search(options.only, way)}


def peak_of(step, batch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        step(*batch)
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak


def serve(make, name, options, pipe):
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    *_, vocabulary, sequence = peer.SHAPES[name]
    tokens = torch.randint(vocabulary, (options.micro_batch, sequence + 1), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    step, engine = make()
    counts = lambda: engine._engine.activation_counts() if engine and engine._engine.recomputes else {}  # noqa: E731
    for _ in range(2):
        step(*batch)
    peak = peak_of(step, batch)
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)
    pipe.send(None)
    while pipe.recv():
        step(*batch)
        before, start = counts(), time.perf_counter()
        loss = step(*batch)
        seconds, after = time.perf_counter() - start, counts()
        trim(0)
        pipe.send({"ms": 1e3 * seconds, "loss": loss, "repeated": (after.get("repeat_us", 0) - before.get("repeat_us", 0)) / 1e3,
                   "read": (after.get("read_us", 0) - before.get("read_us", 0)) / 1e3})
    pipe.send({"peak": peak, "kept": counts().get("kept_bytes", 0), "on disk": counts().get("offloaded_bytes", 0)})


def measure(name, options):
    """{way: (its turns, what it keeps)}."""
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    for way, make in ways(name, options).items():  # one after the other: their first steps must not share the machine
        pipes[way], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(make, name, options, other), daemon=True))
        processes[-1].start()
        other.close()
        pipes[way].recv()
    turns = {way: [] for way in pipes}
    for _ in range(options.rounds):
        for way in random.sample(list(pipes), len(pipes)):
            pipes[way].send(True)
            turns[way].append(pipes[way].recv())
    found = {}
    for way, pipe in pipes.items():
        pipe.send(False)
        found[way] = (turns[way], pipe.recv())
    for process in processes:
        process.join()
    return found


COLUMNS = ("min, ms", "median, ms", "x", "repeated, ms", "read, ms", "over, %", "peak, MB", "kept, MB", "on disk, MB", "loss")


def cells(turns, end, base):
    best = min(turns, key=lambda turn: turn["ms"])
    row = [f"{best['ms']:.0f}", f"{statistics.median(turn['ms'] for turn in turns):.0f}"]
    row.append(f"{best['ms'] / base:.3f}" if base else "")
    over = 100 * (best["ms"] - base - best["repeated"] - best["read"]) / base if base else 0
    row += [f"{best['repeated']:.0f}", f"{best['read']:.0f}", f"{over:+.1f}"] if base and end["kept"] else [""] * 3
    row += [f"{end['peak'] / 1e6:.1f}"] + [f"{end[key] / 1e6:.1f}" if end[key] else "" for key in ("kept", "on disk")]
    return [*row, f"{turns[-1]['loss']:.6f}"]


def markdown(name, found, options):
    base = min(turn["ms"] for turn in found["none"][0]) if "none" in found else 0
    dim, layers, _, vocabulary, sequence = peer.SHAPES[name]
    with torch.device("meta"):
        million = sum(parameter.numel() for parameter in Gpt(name).parameters()) / 1e6
    lines = [f"GPT of {million:.1f} million parameters: {layers} layers of {dim}, {vocabulary:,} tokens; {options.micro_batch} sequences of "
             f"{sequence}, {'bf16 autocast' if options.autocast else 'fp32'}, {options.threads} threads; {options.rounds} rounds, in turns.", "",
             f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join(lines + [f"| {way} | {' | '.join(cells(turns, end, base))} |" for way, (turns, end) in found.items()]) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", choices=peer.SHAPES, nargs="+", default=["33m", "110m"])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--autocast", action="store_true", help="in bfloat16, by autocast")
    parser.add_argument("--only", default="", metavar="REGEX", help="ways whose name matches")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where saved tensors are offloaded to; '': nowhere")
    parser.add_argument("--write", action="store_true", help="puts the tables into docs/activations.md")
    options = parser.parse_args()
    if options.write and (options.only or options.autocast):
        parser.error("--write: found --only or --autocast; expected all ways in a document, in fp32")
    return options


def main():
    options = parse_arguments()
    if options.write:
        document.surroundings(DOCUMENT, COMMAND)  # before minutes of runs
    tables = []
    for name in options.gpt:
        tables.append(markdown(name, measure(name, options), options))
        print(tables[-1], flush=True)
    if options.write:
        about = {"machine": machine.describe(), "date": datetime.date.today().isoformat(),
                 "versions": {"tessera": tessera.__version__, **machine.versions(("torch",))}}
        document.replace_table(DOCUMENT, COMMAND, results.surroundings(about) + "\n\n" + "\n".join(tables))


if __name__ == "__main__":
    main()
