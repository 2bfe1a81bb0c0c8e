"""The engine's calls, on one rank or more: what they answer, what they refuse, and what is left after an error."""
import collections
import copy
import functools
import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import models
import safetensors.torch
import tessera
import torch
from checks import DEVICE, STAGES, check, config, each_stage, largest_difference, loss_of, main, raises, train
from tessera.containers import map_tensors, tensors_in
from torch import nn
from torch.nn import functional

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))


def batch(step, size=4):
    """By rank."""
    return [models._vectors(step * world + r, size, 16) for r in range(world)]


def make(stage, model=None, **changes):
    model = model if model is not None else mlp()
    changes.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    engine, *_ = tessera.initialize(model=model, config=config(stage, **changes))
    return engine


# --------------------------------------------------------------------------------------------------- the step


@check
def returns_what_deepspeed_does():
    model = mlp()
    engine, optimizer, loader, scheduler = tessera.initialize(None, model, config=config(2))
    assert engine.module is model and engine.optimizer is optimizer and loader is None and scheduler is None
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert (engine.global_rank, engine.world_size, engine.global_steps, engine.micro_steps) == (rank, world, 0, 0)
    assert engine.train_micro_batch_size_per_gpu() == 2 and engine.train_batch_size() == 2 * world
    assert engine.zero_optimization_stage() == 2 and engine.gradient_accumulation_steps() == 1
    assert engine.device.type == DEVICE and engine.training
    assert list(engine.parameters())[0] is model[0].weight  # what the engine has not, its module has


@check
def inputs_are_converted_inside_of_containers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, first, *, named, flag):
            self.seen = (first, named, flag)
            return self.layer(first["x"][0]).sum()

    engine = make(0, Model(), bf16={"enabled": True, "auto_cast": True})
    engine({"x": [torch.ones(2, 4)], "n": torch.ones(2, dtype=torch.long)}, named=(torch.ones(1), "text"), flag=None)
    first, named, flag = engine.module.seen
    assert first["x"][0].dtype == torch.bfloat16 and first["n"].dtype == torch.long
    assert named[0].dtype == torch.float32 and named[1] == "text" and flag is None


@check
def containers_are_the_callers_own_where_no_tensor_in_them_moves():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, given):
            self.seen = given
            if isinstance(given, dict):
                given["written"] = 1
            return self.layer(x)

    class Named(dict):
        def __init__(self, name):
            super().__init__()
            self.name = name

    class Pair(tuple):
        def __new__(cls, a, b):
            return super().__new__(cls, (a, b))

    class Boxes(list):
        pass

    x, engine = torch.ones(2, 4, device=DEVICE), make(0, Model())
    itself = [x]
    itself.append(itself)
    for given in ({"x": x}, Named("name"), Pair(x, 1), itself, sys.version_info, collections.defaultdict(list)):
        engine(x, given)
        engine(x, given=given)
        assert engine.module.seen is given and ("written" in given or not isinstance(given, dict)), given

    boxes, name, packed = Boxes([x, {}]), Named("of it"), nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    boxes.size, name["x"] = 3, x
    on_meta = functools.partial(map_tensors, convert=lambda tensor: tensor.to("meta"), keeps=True)  # in the place of another device
    assert type(on_meta(boxes)) is Boxes and on_meta(boxes).size == 3 and on_meta(boxes)[1] is boxes[1] and boxes[0] is x
    assert on_meta(name).name == "of it" and on_meta(name)["x"].is_meta and name["x"] is x
    assert type(on_meta(Pair(x, 1))) is Pair and on_meta(torch.return_types.max((x, x))).values.is_meta
    assert on_meta(packed).data.is_meta and on_meta(packed).batch_sizes is packed.batch_sizes
    raises(tessera.Error, lambda: on_meta(itself), "a list with tensors that are to be moved or copied contains itself")
    assert list(tensors_in(itself)) == [x]
    kept = [{}]
    assert map_tensors(kept, on_meta) == kept and map_tensors(kept, on_meta)[0] is not kept[0]  # a copy, where one is wanted


