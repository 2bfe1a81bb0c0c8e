"""Optimizers that run as they are, on whole parameters: beside themselves in one process, given the same gradients, to the bit."""
import copy
import enum
import os
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import tessera
import torch
from checks import STAGES, check, config, largest_difference, main, raises, standard_error, train, train_plainly
from optimizers import batches, decay_groups, gradients_of_a_step, loss_of, mlp, rank, steps_together, world
from tessera import json_values
from tessera.deepspeed.utils import parameters
from tessera.optimizer_trial import try_out
from torch import nn
from torch.optim import lr_scheduler as schedulers
from whole_optimizers import TRIAL_CASES, Averaging, Both, Centred, Compiled, Hostile, InTwo, Keeping, Tied, clips, halves, optimizers_of_torch, trained, two_groups


def step_beside(engine, theirs, names, samples, clipping=0.0, limit=0.0, loss_of=loss_of):
    """Takes a step, and then theirs with the engine's gradients. Returns which of these parameters has other bits, or what theirs raised; or ""."""
    gradients = gradients_of_a_step(engine, samples, names, clipping, loss_of)
    for name, p in names.items():
        p.grad = gradients.get(name)
    found = {name: engine.full_parameter(name) for name in names}
    try:
        theirs.step()
    except Exception as error:  # of any optimizer
        return f"in one process: {type(error).__name__}: {error}"
    return next((f"{name} is apart by {(found[name] - p.detach()).abs().max()}" for name, p in names.items()
                 if not torch.equal(found[name].nan_to_num(7), p.detach().nan_to_num(7)) and not (found[name] - p.detach()).abs().max() <= limit), "")


def trained_by_name(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def same_bits(stage, make, steps=3, accumulation=1, clipping=0.0, agreed=lambda problem: problem, limit_on_shards=0.0, **changes):
    """Beside each update of an engine, the same optimizer in one process gets the engine's gradients: all parameters have the same bits.
    `agreed`: makes what is wrong on one rank, a text, wrong on all. `limit_on_shards`: how far a class may be apart that has a formula here."""
    model, plain = Tied(), Tied()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=make(model), config=config(
        stage, 500, gradient_accumulation_steps=accumulation, gradient_clipping=clipping, **changes))
    theirs = make(plain)
    in_groups = {id(p) for group in theirs.param_groups for p in group["params"]}
    names = {name: p for name, p in trained_by_name(plain).items() if id(p) in in_groups}
    samples = batches(steps * accumulation)
    for optimizer in (ours, theirs):
        if hasattr(type(optimizer), "train"):
            optimizer.train()
    for step in range(steps):
        problem = agreed(step_beside(engine, theirs, names, samples[step * accumulation:(step + 1) * accumulation], clipping,
                                     limit_on_shards if engine._whole_optimizer is None else 0.0))
        assert not problem, f"stage {stage}, step {step}: {problem}"
    return engine, ours, theirs


@check
def every_optimizer_of_torch_has_its_own_bits():
    for i, (name, make) in enumerate(optimizers_of_torch().items()):
        for stage in STAGES if len(STAGES) == 4 else (STAGES[i % 2],):
            engine, ours, theirs = same_bits(stage, make)
            if world > 1:
                assert not engine._whole_optimizer.on_one_rank, (name, engine._whole_optimizer.why)
            assert_same_state(ours.state_dict(), theirs.state_dict())


def same(found, value):
    """Bits of tensors, and types, in containers, too."""
    if type(found) is not type(value):
        return False
    if isinstance(value, torch.Generator):
        return torch.equal(found.get_state(), value.get_state())
    if isinstance(value, torch.Tensor):
        return torch.equal(found, value) and found.dtype == value.dtype
    if isinstance(value, dict):
        return list(found) == list(value) and all(same(found[key], item) for key, item in value.items())
    if isinstance(value, (list, tuple, deque)):
        return len(found) == len(value) and getattr(found, "maxlen", 0) == getattr(value, "maxlen", 0) and all(map(same, found, value))
    return same(vars(found), vars(value)) if type(value).__module__ == "whole_optimizers" and not isinstance(value, enum.Enum) else found == value


