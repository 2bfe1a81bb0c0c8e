"""Random orders of an engine's calls, at stages 0 to 3, beside plain PyTorch: each call is right, or the error that docs/python.md says of
that place, after which the sequence goes on.

    python tests/python/programs/random_calls.py BACKEND [--first 0] [--sequences 200] [--calls 24] [--stages 0123]

All ranks make the same calls with different data. `Plain` computes all ranks' parts in one process. Five sequences go on in one engine; a
failure says with which arguments it comes again.
"""
import argparse
import copy
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import tessera
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
SAME_ENGINE, RATE = 5, 0.1


class Net(nn.Module):
    """A layer that is used twice, once under reentrant recomputation; running statistics; several units."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.shared, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.kind = kind

    def forward(self, x):
        h = self.norm(self.first(x)).tanh()
        if self.kind == "reentrant" and torch.is_grad_enabled():
            h = h + checkpoint(lambda q: self.shared(q).tanh(), h, use_reentrant=True)
        return self.head(self.shared(h).tanh() + h)


KINDS = {"plain": {}, "reentrant": {}, "recomputed": {"activation_checkpointing": {"policy": "cheap"}}}


class Plain:
    """What the engines of all ranks are to be: one set of parameters, and each rank's buffers. `micro` … are as docs/python.md counts."""

    def __init__(self, kind, world, accumulation):
        self.world, self.accumulation = world, accumulation
        self.nets = [Net(kind) for _ in range(world)]
        for net in self.nets[1:]:
            for name, part in net.named_children():
                for key in part._parameters:
                    part._parameters[key] = self.nets[0].get_submodule(name)._parameters[key]
        self.parameters = dict(self.nets[0].named_parameters())
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=RATE, momentum=0.9)
        self.boundary, self.after_no_sync = None, False
        self.begin_window()

    def begin_window(self):
        self.micro, self.at_boundary, self.discarded, self.stepped = 0, False, False, True

    def count_again(self):
        if self.after_no_sync:
            self.boundary, self.after_no_sync = None, False

    def share_buffers(self):
        for first, *others in zip(*(net.buffers() for net in self.nets)):
            if any(not first.equal(other) for other in others):
                [buffer.copy_(first.clone()) for buffer in (first, *others)]  # a graph that has saved it is stale on all ranks

    def backward(self, losses):
        for loss in losses:
            (loss / (self.world * self.accumulation)).backward()
        self.at_boundary = self.boundary if self.boundary is not None else self.micro + 1 == self.accumulation
        self.micro, self.stepped, self.discarded = self.micro + 1, False, False

    def step(self):
        self.stepped = True
        if not self.at_boundary:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.begin_window()
        self.count_again()

    def zero_grad(self):
        if self.stepped or self.micro == 0:
            return
        self.optimizer.zero_grad()
        self.discarded = True
        if self.at_boundary:
            self.at_boundary, self.micro = False, 0
            self.count_again()

    def drop(self):
        self.optimizer.zero_grad()
        self.begin_window()
        self.count_again()


