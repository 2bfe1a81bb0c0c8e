"""Every argument that a call accepts counts, or is refused by name on all ranks alike: checkpoints, client state, the group, loaders."""
import collections
import copy
import io
import os
import pickle
import random
from pathlib import Path

import numpy as np
import tessera
import torch
from checks import STAGES, check, config, folder, main, raises, standard_error, train
from torch import nn

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20, "warmup_max_lr": 0.01, "warmup_type": "linear"}}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 8))


def make(stage, model=None, **changes):
    changes.setdefault("optimizer", ADAM)
    return tessera.initialize(model=model or mlp(), config=config(stage, 300, **changes))[0]


def steps(engine, numbers):
    batches = [[torch.randn(2, 8, generator=torch.Generator().manual_seed(number * world + r)) for r in range(world)] for number in numbers]
    return train(engine, batches, lambda module, x: module(x).square().mean())


# ------------------------------------------------------------------------------------------------- folders and tags


@check
def a_tag_is_what_str_says_and_zero_is_one():
    for stage in STAGES:
        place, engine, weights = folder(), make(stage), {}
        for tag in (0, 1, "two", Path("three"), np.int64(4), 0.5):
            steps(engine, [len(weights)])
            weights[tag] = engine.full_parameter("0.weight")
            assert Path(engine.save_checkpoint(place, tag=tag)) == place / str(tag), tag
        for tag, value in weights.items():
            path, _ = engine.load_checkpoint(place, tag=tag)
            assert Path(path) == place / str(tag) and engine.full_parameter("0.weight").equal(value), tag
        engine.save_checkpoint(place, tag="probe", save_latest=False)
        assert (place / "latest").read_text() == "0.5\n" and (place / "probe").exists()
        other = folder()
        engine.save_checkpoint(other, "only", save_latest=False)
        raises(tessera.CheckpointError, lambda e=engine, o=other: e.load_checkpoint(o), "\"latest\"")


@check
def folders_and_tags_that_cannot_be_are_refused_on_all_ranks():
    engine = make(3)
    steps(engine, [0])
    place = folder()
    engine.save_checkpoint(place)
    before = sorted(os.listdir("."))
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        for value in (None, ""):
            raises(ValueError, lambda c=call, v=value: c(v), "expected a folder")
        raises(TypeError, lambda c=call: c(5), "_dir is 5", "expected a str or Path")
        raises(ValueError, lambda c=call: c("a\0b"), "NUL")
        raises(ValueError, lambda c=call: c(place, ""), "tag is ''")
        for tag in (True, b"x", [1], torch.ones(())):
            raises(TypeError, lambda c=call, t=tag: c(place, t), "tag is")
        raises(tessera.CheckpointError, lambda c=call: c(place, "a/b"), "'a/b'", "without /")
        raises(tessera.CheckpointError, lambda c=call: c(place, "a\x1b[31mb"), "'a\\x1b[31mb'")
        raises(tessera.CheckpointError, lambda c=call: c(place, ".."), "'..'")
        raises(tessera.CheckpointError, lambda c=call: c(place, "latest"), "latest")
    assert sorted(os.listdir(".")) == before and not Path("None").exists()
    if world > 1:  # one rank alone
        raises(ValueError, lambda: engine.save_checkpoint(None if rank == 1 else place), "rank 1: save_dir is None")
        raises(tessera.Error, lambda: engine.save_checkpoint(place, tag=rank), "tag is '1' on rank 1, but '0' on rank 0")
        raises(tessera.Error, lambda: engine.load_checkpoint(place, load_module_strict=rank == 0), "load_module_strict is False on rank 1")
        raises(tessera.CheckpointError, lambda: engine.save_checkpoint(place, "t", save_latest=rank == 0), "save_latest false on rank 1")
    steps(engine, [1])


# ------------------------------------------------------------------------------------------------- what is loaded