def assert_same_state(ours, theirs):
    assert [{**g, "params": len(g["params"])} for g in ours["param_groups"]] == [{**g, "params": len(g["params"])} for g in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys(), (ours["state"].keys(), theirs["state"].keys())
    for index, expected in theirs["state"].items():
        assert ours["state"][index].keys() == expected.keys()
        for key, value in expected.items():
            found = ours["state"][index][key]
            assert type(found) is type(value) and same(found, value), (index, key, found, value)


@check
def accumulation_clipping_and_bf16():
    make = optimizers_of_torch()["Adafactor"]

    def loss_of_halves(model, sample):
        return nn.functional.cross_entropy(model(sample[0].bfloat16()).float(), sample[1])

    for stage in (0, 3):
        same_bits(stage, make, accumulation=3, clipping=0.05)
        same_bits(stage, lambda m: Centred(two_groups(m)), accumulation=2, clipping=0.05)
        # Masters are fp32: those of the reference too, from the bf16 model's values.
        model, plain = Tied(), Tied()
        engine, _, _, _ = tessera.initialize(model=model, optimizer=make(model), config=config(stage, 500, bf16={"enabled": True}))
        names = trained_by_name(plain)
        with torch.no_grad():
            for name, p in names.items():
                p.copy_(engine.full_parameter(name))
        theirs = make(plain)
        hooked = []
        accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters() if p.requires_grad]
        for node in accumulators:
            node.register_hook(lambda *_, hooked=hooked: hooked.append(1))
        for samples in batches(3):
            problem = step_beside(engine, theirs, names, [samples], loss_of=loss_of_halves)
            assert not problem, (stage, problem)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert len(hooked) == 3 * (len(accumulators) - 2), len(hooked)  # also after an update: two are unused


@check
def as_one_process_trains():
    """Losses and weights beside the same optimizer in plain PyTorch, with schedulers of torch and of the configuration."""
    for stage in (0, 3):
        steps_together(stage, lambda m: torch.optim.NAdam(decay_groups(m), lr=1e-3), make_scheduler=lambda o: schedulers.StepLR(o, 2, 0.5), limit=1e-4,
                       on_shards=False)
    plain, model = mlp(), mlp()
    theirs = torch.optim.Adamax(plain.parameters(), lr=0.1)
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=torch.optim.Adamax(model.parameters(), lr=0.1), config=config(
        2, scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}))
    for rate, batch in zip((0.1, 0.1, 0.05, 0.05, 0.025), batches(5)):
        assert ours.param_groups[0]["lr"] == rate == engine.get_lr()[0], (ours.param_groups[0]["lr"], rate)
        theirs.param_groups[0]["lr"] = rate
        train_plainly(plain, theirs, [batch], loss_of)
        train(engine, [batch], loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 1e-4
    model = mlp()
    raises(tessera.ConfigError, lambda: tessera.initialize(
        model=model, optimizer=torch.optim.Adamax(model.parameters()),
        config=config(0, scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}})), "OneCycle", "cycle_momentum")


@check
def an_update_that_depends_on_others_is_rank_0s():
    for stage in (0, 3):
        with standard_error() as said:
            engine, ours, theirs = same_bits(stage, TRIAL_CASES["clips"].make)
        if world > 1:
            assert engine._whole_optimizer.on_one_rank
            assert (rank == 0) == ("rank 0 updates all parameters" in said[0]), said
        assert_same_state(ours.state_dict(), theirs.state_dict())
    model = mlp()
    engine = tessera.initialize(model=model, optimizer=Hostile(model.parameters(), clips if rank == 0 else lambda *_: None), config=config(1))[0]
    assert engine._whole_optimizer.on_one_rank == (world > 1)  # by what one rank's trial says


@check
def the_trial_finds_what_owners_cannot_do_alone():
    """And changes nothing: no weight, no state or attribute, no generator."""
    for name, case in TRIAL_CASES.items():
        model = Tied()
        optimizer, before = case.make(model), torch.get_rng_state()
        found = try_out(optimizer, "an optimizer")
        for part, said in ((case.depends, found.depends), (case.unsaved, found.unsaved)):
            assert part in said and bool(part) == bool(said), (name, part, found)
        assert found.attributes == list(case.attributes), (name, found)
        assert torch.equal(before, torch.get_rng_state()) and not optimizer.state, name
        assert not getattr(optimizer, "norms", None) and largest_difference(model.state_dict(), Tied().state_dict()) == 0, name

    def moves(optimizer, parameters):
        for p in optimizer.reached():
            p.data.add_(1)

    model, average = Tied(), Tied()
    try_out(Hostile(trained(model), lambda optimizer, _: moves(optimizer, _), average=average, reached=average.parameters), "an optimizer")
    assert largest_difference(average.state_dict(), Tied().state_dict()) == 0
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=Hostile(trained(model), moves, reached=lambda: trained(model)),
                                                           config=config(1)), "past param_groups")


@check
def lists_beside_parameters():
    """Those with an element for each parameter, as torch's `param_names`: step() has the elements of what a rank owns, and may write them."""
    def by_names(optimizer, _):
        for group in optimizer.param_groups:
            assert len(group["params"]) == len(group["param_names"]) == len(group["calls"])
            for i, (p, name) in enumerate(zip(group["params"], group["param_names"])):
                if p.grad is not None:
                    p.grad.mul_(len(name))
                    group["calls"][i] += optimizer.counts

    for stage, counts in ((0, False), (3, False), (3, True)):
        def make(model, counts=counts):
            named = list(model.named_parameters())
            return Hostile([{"params": named, "calls": [0] * len(named)}], by_names, 0.01, counts=counts)

        engine, ours, theirs = same_bits(stage, make)
        assert world == 1 or engine._whole_optimizer.on_one_rank == counts, engine._whole_optimizer.why
        assert ours.param_groups[0]["param_names"] == [name for name, _ in Tied().named_parameters()]
        assert ours.param_groups[0]["calls"] == theirs.param_groups[0]["calls"] and (3 in ours.param_groups[0]["calls"]) == counts


