"""Optimizers that run as they are, and the model that they train in tests: of torch, and of users with unusual ways."""
import enum
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import torch
from optimizers import ByParameter
from torch import nn


class Tied(nn.Module):
    """Matrices, vectors, a convolution, a scalar, a tied, a frozen and an unused parameter, and a large one beside small ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 24, bias=False)
        self.again = nn.Linear(16, 24, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.filters = nn.Conv1d(2, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(72, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 5))

    def forward(self, x):
        x = self.frozen(self.first(x) + self.again(x.flip(-1))) * self.scale
        x = self.filters(x.unflatten(1, (1, 24)).expand(-1, 2, -1))
        return self.head(x.flatten(1))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model, **first):
    """Matrices with options of their own, and the others."""
    return [{"params": [p for p in trained(model) if p.ndim == 2], **first}, {"params": [p for p in trained(model) if p.ndim != 2]}]


class Centred(ByParameter):
    """Of a user's: needs each gradient whole, keeps a tensor of another shape, a number and a text, and knows its parameters by id()."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.numbers = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def update(self, p, state, group):
        if not state:
            state.update(rows=torch.zeros(p.shape[:1]), calls=0, kind="vector" if p.ndim < 2 else "more", number=self.numbers[id(p)])
        centred = p.grad - p.grad.mean()
        if p.ndim > 1:
            centred = centred / (1e-3 + centred.flatten(1).norm(dim=1).view(-1, *[1] * (p.ndim - 1)))
            state["rows"] += centred.flatten(1).sum(1)
        state["calls"] += 1
        p.data.add_(centred, alpha=-group["lr"] / state["calls"] / (1 + 0.01 * state["number"]))


Pair = namedtuple("Pair", "mean count")
Phase = enum.Enum("Phase", "WARM HOT")


@dataclass
class Projection:
    """An object among the states, as GaLore's and Shampoo's are."""

    rows: torch.Tensor
    calls: int = 0


class Keeping(ByParameter):
    """Keeps what other optimizers do: queues of tensors (AdaShift's), objects (GaLore's), and containers inside of each other."""

    def update(self, p, state, group):
        if not state:
            state.update(queue=deque(maxlen=2), numbers=defaultdict(list), pair=Pair(torch.zeros_like(p), 0), phase=Phase.WARM,
                         projection=Projection(torch.zeros(p.shape[:1])), inside=OrderedDict(of=deque([({"last": torch.zeros(2)}, [])])),
                         generator=torch.Generator().manual_seed(p.numel()))
        self.seen = getattr(self, "seen", None) or deque(maxlen=3)
        self.seen.append(1)
        state["queue"].append(p.grad.clone())
        state["numbers"]["norms"].append(float(p.grad.norm()))
        state["pair"] = Pair(0.9 * state["pair"].mean + p.grad, state["pair"].count + 1)
        state["phase"] = Phase.HOT if len(state["numbers"]["norms"]) > 2 else Phase.WARM
        state["projection"].calls += 1
        state["projection"].rows += 0.01 * p.grad.reshape(p.grad.shape[0] if p.ndim else 1, -1).sum(1).view(p.shape[:1])
        inner, listed = state["inside"]["of"][0]
        inner["last"] = inner["last"] * 0.5 + state["queue"][0].sum()
        listed.append(state["projection"].calls)
        scale = 0.02 if state["phase"] is Phase.HOT else 0.01
        scale /= len(listed) + float(torch.rand((), generator=state["generator"])) + abs(float(inner["last"].sum())) % 1
        p.data.sub_(sum(state["queue"]) + state["pair"].mean / state["pair"].count + state["projection"].rows.view(-1, *[1] * (p.ndim - 1))
                    if p.ndim else sum(state["queue"]), alpha=scale)


class InTwo(torch.Tensor):
    """fp32 values kept as two tensors of bf16, as libraries' quantized states are kept: copying one is not implemented."""

    @staticmethod
    def __new__(cls, high, low):
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32, device=high.device)

    def __init__(self, high, low):
        self.high, self.low = high, low

    def whole(self):
        return self.high.float() + self.low.float()

    def __tensor_flatten__(self):
        return ["high", "low"], {"parts": 2}

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        assert context == {"parts": len(parts)} and parts["high"].shape == size
        return InTwo(**parts)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if "clone" in func.name() or "copy" in func.name():
            raise NotImplementedError(func.name())
        return func(*[one.whole() if isinstance(one, InTwo) else one for one in args], **(kwargs or {}))


def halves(value):
    high = value.bfloat16()
    return InTwo(high, (value - high.float()).bfloat16())


