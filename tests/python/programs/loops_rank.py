"""What loops of plain PyTorch do around an engine: they read and write p.grad, discard gradients, set hooks, train two models with one
loss or against each other, and initialize a model twice. Beside plain PyTorch, at every stage."""
import gc
import threading

import models
import tessera
import torch
from checks import DEVICE, config, each_stage, largest_difference, loss_of, main, mlp, raises, same, sgd, train, train_plainly
from torch import nn

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
BATCHES = [[models._vectors(step * world + r, 4, 16) for r in range(world)] for step in range(8)]


def make(stage, model=None, **changes):
    model = model if model is not None else mlp()
    return tessera.initialize(model=model, optimizer=sgd(model), config=config(stage, 500, **changes))[0]


@each_stage
def gradients_that_were_taken_cannot_be_read_written_or_reset(stage):
    plain = mlp()
    optimizer = sgd(plain)
    engine = make(stage, gradient_accumulation_steps=2)
    parameters = list(engine.module.parameters())

    def undone(change, *parts):
        """A change of grad is an error of the next step; zero_grad() gives up the step."""
        engine.backward(loss_of(engine, BATCHES[0][rank]))
        engine.step()
        assert all(p.grad is None for p in parameters)
        engine.backward(loss_of(engine, BATCHES[1][rank]))
        change()
        raises(tessera.Error, engine.step, "parameter 0.weight", *parts)
        engine.zero_grad()
        engine.step()  # updates nothing, as in PyTorch

    def write():
        parameters[0].grad = torch.ones_like(parameters[0])

    def reset():
        parameters[0].grad = None

    undone(write, "its grad was written after backward()", "gradient_clipping")
    undone(reset, "its grad was reset after backward()")
    undone(engine.module.zero_grad, "its grad was reset")
    engine.backward(loss_of(engine, BATCHES[0][rank]))
    engine.step()
    engine.backward(loss_of(engine, BATCHES[1][rank]))
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in parameters)
    reads = [lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0),
             lambda: parameters[0].grad.norm(), lambda: parameters[0].grad.mul_(0.5), lambda: repr(parameters[0].grad),
             *([lambda: parameters[0].grad.numpy()] if DEVICE == "cpu" else [])]
    for read in reads if stage == 0 else reads[:1]:  # libtorch takes a tenth of a second for the backtrace of each
        raises(RuntimeError, read, "the gradient of parameter 0.weight is not in its grad", "full_gradient()", "gradient_clipping")
    engine.step()
    train_plainly(plain, optimizer, [BATCHES[0] + BATCHES[1]], loss_of)
    same(engine, plain, 1e-5)


@each_stage
def one_loss_over_two_engines_is_an_error_that_names_the_other(stage):
    g, d = make(stage), make(stage, nn.Sequential(nn.Linear(5, 5)))
    g.backward(d(g(BATCHES[0][rank][0])).mean())
    before = d.state_dict()
    raises(tessera.Error, d.step, "parameter 0.weight", "did not come from")
    assert largest_difference(d.state_dict(), before) == 0


def initialized_again(stage, ends):
    plain, model = mlp(), mlp()
    optimizer = sgd(plain)
    engine = make(stage, model)
    raises(tessera.ConfigError, lambda: make(stage, model), "parameter 0.weight belongs to an engine", "engine.destroy()")
    train(engine, BATCHES[:2], loss_of)
    train_plainly(plain, optimizer, BATCHES[:2], loss_of)
    if ends == "destroy":
        engine.destroy()
        engine.destroy()
        backward = engine.backward
        raises(tessera.Error, lambda: backward(loss_of(model, BATCHES[2][rank])), "ended by destroy()")
        assert largest_difference(model.state_dict(), plain.state_dict()) < 1e-5  # a plain model
        loss_of(model, BATCHES[0][rank]).backward()
        assert model[0].weight.grad.abs().max() > 0
        model.zero_grad()
        del backward
    del engine
    if ends == "delete":
        gc.collect()
    if ends == "delete" and stage == 3 and world > 1 and tessera.comm.group().backend == "gloo":
        raises(tessera.ConfigError, lambda: make(stage, model), "has no values any more", "engine.destroy()")
        return
    second = make((stage + 1) % 4, model)
    train(second, BATCHES[2:4], loss_of)
    train_plainly(plain, sgd(plain), BATCHES[2:4], loss_of)
    same(second, plain, 1e-5)