@check
def optimizer_states_and_schedule_are_loaded_or_stay():
    for stage in STAGES:
        place, first = folder(), make(stage, scheduler=WARMUP)
        steps(first, range(6))
        first.save_checkpoint(place)
        lr = first.get_lr()
        assert lr[0] not in (0.003, 0.0)
        # Fine-tuning with another rate and decay, without the old moments.
        plain = make(stage, mlp(3), optimizer={"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.5}})
        plain.load_checkpoint(place, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert plain.get_lr() == [0.003] and plain.optimizer.param_groups[0]["weight_decay"] == 0.5
        fresh = make(stage, mlp(3), optimizer={"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.5}})
        fresh.load_checkpoint(place, load_module_only=True)
        assert fresh.get_lr() == [0.003] and fresh.global_steps == 0 and plain.global_steps == 6
        assert steps(plain, range(6, 8)) == steps(fresh, range(6, 8))
        only_optimizer = make(stage, mlp(3), optimizer={"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.5}})
        only_optimizer.load_checkpoint(place, load_lr_scheduler_states=False)
        # It has no schedule, so its rate is a value of its param group, as in torch and in DeepSpeed.
        assert only_optimizer.get_lr() == lr and only_optimizer.optimizer.param_groups[0]["weight_decay"] == 0.1
        # Everything: the rate is the checkpoint's.
        whole = make(stage, mlp(3), scheduler=WARMUP)
        whole.load_checkpoint(place)
        assert whole.get_lr() == lr and steps(whole, range(6, 8)) == steps(first, range(6, 8))
        # A new schedule begins at its beginning, and its place is saved.
        anew = make(stage, mlp(3), scheduler=WARMUP)
        anew.load_checkpoint(place, load_lr_scheduler_states=False)
        assert anew.get_lr() == [0.0] and anew.global_steps == 6 and anew.lr_scheduler.last_epoch == 0
        reference = make(stage, mlp(4), scheduler=WARMUP)
        assert steps(anew, [6, 7]) and steps(reference, [6, 7])
        assert anew.get_lr() == reference.get_lr() and anew.get_lr()[0] > 0 and anew.lr_scheduler.last_epoch == 2 and anew.global_steps == 8
        state = anew.lr_scheduler.state_dict()
        anew.lr_scheduler.step(7)
        steps(reference, range(5))
        assert anew.get_lr() == reference.get_lr() and anew.lr_scheduler.last_epoch == 7
        anew.lr_scheduler.load_state_dict(state)
        assert anew.lr_scheduler.last_epoch == 2


@check
def a_scheduler_of_torch_is_loaded_or_stays():
    def made(stage):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5], gamma=0.1)  # milestones: a Counter of int
        return tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage, 300))[0]

    for stage in STAGES:
        place, first = folder(), made(stage)
        steps(first, range(3))
        first.save_checkpoint(place)
        resumed = made(stage)
        resumed.load_checkpoint(place)
        assert resumed.lr_scheduler.state_dict() == first.lr_scheduler.state_dict() and resumed.get_lr() == first.get_lr()
        kept = made(stage)
        kept.load_checkpoint(place, load_lr_scheduler_states=False)
        assert kept.get_lr() == [1.0] and kept.lr_scheduler.last_epoch == 0 and kept.global_steps == 3
        plain = make(stage)
        steps(plain, [0])
        plain.save_checkpoint(place, "plain")
        with standard_error() as said:
            made(stage).load_checkpoint(place, "plain", load_optimizer_states=False)
        assert ("has no state of a scheduler" in said[0]) == (rank == 0), said


@check
def a_load_that_is_not_strict_says_what_was_left_out():
    for stage in STAGES:
        place, first = folder(), make(stage)
        steps(first, [0])
        first.save_checkpoint(place)
        torch.manual_seed(5)
        wider = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 9), nn.BatchNorm1d(9))
        engine = make(stage, wider)
        before = engine.full_parameter("2.bias")
        raises(tessera.CheckpointError, lambda e=engine, p=place: e.load_checkpoint(p), "2.weight", "load_module_strict=False")
        with standard_error() as said:
            engine.load_checkpoint(place, load_module_strict=False)
        for part in ("load_module_strict=False", "2.weight: [8, 96] in the checkpoint, [9, 96] in the model", "3.weight: not in the checkpoint",
                     "buffer 3.running_mean: not in the checkpoint"):
            assert (part in said[0]) == (rank == 0), (part, said[0])
        assert engine.full_parameter("0.weight").equal(first.full_parameter("0.weight")) and engine.full_parameter("2.bias").equal(before)
        raises(NotImplementedError, lambda e=first, p=place: e.load_checkpoint(p, custom_load_fn=lambda src, dst: None), "custom_load_fn")


@check
def frozen_parameters_are_left_out_where_asked():
    """What the files have then, and what is loaded of them: tests/engine/checkpoint/checkpoint_load_test.cc."""
    for stage in STAGES:
        place, model = folder(), mlp()
        model[0].requires_grad_(False)
        engine = make(stage, model)
        steps(engine, range(2))
        engine.save_checkpoint(place, "small", exclude_frozen_parameters=True)
        engine.save_checkpoint(place, "whole")
        names = [[name for name in ("0.weight", "2.weight") if f'"{name}"' in (place / tag / "manifest.json").read_text()] for tag in ("small", "whole")]
        assert names == [["2.weight"], ["0.weight", "2.weight"]], names
        other = make(stage, mlp(4))
        steps(other, range(3))
        before = other.optimizer.state[other.module[0].weight]
        other.load_checkpoint(place, "whole", load_module_strict=False)
        after = other.optimizer.state[other.module[0].weight]
        assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before), "it has none in the checkpoint"


# --------------------------------------------------------------------------------------------------- client state

NO_DENSE_TENSORS = [*([torch.ones(2, names=("a",))] if hasattr(torch.Tensor, "has_names") else []), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
                    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(2, device="meta"), torch.ones(2).to_sparse(),
                    torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)]

