"""Random orders of an engine's calls, at stages 0 to 3, beside plain PyTorch: each call is right, or the error that docs/python.md says of
that place, after which the sequence goes on.

    python tests/python/programs/random_calls.py BACKEND [--first 0] [--sequences 200] [--calls 24] [--stages 0123] [--lone 2]

With `--lone` one of so many ranks, which this process forks, fails alone in each sequence: all of them end with an error that names a rank, or
go on and are right. Without it all ranks make the same calls with different data. `Plain` computes all ranks' parts in one process. Five sequences go on in one engine; a
failure says with which arguments it comes again.
"""
import argparse
import copy
import functools
import os
import random
import re
import shutil
import socket
import tempfile
import time
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
    """A layer that is used twice, once under reentrant recomputation; running statistics; several units; in the kind "hook" a backward inside
    of a tensor's hook, whose loss is multiplied by `side_scale`. Where `trap` is set, its backward fails."""

    def __init__(self, kind, frozen):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.shared, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.side = nn.Linear(16, 3)
        self.kind, self.side_scale, self.trap = kind, 1, None
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x):
        h = self.norm(self.first(x)).tanh()
        if self.kind == "reentrant" and torch.is_grad_enabled():
            h = h + checkpoint(lambda q: self.shared(q).tanh(), h, use_reentrant=True)
        if self.trap == "forward":
            self.fail()
        if self.trap == "backward":
            h.register_hook(self.fail)
        if self.kind == "hook" and torch.is_grad_enabled():
            h.register_hook(lambda _: self.train_side(h.detach()))
        return self.head(self.shared(h).tanh() + h)

    def train_side(self, h):
        with torch.enable_grad():
            (self.side(h).square().mean() * self.side_scale).backward()

    def fail(self, _=None):
        raise RuntimeError("out of luck")


KINDS = {"plain": {}, "reentrant": {}, "recomputed": {"activation_checkpointing": {"policy": "cheap"}}, "hook": {}}
DTYPES = {"fp32": (torch.float32, 2e-5, {}), "bf16": (torch.bfloat16, 5e-2, {"bf16": {"enabled": True, "auto_cast": True}}),
          "fp16": (torch.float16, 5e-3, {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 64}})}  # and how far apart values may be
FROZEN = ((), ("first.weight",), ("shared.weight", "shared.bias"), ("norm.weight", "head.bias", "side.bias"), ("norm.bias", "head.weight"))


class Plain:
    """What the engines of all ranks are to be: one set of parameters and their fp32 masters, and each rank's buffers. `micro` … are as
    docs/python.md counts."""

    def __init__(self, kind, world, accumulation, dtype, frozen):
        self.world, self.accumulation, self.dtype = world, accumulation, dtype
        self.nets = [Net(kind, frozen) for _ in range(world)]
        for net in self.nets:
            net.side_scale = 1 / world
            for name, part in net.named_children():
                for key, parameter in part._parameters.items():
                    parameter.data = parameter.data.to(dtype)
                    part._parameters[key] = self.nets[0].get_submodule(name)._parameters[key]
        self.parameters = dict(self.nets[0].named_parameters())
        self.make_masters()
        for name, p in self.parameters.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(functools.partial(self.take_gradient, name))
        self.boundary, self.after_no_sync = None, False
        self.begin_window()

    def make_masters(self):
        self.masters = {name: p.detach().float().clone().requires_grad_(p.requires_grad) for name, p in self.parameters.items()}
        self.optimizer = torch.optim.SGD([p for p in self.masters.values() if p.requires_grad], lr=RATE, momentum=0.9)

    @torch.no_grad()
    def take_masters(self, names):
        [self.parameters[name].copy_(self.masters[name]) for name in names]

    @torch.no_grad()
    def take_gradient(self, name, p):
        """Each as it comes, in fp32."""
        master = self.masters[name]
        master.grad = p.grad.float() + (0 if master.grad is None else master.grad)
        p.grad = None

    def forward(self, batches):
        return [net(x.to(self.dtype)) for net, x in zip(self.nets, batches)]

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
            (loss.float() / (self.world * self.accumulation)).backward()
        self.at_boundary = self.boundary if self.boundary is not None else self.micro + 1 == self.accumulation
        self.micro, self.stepped, self.discarded = self.micro + 1, False, False

    def step(self):
        self.stepped = True
        if not self.at_boundary:
            return
        if all(p.grad is None or p.grad.isfinite().all() for p in self.masters.values()):
            updated = [name for name, p in self.masters.items() if p.grad is not None]
            self.optimizer.step()
            self.take_masters(updated)
        self.drop()

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

    def give_up(self):
        """As a checkpoint that is loaded, or zero_grad() after a failure."""
        self.drop()
        self.discarded = True