@check
def what_only_rank_0_does_is_everybodys():
    """Values that it writes into the groups, and hooks, which may call collectives."""
    class Falling(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 0.5
                group["calls"] = group.get("calls", 0) + 1
                group["total"] = group.get("total", torch.zeros(1)) + 1
                nn.utils.clip_grad_norm_(group["params"], 0.1)
                for p in group["params"]:
                    p.data.sub_(p.grad, alpha=group["lr"])

    model = mlp()
    optimizer = Falling(model.parameters(), {"lr": 0.8})
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(tessera.comm.all_gather(rank)))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(2, 500))
    train(engine, batches(3), loss_of)
    assert seen == [list(range(world)), "after"] * 3, seen
    found = tessera.comm.all_gather([ours.param_groups[0]["lr"], ours.param_groups[0]["calls"], engine.get_lr()[0]])
    assert found == [[0.1, 3, 0.1]] * world, found
    folder = Path(os.environ["SAVED"]) / f"falling_of_{world}"
    engine.save_checkpoint(folder)
    model = mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=Falling(model.parameters(), {"lr": 0.8}), config=config(1, 500))
    engine.load_checkpoint(folder)
    train(engine, batches(1), loss_of)
    assert [ours.param_groups[0][key] for key in ("lr", "calls")] == [0.05, 4] and ours.param_groups[0]["total"].tolist() == [4]


@check
def values_of_groups_are_the_same_on_all_ranks():
    """What one rank writes, as ReduceLROnPlateau does by its own loss, is an error of the step on all; after it training goes on."""
    def nadam(model, **options):
        return torch.optim.NAdam([{"params": model[0].parameters()}, {"params": model[2].parameters(), **options}], lr=0.1)

    for stage, make in ((1, nadam), (3, nadam), (2, lambda model: Hostile(model.parameters(), clips))):
        model, other = mlp(), mlp()
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=make(model), config=config(stage, 500))
        undisturbed = tessera.initialize(model=other, optimizer=make(other), config=config(stage, 500))[0]
        train(engine, batches(1), loss_of)
        for key, value in {"lr": 0.25, "weight_decay": 0.5}.items():
            group = ours.param_groups[-1]
            before = dict(group)
            if key not in ours.defaults:
                continue
            if rank == world - 1:
                group[key] = value
            group["rank"], group["tags"] = rank, {"decay", f"of {rank}"}  # a program's own: nothing is computed with it
            engine.backward(loss_of(engine, batches(2)[1][rank]))
            if world > 1:
                raises(tessera.Error, engine.step, f"step(): param group {len(ours.param_groups) - 1} has {key} {before[key]}",
                       f"on rank 0, but {value!r} on rank {world - 1}; expected the same on all ranks")
            engine.zero_grad()
            group.clear()
            group.update(before)
        assert engine.global_steps == 1
        train(engine, batches(3)[1:], loss_of)
        train(undisturbed, batches(3), loss_of)
        assert largest_difference(engine.state_dict(), undisturbed.state_dict()) == 0

    if world > 1:
        model = mlp()
        raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=nadam(model, betas=(0.5, 0.1 * rank)), config=config(1)),
               "torch.optim.nadam.NAdam: param group 1 has betas (0.5, 0.0) on rank 0, but (0.5, 0.1) on rank 1; expected the same on all ranks")
    model = mlp()
    options = {"device": torch.device("cpu", rank), "of this rank": object()}
    train(tessera.initialize(model=model, optimizer=nadam(model, **options), config=config(1))[0], batches(2), loss_of)  # what is not compared