VALUES = {
    "plain": [None, True, 0, -5, 2 ** 53 + 1, -2 ** 63, 2 ** 63 - 1, 0.1, -0.0, 5.0, 1e16, 5e-324, 1.7976931348623157e308, "", "ä\0\n\"\\", {"a": {}}],
    "large": [2 ** 63, -2 ** 200, 10 ** 30],
    "not finite": [float("inf"), float("-inf")],
    "surrogate": ["\ud800x", {"\udfff": 1}],
    "tuples": (1, (2, [3, (4,)]), ()),
    "keys": {0: "a", (1, 2): "b", None: "c", 2.5: "d", True: "e", b"x": "f"},
    "marked": {"$tessera": "tuple", "value": [1]},
    "sets": [{1, 2, "x"}, set(), frozenset({(1, 2)})],
    "bytes": [b"\0\xff", bytearray(b"ab"), b""],
    "complex": [1 + 2j, complex(0.1, -0.0)],
    "kept order": collections.OrderedDict([("z", 1), ("a", (2,))]),
    "counter": collections.Counter({30: 1, 60: 2}),
    "numpy": [np.float32(0.1), np.float64(0.1), np.int64(7), np.bool_(True), np.str_("x"), np.complex64(1 + 2j), np.datetime64("2020-01-01")],
    "numpy's text": [np.bytes_(b"ab\0"), np.bytes_(b""), np.str_("ab\0"), np.str_(""), np.str_("\ud800")],
    "random": random.Random(3).getstate(),
    "torch's": [torch.float16, torch.Size([1, 2]), torch.arange(3).to(torch.uint16)],
}


def assert_same(a, b, path="value"):
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, dict):
        assert len(a) == len(b) and {(type(k), k) for k in a} == {(type(k), k) for k in b}, (path, a, b)
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8)) if a.dim() else a.item() == b.item(), path
    elif isinstance(a, (np.str_, np.bytes_)):
        assert list(a) == list(b), path  # NUL at the end, too: numpy's own comparison leaves it out
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b), path
    elif isinstance(a, float):
        assert a.hex() == b.hex(), path
    else:
        assert a == b, path


@check
def a_client_state_comes_back_as_it_was():
    place, engine = folder(), make(3)
    steps(engine, [0])
    state = {**VALUES, "torch": [torch.get_rng_state(), torch.randn(2, 3).bfloat16(), torch.zeros(0, 4), torch.tensor(3), torch.tensor([True]),
                                 torch.randn(4, 6).t()[1:]],
             "numpy state": list(np.random.RandomState(1).get_state()), "arrays": [np.arange(6.0).reshape(2, 3)[:, 1:], np.zeros((0, 2), "int8")]}
    engine.save_checkpoint(place, client_state=copy.deepcopy(state))
    _, found = engine.load_checkpoint(place)
    state["torch"][-1] = state["torch"][-1].contiguous()
    assert_same(found, state)
    assert list(found["kept order"]) == ["z", "a"]
    for i, value in enumerate(([1, (2,)], (1, 2), "text", 7, {"a": 1}, {}, False)):
        engine.save_checkpoint(place, f"one{i}", client_state=value)
        assert_same(engine.load_checkpoint(place, f"one{i}")[1], value)
    engine.save_checkpoint(place, "none")
    assert engine.load_checkpoint(place, "none")[1] == {}
    nan = engine.save_checkpoint(place, "nan", client_state={"x": (float("nan"),)}) and engine.load_checkpoint(place, "nan")[1]["x"][0]
    assert nan != nan and type(nan) is float
    for value in VALUES.values():
        for other in tessera.comm.all_gather(value):
            assert_same(other, value)


@check
def a_client_state_that_would_not_come_back_is_refused_by_name():
    class Derived(dict):
        pass

    place, engine = folder(), make(0)
    steps(engine, [0])
    cycle = []
    cycle.append(cycle)
    for value, part in (({"a": [1, {"b": object()}]}, "client_state['a'][1]['b'] is of type builtins.object"), ({"x": Derived()}, "Derived"),
                        ({"p": nn.Parameter(torch.ones(2))}, "client_state['p']"), ({"t": torch.ones(2, requires_grad=True)}, "detach()"),
                        ({"big": torch.zeros(2 << 20)}, "8388608 bytes"), ({"s": torch.ones(2).to_sparse()}, "client_state['s']"),
                        ({"path": Path("x")}, "client_state['path']"), ({"c": cycle}, "levels deep"), (lambda: 0, "client_state is of type"),
                        ({"o": np.array([object()])}, "client_state['o']"), ({(1, object()): 2}, "the key (1, <object"),
                        ({"m": np.matrix([1])}, "client_state['m'] is of type numpy.matrix"), ({"r": np.rec.array([(1,)])}, "client_state['r']"),
                        *(({"t": tensor}, "client_state['t'] is ") for tensor in NO_DENSE_TENSORS)):
        text = raises(tessera.Error, lambda v=value: engine.save_checkpoint(place, client_state=v), part)
        assert isinstance(text, str) and "save_checkpoint()" in text
        raises(TypeError, lambda v=value: engine.save_checkpoint(place, client_state=v))
    assert os.listdir(place) == []
    if world > 1:
        raises(TypeError, lambda: engine.save_checkpoint(place, client_state=object() if rank == 1 else 0), "rank 1: client_state")
        for tensor in NO_DENSE_TENSORS:
            raises(TypeError, lambda t=tensor: engine.save_checkpoint(place, client_state=t if rank == 1 else 0), "rank 1: client_state is ")
        raises(TypeError, lambda: tessera.comm.all_gather(object() if rank == 1 else 0), "rank 1's value")
    assert os.listdir(place) == []