@each_stage
def a_model_is_initialized_once_at_a_time(stage):
    initialized_again(stage, "destroy")
    initialized_again(stage, "delete")


@each_stage
def an_initialize_that_fails_gives_the_model_and_the_optimizer_back(stage):
    model, plain = mlp(), mlp()
    optimizer, other = sgd(model), sgd(mlp())
    made = torch.optim.lr_scheduler.StepLR(other, 1)

    def raising(_):
        raise KeyError("mine")

    def raising_on_one_rank(optimizer):
        return raising(optimizer) if rank == world - 1 else torch.optim.lr_scheduler.StepLR(optimizer, 1)

    for scheduler, kind, *parts in (
            ("cosine", tessera.ConfigError, "lr_scheduler is 'cosine' (a str)", "expected a scheduler"),
            (3, tessera.ConfigError, "lr_scheduler is 3 (a int)"),
            (made, tessera.ConfigError, "StepLR of another optimizer"),
            (lambda _: made, tessera.ConfigError, "StepLR of another optimizer"),
            (lambda _: None, tessera.ConfigError, "lr_scheduler is None"),
            (torch.optim.lr_scheduler.StepLR, TypeError, "step_size"),
            (raising, KeyError, "mine"),
            (raising_on_one_rank, KeyError if rank == world - 1 else tessera.Error, "mine")):
        raises(kind, lambda s=scheduler: tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=s, config=config(stage, 500)), *parts)
        assert largest_difference(model.state_dict(), plain.state_dict()) == 0  # whole, and no engine's
        assert optimizer.step.__func__ is type(optimizer).step and len(optimizer.state) == 0
    loss_of(model, BATCHES[0][rank]).backward()
    model.zero_grad()
    engine = tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 500))[0]
    train(engine, BATCHES[:2], loss_of)
    train_plainly(plain, sgd(plain), BATCHES[:2], loss_of)
    same(engine, plain, 1e-5)


@each_stage
def an_optimizer_and_its_scheduler_are_given_again_after_destroy(stage):
    model, plain, earlier = mlp(), mlp(), []
    for count, make_optimizer in enumerate((sgd, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02))):
        optimizer, theirs = make_optimizer(model), make_optimizer(plain)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for again in range(2):
            engine = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage, 500))[0]
            raises(tessera.ConfigError, lambda o=optimizer: tessera.initialize(model=mlp(), optimizer=o, config=config(stage)), "belongs to an engine already")
            for ended in earlier:
                ended.destroy()  # a second time: does nothing
            train(engine, BATCHES[again:again + 1], loss_of)
            train_plainly(plain, theirs, BATCHES[again:again + 1], loss_of)
            theirs.param_groups[0]["lr"] *= 0.5
            same(engine, plain, 1e-5)
            engine.destroy()
            earlier = [engine]
            fresh = make_optimizer(plain)
            fresh.param_groups[0]["lr"] = theirs.param_groups[0]["lr"]
            theirs = fresh  # the moments are gone
        assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        schedule.step()  # nobody else's now
        if count == 0:  # the plain loop
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, BATCHES[0][0]).backward()
                optimizer.step()
            assert len(optimizer.state) == 4
            with torch.no_grad():
                for mine, its in zip(model.parameters(), plain.parameters()):
                    mine.copy_(its)


