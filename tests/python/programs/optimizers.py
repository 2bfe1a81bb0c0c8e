"""Optimizers and schedulers that are compared with themselves in plain PyTorch, and what compares them."""
import models
import tessera
import torch
from checks import config, largest_difference, loss_of, train, train_plainly
from torch import nn
from torch.optim import lr_scheduler as schedulers

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))


def batches(steps):
    return [[models._vectors(step * world + r, 8, 16) for r in range(world)] for step in range(steps)]


def gradients_of_a_step(engine, samples, names, clipping=0.0, loss_of=loss_of):
    """Takes a step, of a micro-batch for each of `samples`. Returns the gradients of these parameters as the optimizer had them: clipped."""
    for i, sample in enumerate(samples):
        engine.backward(loss_of(engine, sample[rank]))
        if i < len(samples) - 1:
            engine.step()
    gradients = {name: engine.full_gradient(name) for name in names if not name.startswith("unused")}
    engine.step()
    norm = engine.get_global_grad_norm()
    coefficient = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
    assert not clipping or coefficient < 1
    return {name: gradient * coefficient for name, gradient in gradients.items()}


def decay_groups(model, **first):
    return [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, **first},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]


class ByParameter(torch.optim.Optimizer):
    """Of a user's: update(p, state, group) is called for each parameter that has a gradient."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)


def steps_together(stage, make_optimizer, by_hand=lambda step, optimizer, model: None, make_scheduler=lambda optimizer: None, reference=None,
                   make=mlp, steps=5, limit=2e-5, on_shards=True):
    """Trains plain PyTorch's and ours; `by_hand` changes both optimizers before each step, and a scheduler of torch's moves both after it.
    `on_shards`: whether it is translated, or runs as it is on whole parameters."""
    plain, model = make(), make()
    theirs, given = (reference or make_optimizer)(plain), make_optimizer(model)
    their_schedule, schedule = make_scheduler(theirs), make_scheduler(given)
    engine, ours, _, returned = tessera.initialize(model=model, optimizer=given, lr_scheduler=schedule, config=config(stage, 500))
    assert returned is schedule and ours.param_groups is given.param_groups and (engine._whole_optimizer is None) == on_shards
    for step, batch in enumerate(batches(steps)):
        by_hand(step, theirs, plain)
        by_hand(step, ours, model)
        assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups] == engine.get_lr()
        expected = train_plainly(plain, theirs, [batch], loss_of)
        assert largest_difference(train(engine, [batch], loss_of), expected) < limit, (stage, step)
        if their_schedule:
            their_schedule.step()
    apart = largest_difference(engine.state_dict(), plain.state_dict())
    assert apart < limit, (stage, apart)
    return engine


def in_two(model, first, second=None):
    """The first layer's parameters, and the others."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2], **first}, {"params": parameters[2:], **(second or {})}]


class Named(nn.Module):
    """Parameters whose names are patterns of others, and characters that JSON escapes."""

    NAMES = ("*", "w*", "w", "w1", "?", 'a"b\\c', "ä [0]", "weight")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in self.NAMES})
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.head(x)


# Of an optimizer with two groups.
SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda step: min(1, step / 3), lambda step: 0.5 ** step]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=1e-2, total_steps=8),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 5)], milestones=[2]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]),
}