# --------------------------------------------------------------------------------------------- the step and the model


@check
def backward_returns_the_loss_that_counts():
    for stage in STAGES:
        engine = make(stage, gradient_accumulation_steps=4)
        x = torch.ones(2, 8)
        loss = engine(x).square().mean()
        assert engine.backward(loss).item() == loss.item() / 4
        loss = engine(x).square().mean()
        assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
        single = make(stage)
        loss = single(x).square().mean()
        assert single.backward(loss).item() == loss.item()


@check
def state_dict_has_torchs_arguments():
    engine = make(3)
    expected = engine.state_dict()
    assert list(engine.state_dict(prefix="m.")) == [f"m.{name}" for name in expected]
    mine = {}
    assert engine.state_dict(mine) is mine and mine.keys() == expected.keys()
    raises(ValueError, lambda: engine.state_dict(keep_vars=True), "keep_vars")
    raises(ValueError, lambda: engine.state_dict(only_rank=world), "only_rank")


@check
def other_data_or_another_seed_on_one_rank_is_an_error_on_all():
    """They decide the order of the samples: some would be taken twice, and others never."""
    def given(length=12 * world, **changes):
        data = None if length is None else torch.utils.data.TensorDataset(torch.arange(length))
        return lambda: tessera.initialize(model=mlp(), training_data=data, config=config(1, optimizer=ADAM, **changes))

    loader = given()()[2]
    seen = sum(tessera.comm.all_gather([number for (batch,) in loader for number in batch.tolist()]), [])
    assert sorted(seen) == list(range(12 * world)), seen
    if world > 1:
        raises(tessera.Error, given(seed=42 + rank), "initialize(): seed is 43 on rank 1, but 42 on rank 0")
        raises(tessera.Error, given(12 * world + rank), f"initialize(): len(training_data) is {12 * world + 1} on rank 1, but {12 * world} on rank 0")
        raises(tessera.Error, given(None if rank == 1 else 12), "len(training_data) is None on rank 1, but 12 on rank 0")
        raises(tessera.ConfigError, given(1 if rank == 1 else 12 * world), "initialize(): rank 1: ")
    given(None, seed=42 + rank)()  # no loader has it


@check
def a_loader_takes_what_torchs_takes_and_its_seed_is_loaded():
    data = torch.utils.data.TensorDataset(torch.arange(16 * world))
    raises(TypeError, lambda: tessera.DataLoader(data, 2, shuffle=True), "shuffle")
    raises(TypeError, lambda: tessera.DataLoader(data, 2, num_wrokers=1), "num_wrokers", "num_workers")
    raises(TypeError, lambda: tessera.DataLoader(data, 2, num_workers=2, in_order=False), "in_order", "expected True")
    raises(tessera.ConfigError, lambda: tessera.DataLoader(data, 17), f"has {16 * world} samples, and a step takes {17 * world} over all ranks")
    first, second = tessera.DataLoader(data, 2, seed=1), tessera.DataLoader(data, 2, seed=2)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert [b[0].tolist() for b in second] == [b[0].tolist() for b in batches]
    assert first.epoch == second.epoch == 1
    batches = iter(tessera.DataLoader(data, 2, seed=1, in_order=True)), iter(first)
    for rolled_back in (False, True, False):  # a checkpoint is loaded inside of a loop, which goes on
        next(batches[1])
        if rolled_back:
            first.load_state_dict({"epoch": 5, "samples_into_epoch": 0})
    assert first.state_dict() == {"epoch": 1, "samples_into_epoch": 6 * world, "seed": 1}
    assert len(list(batches[1])) == 5 and first.epoch == 2 and len(list(batches[0])) == 8


@check
def a_loader_that_has_less_than_a_step_left_goes_to_the_next_epoch():
    data = torch.utils.data.TensorDataset(torch.arange(25 * world))
    first = tessera.DataLoader(data, 2, accumulation_steps=1)
    batches = iter(first)
    for _ in range(11):
        next(batches)
    assert first.state_dict()["samples_into_epoch"] == 22 * world
    for second, per_epoch in ((tessera.DataLoader(data, 2, accumulation_steps=2), 12),
                              (tessera.DataLoader(torch.utils.data.TensorDataset(torch.arange(9 * world)), 2), 4)):
        second.load_state_dict(first.state_dict())
        assert [len(list(second)) for _ in range(3)] == [per_epoch] * 3 and second.epoch == 4


def refused(kind, call, *parts):
    """The error is one line."""
    assert "\n" not in raises(kind, call, *parts)