@check
def states_of_the_constructor_are_rank_0s():
    class Anchored(torch.optim.Optimizer):
        """Pulls back to where the parameters have begun, and keeps a column-major matrix and half precision."""

        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})
            for p in (p for group in self.param_groups for p in group["params"]):
                self.state[p].update(begin=p.detach().clone(), half=torch.zeros_like(p, dtype=torch.bfloat16), double=torch.zeros(2).double())
            self.state["all"] = {"count": 1}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["half"].mul_(0.9).add_(p.grad)
                        p.sub_(self.state[p]["half"].float() + 0.1 * (p - self.state[p]["begin"]), alpha=group["lr"])
                        self.state[p]["columns"] = torch.arange(6.0).view(2, 3).t()

    model = mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)  # rank 0's become everybody's
    optimizer, plain = Anchored(model.parameters()), mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(2, 500))
    theirs = Anchored(plain.parameters())
    for samples in batches(3):
        problem = step_beside(engine, theirs, trained_by_name(plain), [samples])
        assert not problem, problem
    saved = ours.state_dict()
    assert saved["state"]["all"] == {"count": 1} and saved["state"][0]["half"].dtype == torch.bfloat16
    raises(RuntimeError, lambda: ours.state[model[0].weight]["begin"].zero_(), "nference")
    folder = Path(os.environ["SAVED"]) / f"anchored_of_{world}"
    engine.save_checkpoint(folder)
    model = mlp()
    again = Anchored(model.parameters())
    resumed = tessera.initialize(model=model, optimizer=again, config=config(3, 500))[0]
    resumed.load_checkpoint(folder)
    if resumed._whole_optimizer._owned:
        (state, *_) = (state for key, state in resumed._whole_optimizer._state.items() if key != "all")
        assert state["half"].dtype == torch.bfloat16 and state["double"].dtype == torch.float64 and state["columns"].stride() == (1, 3)
    for one in (engine, resumed):
        train(one, batches(5)[3:], loss_of)
    assert all(torch.equal(engine.full_parameter(name), resumed.full_parameter(name)) for name, _ in plain.named_parameters())
    resumed.destroy()
    assert not again.state and again.param_groups[0]["lr"] == 0.1  # moments of other weights would be wrong


@check
def what_cannot_be_right_is_an_error():
    model = mlp()
    text = raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config(1)),
                  "LBFGS", "closure")
    assert "step()" in text

    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.defaults = inner, inner.defaults

        @property
        def param_groups(self):
            return self.inner.param_groups

        @property
        def state(self):
            return self.inner.state

        def step(self, closure=None):
            return self.inner.step(closure)

    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=Around(torch.optim.RMSprop(model.parameters())), config=config(1)),
           "Around.state is a property")

    def replaces(optimizer, parameters):
        for p in parameters:
            p.data = p.data - 0.1 * p.grad

    def nothing(optimizer, parameters):
        pass

    def replaces_later(optimizer, parameters):
        replaces(optimizer, [p for p in parameters if p.numel() > 64])  # not in the trial

    def fails_on_one(optimizer, parameters):
        if rank == world - 1 and any(p.numel() > 64 for p in parameters):  # not in the trial
            raise OSError("disk of rank 1")

    def keeps(what, least=0):
        """What no checkpoint can have, of which only the model's size decides in the end."""
        def keep(optimizer, _):
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.numel() > least):
                optimizer.state[p]["kept"] = what(p)
        return keep

    def distributed(optimizer, _):
        torch.distributed.all_reduce(torch.zeros(1))

    def distributed_later(optimizer, parameters):
        if any(p.numel() > 64 for p in parameters):
            torch.distributed.all_reduce(torch.zeros(1))

    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    for make, parts in ((lambda m: Both(trained(m)[:3], trained(m)[3:], shares=False), ("states of its own", ".state = self.state")),
                        (lambda m: Hostile(trained(m), keeps(lambda p: object())), ("kept", "is of type builtins.object")),
                        (lambda m: Hostile(trained(m), keeps(lambda p: deque([lambda: 0]))), ("it[0] is of type builtins.function",)),
                        (lambda m: Hostile(trained(m), keeps(lambda p: nn.Linear(2, 2))), ("torch.nn.modules.linear.Linear",)),
                        (lambda m: Hostile(trained(m), keeps(lambda p: deque([{"of": p}]))), ("parameter of the model",)),
                        (lambda m: Hostile(trained(m), replaces), ("step() has replaced the memory of a parameter", "in place, as by p.copy_()")),
                        *([(lambda m: Hostile(trained(m), distributed), ("calls torch.distributed", "for one process"))] if world > 1 else ())):
        model = Tied()
        raises(tessera.ConfigError, lambda make=make, model=model: tessera.initialize(model=model, optimizer=make(model), config=config(2)), *parts)

    engine, ours, _, _ = tessera.initialize(model=mlp(), optimizer=lambda params: Hostile(params, keeps(lambda p: object(), 64)), config=config(1, 500))
    train(engine, batches(1), loss_of)
    raises(tessera.Error, ours.state_dict, "is of type builtins.object")  # on all ranks
    train(engine, batches(1), loss_of)
    for first, kind, parts in ((replaces_later, tessera.Error, ("has replaced the memory", "in place")),
                               (fails_on_one, (tessera.Error, OSError), ("disk of rank 1",)),
                               *([(distributed_later, tessera.Error, ("calls torch.distributed",))] if world > 1 else ())):
        def counts(optimizer, *given, first=first):
            optimizer.param_groups[0]["k"] += 1
            return first(optimizer, *given)

        on_disk = {"zero_optimization": {"stage": 1, "unit_numel": 500, "offload_optimizer": {"device": "nvme", "nvme_path": os.environ["SAVED"]}}}
        for stage, more in ((0, {}), (3, {}), (1, on_disk)):
            model, other = mlp(), mlp()
            optimizer = Hostile(model.parameters(), counts, 0.1)
            optimizer.param_groups[0]["k"] = 0
            engine = tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 500, **more))[0]
            undisturbed = tessera.initialize(model=other, optimizer=Hostile(other.parameters(), nothing, 0.1), config=config(stage, 500))[0]
            engine.backward(loss_of(engine, batches(1)[0][rank]))
            raises(kind, engine.step, *parts)
            raises(tessera.Error, lambda engine=engine: engine(batches(1)[0][rank][0]))  # it is not used as if nothing had been
            engine.zero_grad()  # that step is dropped
            assert optimizer.param_groups[0]["k"] == engine.global_steps == 0
            optimizer.first = nothing
            train(engine, batches(2), loss_of)
            train(undisturbed, batches(2), loss_of)
            expected = undisturbed.state_dict()
            assert largest_difference(engine.state_dict(), expected) == 0
            if first is replaces_later:
                optimizer.first = first
                engine.backward(loss_of(engine, batches(1)[0][rank]))
                raises(kind, engine.step, *parts)
                engine.destroy()
                assert largest_difference(model.state_dict(), expected) == 0
    model = mlp()
    optimizer = torch.optim.NAdam(model.parameters())
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(1, 500))
    raises(tessera.Error, lambda: ours.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}), "would not be trained")
    optimizer.param_groups[0]["params"].pop()
    engine.backward(loss_of(engine, batches(1)[0][rank]))
    raises(tessera.Error, engine.step, "was taken out after initialize()")


