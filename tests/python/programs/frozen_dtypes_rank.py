"""Frozen parameters of types that models do not compute in: quantized weights with their scales, beside trained adapters, at every stage.
Beside plain PyTorch."""
import os
import tempfile

import tessera
import torch
from checks import config, each_stage, largest_difference, main, train_plainly
from torch import nn
from torch.nn import functional

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
BATCHES = [[torch.randn(4, 12, generator=torch.Generator().manual_seed(step * world + r)) for r in range(world)] for step in range(4)]
KINDS = {"int8": torch.int8, "uint8": torch.uint8, "int64": torch.int64, "bool": torch.bool, "float64": torch.float64,
         "complex64": torch.complex64, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int16": torch.int16,
         "uint16": torch.uint16}


class Quantized(nn.Module):
    """A linear layer whose weight is kept in another type, with a trained adapter beside it."""

    def __init__(self, dtype, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 5, (12, 12), generator=generator)
        self.weight = nn.Parameter(values.to(torch.float32).to(dtype) if dtype.is_floating_point or dtype.is_complex else values.to(dtype),
                                   requires_grad=False)
        self.scale = nn.Parameter(torch.rand(12, 1, generator=generator) / 20, requires_grad=False)
        self.a = nn.Parameter(torch.randn(4, 12, generator=generator) / 4)
        self.b = nn.Parameter(torch.zeros(12, 4))

    def forward(self, x):
        weight = (self.weight.real if self.weight.is_complex() else self.weight).to(x.dtype) * self.scale
        return torch.tanh(functional.linear(x, weight + self.b @ self.a))


def net(kinds=tuple(KINDS), seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Quantized(KINDS[kind], seed + i) for i, kind in enumerate(kinds)), nn.Linear(12, 3))


def loss_of(model, x):
    return model(x).float().square().mean()


def make(stage, model=None, **changes):
    model = model if model is not None else net()
    trained = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else None
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    zero = {"stage": stage, "unit_numel": 100, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 100, **{**changes, "zero_optimization": zero}))[0]


def run(engine, batches):
    for batch in batches:
        engine.backward(loss_of(engine, batch[rank]))
        engine.step()


def same_frozen(state, plain):
    for name, value in plain.state_dict().items():
        if name.endswith((".weight", ".scale")) and value.ndim == 2 and name != f"{len(plain) - 1}.weight":
            assert state[name].dtype == value.dtype, (name, state[name].dtype)
            assert state[name].view(torch.uint8).equal(value.view(torch.uint8)), name


def to_float(state):
    return {name: (value.real if value.is_complex() else value).float() for name, value in state.items()}


@each_stage
def they_keep_their_bits_and_train_as_in_plain_pytorch(stage):
    for changes in ({}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, **({"offload_param": {"device": "cpu"}} if stage == 3 else {})}}):
        plain = net()
        engine = make(stage, net(seed=0 if rank == 0 else 50), **changes)  # rank 0's values count
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        train_plainly(plain, optimizer, BATCHES, loss_of)
        run(engine, BATCHES)
        state = engine.state_dict()
        same_frozen(state, plain)
        assert largest_difference(to_float(state), to_float(plain.state_dict())) < 1e-5
        assert engine.measured_bytes() == engine.formula_bytes()
        engine.destroy()
        same_frozen(dict(engine.module.state_dict()), plain)
    whole, here = (make(s).measured_bytes()["parameters"] for s in (0, stage))
    assert stage < 3 or here < whole / world + 4096, (here, whole)


@each_stage
def of_a_function_that_makes_the_model(stage):
    engine = make(stage, net)
    same_frozen(engine.state_dict(), net())


@each_stage
def checkpoints_and_files_have_them(stage):
    folder = tessera.comm.all_gather(tempfile.mkdtemp(prefix="tessera_frozen_") if rank == 0 else "")[0]
    engine = make(stage)
    run(engine, BATCHES[:2])
    engine.save_checkpoint(folder, tag="a")
    other = make((stage + 2) % 4, net(seed=9))
    other.load_checkpoint(folder, tag="a")
    for e in (engine, other):
        run(e, BATCHES[2:])
    same_frozen(other.state_dict(), net())
    assert largest_difference(to_float(engine.state_dict()), to_float(other.state_dict())) == 0
    path = os.path.join(folder, "model.pt")
    engine.save_model(path)
    third = make(stage, net(seed=20))
    third.load_weights(path)
    same_frozen(third.state_dict(), net())
    same_frozen(torch.load(path, weights_only=True), net())
    tessera.comm.barrier("files were read")


@each_stage
def they_are_written_inside_of_gathered_parameters(stage):
    """As peft's merge_adapter() does."""
    engine = make(stage)
    with tessera.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        if rank == 0:
            engine.module[0].weight.add_(1)
            engine.module[6].weight.copy_(torch.full((12, 12), 0.5).to(torch.float8_e4m3fn))
    state = engine.state_dict()
    assert state["0.weight"].equal(net()[0].weight + 1) and (state["6.weight"].float() == 0.5).all()
    run(engine, BATCHES[:1])


main()