@check
def arguments_of_other_types_are_refused_in_one_line():
    engine, place = make(0), folder()
    steps(engine, [0])
    surrogate = "\udc80"
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        refused(ValueError, lambda c=call: c(place, surrogate), "tag is '\\udc80'")
        refused(ValueError, lambda c=call: c(surrogate), "_dir is '\\udc80'")
    refused(TypeError, lambda: engine.save_checkpoint(place, save_latest="x"), "save_latest is 'x' (a str)")
    refused(TypeError, lambda: engine.load_checkpoint(place, load_module_only="x"), "load_module_only is 'x'")
    for call in (engine.full_parameter, engine.full_gradient):
        refused(TypeError, lambda c=call: c(None), "name is None", "expected a str")
    for call in (engine.save_model, engine.load_weights):
        refused(TypeError, lambda c=call: c(None), "path is None")
        refused(ValueError, lambda c=call: c(surrogate), "path is '\\udc80'")
        refused(ValueError, lambda c=call: c("a\0.pt"), "NUL")
    for name in ("ignore_missing", "ignore_unexpected"):
        refused(TypeError, lambda n=name: engine.load_weights("x.safetensors", **{n: "2.bias*"}), f"{name} is '2.bias*'", "give ['2.bias*']")
        refused(TypeError, lambda n=name: engine.load_weights("x.safetensors", **{n: [1]}), f"{name}[0] is 1")
    loss = engine(torch.ones(2, 8)).sum()
    refused(TypeError, lambda: engine.backward(loss, scale_wrt_gas="x"), "scale_wrt_gas is 'x'")
    refused(TypeError, lambda: engine.set_gradient_accumulation_boundary("x"), "is_boundary is 'x'")
    refused(TypeError, lambda: engine.zero_grad(set_to_none="x"), "set_to_none is 'x'")
    refused(TypeError, lambda: engine.train("x"), "mode is 'x'")
    refused(TypeError, lambda: engine.state_dict(only_rank="x"), "only_rank is 'x'")
    engine.backward(loss)
    for value in ("x", None, [1], 1j, 10 ** 400):
        engine.optimizer.param_groups[0]["lr"] = value
        refused(tessera.ConfigError, engine.step, "optimizer.param_groups[0]: lr", "expected a number")
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    engine.step()
    rates = engine.get_lr()
    engine.optimizer.param_groups[0]["lr"].mul_(2)
    assert rates == [torch.tensor(0.01).item()] and type(rates[0]) is float, rates
    for arguments, part in (({"seed": -1}, "seed is -1"), ({"seed": "x"}, "seed is 'x'"), ({"accumulation_steps": 0}, "accumulation_steps is 0"),
                            ({"micro_batch_size": 0}, "micro_batch_size is 0"), ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5"),
                            ({"accumulation_steps": True}, "accumulation_steps is True")):
        refused((TypeError, ValueError), lambda a=arguments: tessera.DataLoader([1, 2, 3, 4] * world, **{"micro_batch_size": 1, **a}), part)
    loader = tessera.DataLoader([1, 2, 3, 4] * world, 1)
    refused(TypeError, lambda: loader.set_epoch("x"), "epoch is 'x'")
    refused(ValueError, lambda: loader.load_state_dict({"epoch": -1, "samples_into_epoch": 0}), "epoch is -1")
    refused(ValueError, lambda: tessera.initialize(model=mlp(), config=surrogate), "config is '\\udc80'")
    refused(TypeError, lambda: tessera.initialize(model=mlp(), config=config(0), distributed_port="x"), "distributed_port is 'x'")
    refused(TypeError, lambda: tessera.estimate(mlp(), world=1.5), "world is 1.5")
    refused(ValueError, lambda: tessera.estimate(mlp(), config=surrogate), "config is")
    refused(tessera.ConfigError, lambda: tessera.estimate(mlp(), config=5), "config is 5")
    refused(tessera.ConfigError, lambda: tessera.estimate(mlp(), config={"seed": {1}}), "config: seed is {1} (a set)")
    refused(tessera.ConfigError, lambda: tessera.estimate("x"), "model is 'x'")
    refused(TypeError, lambda: tessera.launch(print, nproc=1.5), "nproc is 1.5")
    refused(TypeError, lambda: tessera.launch(print, args="abc"), "args is a str")
    refused(TypeError, lambda: tessera.GatheredParameters(engine.module, modifier_rank="x"), "modifier_rank is 'x'")
    hidden, weight, target = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1])
    refused(TypeError, lambda: tessera.chunked_cross_entropy(hidden, weight, [0, 1]), "target is a list")
    refused(TypeError, lambda: tessera.chunked_cross_entropy(hidden, weight, target, chunk_rows="x"), "chunk_rows is 'x'")
    for call in (lambda: tessera.comm.barrier(5), lambda: tessera.comm.all_gather(1, label=5), lambda: tessera.comm.all_reduce(1.0, label=5),
                 lambda: tessera.comm.broadcast(torch.ones(1), label=5)):
        refused(TypeError, call, "label is 5 (a int)")
    refused(TypeError, lambda: tessera.comm.broadcast(torch.ones(1), root="x"), "root is 'x'")
    refused(TypeError, lambda: tessera.comm.init_distributed(timeout_s="x"), "timeout_s is 'x'")
    steps(engine, [1])