@check
def train_and_eval_of_the_optimizer():
    for stage in (0, 3):
        model, plain = Tied(), Tied()
        optimizer, theirs = (Averaging(two_groups(m)) for m in (model, plain))
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 500, gradient_accumulation_steps=2))
        names = trained_by_name(plain)

        def same(engine=engine, names=names):
            return all(torch.equal(engine.full_parameter(name), p.detach()) for name, p in names.items())

        for step in range(3):
            for one in (ours, optimizer, theirs):
                one.train()
            for samples in batches(2):
                engine.backward(loss_of(engine, samples[rank]))
                ours.train()  # as the HF Trainer does: nothing
                if not engine.is_gradient_accumulation_boundary():
                    engine.step()
            raises(tessera.Error, ours.eval, "between backward() and step()")
            for name, p in names.items():
                p.grad = engine.full_gradient(name) if not name.startswith("unused") else None
            engine.step()
            theirs.step()
            assert same(), (stage, step)
            (optimizer if step == 1 else ours).eval()
            theirs.eval()
            assert same(), (stage, step)
            engine.eval()
            plain.eval()
            with torch.no_grad():
                x = batches(1)[0][rank][0]
                assert (engine(x) - plain(x)).abs().max() < 1e-5
            engine.train()
            plain.train()
        ours.train()
        theirs.train()
        assert same()
        engine.backward(loss_of(engine, batches(1)[0][rank]))
    model = mlp()
    ours = tessera.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config(1))[1]
    ours.train()
    ours.eval()  # nothing to do


@check
def hooks_are_called_once():
    model = mlp()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(2, 500, gradient_accumulation_steps=2))
    ours.register_step_post_hook(lambda *_: calls.append("ours"))
    train(engine, batches(4), loss_of)
    assert calls == ["before", "after", "ours"] * 2, calls
    assert all(p.grad is None or p.grad.numel() == p.numel() for p in model.parameters())


@check
def states_are_read_and_written():
    for i, make in enumerate((lambda m: Centred(two_groups(m)), lambda m: torch.optim.NAdam(two_groups(m)),
                              lambda m: torch.optim.Adagrad(two_groups(m), lr=0.02, initial_accumulator_value=0.1))):
        engine, ours, theirs = same_bits((2, 3, 0)[i], make)
        saved = ours.state_dict()
        model, plain = Tied(), Tied()
        again, other = make(plain), make(model)
        again.load_state_dict(saved)  # torch's own class takes it
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=other, config=config(1, 500))
        ours.load_state_dict(theirs.state_dict())
        assert_same_state(ours.state_dict(), saved)
        p = model.head[0].weight
        key = next(key for key, value in ours.state[p].items() if isinstance(value, torch.Tensor) and key != "step")
        raises(tessera.Error, lambda state=ours.state[p], key=key: state.__setitem__(key, None), "is a copy")
        ours.state[p] = {**ours.state[p], key: ours.state[p][key] * 2}
        assert torch.equal(ours.state[p][key], 2 * saved["state"][index_of(ours, p)][key])
        assert torch.equal(parameters.safe_get_full_optimizer_state(p, key), ours.state[p][key])
        parameters.safe_set_full_optimizer_state(p, 3 * ours.state[p][key], key)
        assert torch.equal(ours.state[p][key], 6 * saved["state"][index_of(ours, p)][key])
        raises(tessera.Error, lambda p=p: parameters.safe_get_full_optimizer_state(p, "exp_avg_cubed"), "has no state 'exp_avg_cubed'", key)
        if world > 1:
            raises(tessera.Error, lambda p=p, key=key: parameters.safe_get_full_optimizer_state(p, "none" if rank == 1 else key), "rank 1: ")