class Sequence:
    """The calls of one engine and of `Plain`, which are compared."""

    def __init__(self, stage, seed, folder):
        chance = random.Random(seed)
        self.stage, self.folder = stage, folder
        self.rank, self.world = tessera.comm.get_rank(), tessera.comm.get_world_size()
        self.kind, accumulation = chance.choice(list(KINDS)), chance.choice((1, 1, 2, 3))
        self.plain = Plain(self.kind, self.world, accumulation)
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, **KINDS[self.kind],
                  "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}},
                  "zero_optimization": {"stage": stage, "unit_numel": 200, "stage3_param_persistence_threshold": 0}}
        self.make = lambda model: tessera.initialize(model=model, config=config)[0]
        self.engine = self.make(Net(self.kind))
        self.other = self.make(nn.Linear(3, 1))  # a second engine
        self.pending, self.saved, self.said = [], {}, Counter()

    def begin(self, seed):
        self.chance, self.number, self.calls, self.pending = random.Random(seed), 0, [], []

    def call(self, held=False):
        """One random call. `held`: inside of a GatheredParameters of all parameters."""
        names = [name for name in WEIGHTS if not (held and name in ("gathered", "written", "reinitialize"))]
        name = self.chance.choices(names, [WEIGHTS[n] for n in names])[0]
        self.calls.append(("in a GatheredParameters: " if held else "") + name)
        self.number += 1
        getattr(self, name)(held)

    def expect(self, part, function):
        """The engine raises an error with this in its message."""
        try:
            function()
        except RuntimeError as error:
            assert part in str(error), f"{part!r} is not in {error!r}"
            self.said[part] += 1
            return
        raise AssertionError(f"no error: {part}")

    def same(self, mine, theirs, what):
        apart = (mine.detach().float() - theirs.detach().float()).abs().max().item()
        assert apart < 2e-5 * max(1, theirs.detach().abs().max().item()), f"{what}: {apart} apart"

    def batch(self, r):
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(10007 * self.number + r))

    # the calls

    def eval(self, held):
        self.engine.eval()
        self.plain.share_buffers()
        [net.eval() for net in self.plain.nets]

    def train(self, held):
        self.engine.train()
        [net.train() for net in self.plain.nets]

    def forward(self, held):
        outputs = [net(self.batch(r)) for r, net in enumerate(self.plain.nets)]
        mine = self.engine(self.batch(self.rank))
        self.same(mine, outputs[self.rank], "output")
        if torch.is_grad_enabled():
            self.pending.append((functional.softplus(mine).mean(), [functional.softplus(output).mean() for output in outputs]))

    def no_grad_forward(self, held):
        with torch.no_grad():
            self.forward(held)

    def direct_forward(self, held):
        """Of the module, without the engine."""
        with torch.no_grad():
            self.same(self.engine.module(self.batch(self.rank)), [net(self.batch(r)) for r, net in enumerate(self.plain.nets)][self.rank], "output")

    def failing_forward(self, held):
        for model in (*self.plain.nets, self.engine):
            self.expect("mat1 and mat2 shapes cannot be multiplied", lambda model=model: model(torch.ones(4, 7)))

    def input_gradient(self, held):
        """Of an attack, or a saliency map: no gradient of a parameter."""
        if self.kind == "reentrant":  # which torch.autograd.grad refuses
            return
        inputs = [self.batch(r).requires_grad_() for r in range(self.world)]
        mine = inputs[self.rank].detach().requires_grad_()
        expected = [torch.autograd.grad(net(x).square().mean(), x)[0] for net, x in zip(self.plain.nets, inputs)]
        self.same(torch.autograd.grad(self.engine(mine).square().mean(), mine)[0], expected[self.rank], "gradient of the input")

    def backward(self, held):
        if not self.pending:
            self.forward(held)
        count = self.chance.choice((1, 1, 2, 9))  # several forwards, one backward
        chosen = self.pending[-count:]
        loss = sum(mine for mine, _ in chosen)
        call = self.chance.choice(("engine", "loss")) if self.plain.accumulation == 1 else "engine"
        run = (lambda: self.engine.backward(loss)) if call == "engine" or not self.engine._engine.training else loss.backward
        if not self.engine._engine.training:
            self.expect("backward() in evaluation mode", run)
            return
        if self.plain.at_boundary:
            if run == loss.backward:
                run = lambda: self.engine.backward(loss)  # noqa: E731  that of plain PyTorch uses up the graph before it fails
            self.expect("at the accumulation boundary", run)
            return
        del self.pending[-count:]
        before = {name: None if p.grad is None else p.grad.clone() for name, p in self.plain.parameters.items()}
        try:
            self.plain.backward([sum(theirs[r] for _, theirs in chosen) for r in range(self.world)])
        except RuntimeError as error:  # the parameters were updated since the forward
            assert "modified by an inplace operation" in str(error), error
            self.expect("written in place since the forward" if self.kind == "recomputed" else "modified by an inplace operation", run)
            for name, p in self.plain.parameters.items():
                p.grad = before[name]
            if self.engine._engine.has_failed:  # not where a loss.backward() has failed before its first gradient
                self.engine.zero_grad()
                self.plain.drop()
            return
        run()

    def no_sync(self, held):
        with self.engine.no_sync():
            self.plain.boundary = False
            self.expect("step() inside of no_sync()", self.engine.step)
            self.backward(held)
        self.plain.boundary, self.plain.after_no_sync = True, True

    def step(self, held):
        if held and self.stage > 0 and self.plain.at_boundary:
            self.expect("step() inside of a GatheredParameters", self.engine.step)
            return
        self.plain.step()
        self.engine.step()

    def zero_grad(self, held):
        self.plain.zero_grad()
        self.chance.choice((self.engine, self.engine.optimizer)).zero_grad()

    def state_dict(self, held):
        self.plain.share_buffers()
        expected = self.plain.nets[0].state_dict()
        for name, value in self.engine.state_dict().items():
            self.same(value, expected[name], name)

    def optimizer_state(self, held):
        states = self.engine.optimizer.state_dict()["state"]
        for i, parameter in enumerate(self.plain.parameters.values()):
            if parameter in self.plain.optimizer.state:
                self.same(states[i]["momentum_buffer"], self.plain.optimizer.state[parameter]["momentum_buffer"], f"momentum {i}")

    def deepcopy(self, held):
        for (name, mine), theirs in zip(copy.deepcopy(self.engine.module).named_parameters(), self.plain.parameters.values()):
            self.same(mine, theirs, f"copy of {name}")

    def full_parameter(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        self.same(self.engine.full_parameter(name), self.plain.parameters[name], name)

    def full_gradient(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        if self.plain.discarded:
            self.expect("zero_grad() has discarded", lambda: self.engine.full_gradient(name))
            return
        gradient = self.plain.parameters[name].grad
        if gradient is not None:
            self.same(self.engine.full_gradient(name), gradient, f"gradient of {name}")

    def gathered(self, held):
        with tessera.GatheredParameters(self.engine.module):
            for (name, mine), theirs in zip(self.engine.module.named_parameters(), self.plain.parameters.values()):
                self.same(torch.from_numpy(mine.detach().numpy()), theirs, name)
            for _ in range(self.chance.randint(0, 3)):
                self.call(held=True)

    def written(self, held):
        names = self.chance.sample(list(self.plain.parameters), 2)
        with torch.no_grad():
            with tessera.GatheredParameters([self.engine.module.get_parameter(name) for name in names], modifier_rank=self.world - 1):
                if self.rank == self.world - 1:
                    [self.engine.module.get_parameter(name).mul_(0.9) for name in names]
            [self.plain.parameters[name].mul_(0.9) for name in names]

    def set_full_parameter(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        value = self.plain.parameters[name].detach() * 0.9
        self.engine._engine.set_full_parameter(name, value)
        with torch.no_grad():
            self.plain.parameters[name].copy_(value)

    def save(self, held):
        tag = self.chance.choice("ab")
        if self.plain.at_boundary:
            self.expect("save_checkpoint() between the last backward() of a step and step()", lambda: self.engine.save_checkpoint(self.folder, tag))
            return
        self.engine.save_checkpoint(self.folder, tag)
        self.plain.share_buffers()
        self.saved[tag] = copy.deepcopy((self.plain.nets[0].state_dict(), self.plain.optimizer.state_dict()))

    def load(self, held):
        if not self.saved:
            return
        tag = self.chance.choice(sorted(self.saved))
        if held and self.stage > 0:
            self.expect("load_checkpoint() inside of a GatheredParameters", lambda: self.engine.load_checkpoint(self.folder, tag))
            return
        self.engine.load_checkpoint(self.folder, tag)
        model, optimizer = copy.deepcopy(self.saved[tag])
        self.plain.nets[0].load_state_dict(model)
        self.plain.share_buffers()
        self.plain.optimizer.load_state_dict(optimizer)
        self.plain.drop()

    def second_engine(self, held):
        self.other.backward(self.other(torch.ones(2, 3)).square().mean())
        if self.other.is_gradient_accumulation_boundary():
            self.other.step()

    def reinitialize(self, held):
        self.engine.destroy()
        for (name, mine), theirs in zip(self.engine.module.named_parameters(), self.plain.parameters.values()):
            self.same(mine, theirs, f"{name} after destroy()")
        module = self.engine.module
        self.engine = self.make(module)
        self.pending = []  # of released memory
        self.plain.share_buffers()
        [net.train(module.training) for net in self.plain.nets]
        self.plain.optimizer = torch.optim.SGD(self.plain.parameters.values(), lr=RATE, momentum=0.9)
        self.plain.boundary, self.plain.after_no_sync = None, False
        self.plain.drop()

    def end(self):
        """Every sequence ends with a step of training, and equal values."""
        for name in ("train", "zero_grad", "forward", "backward", "step", "state_dict"):
            self.calls.append(name)
            getattr(self, name)(False)


WEIGHTS = {"forward": 14, "backward": 16, "step": 14, "eval": 7, "train": 9, "no_grad_forward": 6, "direct_forward": 2, "zero_grad": 3, "state_dict": 3,
           "deepcopy": 1, "full_parameter": 2, "full_gradient": 3, "gathered": 3, "written": 2, "no_sync": 3, "save": 2, "load": 2, "second_engine": 2,
           "failing_forward": 1, "input_gradient": 3, "optimizer_state": 1, "set_full_parameter": 1,
           "reinitialize": 1}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--stages", default="0123")
    options = parser.parse_args()
    tessera.comm.init_distributed(backend=options.backend, timeout_s=60)
    said, num_calls = Counter(), 0
    for first in range(options.first, options.first + options.sequences, SAME_ENGINE):
        for stage in map(int, options.stages):
            folder = Path(tempfile.mkdtemp() if tessera.comm.get_rank() == 0 else "")
            folder = tessera.comm.all_gather(str(folder), "folder")[0]
            sequence = Sequence(stage, first, folder)
            for seed in range(first, min(first + SAME_ENGINE, options.first + options.sequences)):
                sequence.begin(seed)
                try:
                    for _ in range(options.calls):
                        sequence.call()
                    sequence.end()
                except Exception:
                    print(f"--first {first} --sequences {seed - first + 1} --stages {stage}: kind {sequence.kind}, {sequence.plain.accumulation} micro-steps:\n"
                          f"  {', '.join(sequence.calls)}", flush=True)
                    raise
                num_calls += len(sequence.calls)
            said.update(sequence.said)
            sequence.engine.destroy()
            sequence.other.destroy()
    if tessera.comm.get_rank() == 0:
        print(f"{options.sequences} sequences at stages {options.stages}: {num_calls} calls; errors as expected: "
              + (", ".join(f"{count} {part!r}" for part, count in said.most_common()) or "none"))


if __name__ == "__main__":
    main()
    sys.exit(0)