@check
def tensors_that_cannot_be_sent_are_refused_on_all_ranks():
    comm = tessera.comm
    for dtype in (torch.int64, torch.bool):
        refused(TypeError, lambda d=dtype: comm.all_reduce(torch.ones(3, dtype=d)), f"the tensor is {dtype}", "op='sum'")
    assert comm.all_reduce(torch.full((3,), 2), op="sum").tolist() == [2 * world] * 3
    for call in (comm.all_reduce, comm.broadcast):
        for dtype in (torch.complex64, torch.uint16):
            refused(TypeError, lambda c=call, d=dtype: c(torch.ones(2, dtype=d)), f"the tensor is {dtype}")
        for tensor in NO_DENSE_TENSORS:
            refused(TypeError, lambda c=call, t=tensor: c(t), "tensor is a")
        refused(TypeError, lambda c=call: c(torch.ones(2, 3).t()), "contiguous")
    refused(ValueError, lambda: comm.all_reduce(10 ** 400), "tensor is 1000")
    for value in ("1", None, 1j, [1]):
        refused(TypeError, lambda v=value: comm.all_reduce(v), "tensor is")
    refused(TypeError, lambda: comm.broadcast(1.0), "tensor is 1.0")
    assert comm.all_reduce(1.0) == 1.0 and comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]


@check
def an_in_place_collective_is_a_change_for_autograd():
    comm = tessera.comm
    for call in (lambda h: comm.all_reduce(h), lambda h: comm.all_reduce(h, "sum"), lambda h: comm.broadcast(h)):
        x = torch.tensor([rank + 1.0], requires_grad=True)
        h = x * 1
        y = (h * h).sum()
        call(h.detach())
        if world > 1:
            raises(RuntimeError, y.backward, "modified by an inplace operation")
        else:  # nothing was written
            y.backward()


@check
def the_configurations_schedule_is_moved_to_what_can_be():
    engine = make(1, scheduler=WARMUP)
    schedule = engine.lr_scheduler
    for value, kind in ((-1, ValueError), (1.5, TypeError), ("x", TypeError), (10 ** 30, ValueError)):
        refused(kind, lambda v=value: schedule.step(v), "step(): epoch is")
        refused(kind, lambda v=value: schedule.load_state_dict({"last_epoch": v}), "last_epoch is")
    refused(tessera.ConfigError, lambda: schedule.load_state_dict({"num_steps": 3}), "has no last_epoch, but num_steps", "the engine's scheduler")
    schedule.step(3)
    assert schedule.last_epoch == 3
    steps(engine, range(1))
    optimizer = engine.optimizer
    assert len(optimizer.state) > 0
    del engine
    assert list(optimizer.state.items()) == []  # Lightning goes through them when it ends
    for call in (schedule.get_last_lr, schedule.state_dict, lambda: schedule.step(1), lambda: schedule.last_epoch):
        refused(tessera.Error, call, "the scheduler's engine is gone")


@check
def optimizers_and_parameters_that_are_none_are_refused():
    def given(**arguments):
        return lambda: tessera.initialize(config=config(0, optimizer=ADAM), **{"model": mlp(), **arguments})

    refused(tessera.ConfigError, given(optimizer=lambda parameters: None), "optimizer is a callable that made None")
    model = mlp()
    parameters = model.parameters()
    list(parameters)
    refused(tessera.ConfigError, given(model=model, model_parameters=parameters), "model_parameters is empty", "generator")
    refused(tessera.ConfigError, given(model=model, model_parameters=parameters, optimizer=lambda p: torch.optim.SGD(p, 0.1)), "model_parameters is empty")
    for value in ("abc", model[0].weight, 5):
        refused(tessera.ConfigError, given(model=model, model_parameters=value), "model_parameters is", "expected an iterable")
    frozen = mlp().requires_grad_(False)
    given(model=frozen, model_parameters=[])()


@check
def arguments_of_initialize_count_or_are_refused():
    class Args:
        local_rank = tessera.comm.get_local_rank()

    def given(**arguments):
        return lambda: tessera.initialize(model=mlp(), **{"config": config(0, optimizer=ADAM), **arguments})

    wrong = Args()
    wrong.local_rank = 7
    raises(tessera.ConfigError, given(args=wrong), "args.local_rank is 7")
    Args.deepspeed_config = None
    given(args=Args())()
    Args.deepspeed_config = config(0)
    raises(tessera.ConfigError, given(args=Args()), "several configs")
    raises(tessera.ConfigError, given(config_params=config(0)), "several configs")
    given(args=Args(), config=None)()
    raises(tessera.ConfigError, given(collate_fn=list), "collate_fn", "training_data")
    for name in ("mpu", "mesh_param"):
        raises(tessera.ConfigError, given(**{name: 1}), name)
    raises(tessera.ConfigError, given(distributed_port=99999), "distributed_port is 99999")
    given(dist_init_required=False)()  # the group is there
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tessera.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config(0))
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=optimizer, config=config(0),
                                                           model_parameters=[{"params": list(model.parameters()), "lr": 0.5}]), "lr=0.5")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=optimizer, config=config(0),
                                                           model_parameters=[nn.Parameter(torch.ones(1))]), "not a parameter of the model")
    table = tessera.estimate(mlp(), world=2, config={"bf16": {"enabled": True}})
    path = folder() / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    tessera.comm.barrier()
    assert tessera.estimate(mlp(), world=2, config=path) == table
    assert tessera.estimate(mlp(), world=2, config={"bf16": {"enabled": True}, "train_batch_size": 64, "gradient_accumulation_steps": 2}) == table
    raises(tessera.ConfigError, lambda: tessera.estimate(mlp(), world=0), "world is 0")
    raises(ValueError, lambda: tessera.launch(print, nproc=0), "nproc is 0")


