"""Each policy of `activation_checkpointing`, beside plain PyTorch and torch.utils.checkpoint.

The GPTs of the other benchmarks: one rank, fp32 on the CPU (or bf16 by autocast), SGD. In its turn a way is a process of its own: two steps
come before, then one in which the profiler counts, and the timed one.

min, median  ms of a step
x            of the minimum to Tessera's without a policy
repeated     ms of the fastest step in operators that run again, and (read) in waiting for the disk, by the engine's clock
over         what that step takes beyond these, in per cent of the step without a policy
peak         MB allocated at once in a step, beyond what lies there between steps (parameters, gradients), as PyTorch's profiler
             reports it
kept         MB of saved tensors that the last forward kept, by the engine's count
loss         of the last step: all ways train on the same tokens from the same weights
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path

import forked
import tessera
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import peer  # noqa: E402

DOCUMENT, COMMAND = "activations.md", "make bench-activations"
CHUNK_ROWS = 256
COLUMNS = [("min, ms", "min", ".0f"), ("median, ms", "median", ".0f"), ("x", "x", ".3f"), ("repeated, ms", "repeated", ".0f"), ("read, ms", "read", ".0f"),
           ("over, %", "over", "+.1f"), ("peak, MB", "peak", ".1f"), ("kept, MB", "kept", ".1f"), ("on disk, MB", "on_disk", ".1f"), ("loss", "loss", ".6f")]


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


def plain(args, name, checkpoints):
    model = Gpt(name, checkpoints)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(tokens, target):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the engine's gradients stay, too
        return loss.item()

    return step, None


def own(args, name, chunk_rows=0, **section):
    engine, *_ = tessera.initialize(model=Gpt(name, chunk_rows=chunk_rows), config={
        "train_micro_batch_size_per_gpu": args.micro_batch, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "torch_autocast": {"enabled": args.autocast}, "activation_checkpointing": section})

    def step(tokens, target):
        loss = engine(tokens, target)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, engine._engine


def peak_of(step, batch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        step(*batch)
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak


def add_arguments(parser):
    parser.add_argument("--gpt", choices=peer.SHAPES, nargs="+", default=["33m", "110m"])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--autocast", action="store_true", help="in bfloat16, by autocast")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where saved tensors are offloaded to; '': nowhere")


def is_special(args):
    return args.autocast


def rows(args, _):
    """{GPT and way: (GPT, make(args, GPT) -> (step, compiled engine or None))}."""
    def policy(chunk_rows=0, **section):
        return lambda args, name: own(args, name, chunk_rows, **section)

    found = {}
    for name in args.gpt:
        layers = peer.SHAPES[name][1]
        ways = {"PyTorch": lambda args, name: plain(args, name, False), "PyTorch, checkpoint": lambda args, name: plain(args, name, True),
                "none": policy(), "cheap": policy(policy="cheap"), "block": policy(policy="block"),
                **{f"block, {blocks} of {layers}": policy(policy="block", number_checkpoints=blocks) for blocks in (layers // 4, layers // 2, 3 * layers // 4)},
                **({"offload": policy(policy="offload", nvme_path=args.disk)} if args.disk else {}),
                "chunked loss": policy(CHUNK_ROWS), "chunked loss, block": policy(CHUNK_ROWS, policy="block")}
        found.update({f"{name} {way}": (name, make) for way, make in ways.items()})
    return found


def measure(args, name, make):
    """One row in one round."""
    def body(_):
        torch.manual_seed(1)
        *_, vocabulary, sequence = peer.SHAPES[name]
        tokens = torch.randint(vocabulary, (args.micro_batch, sequence + 1), generator=torch.Generator().manual_seed(1))
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        step, engine = make(args, name)
        for _ in range(2):
            step(*batch)
        peak = peak_of(step, batch)

        def counts():
            return engine.activation_counts() if engine and engine.recomputes else {}

        before, start = counts(), time.perf_counter()
        loss = step(*batch)
        seconds, after = time.perf_counter() - start, counts()
        taken = {key: (after.get(f"{key}_us", 0) - before.get(f"{key}_us", 0)) / 1e3 for key in ("repeat", "read")}
        return {"ms": 1e3 * seconds, "loss": loss, "repeated": taken["repeat"], "read": taken["read"], "peak": peak / 1e6,
                "kept": after.get("kept_bytes", 0) / 1e6, "on_disk": after.get("offloaded_bytes", 0) / 1e6}

    return forked.run(1, body, timeout_s=600)[0]


def summary(rounds, base):
    """A row of the table. `base`: ms without a policy."""
    best = min(rounds, key=lambda turn: turn["ms"])
    clock = dict.fromkeys(("repeated", "read", "over"))
    if base and best["kept"]:
        clock = {"repeated": best["repeated"], "read": best["read"], "over": 100 * (best["ms"] - base - best["repeated"] - best["read"]) / base}
    return {"min": best["ms"], "median": statistics.median(turn["ms"] for turn in rounds), "x": best["ms"] / base if base else None, **clock,
            "peak": best["peak"], "kept": best["kept"] or None, "on_disk": best["on_disk"] or None, "loss": best["loss"]}


def tables(args, measured):
    """(title, what it is of, rows)"""
    for name in args.gpt:
        found = {row.removeprefix(f"{name} "): rounds for row, rounds in measured.items() if row.startswith(f"{name} ")}
        if not found:
            continue
        base = min(turn["ms"] for turn in found["none"]) if "none" in found else None
        dim, layers, _, vocabulary, sequence = peer.SHAPES[name]
        with torch.device("meta"):
            million = sum(parameter.numel() for parameter in Gpt(name).parameters()) / 1e6
        yield ("", f"GPT of {million:.1f} million parameters: {layers} layers of {dim}, {vocabulary:,} tokens; {args.micro_batch} sequences of "
                   f"{sequence}, {'bf16 autocast' if args.autocast else 'fp32'}, {torch.get_num_threads()} threads; {args.rounds} rounds, in turns.",
               {row: summary(rounds, base) for row, rounds in found.items()})
