"""One rank: modules that `tessera.initialize(model=callable)` makes have the values, and the generators the state, of ordinary making."""
import ctypes
import random

import numpy as np
import tessera
import torch
from checks import STAGES, check, config, main, raises
from torch import nn


class Counting(tessera.Engine):
    """Keeps (made whole, recorded, run, drawn)."""

    def __init__(self, *args, deferred):
        super().__init__(*args, deferred=deferred)
        self.counts = deferred.counts


class Net(nn.Module):
    """Many kinds of layers, an initialisation of its own, a buffer and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(600, 128, padding_idx=0)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.lstm = nn.LSTM(128, 40)
        self.convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Linear(128, 600, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.ones(300, 300).tril())
        self.positions = torch.arange(50).unsqueeze(0)
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Normed(nn.Module):
    """Initialisers, and layers that compute with parameters, which autograd has to see."""

    def __init__(self):
        super().__init__()
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(400, 300), std=0.02))
        self.orthogonal = nn.init.orthogonal_(nn.Parameter(torch.empty(300, 280)))
        self.sixteen_bits = nn.Parameter(torch.randn(300, 300).bfloat16())
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(300, 280))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(300, 280))


class Lists(nn.Module):
    """Reads values in another way than by operators."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(300, 300)
        self.weight = nn.Parameter(weight * weight[0].tolist()[0])


def compare(make, stage, seed_more=lambda: None):
    """The engine, of which everything was compared."""
    seed_more()
    torch.manual_seed(3)
    plain = make()
    state = torch.get_rng_state()
    seed_more()
    torch.manual_seed(3)
    engine, *_ = tessera.initialize(model=make, engine_class=Counting, config=config(
        stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    assert torch.equal(torch.get_rng_state(), state)
    assert type(engine.module) is make
    for name, expected in plain.named_parameters():
        assert torch.equal(engine.full_parameter(name), expected.float()), name
    for name, expected in plain.named_buffers():
        assert torch.equal(engine.module.get_buffer(name), expected), name
    return engine, plain


class Scaled(nn.Module):
    """Values that are read by operators while the model is made, and used by others afterwards."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(300, 300)
        self.scaled = nn.Parameter(weight * weight[0, 0].item())
        self.moved = nn.Parameter(weight + 1)
        small = torch.rand(20)
        self.first = nn.Parameter(small * torch.rand(20) * small.sum().item())
        small[3:5].uniform_()
        self.second = nn.Parameter(small)


@check
def same_bits():
    for stage in STAGES:
        engine, plain = compare(Net, stage)
        assert torch.equal(engine.module.positions, plain.positions)
        assert engine.module.head.weight is engine.module.table.weight
        whole, recorded, run, drawn = engine.counts
        assert not whole and recorded > 0, engine.counts
        assert (run > 0, drawn > 0) == (engine.global_rank == 0, engine.global_rank == 0), engine.counts


@check
def values_that_are_computed_with():
    engine, _ = compare(Normed, 3)
    assert not engine.counts[0] and engine.counts[2] > 0, engine.counts


@check
def values_that_are_read_by_operators():
    for stage in (0, 3):
        compare(Scaled, stage)


@check
def values_that_are_read():
    engine, _ = compare(Lists, 3)
    assert engine.counts[0]


class Numpy(nn.Module):
    """Memory that numpy writes: one buffer for all layers, and arrays over parameters."""

    def __init__(self):
        super().__init__()
        buffer = np.empty((300, 300), np.float32)
        self.layers = nn.ModuleList()
        for read in (torch.from_numpy, torch.as_tensor, torch.from_dlpack, lambda array: torch.frombuffer(array.data, dtype=torch.float32)):
            layer = nn.Linear(300, 300)
            buffer[:] = np.random.standard_normal((300, 300))
            layer.weight.data.copy_(read(buffer).view(300, 300))
            buffer[:] = 7
            self.layers.append(layer)
        self.small = nn.Parameter(torch.zeros(100))
        array = self.small.detach().numpy()
        nn.init.normal_(self.small)
        array *= 0.1
        self.std = float(array.std())
        storage = nn.Parameter(torch.zeros(50))
        pointer = ctypes.cast(storage.untyped_storage().data_ptr(), ctypes.POINTER(ctypes.c_float))
        nn.init.uniform_(storage)
        pointer[3] = 5.0
        self.storage = storage
        self.last = nn.Parameter(torch.randn(300, 300))


class States(nn.Module):
    """Reads the states of generators, and goes on from them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(300, 300)
        self.seed = torch.initial_seed()
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        self.second = nn.Parameter(torch.randn(300, 300, generator=generator))
        self.cloned = nn.Parameter(torch.randn(300, 300, generator=torch.default_generator.clone_state()))
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + 1)
            self.forked = nn.Linear(300, 300)
        self.states = [torch.default_generator.get_state(), generator.get_state()]
        np.random.seed(torch.initial_seed() % 2 ** 32)
        self.numbers = nn.Parameter(torch.from_numpy(np.random.standard_normal((300, 300)).astype(np.float32)))
        self.after = nn.Linear(300, 300)
        self.states.append(torch.random.get_rng_state())


class Drawing(nn.Module):
    """Draws from the generators of Python and numpy before it is made a second time."""

    def __init__(self):
        super().__init__()
        self.rate = random.random()
        self.weight = nn.Parameter(torch.from_numpy(np.random.standard_normal((300, 300)).astype(np.float32)))
        self.noise = nn.Parameter(torch.randn(300, 300))
        self.largest = float(self.noise.detach().numpy().max())


def seed_others():
    random.seed(5)
    np.random.seed(5)


def others_drew():
    return random.random(), np.random.random()


@check
def memory_that_numpy_writes():
    engine, plain = compare(Numpy, 3, seed_others)
    assert not engine.counts[0]
    assert engine.module.std == plain.std


@check
def states_of_generators():
    engine, plain = compare(States, 3, seed_others)
    assert not engine.counts[0]
    assert engine.module.seed == plain.seed == 3
    for ours, expected in zip(engine.module.states, plain.states):
        assert torch.equal(ours, expected)


@check
def made_twice():
    engine, plain = compare(Drawing, 3, seed_others)
    assert engine.counts[0]
    assert (engine.module.rate, engine.module.largest) == (plain.rate, plain.largest)
    ours = others_drew()
    seed_others()
    Drawing()
    assert ours == others_drew()


@check
def interrupted():
    """Ctrl-C in a constructor ends it, and does not have it called once more."""
    calls = []

    def make():
        calls.append(1)
        raise KeyboardInterrupt

    try:
        tessera.initialize(model=make, config=config(0))
    except KeyboardInterrupt:
        assert calls == [1]
    else:
        raise AssertionError("no KeyboardInterrupt")


@check
def mistakes():
    def fails():
        raise ValueError("no such size")

    raises(ValueError, lambda: tessera.initialize(model=fails, config=config(0)), "no such size")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=lambda: 3, config=config(0)), "expected a torch.nn.Module")


main()
