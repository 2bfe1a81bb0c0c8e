"""Random forwards of PyTorch operators, under each policy of activation_checkpointing beside plain PyTorch: equal to the bit.

    python tests/python/programs/random_programs.py [--first 0] [--programs 200] [--policies-each N]

A program is a list of instructions over a list of tensors: views, whole-tensor and slice in-place operators, aliases that cross the
blocks (a block begins where a layer of `self.layers` is read), random operators, normalizations with running statistics, functions with
a backward of their own, lists, casts, autocast, nested torch.utils.checkpoint, memory that numpy writes, scalars and numbers, hooks. What plain PyTorch refuses (a
tensor that its backward needs was written) is left out, and so are writes through `.data` to tensors that may have been saved: plain
PyTorch's backward reads what was written, and ours what was saved. A program that differs is made shorter as long as it differs, and printed.
"""
import argparse
import random
import sys
import tempfile
import time
import warnings

import numpy
import tessera
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
ROWS, WIDTH = 32, 48  # 6 KiB: large enough to be dropped


class Scaled(torch.autograd.Function):
    """Saves an input, its result, and a number; draws noise."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        y = x.sin() * factor + 0.1 * torch.rand_like(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * x.cos() * ctx.factor + 0 * y, None


class Negated(torch.autograd.Function):
    """Writes its input and returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


_count = torch.zeros(ROWS, WIDTH)