@check
def a_second_call_for_the_group_may_not_ask_for_another():
    joined = tessera.comm.init_distributed()
    assert tessera.comm.init_distributed(timeout_s=60) is joined
    if world > 1:
        raises(tessera.CommError, lambda: tessera.comm.init_distributed(timeout_s=5), "timeout_s=5")
        raises(tessera.CommError, lambda: tessera.comm.init_distributed(backend="nccl"), "backend='nccl'")
    other = "cpu" if joined.device.type == "cuda" else "cuda"
    raises(tessera.CommError, lambda: tessera.comm.init_distributed(device=other), f"device='{other}'")
    for value in (0, -1, float("nan"), float("inf"), 9e15):
        raises(ValueError, lambda v=value: tessera.comm.init_distributed(timeout_s=v), "timeout_s is", "seconds from")
    raises(ValueError, lambda: tessera.comm.init_distributed(backend="mpi"), "backend is 'mpi'")
    raises(ValueError, lambda: tessera.comm.broadcast(torch.ones(1), root=world), "root is")
    raises(ValueError, lambda: tessera.comm.all_reduce(1.0, op="max"), "op is 'max'")


@check
def what_is_not_said_is_said_and_what_cannot_be_is_refused():
    """No optimizer, monitors that are not here, sections of another program, a scheduler that no checkpoint could have, copies."""
    def make(**given):
        with standard_error() as said:
            engine = tessera.initialize(model=mlp(), **given)[0]
        return engine, said[0]

    line = "no optimizer was given: AdamW with lr 0.001"
    for changes, expected in (({}, True), ({"optimizer": {}}, True), ({"optimizer": ADAM}, False)):
        engine, said = make(config=config(1, **changes))
        assert (line in said) == (expected and rank == 0), said
    assert line not in make(config=config(1), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))[1]
    engine, said = make(config={**config(1), "wandb": {"enabled": True, "project": "p"}, "comet": {"enabled": True}}, overrides=["steps_per_print=5"])
    assert rank != 0 or "no effect in Tessera: comet, wandb" in said, said
    assert engine.config["steps_per_print"] == 5
    raises(tessera.ConfigError, lambda: make(config={**config(1), "comm": {"backend": "gloo"}}), "config:1: comm", "tessera.comm.init_distributed()")
    path = folder() / "ds.hjson"
    path.write_text("# Hjson\ntrain_micro_batch_size_per_gpu: 2\noptimizer: {\n type: AdamW\n params: {lr: 0.25,}}\nzero_optimization: {stage: 2}")
    tessera.comm.barrier()
    assert make(config=path)[0].get_lr() == [0.25]

    class Held:
        def __init__(self, state):
            self.state = state

        def step(self):
            pass

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            assert same_queue(state["queue"])

    queue = collections.deque([torch.ones(2), ({"x": collections.defaultdict(list, {1: [2]})},)], maxlen=5)

    def same_queue(found):
        return found.maxlen == 5 and found[0].equal(queue[0]) and found[1] == queue[1] and type(found[1][0]["x"]) is collections.defaultdict

    raises(tessera.ConfigError, lambda: make(config=config(1), lr_scheduler=lambda _: Held({"at": [object()]})), "lr_scheduler.state_dict()['at'][0]")
    raises(tessera.ConfigError, lambda: make(config=config(1), lr_scheduler=lambda _: type("Bare", (), {"step": Held.step})()), "no state_dict()")
    engine, _ = make(config=config(2), lr_scheduler=lambda _: Held({"queue": queue}), optimizer=lambda p: torch.optim.AdamW(p))
    place = folder()
    engine.save_checkpoint(place, client_state={"queue": queue})
    assert same_queue(engine.load_checkpoint(place)[1]["queue"])

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(3))
    configured = tessera.initialize(model=mlp(), config=config(1, optimizer=ADAM, scheduler=WARMUP))[0]
    for one, instead in ((engine, "engine.save_checkpoint(folder)"), (ours, "optimizer.state_dict()"), (optimizer, "optimizer.state_dict()"),
                         (schedule, "scheduler.state_dict()"), (configured.lr_scheduler, "scheduler.state_dict()")):
        for call in (pickle.dumps, copy.deepcopy, copy.copy, lambda value: torch.save(value, io.BytesIO())):
            if not (one is optimizer and call is copy.copy):
                raises(tessera.errors.CannotBeCopied, lambda call=call, one=one: call(one), instead)
    engine.destroy()
    assert type(pickle.loads(pickle.dumps(schedule))) is torch.optim.lr_scheduler.StepLR
    assert len(copy.deepcopy(optimizer).param_groups) == 1