@check
def evaluation_generation_and_inference_mode():
    import transformers

    model, _, _ = models.transformers_cases()["gpt2"]
    torch.manual_seed(0)
    gpt = model()
    tokens = models._tokens(0)
    expected = copy.deepcopy(gpt).eval().generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for stage in STAGES:
        engine = make(stage, copy.deepcopy(gpt))
        engine.eval()
        assert not engine.training
        with torch.inference_mode():
            out = engine(input_ids=tokens)
        assert isinstance(out, transformers.utils.ModelOutput)
        with torch.no_grad():
            assert engine.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0).equal(expected)
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


# --------------------------------------------------------------------------------------------- the whole model


@check
def parameters_gradients_and_state():
    for stage in STAGES:
        plain, model = mlp(), mlp(rank)  # rank 0's values count
        engine = make(stage, model)
        assert largest_difference(engine.state_dict(), plain.state_dict()) == 0
        samples = batch(0)
        for sample in samples:
            (loss_of(plain, sample) / world).backward()
        raises(tessera.Error, lambda e=engine: e.full_gradient("0.weight"), "there is none yet")
        engine.backward(loss_of(engine, samples[rank]))
        for name, parameter in plain.named_parameters():
            assert (engine.full_gradient(name) - parameter.grad).abs().max() < 1e-6
            assert engine.full_parameter(name).equal(parameter)
        raises(tessera.Error, lambda e=engine: e.full_parameter("no.such"), "no parameter named no.such")
        engine.step()
        mine = engine.state_dict(only_rank=world - 1)
        assert len(mine) == (len(plain.state_dict()) if rank == world - 1 else 0)
        sizes = engine.measured_bytes()
        assert sizes == engine.formula_bytes() and sizes["total"] > 0


@check
def gathered_parameters():
    for stage in STAGES:
        engine = make(stage)
        weight = engine.module[3].weight
        with tessera.GatheredParameters(weight, modifier_rank=0):
            if rank == 0:
                with torch.no_grad():
                    weight.fill_(0.25)
        assert engine.full_parameter("3.weight").eq(0.25).all()
        with tessera.GatheredParameters(engine.module):
            assert weight.detach().numpy().sum() == 0.25 * 64 * 64
        with tessera.GatheredParameters(nn.Linear(2, 2).weight), tessera.GatheredParameters(weight, enabled=False):
            pass  # what no engine owns
        try:
            with tessera.GatheredParameters(weight, modifier_rank=0):
                raise KeyError("mine")
        except KeyError:
            pass
        engine.backward(loss_of(engine, batch(0)[rank]))
        engine.step()


@each_stage
def replaced_memory_is_taken_over_or_an_error_on_all_ranks(stage):
    engine = make(stage)
    weight = engine.module[3].weight
    bias = engine.module[3].bias
    with tessera.GatheredParameters([weight, bias], modifier_rank=0):  # as scripts of DeepSpeed write
        weight.data = torch.full_like(weight, 0.5 + rank).t()
        if rank == 0:
            bias.data = bias.data.flip(0) * 0 + 0.75
    assert engine.full_parameter("3.weight").eq(0.5).all() and engine.full_parameter("3.bias").eq(0.75).all()
    engine.backward(loss_of(engine, batch(0)[rank]))
    engine.step()

    def replace(what):
        with tessera.GatheredParameters([weight, bias], modifier_rank=0):
            if rank == world - 1:
                what()

    def shape():
        weight.data = torch.zeros(2, 3)

    def parameter():
        engine.module[3].bias = nn.Parameter(torch.zeros(64))

    where = f"GatheredParameters: on rank {world - 1} "
    raises(tessera.Error, lambda: replace(shape), where + "3.weight is a torch.float32 of [2, 3] now", "in place, as by p.data.copy_(x)")
    engine.backward(loss_of(engine, batch(0)[rank]))  # its memory is the engine's again
    engine.step()
    raises(tessera.Error, lambda: replace(parameter), where + "another Parameter is in the place of 3.bias", "in place")
    engine.module[3].bias = bias
    engine.backward(loss_of(engine, batch(0)[rank]))
    engine.step()