def _moved(value, momentum, gradient):
    momentum = 0.9 * momentum + gradient / (gradient.norm() + 1e-6)
    return value - 0.05 * momentum, momentum


class Compiled(ByParameter):
    """Compiles its update in one graph, as torchao's do, and keeps what it needs as an InTwo."""

    def update(self, p, state, group):
        momentum = state["momentum"].whole() if state else torch.zeros_like(p)
        with torch._dynamo.config.patch(recompile_limit=1000):  # once for each shape
            value, momentum = torch.compile(_moved, fullgraph=True, dynamic=False, backend="eager")(p.detach(), momentum, p.grad)
        p.data.copy_(value)
        state["momentum"] = halves(momentum)


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients itself."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Both(torch.optim.Optimizer):
    """Matrices by one optimizer and the others by another one, which share groups and, if `shares`, states with this."""

    def __init__(self, matrices, others, shares=True):
        self.first, self.second, self.shares = torch.optim.Adafactor(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, amsgrad=True), shares
        super().__init__([*self.first.param_groups, *self.second.param_groups], {})
        self.param_groups[:] = [*self.first.param_groups, *self.second.param_groups]

    def step(self, closure=None):
        if self.shares:
            self.first.state = self.second.state = self.state
        self.first.step()
        self.second.step()


class GoingOn(torch.optim.Optimizer):
    """Decays, and goes on with its momentum, where a parameter has no gradient, too."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9)
                if p.grad is not None:
                    momentum.add_(p.grad)
                p.mul_(0.99).sub_(momentum, alpha=group["lr"])


class OfTheSameName(torch.optim.Optimizer):
    """A user's, with the name and the options of one that has a formula here, and another update."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() + group["weight_decay"] * p, alpha=group["lr"])


OfTheSameName.__name__ = OfTheSameName.__qualname__ = "Lion"


def with_other_step(optimizer):
    """What some programs do: they put a step() of their own into the optimizer."""
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.sub_(p.grad.sign(), alpha=0.01)

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


class Growing(ByParameter):
    """Its groups have a list that grows past the number of the group's parameters, and an option that is a list of two."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group.update(rates=[], betas=[0.5, 0.25])

    def step(self, closure=None):
        for group in self.param_groups:
            group["rates"].append(group["lr"])
        return super().step(closure)

    def update(self, p, state, group):
        p.sub_(p.grad, alpha=sum(group["rates"]) * group["betas"][0] / 10)


def optimizers_of_torch():
    """By class and options. LBFGS and SparseAdam are refused elsewhere, and classes with formulas of ours are here with others' options."""
    makers = {
        "Adadelta": lambda m: torch.optim.Adadelta(two_groups(m, rho=0.8), lr=0.5),
        "Adafactor": lambda m: torch.optim.Adafactor(two_groups(m, weight_decay=0.1), lr=0.02),
        "Adagrad from 0.1": lambda m: torch.optim.Adagrad(two_groups(m), lr=0.02, initial_accumulator_value=0.1),
        "Adamax": lambda m: torch.optim.Adamax(two_groups(m, weight_decay=0.1), lr=0.01),
        "ASGD": lambda m: torch.optim.ASGD(two_groups(m, weight_decay=0.1), lr=0.05, t0=1.0),
        "NAdam": lambda m: torch.optim.NAdam(two_groups(m, weight_decay=0.1), lr=0.01, decoupled_weight_decay=True),
        "RAdam": lambda m: torch.optim.RAdam(two_groups(m), lr=0.05),
        "RMSprop": lambda m: torch.optim.RMSprop(two_groups(m, centered=True), lr=0.01, momentum=0.9),
        "Rprop": lambda m: torch.optim.Rprop(two_groups(m), lr=0.01),
        "a user's": lambda m: Centred(two_groups(m, lr=0.02)),
        "going on": lambda m: GoingOn(two_groups(m), lr=0.05),
        "of the same name": lambda m: OfTheSameName(two_groups(m)),
        "another step": lambda m: with_other_step(torch.optim.AdamW(two_groups(m), lr=0.05)),
        "growing": lambda m: Growing([{"params": [p]} if i % 2 else {"params": [p], "lr": 0.02} for i, p in enumerate(trained(m))][:2] +
                                     [{"params": trained(m)[2:4]}, {"params": trained(m)[4:]}]),
        "two in one": lambda m: Both(*([p for p in trained(m) if (p.ndim == 2) == is_2d] for is_2d in (True, False))),
    }
    if hasattr(torch.optim, "Muon"):
        makers["Muon"] = lambda m: torch.optim.Muon([p for p in trained(m) if p.ndim == 2], lr=0.02, weight_decay=0.1)
    return makers
