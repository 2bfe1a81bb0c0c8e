"""Optimizers that run as they are, and the model that they train in tests: of torch, and of users with unusual ways."""
import enum
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import torch
from optimizers import ByParameter
from torch import nn
from torch.optim import lr_scheduler as schedulers


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


class Averaging(torch.optim.Optimizer):
    """As schedulefree's classes: the parameters are one sequence in train(), and its average in eval()."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "steps": 0, "averaged": False})

    @torch.no_grad()
    def _swap(self, averaged):
        for group in self.param_groups:
            if group["averaged"] != averaged:
                for p in group["params"]:
                    if "average" in self.state[p]:
                        kept = p.clone()
                        p.copy_(self.state[p]["average"])
                        self.state[p]["average"].copy_(kept)
                group["averaged"] = averaged

    def train(self):
        self._swap(False)

    def eval(self):
        self._swap(True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert not group["averaged"]
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (1e-6 + p.grad.norm()), alpha=group["lr"])
                    average = self.state[p].setdefault("average", p.clone())
                    average.lerp_(p, 1 / group["steps"])


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


OfTheSameName.__name__ = OfTheSameName.__qualname__ = "FusedLion"
OfTheSameName.__module__ = "tessera.deepspeed.ops.lion"


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


class Hostile(torch.optim.SGD):
    """SGD, after what `first(optimizer, parameters)` does with those that have gradients. SGD's update does not follow where that is False."""

    def __init__(self, params, first, lr=0.5, maximize=True, momentum=0.0, foreach=None, **attributes):
        super().__init__(params, lr, maximize=maximize, momentum=momentum, foreach=foreach)
        self.first = first
        vars(self).update(attributes)

    def step(self, closure=None):
        go_on = self.first(self, [p for group in self.param_groups for p in group["params"] if p.grad is not None])
        return None if go_on is False else super().step(closure)


def clips(optimizer, parameters):
    """By the norm of all gradients."""
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clips_its_own_list(optimizer, parameters):
    """What it has listed when it was made."""
    nn.utils.clip_grad_norm_([p for p in optimizer.listed if p.grad is not None], 0.1)


def clips_later(optimizer, parameters):
    """By the mean of the norms that it has seen, from the tenth step on."""
    optimizer.norms.append(float(nn.utils.get_total_norm([p.grad for p in parameters])))
    if len(optimizer.norms) > 9:
        nn.utils.clip_grad_norm_(parameters, sum(optimizer.norms) / len(optimizer.norms) / 2)


def skips_large_norms(optimizer, parameters):
    return bool(nn.utils.get_total_norm([p.grad for p in parameters]) < 5000)


def scales_by_neighbours(optimizer, parameters):
    """Each second matrix is scaled by the one before, as adapters' are by some methods."""
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == 2]
    for i in range(3, len(matrices), 2):
        if matrices[i].grad is not None:
            matrices[i].grad.mul_(1 + matrices[i - 1].detach().norm())


def draws_for_each(optimizer, parameters):
    for p in parameters:
        p.grad += torch.randn_like(p.grad)


def draws_once(optimizer, parameters):
    """One number of the generator scales the update of all."""
    scale = float(torch.rand(()))
    for p in parameters:
        p.grad.mul_(scale)


def draws_of_its_own(optimizer, parameters):
    for p in parameters:
        p.grad.mul_(torch.rand((), generator=optimizer.generator))


def fails(optimizer, parameters):
    raise ValueError("not today")


def counts_gradients(optimizer, parameters):
    """Its rate falls with the steps in which its group has had a gradient."""
    for group in optimizer.param_groups:
        group["seen"] = group.get("seen", 0) + any(p.grad is not None for p in group["params"])
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(group["seen"])


def counts_in_full_groups(optimizer, parameters):
    """Not in those that have no parameters on a rank."""
    for group in optimizer.param_groups:
        if group["params"]:
            group["number"] = group.get("number", 0) + 1


def counts_by_parameter(optimizer, parameters):
    """In an attribute, which no checkpoint has."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.by_parameter[p] = optimizer.by_parameter.get(p, 0) + 1


def counts_in_an_object(optimizer, parameters):
    optimizer.object.number += 1


def with_schedule(optimizer, factor):
    schedulers.LambdaLR(optimizer, lambda step: factor)  # the first rate is there when initialize() is called
    return optimizer


@dataclass
class TrialCase:
    """An optimizer, and what the trial says of it: the two texts are parts of its own, and "" is all of it."""

    make: object
    depends: str = ""
    unsaved: str = ""
    attributes: tuple = ()


_ON_OTHERS = "depends on the other parameters"
TRIAL_CASES = {
    "only its own": TrialCase(lambda m: Centred(two_groups(m))),
    "clips": TrialCase(lambda m: Hostile(trained(m), clips), _ON_OTHERS),
    "clips at a rate of nearly 0": TrialCase(lambda m: with_schedule(Hostile(trained(m), clips), 1e-12), _ON_OTHERS),
    "clips at a rate of 0": TrialCase(lambda m: with_schedule(Hostile(trained(m), clips, torch.tensor(0.5), foreach=False), 0.0), _ON_OTHERS),
    "clips its own list": TrialCase(lambda m: Hostile(trained(m), clips_its_own_list, listed=trained(m)), _ON_OTHERS),
    "clips later": TrialCase(lambda m: Hostile(trained(m), clips_later, maximize=False, norms=[], model=m),  # the model is not copied
                             "what it keeps in its groups or attributes", attributes=("norms",)),
    "skips": TrialCase(lambda m: Hostile(trained(m), skips_large_norms), _ON_OTHERS),
    "neighbours": TrialCase(lambda m: Hostile([*trained(m)[3:], *trained(m)[:3]], scales_by_neighbours), _ON_OTHERS),
    "draws for each": TrialCase(lambda m: Hostile(trained(m), draws_for_each), "draws random numbers"),
    "draws once": TrialCase(lambda m: Hostile(trained(m), draws_once, maximize=False), "draws random numbers"),
    "draws of its own": TrialCase(lambda m: Hostile(trained(m), draws_of_its_own, generator=torch.Generator()), "depends", attributes=("generator",)),
    "fails": TrialCase(lambda m: Hostile(trained(m), fails), "ValueError: not today", "as the trial failed"),
    "counts gradients": TrialCase(lambda m: Hostile(two_groups(m), counts_gradients, maximize=False), "whether it has parameters"),
    "counts in full groups": TrialCase(lambda m: Hostile([{"params": [p]} for p in trained(m)], counts_in_full_groups), "whether it has parameters"),
    "counts by parameter": TrialCase(lambda m: Hostile(trained(m), counts_by_parameter, by_parameter={}), "what it keeps in its groups or attributes",
                                     "the attribute by_parameter, which step() changes"),
    "counts in an object": TrialCase(lambda m: Hostile(trained(m), counts_in_an_object, object=types.SimpleNamespace(number=0)),
                                     unsaved="the attribute object, which step() changes"),
    "two in one": TrialCase(lambda m: Both(trained(m)[:3], trained(m)[3:])),
}