@check
def what_one_rank_raises_while_a_checkpoint_is_prepared_ends_the_call_on_all():
    """An exception of any type, which is the caller's own on its rank; training goes on."""
    class Failing(torch.optim.lr_scheduler.StepLR):
        fails = False

        def state_dict(self):
            return {}["missing"] if self.fails else super().state_dict()

    engine, _, _, schedule = tessera.initialize(model=mlp(), optimizer=lambda p: torch.optim.AdamW(p), lr_scheduler=lambda o: Failing(o, 1), config=config(2))
    place, schedule.fails = folder(), rank == world - 1
    raises(KeyError if schedule.fails else tessera.Error, lambda: engine.save_checkpoint(place), "'missing'",
           *([] if schedule.fails else [f"save_checkpoint(): rank {world - 1}: KeyError: 'missing' at arguments_rank.py:"]))
    schedule.fails = False
    engine.save_checkpoint(place)
    in_group = engine.optimizer.param_groups[0]["params"]
    first = in_group[0]
    if rank == world - 1:
        in_group[0] = nn.Parameter(torch.ones(2))
    raises(tessera.Error, lambda: engine.load_checkpoint(place), f"load_checkpoint(): {f'rank {world - 1}: ' if world > 1 else ''}"
           "optimizer.param_groups[0] has a tensor of shape [2] that is not a parameter of the engine's model")
    in_group[0] = first
    engine.load_checkpoint(place)


@check
def arguments_keep_their_dtypes():
    """As in DeepSpeed: bf16 and fp16 cast the model and not what it is given, unless auto_cast says so, and then what is given by position."""
    class Seen(nn.Linear):
        def forward(self, x, target, **more):
            self.seen = [x.dtype, target.dtype, more["named"][0].dtype]
            return (super().forward(x.to(self.weight.dtype)).float() - target.float()).square().mean()

    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for cast in (False, True):
            engine = tessera.initialize(model=Seen(8, 8), config=config(2, optimizer=ADAM, **{precision: {"enabled": True, "auto_cast": cast}}))[0]
            target = torch.full((2, 8), 2005.0)
            engine(torch.ones(2, 8), target, named=[torch.ones(1)])
            assert engine.module.seen == [dtype if cast else torch.float32] * 2 + [torch.float32], (engine.module.seen, precision, cast)
    engine = make(2, bf16={"enabled": True})
    try:
        engine(torch.ones(2, 8))
    except RuntimeError as error:
        assert not hasattr(error, "add_note") or '"bf16": {"auto_cast": true}' in error.__notes__[0]
    else:
        raise AssertionError("a model in bf16 took fp32")
    engine.zero_grad()
    engine(torch.ones(2, 8).bfloat16())


@check
def calls_of_deepspeed():
    import tessera.deepspeed as deepspeed

    place = folder()
    model = mlp()
    model[0].requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
                                      config=config(3, 300, optimizer=ADAM, bf16={"enabled": True, "auto_cast": True}))
    with standard_error() as said:
        assert engine.load_checkpoint(place / "nothing") == (None, None)
    assert ("nothing is loaded" in said[0]) == (rank == 0), said
    raises(tessera.CheckpointError, lambda: engine.load_checkpoint(place, "no"), "no checkpoint no")
    assert engine.save_16bit_model(place / "model") is True
    engine.save_16bit_model(place / "model", "small.safetensors", exclude_frozen_parameters=True)
    raises(ValueError, lambda: engine.save_16bit_model(None), "save_dir is None")
    if rank == 0:
        import safetensors.torch
        saved = torch.load(place / "model" / "pytorch_model.bin", weights_only=True)
        assert list(saved) == list(model.state_dict(keep_vars=True)) and {v.dtype for v in saved.values()} == {torch.bfloat16}
        assert sorted(safetensors.torch.load_file(place / "model" / "small.safetensors")) == ["2.bias", "2.weight"]
    assert sorted(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or ["2.bias", "2.weight"]) == ["2.bias", "2.weight"]
    raises(NotImplementedError, lambda: engine.compile(schedule=[]), "schedule")
    for arguments, part in (({"rank": 5}, "rank=5"), ({"world_size": 9}, "world_size=9"), ({"init_method": "tcp://x:1"}, "init_method")):
        raises(ValueError, lambda a=arguments: deepspeed.init_distributed(**a), part)
    for name in ("timeout", "init_method"):
        raises(TypeError, lambda n=name: deepspeed.init_distributed(**{n: 60}), f"init_distributed({name}=60): expected a")
    raises(NotImplementedError, lambda: deepspeed.init_distributed(config={}), "config")
    utils, zero = __import__("deepspeed").utils, __import__("deepspeed").zero
    assert utils.set_z3_leaf_modules(model, [nn.GELU]) == [model[1]] and utils.set_z3_leaf_modules(model, ["GELU"]) == [model[1]]
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    raises(RuntimeError, lambda: zero.register_external_parameter(model, torch.ones(1)), "expected a Module and a Parameter")


if __name__ == "__main__":
    main()
