"""Every argument that a call accepts counts, or is refused by name on all ranks alike: checkpoints, client state, the group, loaders."""
import collections
import copy
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import tessera
import torch
from checks import check, config, main, raises, standard_error, train
from torch import nn

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
STAGES = (0, 3)
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20, "warmup_max_lr": 0.01, "warmup_type": "linear"}}


def folder():
    """A new one that all ranks share."""
    return Path(tessera.comm.all_gather(tempfile.mkdtemp(dir=os.getcwd()))[0])


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
        assert (place / "latest").read_text() == "0.5\n"


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


@check
def latest_stays_where_it_is_told_to():
    for stage in STAGES:
        place, engine = folder(), make(stage, checkpoint={"keep_last": 1})
        steps(engine, [0])
        engine.save_checkpoint(place)
        steps(engine, [1])
        engine.save_checkpoint(place, tag="probe", save_latest=False)
        assert (place / "latest").read_text() == "global_step1\n"
        steps(engine, [2])
        engine.save_checkpoint(place)
        assert (place / "latest").read_text() == "global_step3\n"
        tessera.comm.barrier()  # rank 0 deletes
        assert sorted(os.listdir(place)) == ["global_step3", "latest", "probe"]
        assert engine.load_checkpoint(place)[0].endswith("global_step3")
        assert engine.load_checkpoint(place, "probe")[0].endswith("probe") and engine.global_steps == 2
        other = folder()
        engine.save_checkpoint(other, "only", save_latest=False)
        assert os.listdir(other) == ["only"]
        raises(tessera.CheckpointError, lambda e=engine, o=other: e.load_checkpoint(o), "\"latest\"")


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
        assert only_optimizer.get_lr() == [0.003] and only_optimizer.optimizer.param_groups[0]["weight_decay"] == 0.1
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
        anew.save_checkpoint(place, "anew")
        resumed = make(stage, mlp(3), scheduler=WARMUP)
        resumed.load_checkpoint(place, "anew")
        anew.lr_scheduler.step(7)
        steps(reference, range(5))
        assert anew.get_lr() == reference.get_lr() and anew.lr_scheduler.last_epoch == 7
        anew.lr_scheduler.load_state_dict(resumed.lr_scheduler.state_dict())
        assert resumed.get_lr() == anew.get_lr() and steps(resumed, range(8, 10)) == steps(anew, range(8, 10))


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
        rates = []
        for engine in (first, made(stage)):
            if engine is not first:
                engine.load_checkpoint(place)
            rates.append([engine.get_lr()[0] for number in range(3, 7) if steps(engine, [number])])
        assert rates[0] == rates[1] and len(set(rates[0])) == 2, rates
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
        raises(TypeError, lambda e=first, p=place: e.load_checkpoint(p, load_moduel_strict=False), "load_moduel_strict")
        raises(TypeError, lambda e=first, p=place: e.save_checkpoint(p, tga=1), "tga")


@check
def frozen_parameters_are_left_out_where_asked():
    for stage in STAGES:
        place = folder()
        model = mlp()
        model[0].requires_grad_(False)
        engine = make(stage, model)
        steps(engine, range(2))
        engine.save_checkpoint(place, "small", exclude_frozen_parameters=True)
        engine.save_checkpoint(place, "whole")
        names = [[name for name in ("0.weight", "2.weight") if f'"{name}"' in (place / tag / "manifest.json").read_text()] for tag in ("small", "whole")]
        assert names == [["2.weight"], ["0.weight", "2.weight"]], names
        other = mlp(4)
        other[0].requires_grad_(False)
        frozen = other[0].weight.detach().clone()
        second = make(stage, other)
        raises(tessera.CheckpointError, lambda e=second, p=place: e.load_checkpoint(p, "small"), "0.weight")
        second.load_checkpoint(place, "small", load_module_strict=False)
        assert second.full_parameter("0.weight").equal(frozen)
        assert second.full_parameter("2.weight").equal(engine.full_parameter("2.weight")) and second.global_steps == 2
        with tessera.GatheredParameters(second.module[0], modifier_rank=0), tessera.GatheredParameters(engine.module[0]), torch.no_grad():
            if rank == 0:
                for mine, its in zip(second.module[0].parameters(), engine.module[0].parameters()):
                    mine.copy_(its)
        assert steps(second, range(2, 5)) == steps(engine, range(2, 5))