@check
def a_rate_that_was_none_may_be_written():
    class OwnRate(torch.optim.Optimizer):
        """Has a rate of its own where its groups have none, as transformers' Adafactor."""

        def __init__(self, params):
            super().__init__(params, {"lr": None})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=0.5 if group["lr"] is None else group["lr"])

    model, plain = mlp(), mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=OwnRate(model.parameters()), config=config(2, 500))
    theirs = OwnRate(plain.parameters())
    for step, samples in enumerate(batches(3)):
        if step == 1:
            ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.25
        problem = step_beside(engine, theirs, trained_by_name(plain), [samples])
        assert not problem, f"step {step}: {problem}"


@check
def a_state_dict_is_loaded_wholly_or_not_at_all():
    class Sharing(Averaging):
        """Has a state of no parameter, and counts the calls of eval()."""

        calls = 0

        def step(self, closure=None):
            super().step(closure)
            self.state["shared"]["steps"] = self.param_groups[0]["steps"]

        def eval(self):
            Sharing.calls += 1
            super().eval()

    model = mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=Sharing(model.parameters()), config=config(2, 500))
    train(engine, batches(2), loss_of)
    ours.eval()
    before, calls = ours.state_dict(), Sharing.calls
    assert before["state"]["shared"] == {"steps": 2}, before["state"].keys()

    def changed(**state):
        moved = {index: {key: value + 1 for key, value in one.items()} for index, one in before["state"].items() if index != "shared"}
        return {"param_groups": before["param_groups"], "state": {**moved, "shared": {"steps": 7}, **state}}

    last = {**changed()["state"], len(model.state_dict()) - 1: 3}
    for broken, kind in (({**changed(), "state": last}, tessera.Error), (changed(shared={"lock": Lock()}), TypeError)):
        raises(kind, lambda broken=broken: ours.load_state_dict(broken))
        assert_same_state(ours.state_dict(), before)
    ours.eval()  # the second call in a row
    assert Sharing.calls == calls, (Sharing.calls, calls)
    ours.load_state_dict(changed())
    assert_same_state(ours.state_dict(), changed())


@contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@check
def defaults_of_the_users_change_nothing():
    """On the one device tensors have no values, in the other type few digits."""
    folder = Path(os.environ["SAVED"]) / f"default_of_{world}"
    users = (("cpu", torch.float32), ("meta", torch.float32), ("cpu", torch.bfloat16))
    samples, orders = [torch.full((2,), float(i)) for i in range(8 * world)], []
    for of_user in users:
        loader = tessera.DataLoader(samples, 2)
        with defaults(*of_user):
            orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1] == orders[2]

    class Derived(torch.optim.SGD):
        """Runs as it is."""

    for make in (lambda m: Derived(trained(m), lr=0.05, momentum=0.9), lambda m: torch.optim.AdamW(trained(m), lr=torch.tensor(0.0137))):
        results = []
        for of_user in users:
            model, again = Tied(), Tied()
            optimizer, other = make(model), make(again)
            samples = batches(4)
            with defaults(*of_user):
                engine = tessera.initialize(model=model, optimizer=optimizer, config=config(3, 500))[0]
                train(engine, samples[:2], loss_of)
                engine.save_checkpoint(folder)
                resumed = tessera.initialize(model=again, optimizer=other, config=config(1, 500))[0]
                resumed.load_checkpoint(folder)
                train(resumed, samples[2:], loss_of)
                if resumed._whole_optimizer:
                    assert not resumed._whole_optimizer.why, resumed._whole_optimizer.why
                results.append((resumed.state_dict(), resumed.optimizer.state_dict(), resumed.get_lr()))
        for result in results[1:]:
            assert all(torch.equal(results[0][0][name], value) for name, value in result[0].items())
            assert_same_state(results[0][1], result[1])
            assert results[0][2] == result[2]


@check
def a_save_takes_one_copy_of_the_states():
    """Of an optimizer that runs as it is, at the peak, by the kernel: what a checkpoint keeps of 128 MiB."""
    engine = tessera.initialize(model=nn.Linear(4096, 4096, bias=False), optimizer=lambda p: torch.optim.Adamax(p), config=config(0))[0]
    train(engine, [torch.ones(world, 1, 4096)], lambda model, x: model(x).mean())

    def memory(key):
        return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)).split()[1]) << 10

    filling = torch.ones(1 << 26)  # takes what was freed, and is still counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, saved = memory("VmRSS"), engine._whole_optimizer.state_bytes()
    assert memory("VmHWM") - before < 1.25 * saved.nbytes + (8 << 20), (memory("VmHWM") - before, saved.nbytes, filling.nbytes)
    assert saved.nbytes > 2 * 4096 * 4096 * 4 or rank > 0


