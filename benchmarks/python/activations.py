"""Memory and time of a step under each policy of `activation_checkpointing`, beside plain PyTorch and torch.utils.checkpoint.

    .deps/venv/bin/python benchmarks/python/activations.py --gpt 33m [--micro-batch 8] [--rounds 3] [--only REGEX] [--disk DIR]

The GPTs of the other benchmarks (benchmarks/gpt.h), written in torch: one rank, fp32 on the CPU, SGD. Each way is a process of its own;
they take turns, a step each, in random order. Two steps come before, since the first one is the profile of a budget.

min, median  ms of a step
x            of the minimum to Tessera's without a policy; repeated, read: ms of a step in operators that run again, and in waiting for
             the disk, by the engine's clock; over: what the step takes beyond these, in per cent of the step without a policy
peak         MB allocated at once in a step, beyond what lies there between steps (parameters, gradients), as PyTorch's profiler
             reports it, in a step that is not timed
loss         of the last step: all ways train on the same tokens from the same weights
"""
import argparse
import gc
import multiprocessing
import random
import re
import statistics
import tempfile
import time

import tessera
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SHAPES = {"small": (256, 4, 4, 4096), "33m": (512, 8, 8, 8192), "110m": (768, 12, 12, 16384)}  # dim, layers, heads, vocabulary
SEQUENCE = 128


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, name, checkpoints=False):
        super().__init__()
        dim, layers, heads, vocabulary = SHAPES[name]
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(SEQUENCE, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.checkpoints = checkpoints

    def forward(self, tokens, target):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def plain(name, checkpoints):
    model = Gpt(name, checkpoints)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(tokens, target):
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the engine's gradients stay, too
        return loss.item()

    return step, None


def engine_of(name, micro_batch, section):
    engine, *_ = tessera.initialize(model=Gpt(name), config={
        "train_micro_batch_size_per_gpu": micro_batch, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "activation_checkpointing": section})

    def step(tokens, target):
        loss = engine(tokens, target)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, engine


def saved_bytes(name, micro_batch, batch):
    step, engine = engine_of(name, micro_batch, {"policy": "cheap"})
    step(*batch)
    counts = engine._engine.activation_counts()
    del step, engine
    gc.collect()
    torch.manual_seed(1)
    return counts["kept_bytes"] + counts["dropped_bytes"]


def ways(options):
    """{name: make(batch) -> (step, engine or None)}."""
    name, size = options.gpt, options.micro_batch
    own = lambda **section: lambda batch: engine_of(name, size, section)  # noqa: E731
    budget = lambda percent, **more: lambda batch: engine_of(name, size, {  # noqa: E731
        "policy": "budget", "budget_bytes": saved_bytes(name, size, batch) * percent // 100, **more})
    found = {"PyTorch": lambda batch: plain(name, False), "PyTorch, checkpoint": lambda batch: plain(name, True), "none": own()}
    for policy in ("cheap", "block"):
        found[policy] = own(policy=policy)
    for percent in (75, 50, 25):
        found[f"budget, {percent} %"] = budget(percent)
    if options.disk:
        found["offload"] = own(policy="offload", nvme_path=options.disk)
        for percent in (50, 25, 10):
            found[f"budget, {percent} %, disk"] = budget(percent, nvme_path=options.disk)
    return {way: make for way, make in found.items() if re.search(options.only, way)}


def peak_of(step, batch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(*batch)
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak


def serve(make, options, pipe):
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    shape = (options.micro_batch, SEQUENCE + 1)
    tokens = torch.randint(SHAPES[options.gpt][3], shape, generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    step, engine = make(batch)
    counts = lambda: engine._engine.activation_counts() if engine and engine._engine.recomputes else {}  # noqa: E731
    for _ in range(2):
        step(*batch)
    peak = peak_of(step, batch)
    pipe.send(None)
    while pipe.recv():
        before, start = counts(), time.perf_counter()
        loss = step(*batch)
        seconds, after = time.perf_counter() - start, counts()
        pipe.send((seconds, {key: after[key] - before[key] for key in ("repeat_us", "read_us") if after}, loss))
    pipe.send((peak, counts()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", choices=SHAPES, default="33m")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="where saved tensors are offloaded to; '': nowhere")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    for way, make in ways(options).items():  # one after the other: their first steps must not share the machine
        pipes[way], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(make, options, other), daemon=True))
        processes[-1].start()
        pipes[way].recv()
    results = {way: [] for way in pipes}
    for _ in range(options.rounds):
        for way in random.sample(list(pipes), len(pipes)):
            pipes[way].send(True)
            results[way].append(pipes[way].recv())
    report(results, {way: finish(pipe) for way, pipe in pipes.items()})


def finish(pipe):
    pipe.send(False)
    return pipe.recv()


def report(results, ends):
    milliseconds = {way: [1e3 * seconds for seconds, _, _ in steps] for way, steps in results.items()}
    base = min(milliseconds["none"]) if "none" in results else 0
    print("| way | min, ms | median, ms | x | repeated, ms | read, ms | over, % | peak, MB | kept, MB | on disk, MB | loss |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for way, steps in results.items():
        best = min(range(len(steps)), key=lambda i: steps[i][0])
        work = {key: value / 1e3 for key, value in steps[best][1].items()}
        lowest = milliseconds[way][best]
        over = 100 * (lowest - base - sum(work.values())) / base if base else 0
        peak, counts = ends[way]
        kept, on_disk = counts.get("kept_bytes", 0) / 1e6, counts.get("offloaded_bytes", 0) / 1e6
        print(f"| {way} | {lowest:.0f} | {statistics.median(milliseconds[way]):.0f} | {lowest / base if base else 0:.3f} "
              f"| {work.get('repeat_us', 0):.0f} | {work.get('read_us', 0):.0f} | {over:+.1f} | {peak / 1e6:.1f} | {kept:.1f} "
              f"| {on_disk:.1f} | {steps[-1][2]:.7f} |")


if __name__ == "__main__":
    main()
