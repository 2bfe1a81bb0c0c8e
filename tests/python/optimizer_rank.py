"""Optimizers and schedulers of torch beside themselves: translated, and as they are."""
import os
from pathlib import Path

import models
import tessera
import torch
from checks import check, config, largest_difference, main, raises, train, train_plainly
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))


def batches(steps):
    return [[models._vectors(step * world + r, 8, 16) for r in range(world)] for step in range(steps)]


def loss_of(model, samples):
    return functional.cross_entropy(model(samples[0]), samples[1])


def decay_groups(model, **first):
    return [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, **first},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as lion_pytorch has it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((moment * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def compare(stage, make_optimizer, make_scheduler=None, steps=6, limit=2e-5):
    plain, model = mlp(), mlp()
    theirs = make_optimizer(plain)
    their_schedule = make_scheduler(theirs) if make_scheduler else None
    optimizer = make_optimizer(model)
    schedule = make_scheduler(optimizer) if make_scheduler else None
    engine, ours, _, returned = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage))
    assert returned is schedule and ours.param_groups is optimizer.param_groups
    for batch in batches(steps):
        assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups] == engine.get_lr()
        expected = train_plainly(plain, theirs, [batch], loss_of)
        got = train(engine, [batch], loss_of)
        assert largest_difference(got, expected) < limit, (stage, got, expected)
        if their_schedule:
            their_schedule.step()
    apart = largest_difference(engine.state_dict(), plain.state_dict())
    assert apart < limit, (stage, apart)
    return engine


@check
def every_optimizer_of_torch_that_has_a_counterpart():
    makers = {
        "AdamW": lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-3, betas=(0.8, 0.95), eps=1e-6),
        "Adam": lambda m: torch.optim.Adam(decay_groups(m, lr=2e-3), lr=1e-3),
        "SGD": lambda m: torch.optim.SGD(decay_groups(m), lr=0.05, momentum=0.9, nesterov=True),
        "SGD with dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.5),
        "Adagrad": lambda m: torch.optim.Adagrad(decay_groups(m), lr=0.02, lr_decay=0.1),
        "Lion": lambda m: Lion(decay_groups(m), lr=1e-4),
    }
    for maker in makers.values():
        for stage in (0, 1, 2, 3) if maker is makers["AdamW"] else (2,):
            compare(stage, maker, limit=2e-4 if maker is makers["Lion"] else 2e-5)


@check
def schedulers_of_torch_drive_the_rates():
    def adamw(model):
        return torch.optim.AdamW(decay_groups(model), lr=1e-2)

    for make in (lambda o: schedulers.LambdaLR(o, [lambda step: min(1, step / 3), lambda step: 0.5 ** step]),
                 lambda o: schedulers.OneCycleLR(o, max_lr=1e-2, total_steps=8),
                 lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 5)],
                                                   milestones=[2])):
        compare(1, adamw, make)
    compare(3, adamw, lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)))


@check
def what_is_written_into_the_groups_counts():
    plain, model = mlp(), mlp()
    theirs = torch.optim.AdamW(decay_groups(plain), lr=1e-2)
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=torch.optim.AdamW(decay_groups(model), lr=1e-2), config=config(2))
    for step, batch in enumerate(batches(5)):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[1]["betas"] = (0.9, 0.9 + 0.01 * step)
        train_plainly(plain, theirs, [batch], loss_of)
        train(engine, [batch], loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5


@check
def the_configurations_optimizer_shows_its_groups_and_schedule():
    model = mlp()
    given = config(1, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1},
                                 "param_groups": [{"match": ["*.bias", "1.*"], "weight_decay": 0.0}]},
                   scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}})
    engine, optimizer, _, schedule = tessera.initialize(model=model, config=given)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(model[0].weight), id(model[3].weight)}
    rates = []
    for batch in batches(7):
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == engine.get_lr() == [rates[-1]] * 2
        train(engine, [batch], loss_of)
        schedule.step()
    assert rates == [0, 0, 0.0025, 0.005, 0.0075, 0.01, 0.01], rates
    assert schedule.last_epoch == 7