@check
def models_are_saved_for_other_programs():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])
    make_model, _, _ = models.torch_cases()["recurrent_and_tied"]
    for stage in STAGES:
        torch.manual_seed(0)
        model = make_model()
        model.register_buffer("steps", torch.tensor([3, 4]))
        expected = copy.deepcopy(model.state_dict())
        engine = make(stage, model)
        path = folder / f"model{stage}.safetensors"
        engine.save_model(path)
        if rank == 0:
            saved = safetensors.torch.load_file(path)
            assert largest_difference({**saved, "head.weight": saved["table.weight"]}, expected) == 0
            half = torch.load(folder / "half.pt") if (folder / "half.pt").exists() else None
            assert half is None or half["table.weight"].dtype == torch.bfloat16 and half["steps"].tolist() == [3, 4]
        engine.save_model(folder / "half.pt", dtype="bf16")
        other = make(stage, make_model())
        other.load_weights(path, ignore_unexpected=["steps"])
        assert largest_difference(other.state_dict(), {k: v for k, v in expected.items() if k != "steps"}) == 0
        raises(tessera.CheckpointError, lambda e=engine: e.save_model(folder / "none" / "model.safetensors"))
        raises(tessera.CheckpointError, lambda e=engine: e.save_model(folder / "model.xyz"), "no format has this ending")
        raises(tessera.CheckpointError, lambda e=engine: e.load_weights(folder / "nothing.safetensors"))


# ---------------------------------------------------------------------------------------------------- refusals


@check
def configurations_that_cannot_be_used():
    model = mlp()
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model), "no config was given")
    for other in ("x", make(0)):
        raises(tessera.ConfigError, lambda o=other: tessera.initialize(model=o, config=config(0)), "expected a torch.nn.Module")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=torch.nn.DataParallel(model), config=config(0)), "wrapped in DataParallel", "model.module")
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(())})()
    for call in (lambda: tessera.initialize(model=model, config=config(0), training_data=stream), lambda: tessera.DataLoader(stream, 2)):
        raises(tessera.ConfigError, call, "a Stream without len()", "torch.utils.data.DataLoader")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, config=config(7)), "zero_optimization.stage")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, config=config(0, optimiser={})), "did you mean \"optimizer\"")
    for value, shown in (({1, 2}, "{1, 2} (a set)"), (float("nan"), "nan (a float)"), (torch.tensor(0.5), "tensor(0.5000) (a Tensor)")):
        raises(tessera.ConfigError, lambda v=value: tessera.initialize(model=model, config=config(0, x={"y": [1, {"z": v}]})),
               f"x.y[1].z is {shown}; expected what JSON has")
    ring = {}
    ring["x"] = ring
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, config=ring), "Circular reference", "expected what JSON has")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, config="none.json"), "none.json")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model.double(), config=config(0)), "fp32")
    assert issubclass(tessera.ConfigError, tessera.Error) and issubclass(tessera.Error, RuntimeError)


@check
def detached_parameters_are_named_at_the_next_call():
    changes = {"0.weight": (lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.load_state_dict(mlp().state_dict(), assign=True),
                            lambda m: m.load_state_dict(mlp(4).state_dict())),
               "3.weight": (lambda m: setattr(m[3], "weight", nn.Parameter(torch.ones(64, 64))), lambda m: m.__setitem__(3, nn.Linear(64, 64))),
               "extra": (lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2))),)}
    for stage in STAGES:
        for name, change in ((name, change) for name, several in changes.items() for change in several):
            engine = make(stage)
            engine.backward(loss_of(engine, batch(0)[rank]))
            engine.step()
            try:
                change(engine.module)
            except RuntimeError:  # where the write itself is refused
                continue
            text = raises(tessera.Error, lambda e=engine: e(batch(1)[rank][0]), "")
            assert name in text or "writes into unit" in text, (stage, name, text)