@check
def what_cannot_be_encoded_on_one_rank_is_an_error_on_all():
    """Whatever is raised there."""
    class Key:
        def __repr__(self):
            raise RuntimeError("has no words")

    engine = engine_of(lambda m: Centred(two_groups(m)), 2)
    train(engine, batches(1), loss_of)
    if rank == world - 1:
        next(iter(engine._whole_optimizer._state.values()))["odd"] = {Key(): 1}
    raises(tessera.Error, engine.optimizer.state_dict, "has no words")


def index_of(optimizer, parameter):
    return [id(p) for group in optimizer.param_groups for p in group["params"]].index(id(parameter))


class Slowing(torch.optim.RMSprop):
    """Counts in an attribute, and says so in a state_dict() of its own."""

    number = 0

    def step(self, closure=None):
        self.number += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.number
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "number": self.number}


SAVED = {"user": lambda m: Centred(two_groups(m)), "adafactor": lambda m: torch.optim.Adafactor(two_groups(m), lr=0.02),
         "clipping": lambda m: Hostile(trained(m), clips, 0.05, momentum=0.9), "keeping": lambda m: Keeping(two_groups(m)),
         "slowing": lambda m: Slowing(trained(m)), "compiled": lambda m: Compiled(trained(m), lr=0.05)}


def engine_of(make, stage):
    model = Tied()
    return tessera.initialize(model=model, optimizer=make(model), config=config(stage, 500))[0]


@check
def checkpoints_resume():
    """To the bit on as many ranks and another stage; SAVED is the folder that another world goes on from."""
    folder = Path(os.environ["SAVED"])
    for i, (name, make) in enumerate(SAVED.items()):
        saved, stage = folder / f"{name}_of_{world}", (0, 3)[i % 2]
        engine = engine_of(make, stage)
        train(engine, batches(2), loss_of)
        engine.save_checkpoint(saved)
        train(engine, batches(4)[2:], loss_of)
        resumed = engine_of(make, 3 - stage)
        resumed.load_checkpoint(saved)
        train(resumed, batches(4)[2:], loss_of)
        assert_same_state(resumed.optimizer.state_dict(), engine.optimizer.state_dict())
        for key, value in engine.state_dict().items():
            assert torch.equal(resumed.state_dict()[key], value), (name, key)
    translated = engine_of(lambda m: torch.optim.AdamW(trained(m)), 1)
    raises(tessera.Error, lambda: translated.load_checkpoint(saved), "it was saved with the optimizer", "load_optimizer_states=False")
    translated.load_checkpoint(saved, load_optimizer_states=False)
    translated.save_checkpoint(folder / f"translated_of_{world}")
    raises(tessera.Error, lambda: engine_of(SAVED["user"], 2).load_checkpoint(folder / f"translated_of_{world}"), "states are not those of")


@check
def checkpoints_of_another_world():
    folder = Path(os.environ["SAVED"])
    for name in ("user", "adafactor", "clipping", "keeping"):
        others = [path for other in (1, 2, 3) if (path := folder / f"{name}_of_{other}").exists()]
        assert others
        for saved in others:
            engine = engine_of(SAVED[name], 3)
            engine.load_checkpoint(saved)
            plain = Tied()
            theirs = SAVED[name](plain)
            if name == "keeping":  # torch's load_state_dict() knows no such states
                parameters = [p for group in theirs.param_groups for p in group["params"]]
                theirs.state.update((parameters[i], copy.deepcopy(state)) for i, state in engine.optimizer.state_dict()["state"].items())
                assert {state["queue"].maxlen for state in theirs.state.values()} == {2}
            else:
                theirs.load_state_dict(engine.optimizer.state_dict())
            with torch.no_grad():
                for key, p in plain.named_parameters():
                    p.copy_(engine.full_parameter(key))
            for samples in batches(2):
                problem = step_beside(engine, theirs, trained_by_name(plain), [samples])
                assert not problem, (saved.name, problem)


class Renamed(nn.Module):
    """Its weight has two names, the first of which is given, and its head a width."""

    def __init__(self, first, second, width):
        super().__init__()
        torch.manual_seed(2)
        self.register_parameter(first, nn.Parameter(torch.randn(16, 16)))
        self.register_parameter(second, getattr(self, first))
        self.head = nn.Linear(16, width)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.one) @ self.two)


def renamed(stage, first, second, width, section):
    model = Renamed(first, second, width)
    optimizer = None if section else torch.optim.NAdam(model.parameters(), lr=0.01)
    return tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 300, **section))[0]