@torch.library.custom_op("tessera_test::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.rand_like(x)


noise.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("tessera_test::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    _count.add_(0.5)
    return x * _count


count.register_autograd(lambda ctx, gradient: gradient * ctx.count,
                        setup_context=lambda ctx, inputs, output: setattr(ctx, "count", _count.clone()))


@torch.library.custom_op("tessera_test::halve", mutates_args={"x"})
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.compile(backend="aot_eager", dynamic=False)
def compiled(a, b):
    return (a - 0.1 * b.square().mean()).tanh() * b


UNARY = {"sin": torch.sin, "tanh": torch.tanh, "exp": lambda a: (a * 0.1).exp(), "relu": torch.relu, "sigmoid": torch.sigmoid, "abs": torch.abs,
         "gelu": functional.gelu, "silu": functional.silu, "softmax": lambda a: a.softmax(1) * 8, "cumsum": lambda a: a.cumsum(1) * 0.1,
         "sort": lambda a: a.sort(1)[0], "fft": lambda a: torch.fft.fft(a).abs() * 0.2, "where": lambda a: torch.where(a > 0, a, 0.1 * a),
         "pow": lambda a: (a.abs() + 0.1).pow(1.5), "logsumexp": lambda a: a - a.logsumexp(1, keepdim=True), "norm": lambda a: a / (1 + a.norm(dim=1, keepdim=True)),
         "max": lambda a: a - a.max(1, keepdim=True)[0], "glu": lambda a: functional.glu(torch.cat([a, a.flip(1)], 1), 1),
         "clone": torch.clone, "pool": lambda a: functional.avg_pool1d(a[None], 3, 1, 1)[0], "cosh": lambda a: a.clamp(-3, 3).cosh()}
SCALAR = {"loss": lambda a: 0.1 * a.square().mean(), "in_place": lambda a: a.mean().mul_(0.3).add_(1), "norm": lambda a: 2 - a.norm() * 0.01, "mean": lambda a: a.mean() / 3,
          "logdet": lambda a: torch.logdet(a.tanh().t() @ a.tanh() * 0.01 + torch.eye(WIDTH)) * 0.01, "double": lambda a: torch.tensor(0.1, dtype=torch.double) * a.mean(),
          "power": lambda a: 2.0 ** a.mean().tanh(), "integers": lambda a: (torch.arange(4) * 0.5).sum() * a.tanh().max(),
          "entropy": lambda a: -(a.softmax(1) * a.log_softmax(1)).sum(1).mean()}
NUMBER = {"left": lambda a, b: 1 - 0.5 * a, "power": lambda a, b: 2.0 ** a.tanh(), "divided": lambda a, b: 1 / (2 + a.tanh()), "alpha": lambda a, b: torch.add(a, b, alpha=0.3),
          "integers": lambda a, b: a * (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) * 0.001).sin(), "compared": lambda a, b: (a > 0) * 0.5 * b,
          "remainder": lambda a, b: a + torch.remainder(b, 0.7),
          "half": lambda a, b: (a.bfloat16() * 0.1 * b.bfloat16().mean()).float()}
WRITE = {"sin": torch.sin_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_, "relu": torch.relu_, "neg": torch.neg_, "cos": torch.cos_,
         "halve": lambda a: a.mul_(0.5), "one_more": lambda a: a.add_(1), "clamp": lambda a: a.clamp_(-2, 2), "zero": torch.zero_,
         "leaky": lambda a: functional.leaky_relu(a, 0.1, inplace=True), "silu": lambda a: functional.silu(a, inplace=True),
         "dropout": lambda a: functional.dropout(a, 0.3, True, inplace=True), "uniform": lambda a: a.detach().uniform_(-1, 1),
         "negated": lambda a: Negated.apply(a), "fill": lambda a: a.fill_(0.3), "abs": lambda a: a.detach().abs_()}
WRITE_WITH = {"mul": lambda a, b: a.mul_(b.tanh()), "add": lambda a, b: a.add_(b), "copy": lambda a, b: a.copy_(b), "lerp": lambda a, b: a.lerp_(b, 0.3),
              "addcmul": lambda a, b: a.addcmul_(b, b.sin(), value=0.1), "sub": lambda a, b: a.sub_(b, alpha=0.5), "div": lambda a, b: a.div_(2 + b.tanh()),
              "masked": lambda a, b: a.masked_fill_(b > 0.5, 0.2), "film": lambda a, b: a.mul_(b.sigmoid()).add_(b), "where": lambda a, b: a.copy_(torch.where(b > 0, a, b)),
              "foreach": lambda a, b: torch._foreach_add_([a, a[:, :5]], [b, b[:, :5]]), "foreach_lerp": lambda a, b: torch._foreach_lerp_([a.detach()], [b.detach()], 0.5),
              "index": lambda a, b: a.index_copy_(0, torch.tensor([1, 3]), b[:2]), "scatter": lambda a, b: a.scatter_add_(1, torch.zeros(ROWS, 2, dtype=torch.long), b[:, :2])}
VIEW = {"transposed": lambda a: a.t().contiguous().t(), "reshaped": lambda a: a.view(16, 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH), "flipped": lambda a: a.flip(1),
        "flat": lambda a: a.reshape(-1).view(ROWS, WIDTH), "expanded": lambda a: a[:, None].expand(ROWS, 2, WIDTH)[:, 1], "row": lambda a: a[3].expand(ROWS, WIDTH),
        "column": lambda a: a[:, 3].reshape(ROWS, 1).expand(ROWS, WIDTH), "strided": lambda a: a.as_strided((ROWS, WIDTH), a.stride()), "alias": lambda a: a[:],
        "wide": lambda a: torch.cat([a, a], 1)[:, 8:8 + WIDTH], "detached": torch.detach, "copied": lambda a: a.detach().clone(), "data": lambda a: a.data * 1,
        "unfolded": lambda a: a.unfold(1, 4, 4).reshape(ROWS, WIDTH), "steps": lambda a: a.repeat(1, 2)[:, ::2], "column_block": lambda a: a[:, 3].reshape(8, 4).repeat(4, 12)}
KINDS = ["unary", "unary", "binary", "binary", "layer", "layer", "write", "write", "write_with", "write_with", "slice_write", "slice_write_with", "view", "view", "dropout",
         "rrelu", "buffer", "buffer_write", "halves", "unsafe_halves", "batch_norm", "batch_norm_mean", "statistics", "layer_norm", "group_norm", "function", "checkpoint",
         "checkpoint", "cast", "autocast", "list", "numpy_mask", "numpy_input", "empty", "out", "op_noise", "op_count", "op_halve",
         "scalar", "scalar", "number", "number_list", "autocast_region", "hook", "reentrant", "compiled", "python_random", "gru", "no_grad_write", "tanh_chain"]


def program(seed):
    chance = random.Random(seed)
    return [(chance.choice(KINDS), chance.randint(0, 99), chance.randint(0, 99), chance.randint(0, 31)) for _ in range(chance.randint(5, 16))]


def choose(table, number):
    return table[list(table)[number % len(table)]]


class Net(nn.Module):
    def __init__(self, instructions):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.mean_norm = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.layer_norm, self.group_norm, self.cell = nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("table", torch.linspace(0.5, 1.5, ROWS * WIDTH).view(ROWS, WIDTH))
        self.register_buffer("bilinear", torch.linspace(-0.1, 0.1, WIDTH**3).view(WIDTH, WIDTH, WIDTH))
        self.instructions = instructions

    def forward(self, x):
        tensors = [x * 1.0, self.first(x), x]
        chance = random.Random(1)
        pool = numpy.zeros((ROWS, WIDTH), numpy.float32)
        for instruction in self.instructions:
            self.execute(tensors, *instruction, chance, pool)
        return self.head(sum(tensor.clamp(-9, 9) for tensor in tensors))

    def execute(self, tensors, kind, i, j, number, chance, pool):
        a, b = tensors[i % len(tensors)], tensors[j % len(tensors)]
        at = slice(number, number + 8)
        layer = self.layers[number % 2]
        if kind == "write":
            choose(WRITE, number)(a)
        elif kind == "write_with":
            choose(WRITE_WITH, number)(a, b)
        elif kind == "slice_write":
            choose(WRITE, j)(a[:, at])
        elif kind == "slice_write_with":
            a[:, at] = b[:, at] * 0.5
        elif kind == "no_grad_write":
            with torch.no_grad():
                a.detach().mul_(0.9)
        elif kind == "buffer_write":
            with torch.no_grad():
                self.average.mul_(0.9).add_(a.detach().tanh().mean(0) * 0.1)
                if number % 3 == 0:
                    self.table.data.copy_(a.detach().tanh())
        elif kind == "op_halve":
            if not a.requires_grad:
                halve(a)
        else:
            tensors.append(self.make(kind, a, b, j, number, layer, at, chance, pool))

    def make(self, kind, a, b, j, number, layer, at, chance, pool):
        if kind == "unary":
            return choose(UNARY, number)(a)
        if kind == "binary":
            return [a * b.tanh() + b, torch.addcmul(a, b, b.sin(), value=0.1), torch.lerp(a, b, 0.3), torch.maximum(a, b), a @ (b.t() @ b) * 0.01][number % 5]
        if kind == "layer":
            return layer(a.clamp(-9, 9))
        if kind == "view":
            return choose(VIEW, number)(a)
        if kind == "dropout":
            return [functional.dropout(a, 0.3), functional.alpha_dropout(a, 0.2, True), functional.feature_dropout(a[None], 0.2, True)[0],
                    a * torch.empty_like(a).bernoulli_(0.8), a + torch.randn_like(a), a * torch.rand(ROWS, WIDTH)][number % 6]
        if kind == "rrelu":
            return functional.rrelu(a, training=True)
        if kind == "buffer":
            return a * self.average + self.table
        if kind == "halves":
            left, right = a.chunk(2, 1)
            return torch.cat([right.sin(), left * 2], 1)
        if kind == "unsafe_halves":
            left, right = (a * 1.0).unsafe_chunk(2, 1)
            left.mul_(2)
            return torch.cat([right.tanh_(), left], 1)
        if kind == "batch_norm":
            return self.norm(a)
        if kind == "batch_norm_mean":
            return self.mean_norm(self.mean_norm(a).sin())
        if kind == "statistics":
            y = (a - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()
            self.norm(a)
            return y
        if kind == "layer_norm":
            return self.layer_norm(a)
        if kind == "group_norm":
            return self.group_norm(a)
        if kind == "function":
            return Scaled.apply(a, chance.random())
        if kind == "checkpoint":
            return checkpoint(lambda t: functional.dropout(layer(t.tanh()), 0.2).sin() * b, a, use_reentrant=False)
        if kind == "cast":
            return [a.double().sin().float(), a.bfloat16().float(), a.to(torch.float16).float() * 2][number % 3]
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return functional.gelu(layer(a.clamp(-9, 9))).float()
        if kind == "list":
            pieces = [piece.clone() for piece in a.split(16, 1)]
            torch._foreach_mul_(pieces, 0.5)
            pieces = torch._foreach_sin(pieces)
            return torch.stack(pieces, 1).flatten(1)
        if kind == "numpy_mask":
            mask = [a.new_zeros(ROWS, WIDTH), torch.zeros_like(a), torch.full((ROWS, WIDTH), 0.5), (a.detach() * 1.0).contiguous()][number % 4]
            mask.detach().numpy()[:, ::2] = 2.0
            return a.sin() * mask
        if kind == "numpy_input":
            pool[:] = numpy.sin(a.detach().numpy() + number)
            return layer(torch.from_numpy(pool) * 2) if j % 2 else a * torch.from_numpy(pool).sin()
        if kind == "empty":
            y = a.new_empty(ROWS, WIDTH)
            y.copy_(b)
            y[:, at] = 1.0
            return y
        if kind == "out":
            y = torch.empty(ROWS, WIDTH)
            torch.mul(a.detach(), b.detach(), out=y)
            return y.sin() * a
        if kind == "op_noise":
            return noise(a).sin()
        if kind == "op_count":
            return count(a).tanh()
        if kind == "scalar":
            return a + b.tanh() * choose(SCALAR, number)(a) * 0.1
        if kind == "number":
            return choose(NUMBER, number)(a, b)
        if kind == "number_list":
            total = a.mean()
            scaled = torch._foreach_mul([total, a, b], [0.1, 0.5, 2])
            return torch.where(a > 0, 0.3 * total, scaled[1]) + scaled[0] + torch.cat([(2 * total)[None].expand(1, WIDTH), scaled[2][1:]])
        if kind == "autocast_region":
            with torch.autocast("cpu", [torch.bfloat16, torch.float16][number % 2]):
                h = layer(a.clamp(-9, 9)).tanh()
                with torch.autocast("cpu", enabled=False):
                    h = h.float() * (0.1 * b.tanh().sum()).tanh()
                return functional.bilinear(h, h.sin(), self.bilinear) + layer(h).float()
        if kind == "hook":
            y = layer(a.clamp(-9, 9)).tanh()
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 0.5 + 0.1 * gradient.mean())
            return y.sin() * b
        if kind == "reentrant":
            return checkpoint(lambda t: functional.dropout(layer(t.tanh()) * (0.1 * t.tanh().sum()), 0.2).sin(), a, use_reentrant=True)
        if kind == "compiled":
            return compiled(a, b)
        if kind == "python_random":
            return (a * chance.random()).sin() * torch.tensor([chance.random() for _ in range(WIDTH)])
        if kind == "gru":
            return self.cell(a.clamp(-9, 9), self.cell(b.clamp(-9, 9), torch.zeros(ROWS, WIDTH)))
        if kind == "tanh_chain":
            return ((a.tanh() * 2).sigmoid() + b).tanh() * b
        raise AssertionError(kind)


def inputs_of(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def steps_of(model, parameters_of, backward, steps=2):
    """Outputs and gradients of each step, the buffers and the generator's state after the last. The weights stay as they are."""
    found = []
    _count.zero_()
    for step in range(steps):
        torch.manual_seed(step)
        output = model(inputs_of(step))
        backward(output.square().mean())
        found.append(output.detach())
        found += parameters_of()
    return found


def plain(instructions):
    model = Net(instructions)

    def gradients():
        grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        return grads

    return steps_of(model, gradients, torch.Tensor.backward) + list(model.buffers()) + [torch.get_rng_state()]


def with_policy(instructions, section, stage):
    recomputation = {"activation_checkpointing": section} if section else {}
    engine, *_ = tessera.initialize(model=Net(instructions), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage}, **recomputation})

    def gradients():
        found = [engine.full_gradient(name) for name, _ in engine.module.named_parameters()]
        engine.step()
        return found

    found = steps_of(engine, gradients, engine.backward) + list(engine.module.buffers()) + [torch.get_rng_state()]
    return found, engine._engine.activation_counts() if section else None