@each_stage
def what_no_sync_says_ends_with_it(stage):
    """Nested, too; and what was said by hand counts again. One alone: random_calls.py."""
    engine = make(stage, gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync():
        with engine.no_sync():
            engine.backward(loss_of(engine, BATCHES[0][rank]))
        raises(tessera.Error, engine.step, "no_sync()")
    engine.backward(loss_of(engine, BATCHES[1][rank]))
    engine.step()
    assert engine.global_steps == 1 and not engine.is_gradient_accumulation_boundary()


@each_stage
def a_no_sync_that_is_refused_leaves_step_as_it_was(stage):
    engine = make(stage, managed_gradient_accumulation=False)
    raises(tessera.Error, lambda: engine.no_sync().__enter__(), "managed_gradient_accumulation")
    engine.backward(loss_of(engine, BATCHES[0][rank]))
    engine.step()
    assert engine.global_steps == 1


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = (nn.Linear(16, 5) for _ in range(3))
        self.uses_both = True

    def forward(self, x):
        return self.first(x) + self.second(x) if self.uses_both else self.first(x)


@each_stage
def zeros_in_grad_are_refused_where_they_would_count(stage):
    plain, engine = Branches(), make(stage, Branches())
    optimizer = sgd(plain)
    for step, batch in enumerate(BATCHES[:5]):
        for model in (plain, engine.module):
            model.uses_both = step < 3
        keeps = step in (0, 1, 3)
        for one in (engine.optimizer, optimizer):
            one.zero_grad(set_to_none=not keeps)
        if step == 3:
            engine.backward(loss_of(engine, batch[rank]))
            raises(tessera.Error, engine.step, "parameter second.weight has no gradient", "zero_grad(set_to_none=False)")
            for one in (engine, optimizer):
                one.zero_grad()
        for samples in batch:
            (loss_of(plain, samples) / world).backward()
        optimizer.step()
        engine.backward(loss_of(engine, batch[rank]))
        engine.step()
    same(engine, plain, 1e-5)
    if world > 1:  # a gradient on one rank is one
        engine.optimizer.zero_grad(set_to_none=False)
        engine.module.uses_both = rank == 0
        before = engine.full_parameter("second.weight")
        engine.backward(loss_of(engine, BATCHES[0][rank]))
        engine.step()
        assert not engine.full_parameter("second.weight").equal(before)


def layer(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 1, bias=False)


@each_stage
def several_engines_in_one_gathered_parameters(stage):
    """Rank 1 has made other objects, so that its engines have other addresses in another order."""
    kept = []
    for extra in (1, 7):
        if rank == 1:
            kept += [threading.Event() for _ in range(3 * extra)]
        engines = [make(stage, layer(seed)) for seed in range(3)]
        weights = [engine.module.weight for engine in engines]
        expected = [layer(seed).weight.detach() for seed in range(3)]
        with torch.no_grad(), tessera.GatheredParameters(weights[::-1], modifier_rank=0):
            if rank == 0:
                weights[1].fill_(7)
        expected[1] = torch.full((1, 4), 7.0)
        with tessera.GatheredParameters(weights[:2], modifier_rank=world - 1), torch.no_grad():  # nested, and overlapping
            with tessera.GatheredParameters(weights[1:]):
                assert all(w.equal(e) for w, e in zip(weights, expected))
                raises(tessera.Error, engines[2].destroy, "destroy() inside of a GatheredParameters that holds weight")
            inner = tessera.GatheredParameters(weights[1:], modifier_rank=0)
            inner.__enter__()
            if rank == world - 1:
                weights[0].fill_(8)
            if rank == 0:
                weights[2].fill_(9)
        inner.__exit__(None, None, None)
        expected[0], expected[2] = torch.full((1, 4), 8.0), torch.full((1, 4), 9.0)
        assert all(e.state_dict()["weight"].equal(w) for e, w in zip(engines, expected))
        engines[1].destroy()
        with tessera.GatheredParameters(weights, modifier_rank=0), torch.no_grad():  # one of them is a plain module's
            if rank == 0:
                weights[1].zero_()
                weights[2].zero_()
        assert weights[1].equal(torch.zeros(1, 4)) and engines[2].state_dict()["weight"].equal(torch.zeros(1, 4))
        for engine in engines:
            engine.destroy()
        assert weights[0].equal(expected[0])


if __name__ == "__main__":
    main()