@check
def states_are_of_the_parameters_that_are_loaded():
    """A tied parameter's under another of its names; where a load is not strict, those of other parameters stay."""
    for stage, name in zip((STAGES[0], STAGES[-1], STAGES[-1]), ("", "Adafactor", "AdamW8bit")):
        section = {"optimizer": {"type": name, "params": {"lr": 0.01}}} if name else {}
        place = Path(os.environ["SAVED"]) / f"renamed_{name}_of_{world}"
        first = renamed(stage, "one", "two", 5, section)
        train(first, batches(2), lambda module, x: module(x[0]).square().mean())
        first.save_checkpoint(place)
        second = renamed(stage, "two", "one", 5, section)
        second.load_checkpoint(place)
        third = renamed(stage, "two", "one", 7, section)
        train(third, batches(1), lambda module, x: module(x[0]).square().mean())
        before = third.optimizer.state[third.module.head.weight]
        third.load_checkpoint(place, load_module_strict=False)
        for engine in (second, third):
            assert same(dict(engine.optimizer.state[engine.module.two]), dict(first.optimizer.state[first.module.one])), name
        assert same(dict(third.optimizer.state[third.module.head.weight]), dict(before)), name
        train(third, batches(1), lambda module, x: module(x[0]).square().mean())


@check
def states_that_there_are_at_initialize_are_kept():
    model, plain = mlp(), mlp()
    ours, theirs = (torch.optim.NAdam(m.parameters(), lr=1e-3) for m in (model, plain))
    for samples in batches(2):
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            sum(loss_of(one, batch) for batch in samples).backward()
            optimizer.step()
    model.zero_grad()
    engine = tessera.initialize(model=model, optimizer=ours, config=config(2, 500))[0]
    train_plainly(plain, theirs, batches(4)[2:], loss_of)
    train(engine, batches(4)[2:], loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 1e-5


@check
def states_that_only_rank_0_has_loaded_are_everybodys():
    """Of an optimizer that is rank 0's, and of one whose parameters have owners."""
    for first, is_rank_0s in ((clips, True), (lambda *_: None, False)):
        model = mlp()
        optimizer = Hostile(model.parameters(), first, momentum=0.9)
        if rank == 0:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, config=config(2, 500))
        assert engine._whole_optimizer.on_one_rank == (is_rank_0s and world > 1)
        assert len(ours.state) == len(list(model.parameters()))
        for p in model.parameters():
            assert torch.equal(ours.state[p]["momentum_buffer"], torch.full(p.shape, 3.0))
        assert list(ours.state_dict()["state"]) == list(range(len(ours.state)))
        train(engine, batches(1), loss_of)
        try:
            with tessera.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
                if rank == 0:
                    next(model.parameters()).fill_(7)
                raise ValueError
        except ValueError:
            pass
        for call in (ours.state_dict, lambda ours=ours, model=model: ours.state[next(model.parameters())]):
            raises(tessera.Error, call, "was left by an exception")  # rank 0's; the others do not wait for it


@check
def a_compiled_update_and_states_of_a_class_of_the_optimizers():
    for stage in (0, 3):
        engine, ours, _ = same_bits(stage, lambda m: Compiled(trained(m), lr=0.05))
        assert not engine._whole_optimizer.on_one_rank, engine._whole_optimizer.why
        state = ours.state[next(p for p in engine.module.parameters() if p.requires_grad)]["momentum"]
        assert type(state) is InTwo
        raises(RuntimeError, lambda state=state: state.high.zero_(), "inference")  # a copy, as all that `state` gives
    elements = sum(p.numel() for name, p in engine.module.named_parameters() if p.requires_grad and not name.startswith("unused"))
    measured = sum(tessera.comm.all_gather(engine.measured_bytes()["optimizer"], "states"))
    assert measured == 4 * elements, (measured, elements)
    kept = json_values.to_bytes({"it": halves(torch.randn(3))}).numpy().tobytes()
    unknown = torch.frombuffer(bytearray(kept.replace(b"InTwo", b"Other")), dtype=torch.uint8)
    raises(tessera.Error, lambda: json_values.from_bytes(unknown), "whole_optimizers.Other, the class of a tensor", "imported before")


@check
def state_on_disk_and_in_groups():
    make = optimizers_of_torch()["Adafactor"]
    folder = os.environ["SAVED"]
    for stage in (1, 3):
        same_bits(stage, make, zero_optimization={"stage": stage, "unit_numel": 500, "offload_optimizer": {"device": "nvme", "nvme_path": folder}})
    if world == 2:
        for more in ({"mics_shard_size": 1}, {"zero_hpz_partition_size": 1}):
            same_bits(3, make, zero_optimization={"stage": 3, "unit_numel": 500, "stage3_param_persistence_threshold": 0, **more})


if __name__ == "__main__":
    main()