# --------------------------------------------------------------------------------------------------- client state

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
    "numpy": [np.float32(0.1), np.float64(0.1), np.int64(7), np.bool_(True), np.str_("x"), np.complex64(1 + 2j)],
    "random": random.Random(3).getstate(),
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
                        ({"o": np.array([object()])}, "client_state['o']"), ({(1, object()): 2}, "the key (1, <object")):
        text = raises(tessera.Error, lambda v=value: engine.save_checkpoint(place, client_state=v), part)
        assert isinstance(text, str) and "save_checkpoint()" in text
        raises(TypeError, lambda v=value: engine.save_checkpoint(place, client_state=v))
    assert os.listdir(place) == []
    if world > 1:
        raises(TypeError, lambda: engine.save_checkpoint(place, client_state=object() if rank == 1 else 0), "rank 1: client_state")
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
def a_loader_takes_what_torchs_takes_and_its_seed_is_loaded():
    data = torch.utils.data.TensorDataset(torch.arange(16 * world))
    raises(TypeError, lambda: tessera.DataLoader(data, 2, shuffle=True), "shuffle")
    raises(TypeError, lambda: tessera.DataLoader(data, 2, num_wrokers=1), "num_wrokers", "num_workers")
    first, second = tessera.DataLoader(data, 2, seed=1), tessera.DataLoader(data, 2, seed=2)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert [b[0].tolist() for b in second] == [b[0].tolist() for b in batches]


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
    raises(TypeError, given(modle=1), "modle")
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
    raises(tessera.ConfigError, lambda: tessera.estimate(mlp(), world=0), "world is 0")
    raises(ValueError, lambda: tessera.launch(print, nproc=0), "nproc=0")


@check
def a_second_call_for_the_group_may_not_ask_for_another():
    joined = tessera.comm.init_distributed()
    assert tessera.comm.init_distributed(timeout_s=60) is joined
    if world > 1:
        raises(tessera.CommError, lambda: tessera.comm.init_distributed(timeout_s=5), "timeout_s=5")
        raises(tessera.CommError, lambda: tessera.comm.init_distributed(backend="nccl"), "backend='nccl'")
        raises(tessera.CommError, lambda: tessera.comm.init_distributed(device="cuda"), "device='cuda'")
    for value in (0, -1, float("nan"), float("inf"), 9e15):
        raises(ValueError, lambda v=value: tessera.comm.init_distributed(timeout_s=v), "timeout_s is", "seconds from")
    raises(ValueError, lambda: tessera.comm.init_distributed(backend="mpi"), "backend is 'mpi'")
    raises(ValueError, lambda: tessera.comm.broadcast(torch.ones(1), root=world), "root is")
    raises(ValueError, lambda: tessera.comm.all_reduce(1.0, op="max"), "op is 'max'")


@check
def calls_of_deepspeed():
    import tessera.deepspeed as deepspeed

    place = folder()
    model = mlp()
    model[0].requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
                                      config=config(3, 300, optimizer=ADAM, bf16={"enabled": True}))
    with standard_error() as said:
        assert engine.load_checkpoint(place / "nothing") == (None, None)
    assert ("nothing is loaded" in said[0]) == (rank == 0), said
    raises(tessera.CheckpointError, lambda: engine.load_checkpoint(place, "no"), "no checkpoint no")
    assert engine.save_16bit_model(place / "model") is True
    engine.save_16bit_model(place / "model", "small.safetensors", exclude_frozen_parameters=True)
    raises(ValueError, lambda: engine.save_16bit_model(None), "save_dir is None")
    raises(TypeError, lambda: engine.save_16bit_model(place, filename="x"), "filename")
    if rank == 0:
        import safetensors.torch
        saved = torch.load(place / "model" / "pytorch_model.bin", weights_only=True)
        assert list(saved) == list(model.state_dict(keep_vars=True)) and {v.dtype for v in saved.values()} == {torch.bfloat16}
        assert sorted(safetensors.torch.load_file(place / "model" / "small.safetensors")) == ["2.bias", "2.weight"]
    assert sorted(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or ["2.bias", "2.weight"]) == ["2.bias", "2.weight"]
    raises(NotImplementedError, lambda: engine.compile(schedule=[]), "schedule")
    raises(TypeError, lambda: engine.compile(nothing=1), "nothing")
    raises(TypeError, lambda: deepspeed.initialize(model=mlp(), config=config(0), nothing=1), "nothing")
    for arguments, part in (({"rank": 5}, "rank=5"), ({"world_size": 9}, "world_size=9"), ({"init_method": "tcp://x:1"}, "init_method")):
        raises(ValueError, lambda a=arguments: deepspeed.init_distributed(**a), part)
    raises(NotImplementedError, lambda: deepspeed.init_distributed(config={}), "config")
    utils, zero = __import__("deepspeed").utils, __import__("deepspeed").zero
    assert utils.set_z3_leaf_modules(model, [nn.GELU]) == [model[1]] and utils.set_z3_leaf_modules(model, ["GELU"]) == [model[1]]
    raises(ValueError, lambda: utils.set_z3_leaf_modules(model, [nn.Conv2d]), "Conv2d")
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    raises(RuntimeError, lambda: zero.register_external_parameter(model, torch.ones(1)), "expected a Module and a Parameter")


if __name__ == "__main__":
    main()