@check
def errors_of_python_code_in_backward_are_its_own_and_leave_no_cycle():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("mine")

    for stage in STAGES:
        engine = make(stage)
        loss = loss_of(engine, batch(0)[rank])
        try:
            engine.backward(Failing.apply(loss))
            raise AssertionError("no error")
        except KeyError as error:
            assert error.args == ("mine",)
        raises(tessera.Error, engine.step, "an earlier backward() or step() failed")
        gone = weakref.ref(engine)
        del engine, loss
        gc.collect()
        assert gone() is None


@check
def no_cycle_keeps_an_engine_alive():
    gc.collect()
    gc.disable()
    try:
        for stage in STAGES:
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            engine, *rest = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage))
            train(engine, [batch(0)], loss_of)
            gone, parameter = weakref.ref(engine), weakref.ref(model[0].weight)
            del engine, rest
            assert gone() is None, f"stage {stage}"
            del model, schedule, optimizer
            gc.collect()
            assert parameter() is None, f"stage {stage}"
    finally:
        gc.enable()


@check
def another_thread_may_take_its_turn():
    for stage in STAGES:
        engine = make(stage)
        failures = []

        def run(e=engine, f=failures):
            try:
                train(e, [batch(0), batch(1)], loss_of)
            except Exception as error:
                f.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        train(engine, [batch(2)], loss_of)
        assert not failures and engine.global_steps == 3, failures


@check
def loader_processes_are_forked_safely():
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 24 * world

        def __getitem__(self, i):
            return torch.full((16,), float(i)), i % 5

    for stage in (0, 3):
        engine, _, loader, _ = tessera.initialize(model=mlp(), training_data=Numbers(), config=config(stage))
        loader._options["num_workers"] = 2
        losses = []
        for x, y in loader:
            loss = functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert len(losses) == len(loader) == 12 and engine.global_steps == 12


@check
def an_estimate_reads_the_configuration_as_the_engine_does():
    assert str(tessera.estimate(mlp(), world=world)).count("\n") == 4
    for section in ({"stage": 2, "reduce_bucket_size": 100}, {"stage": 3, "allgather_bucket_size": 100}, {"stage": 1, "unit_numel": 100},
                    {"stage": 3, "mics_shard_size": 1}, {"stage": 3, "zero_hpz_partition_size": world}):
        given = {"optimizer": {"type": "AdamW"}, "zero_optimization": section}
        engine = make(section["stage"], zero_optimization=section)
        table = tessera.estimate(mlp(), world=world, config=given)
        with torch.device("meta"):
            assert tessera.estimate(mlp(), world=world, config=given) == table
        if tessera.comm.group().backend != "shm":
            assert table[section["stage"]]["total"] == engine.measured_bytes()["total"], (section, table, engine.measured_bytes())
    kept = {"checkpoint": {"async": True}}
    engine, table = make(1, **kept), tessera.estimate(mlp(), world=world, config={"optimizer": {"type": "AdamW"}, **kept})
    assert table[1]["snapshot"] == engine.formula_bytes()["snapshot"] > 0 and str(table).count("snapshot") == 1
    offloaded = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "."}, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}}
    assert tessera.estimate(mlp(), world=2, config=offloaded)[3] == tessera.estimate(mlp(), world=2)[3]  # in all tiers together
    impossible = {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "."}}}
    raises(tessera.ConfigError, lambda: tessera.estimate(mlp(), config=impossible), "offload_param")


if __name__ == "__main__":
    main()