def policies(folder):
    return {"cheap": {"policy": "cheap"}, "block": {"policy": "block"}, "first_block": {"policy": "block", "number_checkpoints": 1},
            "offload": {"policy": "offload", "nvme_path": folder}}


def same_bits(found, wanted):
    """NaN is equal to NaN: a program may compute it."""
    return all(torch.equal(torch.nan_to_num(a, 12345.0), torch.nan_to_num(b, 12345.0)) for a, b in zip(found, wanted, strict=True))


def outcome(instructions, section, stage, wanted=None):
    """"refused" by plain PyTorch, "equal", "differs", or an error of ours."""
    if wanted is None:
        try:
            wanted = plain(instructions)
        except Exception:  # noqa: BLE001 - torch's errors have many types
            return "refused", None
    try:
        found, counts = with_policy(instructions, section, stage)
    except Exception as error:  # noqa: BLE001 - to be reported with the program
        return f"{type(error).__name__}: {error}", None
    # At stage 3 the first step may add up the parts of a layer in another order (docs/python.md), with or without recomputation.
    same = same_bits(found, wanted) or (stage == 3 and section and same_bits(found, with_policy(instructions, None, stage)[0]))
    return ("equal" if same else "differs"), counts


def shorten(instructions, section, stage):
    """The program without what its failure does not need."""
    failing, again = ("equal", "refused"), True
    while again:
        again = False
        for i in range(len(instructions)):
            shorter = instructions[:i] + instructions[i + 1:]
            if outcome(shorter, section, stage)[0] not in failing:
                instructions, again = shorter, True
                break
    return instructions


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--policy")
    parser.add_argument("--policies-each", type=int, default=9, help="try each program under so many of the policies, in turns")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    seed, compared, failures = arguments.first, 0, 0
    totals = {"num_dropped": 0, "num_repeated": 0, "num_offloaded": 0, "num_verified": 0}
    with tempfile.TemporaryDirectory() as folder:
        sections = {name: section for name, section in policies(folder).items() if arguments.policy in (None, name)}
        while compared < arguments.programs and failures < arguments.failures:
            instructions, stage = program(seed), 3 if seed % 4 == 3 else 0
            seed += 1
            try:
                wanted = plain(instructions)
            except Exception:  # noqa: BLE001 - torch's errors have many types
                continue
            compared += 1
            names = list(sections)
            for name in [names[(seed + k) % len(names)] for k in range(min(arguments.policies_each, len(names)))]:
                section = sections[name]
                said, counts = outcome(instructions, section, stage, wanted)
                if said != "equal":
                    failures += 1
                    print(f"program {seed - 1} under {name}: {said}\n  shortest:", flush=True)
                    for instruction in shorten(instructions, section, stage):
                        print("   ", instruction, flush=True)
                else:
                    for key in totals:
                        totals[key] += counts[key]
    print(f"{compared} programs of seeds {arguments.first} to {seed - 1} in {time.monotonic() - start:.0f} s, {len(sections)} policies: "
          f"{failures} failures; {totals}", flush=True)
    # A test of programs of which nothing is dropped would prove nothing.
    used = all(totals.values()) if arguments.policy is None else True
    sys.exit(0 if failures == 0 and used else 1)


if __name__ == "__main__":
    main()