class Sequence:
    """The calls of one engine and of `Plain`, which are compared."""

    def __init__(self, stage, seed, folder):
        chance = random.Random(seed)
        self.stage, self.folder = stage, folder
        self.rank, self.world = tessera.comm.get_rank(), tessera.comm.get_world_size()
        self.kind, accumulation = chance.choice(list(KINDS)), chance.choice((1, 1, 2, 3))
        self.dtype, self.frozen = chance.choice(["fp32", *DTYPES]), chance.choice(FROZEN)
        dtype, self.tolerance, section = DTYPES[self.dtype]
        self.plain = Plain(self.kind, self.world, accumulation, dtype, self.frozen)
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, **KINDS[self.kind], **section,
                  "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}},
                  "zero_optimization": {"stage": stage, "unit_numel": 200, "stage3_param_persistence_threshold": 0}}
        self.make = lambda model: tessera.initialize(model=model, config=config)[0]
        self.engine = self.make(Net(self.kind, self.frozen))
        self.engine.module.side_scale = self.engine.scale(torch.ones(1)).item()
        self.other = self.make(nn.Linear(3, 1))  # a second engine
        self.pending, self.saved, self.said = [], {}, Counter()

    def begin(self, seed):
        self.chance, self.number, self.calls, self.pending = random.Random(seed), 0, [], []
        if self.dtype != "fp32":  # else what is rounded otherwise in sums adds up
            with torch.no_grad():
                [master.copy_(self.engine.full_parameter(name)) for name, master in self.plain.masters.items()]
            self.plain.take_masters(self.plain.masters)

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
        mine, theirs = mine.detach().float(), theirs.detach().float()
        apart = (mine - theirs).abs().max().item()
        assert apart < self.tolerance * max(1, theirs.abs().max().item()), f"{what}: {apart} apart"

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
        outputs = self.plain.forward(map(self.batch, range(self.world)))
        mine = self.engine(self.batch(self.rank))
        self.same(mine, outputs[self.rank], "output")
        if torch.is_grad_enabled():
            self.pending.append((functional.softplus(mine).mean(), [functional.softplus(output).mean() for output in outputs]))

    def overflow(self, held):
        """One rank's next backward gives what is not finite: the step is skipped on all."""
        self.forward(held)
        mine, theirs = self.pending.pop()
        rank = self.chance.randrange(self.world)
        theirs[rank] = theirs[rank] * float("inf")
        self.pending.append((mine * float("inf") if rank == self.rank else mine, theirs))

    def failing_backward(self, held):
        """Of all ranks."""
        if self.plain.at_boundary or not self.engine._engine.training:
            return
        for net in (*self.plain.nets, self.engine.module):
            net.trap = "backward"
        self.forward(held)
        for net in (*self.plain.nets, self.engine.module):
            net.trap = None
        loss = self.pending.pop()[0]
        calls = self.engine.backward, lambda loss: self.engine.scale(loss).backward()
        call = self.chance.choice(calls[:2 if self.plain.accumulation == 1 else 1])
        self.expect("out of luck", lambda: call(loss))
        has_failed = self.engine._engine.has_failed
        self.engine.zero_grad()
        self.plain.give_up() if has_failed else self.plain.drop()

    def no_grad_forward(self, held):
        with torch.no_grad():
            self.forward(held)

    def direct_forward(self, held):
        """Of the module, without the engine."""
        with torch.no_grad():
            expected = self.plain.forward(map(self.batch, range(self.world)))
            self.same(self.engine.module(self.batch(self.rank).to(self.plain.dtype)), expected[self.rank], "output")

    def failing_forward(self, held):
        for model in (*self.plain.nets, self.engine):
            self.expect("mat1 and mat2 shapes cannot be multiplied", lambda model=model: model(torch.ones(4, 7, dtype=self.plain.dtype)))

    def input_gradient(self, held):
        """Of an attack, or a saliency map: no gradient of a parameter."""
        if self.kind in ("reentrant", "hook"):  # torch.autograd.grad refuses the first, and the second has gradients of parameters
            return
        inputs = [self.batch(r).requires_grad_() for r in range(self.world)]
        mine = inputs[self.rank].detach().requires_grad_()
        expected = [torch.autograd.grad(output.square().mean(), x)[0] for output, x in zip(self.plain.forward(inputs), inputs)]
        self.same(torch.autograd.grad(self.engine(mine).square().mean(), mine)[0], expected[self.rank], "gradient of the input")

    def backward(self, held):
        if not self.pending:
            self.forward(held)
        count = self.chance.choice((1, 1, 2, 9))  # several forwards, one backward
        chosen = self.pending[-count:]
        loss = sum(mine for mine, _ in chosen)
        call = self.chance.choice(("engine", "loss")) if self.plain.accumulation == 1 else "engine"
        run = (lambda: self.engine.backward(loss)) if call == "engine" or not self.engine._engine.training else self.engine.scale(loss).backward
        if not self.engine._engine.training:
            self.expect("backward() in evaluation mode", run)
            return
        if self.plain.at_boundary:
            if call == "loss":
                run = lambda: self.engine.backward(loss)  # noqa: E731  that of plain PyTorch uses up the graph before it fails
            self.expect("at the accumulation boundary", run)
            return
        del self.pending[-count:]
        before = [p.grad for p in self.plain.masters.values()]
        try:
            self.plain.backward([sum(theirs[r] for _, theirs in chosen) for r in range(self.world)])
        except RuntimeError as error:  # the parameters were updated since the forward
            assert "modified by an inplace operation" in str(error), error
            self.expect("written in place since the forward" if self.kind == "recomputed" else "modified by an inplace operation", run)
            for master, gradient in zip(self.plain.masters.values(), before):
                master.grad = gradient
            if self.engine._engine.has_failed:  # not where a loss.backward() has failed before its first gradient
                self.engine.zero_grad()
                self.plain.give_up()
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
        for i, parameter in enumerate(p for p in self.plain.masters.values() if p.requires_grad):
            if parameter in self.plain.optimizer.state:
                self.same(states[i]["momentum_buffer"], self.plain.optimizer.state[parameter]["momentum_buffer"], f"momentum {i}")

    def deepcopy(self, held):
        for (name, mine), theirs in zip(copy.deepcopy(self.engine.module).named_parameters(), self.plain.parameters.values()):
            self.same(mine, theirs, f"copy of {name}")

    def full_parameter(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        self.same(self.engine.full_parameter(name), self.plain.masters[name], name)

    def full_gradient(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        refusals = {"has discarded": self.plain.discarded, "no backward() was called": self.engine.micro_steps == 0,
                    "is frozen and has no gradient": name in self.frozen}
        if self.plain.discarded or name in self.frozen:
            self.expect(next(said for said, is_so in refusals.items() if is_so), lambda: self.engine.full_gradient(name))
            return
        gradient = self.plain.masters[name].grad
        if gradient is not None and gradient.isfinite().all():
            self.same(self.engine.full_gradient(name), gradient, f"gradient of {name}")

    def gathered(self, held):
        with tessera.GatheredParameters(self.engine.module):
            for (name, mine), theirs in zip(self.engine.module.named_parameters(), self.plain.parameters.values()):
                raw = torch.from_numpy(mine.detach().view(torch.uint8).numpy()).view(mine.dtype)
                self.same(raw, theirs, name)
            for _ in range(self.chance.randint(0, 3)):
                self.call(held=True)

    def written(self, held):
        names = self.chance.sample(list(self.plain.parameters), 2)
        with torch.no_grad():
            with tessera.GatheredParameters([self.engine.module.get_parameter(name) for name in names], modifier_rank=self.world - 1):
                if self.rank == self.world - 1:
                    [self.engine.module.get_parameter(name).mul_(0.9) for name in names]
            for name in names:
                self.plain.parameters[name].mul_(0.9)
                self.plain.masters[name].copy_(self.plain.parameters[name])

    def set_full_parameter(self, held):
        name = self.chance.choice(list(self.plain.parameters))
        value = self.plain.masters[name].detach() * 0.9
        self.engine._engine.set_full_parameter(name, value)
        with torch.no_grad():
            self.plain.masters[name].copy_(value)
        self.plain.take_masters([name])

    def save(self, held):
        tag = self.chance.choice("ab")
        if self.plain.at_boundary:
            self.expect("save_checkpoint() between the last backward() of a step and step()", lambda: self.engine.save_checkpoint(self.folder, tag))
            return
        self.engine.save_checkpoint(self.folder, tag)
        self.plain.share_buffers()
        self.saved[tag] = copy.deepcopy((self.plain.nets[0].state_dict(), self.plain.masters, self.plain.optimizer.state_dict()))

    def load(self, held):
        if not self.saved:
            return
        tag = self.chance.choice(sorted(self.saved))
        if held and self.stage > 0:
            self.expect("load_checkpoint() inside of a GatheredParameters", lambda: self.engine.load_checkpoint(self.folder, tag))
            return
        self.engine.load_checkpoint(self.folder, tag)
        model, masters, optimizer = copy.deepcopy(self.saved[tag])
        self.plain.nets[0].load_state_dict(model)
        with torch.no_grad():
            [self.plain.masters[name].copy_(value) for name, value in masters.items()]
        self.plain.share_buffers()
        self.plain.optimizer.load_state_dict(optimizer)
        self.plain.give_up()

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
        self.plain.make_masters()
        self.plain.boundary, self.plain.after_no_sync = None, False
        self.plain.drop()

    def fail_alone(self):
        """In a forward, or in a backward, or in between. Where it goes on, the next calls are those of the other ranks."""
        place, victim = self.chance.choice(("forward", "backward", "between")), self.chance.randrange(self.world)
        goes_on = self.chance.random() < 0.6
        self.train(False)
        self.zero_grad(False)
        self.calls.append(f"rank {victim} fails alone: {place}, {'goes on' if goes_on else 'raises'}")
        drops = self.chance.choice((self.engine.zero_grad, self.engine.destroy, lambda: None))
        self.engine.module.trap = place if self.rank == victim else None
        try:
            if place == "between" and self.rank == victim:
                self.engine.module.fail()
            loss = functional.softplus(self.engine(self.batch(self.rank))).mean()
            if place != "forward":
                self.engine.backward(loss)
        except RuntimeError as error:
            if "out of luck" not in str(error) or not goes_on:
                raise
            drops()
        self.engine.module.trap = None
        self.calls.append("went on")
        for r, net in enumerate(self.plain.nets):
            if place != "between" or r != victim:
                net(self.batch(r).to(self.plain.dtype))  # which fails where its running statistics are counted already

    def run(self, seed, calls, fails_at=None, how_to_repeat=""):
        self.begin(seed)
        try:
            for number in range(calls):
                self.fail_alone() if number == fails_at else self.call()
            self.end()
        except Exception:
            print(f"{how_to_repeat}{self.kind}, {self.dtype}, frozen {self.frozen}, {self.plain.accumulation} micro-steps:\n"
                  f"  {', '.join(self.calls)}", flush=True)
            raise

    def end(self):
        """Every sequence ends with a step of training, and equal values."""
        for name in ("train", "zero_grad", "forward", "backward", "step", "state_dict"):
            self.calls.append(name)
            getattr(self, name)(False)


WEIGHTS = {"forward": 14, "backward": 16, "step": 14, "eval": 7, "train": 9, "no_grad_forward": 6, "direct_forward": 2, "zero_grad": 3, "state_dict": 3,
           "deepcopy": 1, "full_parameter": 2, "full_gradient": 3, "gathered": 3, "written": 2, "no_sync": 3, "save": 2, "load": 2, "second_engine": 2,
           "failing_forward": 1, "input_gradient": 3, "optimizer_state": 1, "set_full_parameter": 1,
           "reinitialize": 1, "overflow": 1, "failing_backward": 1}


def lone_rank(options, seed, stage, folder):
    tessera.comm.init_distributed(backend=options.backend, timeout_s=20, rendezvous_timeout_s=60)
    sequence = Sequence(stage, seed, folder)
    sequence.run(seed, options.calls, fails_at=random.Random(seed).randrange(options.calls))
    sequence.engine.destroy()


def outcome_of(codes, logs):
    """What has become of the ranks of a sequence, in a few words; those of a fault begin with "fault"."""
    if None in codes:
        return "fault: a rank waits for ever"
    if not any(codes):
        return "all went on, and were right"
    for code, log in zip(codes, logs):
        last = log.strip().splitlines()[-1]
        if code != 1 or not re.search("rank \\d|out of luck|an earlier (loss.)?backward|ended by destroy|at the accumulation boundary", last) or " apart" in last:
            return "fault: " + last
    return "all ended with an error"


def run_lone(options):
    """Forks the ranks of each sequence, in which it returns early."""
    outcomes = Counter()
    for seed in range(options.first, options.first + options.sequences):
        stage = int(options.stages[seed % len(options.stages)])
        folder = Path(tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"WORLD_SIZE": options.lone, "LOCAL_WORLD_SIZE": options.lone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        pids, codes = [], [None] * options.lone
        for rank in range(options.lone):
            pids.append(os.fork())
            if pids[-1] == 0:
                for output in (1, 2):
                    os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), output)
                os.environ.update({name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()})
                lone_rank(options, seed, stage, folder)
                return
        until = time.monotonic() + 90
        while None in codes and time.monotonic() < until:
            for rank, pid in enumerate(pids):
                if codes[rank] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.02)
        [os.kill(pid, 9) for pid, code in zip(pids, codes) if code is None]
        logs = [(folder / f"{rank}.log").read_text() for rank in range(options.lone)]
        outcome = outcome_of(codes, logs)
        outcomes[outcome] += 1
        shutil.rmtree(folder)
        if outcome.startswith("fault"):
            print(f"--lone {options.lone} --first {seed} --sequences 1 --stages {stage}: {outcome}", *logs, sep="\n", flush=True)
    print(f"{options.sequences} sequences, a rank fails alone: {dict(outcomes)}")
    assert not any(outcome.startswith("fault") for outcome in outcomes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--stages", default="0123")
    parser.add_argument("--lone", type=int)
    options = parser.parse_args()
    if options.lone:
        run_lone(options)
        return
    tessera.comm.init_distributed(backend=options.backend, timeout_s=60)
    said, num_calls = Counter(), 0
    for first in range(options.first, options.first + options.sequences, SAME_ENGINE):
        for stage in map(int, options.stages):
            folder = Path(tempfile.mkdtemp() if tessera.comm.get_rank() == 0 else "")
            folder = tessera.comm.all_gather(str(folder), "folder")[0]
            sequence = Sequence(stage, first, folder)
            for seed in range(first, min(first + SAME_ENGINE, options.first + options.sequences)):
                sequence.run(seed, options.calls, how_to_repeat=f"--first {first} --sequences {seed - first + 1} --stages {stage}: ")
                num_calls += len(sequence.calls)
            said.update(sequence.said)
            sequence.engine.destroy()
            sequence.other.destroy()
    if tessera.comm.get_rank() == 0:
        print(f"{options.sequences} sequences at stages {options.stages}: {num_calls} calls; errors as expected: "
              + (", ".join(f"{count} {part!r}" for part, count in said.most_common()) or "none"))


if __name__ == "__main__":
    main()