@check
def groups_of_model_parameters_and_makers_of_optimizers():
    plain = mlp()
    theirs = torch.optim.AdamW(decay_groups(plain), lr=1e-2)
    train_plainly(plain, theirs, batches(3), loss_of)
    section = {"type": "AdamW", "params": {"lr": 1e-2}}
    model = mlp()
    engines = [tessera.initialize(model=model, model_parameters=decay_groups(model), config=config(2, optimizer=section))[0]]
    model = mlp()
    engines.append(tessera.initialize(model=model, model_parameters=decay_groups(model), config=config(2),
                                      optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
                                      lr_scheduler=lambda o: schedulers.LambdaLR(o, lambda step: 1.0))[0])
    for engine in engines:
        train(engine, batches(3), loss_of)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5
    model = mlp()
    tessera.initialize(model=model, model_parameters=model.parameters(), config=config(0))


@check
def what_cannot_be_translated_is_refused_by_name():
    def refused(make, *parts):
        model = mlp()
        raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=make(model), config=config(1)), *parts)

    def stepped(model):
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, batches(1)[0][0]).backward()
        optimizer.step()
        return optimizer

    class Mine(torch.optim.AdamW):
        pass

    refused(lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "torch.optim.adam.Adam", "amsgrad=True", "expected False")
    refused(lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop is not an optimizer Tessera has", "expected AdamW")
    refused(lambda m: Mine(m.parameters()), "Mine is not an optimizer")
    refused(stepped, "has taken steps", "load_checkpoint()")
    refused(lambda m: torch.optim.SGD(m[0].parameters()), "parameter 1.weight is trainable and in no param group", "requires_grad_(False)")
    refused(lambda m: torch.optim.SGD(mlp().parameters()), "[64, 16]", "not a parameter of the model")
    refused(lambda m: "AdamW", "expected an optimizer of torch.optim")


@check
def a_schedulers_place_is_in_the_checkpoint():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])

    def make():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return tessera.initialize(model=model, optimizer=optimizer, config=config(3),
                                  lr_scheduler=schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)))[0]

    whole, first, second = make(), make(), make()
    train(whole, batches(6), loss_of)
    train(first, batches(3), loss_of)
    first.save_checkpoint(folder, client_state=[1, 2])
    _, client_state = second.load_checkpoint(folder)
    assert client_state == [1, 2] and second.get_lr() == first.get_lr() == [0.0025]
    train(second, batches(6)[3:], loss_of)
    assert second.get_lr() == whole.get_lr()
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0


@check
def the_loader_resumes_at_the_same_sample():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])
    data = torch.utils.data.TensorDataset(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 5,
                                          torch.arange(50))

    def make():
        return tessera.initialize(model=mlp(), training_data=data, config=config(2, gradient_accumulation_steps=2, seed=3))[0]

    def run(engine, num_batches):
        seen = []
        while len(seen) < num_batches:
            for x, y, number in engine.training_dataloader:
                seen.append(number.tolist())
                engine.backward(functional.cross_entropy(engine(x), y))
                engine.step()
                if len(seen) == num_batches:
                    break
        return seen

    per_epoch = len(make().training_dataloader)
    assert per_epoch == 50 // (4 * world) * 2
    whole, first, second = make(), make(), make()
    seen = run(whole, 2 * per_epoch)
    assert len({n for batch in seen[:per_epoch] for n in batch}) == 2 * per_epoch
    assert run(first, per_epoch + 4) == seen[:per_epoch + 4]
    first.save_checkpoint(folder, "loader")
    second.load_checkpoint(folder, "loader")
    assert run(second, per_epoch - 4) == seen[per_epoch + 4:]
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0


if __name__ == "__main__":
    main()
