"""What DeepSpeed's further names do on a group of ranks, at every stage, beside plain PyTorch."""
import tessera.deepspeed  # noqa: F401  isort: skip
import json
import pickle
import tempfile
from pathlib import Path

import deepspeed
import tessera
import torch
from checks import DEVICE, STAGES, check, config, largest_difference, main, raises, train, train_plainly
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.lr_schedules import OneCycle, WarmupDecayLR, WarmupLR
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tessera.comm import get_rank as rank
from tessera.comm import get_world_size as world
from torch import nn
from torch.nn import functional

utils = deepspeed.utils


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))


def make(stage, model=None, **changes):
    model = net() if model is None else model
    options = config(stage, unit_numel=40, gradient_clipping=0, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "betas": (0.8, 0.9)}})
    options["zero_optimization"].update(changes.pop("zero_optimization", {}), stage3_max_live_parameters=0)
    return deepspeed.initialize(model=model, model_parameters=changes.pop("model_parameters", None), optimizer=changes.pop("optimizer", None),
                                lr_scheduler=changes.pop("lr_scheduler", None), config={**options, **changes})


def batch(step):
    """By rank."""
    return [torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world())]


def loss_of(model, x):
    return functional.cross_entropy(model(x).float(), x.argmax(-1) % 3)


@check
def torch_group():
    """initialize() makes torch.distributed's group; it can be ended and made anew."""
    assert not torch.distributed.is_initialized()
    engine = make(1)[0]
    for _ in range(2):
        assert torch.distributed.is_initialized() and torch.distributed.get_backend() == deepspeed.comm.get_backend() == ("gloo" if DEVICE == "cpu" else "nccl")
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (rank(), world())
        total = torch.tensor([rank() + 1.0])
        deepspeed.comm.all_reduce(total)
        assert total.item() == world() * (world() + 1) / 2
        gathered = torch.empty(world())
        deepspeed.comm.all_gather_into_tensor(gathered, torch.tensor([float(rank())]))
        assert gathered.tolist() == list(range(world()))
        assert deepspeed.comm.get_world_group() is torch.distributed.group.WORLD is engine.data_parallel_group
        group = deepspeed.comm.new_group([0])
        assert deepspeed.comm.get_rank(group) == (0 if rank() == 0 else -1)
        deepspeed.comm.destroy_process_group()
        deepspeed.init_distributed()


@check
def attributes_of_parameters():
    for stage in STAGES:
        engine = make(stage, model=nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)))[0]
        weight = engine.module[0].weight
        if stage < 3:
            assert not any(hasattr(weight, name) for name in ("ds_id", "ds_shape", "ds_numel", "ds_status", "all_gather", "ds_tensor"))
            assert not deepspeed.runtime.zero.utils.is_zero_param(weight)
            continue
        assert len({parameter.ds_id for parameter in engine.parameters()}) == 4
        assert set(tessera.comm.all_gather(weight.ds_id)) == {weight.ds_id}
        assert (weight.ds_shape, weight.ds_numel) == (torch.Size([7, 6]), 42) and deepspeed.runtime.zero.utils.is_zero_param(weight)
        for _ in range(2):
            assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            with deepspeed.zero.GatheredParameters(weight):
                with deepspeed.zero.GatheredParameters([weight, engine.module[1].weight]):
                    assert weight.ds_status is engine.module[1].weight.ds_status is ZeroParamStatus.AVAILABLE
                assert weight.ds_status is ZeroParamStatus.AVAILABLE
                assert engine.module[1].weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            train(engine, [batch(0)], loss_of)
        weight.all_gather([weight])
        assert weight.ds_status is ZeroParamStatus.AVAILABLE and weight.detach().numpy().shape == (7, 6)
        weight.partition()
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        raises(tessera.Error, lambda w=weight: w.partition(has_been_updated=True), "modifier_rank=0")
        with deepspeed.zero.GatheredParameters(engine.module):
            assert not hasattr(pickle.loads(pickle.dumps(weight)), "ds_id")  # nothing is stored in it
        engine.destroy()
        assert not hasattr(weight, "ds_id")
    with deepspeed.zero.Init():
        model = nn.Linear(3, 2)
    assert (model.weight.ds_shape, model.weight.ds_status) == ((2, 3), ZeroParamStatus.NOT_AVAILABLE)
    engine = deepspeed.initialize(model=model, config=config(1))[0]
    assert not hasattr(model.weight, "ds_shape")
    engine.destroy()


@check
def trls_loop_around_generation():
    """What TRL does with the engine's hooks around generation at stage 3 (trl/models/utils.py, remove_hooks and add_hooks)."""
    engine = make(3)[0]
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        for parameter in (*offload.module.parameters(), *(value for _, value in offload.module.ds_external_parameters())):
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        engine(batch(0)[rank()])
        offload._register_deepspeed_module(offload.module)
    with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as unwrapped:
        assert all(parameter.ds_status is ZeroParamStatus.AVAILABLE for parameter in unwrapped.parameters())
    engine = make(2)[0]
    assert not hasattr(engine.optimizer, "parameter_offload")


@check
def values_of_single_parameters():
    """Masters, gradients and moments are read and set; training goes on from what was set as plain PyTorch does."""
    for stage in STAGES:
        plain = net()
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0)
        engine, _, _, _ = make(stage)
        weight = engine.module[2].weight
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg").count_nonzero() == 0 and utils.safe_get_full_grad(weight) is None
        train(engine, [batch(0)], loss_of)
        train_plainly(plain, theirs, [batch(0)], loss_of)
        engine.backward(loss_of(engine, batch(1)[rank()]))
        theirs.zero_grad()
        sum(loss_of(plain, x) for x in batch(1)).div(world()).backward()
        near(utils.safe_get_full_grad(weight), plain[2].weight.grad)
        engine.step()
        theirs.step()
        near(utils.safe_get_full_fp32_param(weight), plain[2].weight.detach(), 1e-5)
        for key in ("exp_avg", "exp_avg_sq"):
            near(utils.safe_get_full_optimizer_state(weight, key), theirs.state[plain[2].weight][key])
        new = torch.linspace(-1, 1.2345678, 21).view(3, 7)
        utils.safe_set_full_fp32_param(weight, new + rank())  # rank 0's counts
        utils.safe_set_full_optimizer_state(weight, new * 0.01 + rank(), "exp_avg")
        assert torch.equal(utils.safe_get_full_fp32_param(weight), new)
        with torch.no_grad():
            plain[2].weight.copy_(new)
            theirs.state[plain[2].weight]["exp_avg"].copy_(new * 0.01)
        train(engine, [batch(2)], loss_of)
        train_plainly(plain, theirs, [batch(2)], loss_of)
        near(utils.safe_get_full_fp32_param(weight), plain[2].weight.detach(), 2e-5)
        for call, arguments in ((utils.safe_get_full_optimizer_state, (weight, "momentum")),
                                (utils.safe_set_full_optimizer_state, (weight, new[0], "exp_avg")), (utils.safe_set_full_grad, (weight, new)),
                                (utils.safe_update_full_grad_vectorized, ([weight], lambda g, p: -g)), (utils.safe_set_full_fp32_param, (weight, new[0])),
                                (utils.safe_get_full_fp32_param, (nn.Linear(2, 2).weight,))):
            raises(tessera.Error, lambda c=call, a=arguments: c(*a), "expected")
        if stage == 3:
            parts_of_parameters(engine, weight)
        else:
            raises(tessera.Error, lambda w=weight: utils.safe_get_local_fp32_param(w), "expected stage 3")
        engine.destroy()


def parts_of_parameters(engine, weight):
    size = -(-21 // world())
    for whole, part in ((utils.safe_get_full_fp32_param(weight), utils.safe_get_local_fp32_param(weight)),
                        (utils.safe_get_full_optimizer_state(weight, "exp_avg"), utils.safe_get_local_optimizer_state(weight, "exp_avg"))):
        padded = functional.pad(whole.flatten(), (0, size * world() - 21))
        assert torch.equal(part, padded.view(world(), size)[rank()])
    values = torch.arange(size, dtype=torch.float32) + 100 * rank()
    utils.safe_set_local_fp32_param(weight, values)
    utils.safe_set_local_optimizer_state(weight, -values, "exp_avg_sq")
    expected = torch.cat([torch.arange(size, dtype=torch.float32) + 100 * r for r in range(world())])[:21].view(3, 7)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), expected)
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), -expected)
    raises(tessera.Error, lambda: utils.safe_set_local_fp32_param(weight, values[1:]), "expected a floating tensor of shape")
    raises(tessera.Error, lambda: utils.safe_set_local_grad(weight, values), "expected between")
    engine.backward(loss_of(engine, batch(3)[rank()]))
    gradient = utils.safe_get_full_grad(weight)
    assert torch.equal(utils.safe_get_local_grad(weight), functional.pad(gradient.flatten(), (0, size * world() - 21)).view(world(), size)[rank()])
    utils.safe_set_local_grad(weight, values)
    assert torch.equal(utils.safe_get_full_grad(weight), expected)
    utils.safe_update_full_grad_vectorized(list(engine.module.parameters()), lambda gradient, parameter: gradient * 2)
    assert torch.equal(utils.safe_get_full_grad(weight), 2 * expected)
    engine.step()


@check
def masters_of_16_bit_parameters():
    """They are set in fp32, and what the model computes with is their rounded value."""
    for stage in STAGES:
        engine = make(stage, bf16={"enabled": True}, zero_optimization={"offload_optimizer": {"device": "cpu"}} if stage else {})[0]
        train(engine, [batch(0)], lambda model, x: loss_of(model, x.bfloat16()))
        weight, other = engine.module[2].weight, engine.full_parameter("0.weight")
        value = torch.linspace(-1, 1.2345678, 21).view(3, 7)
        utils.safe_set_full_fp32_param(weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), value) and torch.equal(engine.full_parameter("0.weight"), other)
        assert torch.equal(engine.state_dict()["2.weight"], value.bfloat16())
        engine.backward(loss_of(engine, batch(1)[rank()].bfloat16()))
        utils.safe_set_full_fp32_param(weight, -value)
        utils.safe_set_full_grad(weight, torch.zeros_like(value))
        utils.safe_set_full_optimizer_state(weight, torch.zeros_like(value), "exp_avg")
        engine.step()
        assert torch.equal(utils.safe_get_full_fp32_param(weight), -value)
        engine.destroy()


def near(ours, theirs, limit=1e-6):
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= limit, (ours - theirs).abs().max()


@check
def loss_scale():
    for stage in STAGES:
        engine, optimizer, _, _ = make(stage, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1})
        assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale, engine.dynamic_loss_scale()) == (16, 16, True, True)
        scale = optimizer.loss_scaler
        assert (scale.cur_scale, scale.loss_scale, scale.dynamic, scale.scale_window, scale.min_scale, scale.cur_iter) == (16, 16, True, 2, 1, 0)
        assert optimizer.loss_scale_config.dynamic_loss_scale and engine.initial_dynamic_scale() == 16 and engine.fp16_enabled()
        x = batch(0)[rank()].half()
        for factor, expected, iteration in ((float("inf"), 8, 1), (1, 8, 2), (1, 8, 3), (1, 16, 4)):
            engine.backward(loss_of(engine, x) * factor)
            engine.step()
            assert (optimizer.loss_scale_config.cur_scale, optimizer.loss_scale_config.cur_iter) == (expected, iteration)
            assert optimizer.overflow == (factor != 1)
        engine.destroy()
    engine, optimizer, _, _ = make(2)
    assert (optimizer.cur_scale, optimizer.dynamic_loss_scale, optimizer.loss_scaler.scale_window) == (1, False, None)
    engine, fixed, _, _ = make(1, fp16={"enabled": True, "loss_scale": 8})
    assert (fixed.cur_scale, fixed.dynamic_loss_scale) == (8, False)


@check
def schedules():
    """The configuration's schedule, and a class of the same name, have the same rates, at each step."""
    parameters = {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "total_num_steps": 9}
    for stage in (0, 3):
        ours, optimizer, _, schedule = make(stage, scheduler={"type": "WarmupDecayLR", "params": parameters})
        stepped, _, _, client = make(stage, lr_scheduler=lambda o: WarmupDecayLR(o, **parameters))
        plain = torch.optim.AdamW(net().parameters(), lr=1e-2)
        alone = WarmupDecayLR(plain, **parameters)
        assert schedule.last_batch_iteration == client.last_batch_iteration == -1 and schedule.optimizer is optimizer
        assert ours.get_mom() == schedule.get_mom() == [(0.8, 0.9)] and ours.scheduler_name() == "WarmupDecayLR"
        for step in range(12):
            train(ours, [batch(step)], loss_of)
            train(stepped, [batch(step)], loss_of)
            alone.step()
            for rates in (ours.get_lr(), schedule.get_last_lr(), stepped.get_lr()):
                assert abs(rates[0] - plain.param_groups[0]["lr"]) < 1e-15, (rates, plain.param_groups[0]["lr"])
            assert schedule.last_batch_iteration == client.last_batch_iteration == step == schedule.state_dict()["last_batch_iteration"]
        assert largest_difference(ours.state_dict(), stepped.state_dict()) == 0
        raises(tessera.Error, client.step, "engine.step() steps the scheduler")
        schedule.step(2)
        alone.step(2)
        assert abs(schedule.get_last_lr()[0] - alone.get_last_lr()[0]) < 1e-15
        schedule.load_state_dict({"last_batch_iteration": 5})
        assert schedule.last_batch_iteration == 5
    WarmupLR(optimizer, warmup_num_steps=3).step()
    model = net()
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.3, 0.4]}}
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    assert make(2, model, model_parameters=groups, scheduler=cycle)[0].get_lr() == [0.1, 0.2]


@check
def an_optimizer_of_its_classes():
    """What FusedAdam computes: optimizer_rank.py, and alone deepspeed_names_test.py."""
    model = net()
    client = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, optimizer, _, _ = make(3, model=model, optimizer=client)
    assert optimizer.optimizer is client and engine.optimizer_name() == "FusedAdam"


@check
def numbers_of_an_engine():
    for stage in STAGES:
        engine, optimizer, _, _ = make(stage, gradient_accumulation_steps=3, bf16={"enabled": True})
        assert engine.get_batch_info() == (6 * world(), 2, 3)
        assert (engine.zero_optimization(), engine.zero_optimization_partition_gradients(), engine.zero_optimization_partition_weights()) \
            == (stage > 0, stage >= 2, stage == 3)
        assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.amp_enabled(), engine.zero_cpu_offload()) == (True, False, False, False)
        assert engine.get_data_types() == (torch.bfloat16, torch.float32) and engine.communication_data_type is torch.float32
        assert (engine.get_data_parallel_rank(), engine.get_data_parallel_world_size(), engine.get_model_parallel_rank()) == (rank(), world(), 0)
        engine.set_lr(0.25)
        assert engine.get_lr() == [0.25] == optimizer.get_lr() and engine.get_type() == [0.0]
        assert set(optimizer.param_names.values()) == {name for name, _ in engine.module.named_parameters()}
        for call in (lambda e=engine: e.set_train_batch_size(12 * world()), lambda e=engine: e.set_gradient_accumulation_steps(2),
                     lambda e=engine: e.offload_states(), lambda e=engine: e.scale(torch.ones(2))):
            raises(tessera.Error, call)
        engine.set_train_batch_size(6 * world())
        engine.empty_partition_cache()
        engine.allreduce_gradients()
        loader = engine.deepspeed_io([torch.full((), float(i)) for i in range(12 * world())], route="eval")
        assert sorted(sum(tessera.comm.all_gather([float(x) for part in loader for x in part]), [])) == [float(i) for i in range(12 * world())]
        assert len(engine.deepspeed_io([torch.zeros(6)] * 12 * world())) == 6
        engine.destroy()
    offloaded = make(3, zero_optimization={"offload_optimizer": {"device": "cpu"}})[0]
    assert offloaded.zero_cpu_offload() and offloaded.zero_use_cpu_optimizer() and offloaded.zero_offload_param() is None
    states = tessera.comm.all_gather(tempfile.mkdtemp())[0]
    on_disk = make(3, zero_optimization={"offload_optimizer": {"device": "nvme", "nvme_path": states}})[0]
    assert on_disk.zero_use_cpu_optimizer() and not on_disk.zero_cpu_offload()


@check
def loaders_have_as_many_batches_on_all_ranks():
    """At stage 3 forwards in evaluation are collective. A rank with more batches than the others would wait for them."""
    engine = make(3)[0]
    engine.eval()
    for length in (4 * world() + 1, 4 * world(), 1):
        for route in ("eval", "predict"):
            data = [torch.full((6,), float(number)) for number in range(length)]
            parts = list(engine.deepspeed_io(data, batch_size=2, route=route))
            with torch.no_grad():
                assert all(engine(part).shape == (len(part), 3) for part in parts)
            found = tessera.comm.all_gather([row[0].item() for part in parts for row in part])
            in_order = [found[number % world()][number // world()] for number in range(sum(map(len, found)))]
            assert len(in_order) == -(-length // world()) * world() and in_order == [float(number % length) for number in range(len(in_order))], found
    last = world() - 1
    if last > 0:
        for route in ("train", "eval"):
            raises(tessera.Error, lambda r=route: engine.deepspeed_io([torch.zeros(6)] * (12 * world() + rank() // last), route=r),
                   f"deepspeed_io(): len(dataset) is {12 * world() + 1} on rank {last}, but {12 * world()} on rank 0")
            raises(tessera.Error, lambda r=route: engine.deepspeed_io([torch.zeros(6)] * 12 * world(), batch_size=1 + rank() // last, route=r),
                   f"batch_size is 2 on rank {last}, but 1 on rank 0")
        raises(ValueError, lambda: engine.deepspeed_io([torch.zeros(6)], route="test" if rank() == last else "eval"), f"rank {last}: route is 'test'")
        raises(tessera.Error, lambda: utils.safe_get_full_optimizer_state(engine.module[0].weight, "none" if rank() == last else "exp_avg"),
               f"rank {last}: AdamW has no state 'none'")
        seeded = make(1, seed=42 + rank() // last)[0]
        raises(tessera.Error, lambda: seeded.deepspeed_io([torch.zeros(6)] * 12 * world()), f"seed is 43 on rank {last}, but 42 on rank 0")
        assert len(list(seeded.deepspeed_io([torch.zeros(6)] * 12 * world(), route="eval"))) == 6  # it needs none
    alone = engine.deepspeed_io([torch.zeros(6)] * 3, batch_size=1, data_sampler=[2]) if rank() == 0 else [0]  # with one it is not collective
    assert len(alone) == 1


@check
def isinstance_says_which_optimizer_the_configuration_has():
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    every = {FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPULion}
    for kind, offloads, expected, params in (("Adam", False, FusedAdam, {"adam_w_mode": False}), ("AdamW", True, DeepSpeedCPUAdam, {}),
                                             ("Lion", False, FusedLion, {}), ("Lion", True, DeepSpeedCPULion, {}), ("LAMB", False, FusedLamb, {}),
                                             ("Muon", False, None, {}), ("SGD", False, None, {})):
        model = net()
        engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind, "params": params},
            "zero_optimization": {"stage": 2, "cpu_offload": offloads}})
        assert {one for one in every if isinstance(optimizer.optimizer, one)} == {expected} - {None}, kind
        assert type(engine.basic_optimizer).__name__ == (expected.__name__ if expected else {"Muon": "MuonWithAuxAdam"}.get(kind, kind))
        assert isinstance(optimizer, (deepspeed.DeepSpeedOptimizer, tessera.Optimizer)) and isinstance(optimizer, torch.optim.Optimizer)
        if "Adam" in kind:
            assert optimizer.adam_w_mode is (kind == "AdamW")
        else:
            assert not hasattr(optimizer, "adam_w_mode")
        engine.destroy()


@check
def backward_passes_are_reduced_together():
    for stage in STAGES:
        engines = [make(stage, gradient_accumulation_steps=3, gradient_clipping=0.1)[0] for _ in range(2)]
        for step in range(3):
            for i in range(3):
                engines[0].backward(loss_of(engines[0], batch(3 * step + i)[rank()]))
                engines[0].step()
            with engines[1].coalesce_grad_reduction():
                for i in range(3):
                    engines[1].set_gradient_accumulation_boundary(i == 2)  # it says nothing for this step
                    engines[1].backward(loss_of(engines[1], batch(3 * step + i)[rank()]))
                engines[1]._backward_epilogue()  # does nothing
                raises(AssertionError, engines[1].step, "expected it after the with")
                raises(AssertionError, engines[1].no_sync, "cannot be nested")
                raises(AssertionError, engines[1].coalesce_grad_reduction().__enter__, "cannot be nested")
            engines[1].step()
            assert engines[1].was_step_applied() and engines[1].global_steps == step + 1
        assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm()
        assert largest_difference(engines[0].state_dict(), engines[1].state_dict()) == 0
        with engines[1].coalesce_grad_reduction():
            pass
        engines[1].step()
        assert engines[1].global_steps == 3


@check
def a_model_is_given_to_initialize_again():
    for stage in STAGES:
        model = net()
        first, second = make(stage, model)[0], make(stage, model)[0]
        raises(tessera.Error, lambda e=first: e(batch(0)[rank()]), "was ended by destroy()")
        raises(tessera.ConfigError, lambda s=stage, m=model: make(s, m, no_such_key=1), "no_such_key")  # and the engine stays
        raises(tessera.ConfigError, lambda s=stage, m=model: make(s, m, scheduler={"type": "WarmupLRR"}), "WarmupLRR")
        raises(tessera.CheckpointError, lambda m=model: utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(m, "missing"), "missing")
        before = second.state_dict()
        second.backward(loss_of(second, batch(0)[rank()]))
        second.step()
        assert largest_difference(before, second.state_dict()) > 0


@check
def a_checkpoint_is_loaded_into_a_module_inside_of_gathered_parameters():
    """DeepSpeed's users gather first: its partitioned parameters have no shape to load into."""
    engine = make(3)[0]
    expected = engine.state_dict()
    place = tessera.comm.all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0]
    engine.save_checkpoint(place)
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        module = utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, place)
        assert largest_difference(module.state_dict(), expected) == 0
    assert largest_difference(module.state_dict(), expected) == 0
    raises(tessera.Error, lambda: engine(batch(0)[rank()]), "was ended by destroy()")
    module(batch(0)[rank()])


@check
def a_module_that_is_set_to_training_after_eval_trains():
    engine = make(2)[0]
    engine.eval()
    engine(batch(0)[rank()])
    for module in engine.module.modules():  # as Lightning restores modes
        module.training = True
    engine.backward(loss_of(engine, batch(0)[rank()]))
    engine.step()
    assert engine.was_step_applied()


@check
def the_schedule_of_a_configuration_shows_its_betas():
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9,
                                               "cycle_first_step_size": 2}}
    engine, optimizer, _, scheduler = make(1, scheduler=schedule)
    assert isinstance(scheduler, OneCycle) and not isinstance(scheduler, WarmupLR) and scheduler.get_mom() == [(0.9, 0.99)]
    of_torch = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    same = OneCycle(of_torch, **schedule["params"])
    for step in range(5):
        engine.backward(loss_of(engine, batch(step)[rank()]))
        engine.step()
        same.step()
        assert optimizer.param_groups[0]["betas"] == of_torch.param_groups[0]["betas"], (step, optimizer.param_groups[0]["betas"])
        assert engine.get_mom() == scheduler.get_mom() == [of_torch.param_groups[0]["betas"]]


@check
def what_an_engine_has_not():
    class Fails(nn.Linear):
        @property
        def broken(self):
            raise AttributeError("the module's own words")

    engine = make(0, model=Fails(2, 2))[0]
    text = raises(AttributeError, lambda: engine.no_such_thing, "'DeepSpeedEngine' object has no attribute 'no_such_thing'", "Fails")
    assert "neither has its module" in text
    raises(AttributeError, lambda: engine.broken, "'Fails' object has no attribute 'broken'")  # torch's words for a property that raises it
    assert engine.in_features == 2 and not hasattr(engine, "no_such_thing")


@check
def a_model_without_an_optimizer():
    """Has no memory for training, and the outputs of the module."""
    for stage in STAGES:
        model = net()
        options = config(stage, unit_numel=40, bf16={"enabled": True})
        (path := Path(tempfile.mkdtemp(), "ds.json")).write_text(json.dumps(options))
        expected = functional.linear(functional.gelu(functional.linear(
            batch(0)[rank()].bfloat16(), *(value.detach().bfloat16() for value in model[0].parameters()))), *(
                value.detach().bfloat16() for value in model[2].parameters()))
        engine = deepspeed.initialize(model=model, model_parameters=[] if stage else None, config=options if stage % 2 else str(path))[0]  # as Lightning
        held = engine.measured_bytes()
        assert held["total"] == held["parameters"] > 0 and isinstance(engine, deepspeed.DeepSpeedEngine)
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(batch(0)[rank()].bfloat16()), expected)
        raises(tessera.Error, engine.step, "given no optimizer", "optimizer=")
        x = batch(0)[rank()].bfloat16().requires_grad_()
        engine.train()
        raises(AssertionError, lambda e=engine, x=x: e.backward(e(x).sum()), "given no optimizer", "loss.backward()")
        for _ in range(2):
            engine(x).sum().backward()
        assert x.grad.count_nonzero() > 0
        engine.destroy()


@check
def weights_in_and_out():
    for stage in STAGES:
        model = net()
        model[0].bias.requires_grad_(False)
        engine = make(stage, model=model, bf16={"enabled": True})[0]
        train(engine, [batch(0)], lambda model, x: loss_of(model, x.bfloat16()))
        state = engine.module_state_dict()
        assert largest_difference(dict(state), dict(engine.state_dict())) == 0
        assert "0.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
        path = tessera.comm.all_gather(tempfile.mkdtemp())[0]
        assert engine.load_checkpoint(path) == (None, None)
        raises(tessera.Error, lambda e=engine, p=path: e.load_checkpoint(p, tag="a" if rank() == 0 else None), *(["tag"] if world() > 1 else []))
        engine.load_module_state_dict({"module": {name: value + 1 for name, value in state.items()}})
        assert largest_difference(dict(engine.state_dict()), {name: value + 1 for name, value in state.items()}) == 0
        raises(RuntimeError, lambda e=engine: e.load_module_state_dict({"module": {}}), "Missing key")
        engine.load_module_state_dict({"module": {}}, strict=False)
        raises(RuntimeError, lambda e=engine: e.load_module_state_dict({"module": {"0.weight": torch.zeros(7, 6)}}), "Missing key")
        raises(Exception, lambda e=engine, s=state: e.load_module_state_dict({"module": s} if rank() < world() - 1 else {}), "module")
        engine.load_module_state_dict({"module": state})
        assert largest_difference(dict(engine.state_dict()), state) == 0
        train(engine, [batch(1)], lambda model, x: loss_of(model, x.bfloat16()))
        called = []
        engine.load_module_state_dict({"module": 7}, custom_load_fn=lambda src, dst, to=called: to.append((src, dst)))
        assert called == [(7, engine.module)]
        masters = {name: engine.full_parameter(name) for name, _ in engine.named_tensors}
        if stage in (1, 3):
            consolidated(engine, masters)
        engine.destroy()


@check
def an_adapter_with_modules_to_save():
    """peft asks a module at stage 3 for the keys of its state dict, on the rank that saves."""
    import peft
    for stage in (2, 3):
        model = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
        engine = make(stage, model=model)[0]
        train(engine, [batch(0)], loss_of)
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            expected = {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}
        state = engine._zero3_consolidated_16bit_state_dict()
        if rank() == 0:
            found = peft.get_peft_model_state_dict(model, state_dict=state)
            assert any("lora_A" in name for name in found) and any(name.endswith("2.weight") for name in found), found.keys()
            assert largest_difference(dict(found), expected) == 0
        tessera.comm.barrier()


def consolidated(engine, masters):
    from deepspeed.utils import zero_to_fp32
    folder = tessera.comm.all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0]
    engine.save_checkpoint(folder, tag="a")
    if rank() == 0:
        states = [zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder),
                  zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="a", lazy_mode=True),
                  zero_to_fp32.load_state_dict_from_zero_checkpoint(net(), folder).state_dict()]
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/out")
        states.append(torch.load(f"{folder}/out/pytorch_model.bin", weights_only=True))
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/safe", safe_serialization=True)
        import safetensors.torch
        states.append({name: value for path in Path(folder, "safe").glob("*.safetensors") for name, value in safetensors.torch.load_file(path).items()})
        for state in states:
            assert largest_difference(dict(state), masters) == 0
        raises(tessera.CheckpointError, lambda: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="b"), "b")
        kept = Path(folder, "out", "pytorch_model.bin").read_bytes()
        for size, kind, part in (("1KB", tessera.Error, "1KB"), ("5 gigs", ValueError, "max_shard_size is '5 gigs'; expected a number of bytes")):
            raises(kind, lambda size=size: zero_to_fp32.convert_zero_checkpoint_to_state_dict(folder, f"{folder}/out", torch.bfloat16, size), part)
            assert {path.name: path.read_bytes() for path in Path(folder, "out").iterdir()} == {"pytorch_model.bin": kept}, size
        for size in ("1MB", 10**6, "1000000 B", None):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/out", max_shard_size=size)
        raises(tessera.Error, lambda: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True), "frozen")
    tessera.comm.barrier()


@check
def values_beside_the_engines_in_its_monitors():
    folder = tessera.comm.all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0]
    engine = make(1, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})[0]
    train(engine, [batch(0)], loss_of)
    engine.monitor.write_events([("Train/mine", 0.5, engine.global_samples), ("Train/mine", 0.25, engine.global_samples + 1)])
    assert engine.monitor.enabled and not make(1)[0].monitor.enabled
    engine.destroy()
    if rank() == 0:
        found = {path.name: path.read_text() for path in Path(folder).rglob("*.csv")}
        mine = next(text for name, text in found.items() if "mine" in name)
        assert f"{engine_samples(0)},0.5" in mine and f"{engine_samples(1)},0.25" in mine, mine
        assert any("train_loss" in name for name in found), found
    tessera.comm.barrier()


@check
def an_engine_and_the_monitors_of_a_configuration_keep_their_records():
    from deepspeed.monitor.monitor import MonitorMaster

    for engine_is_first in (True, False):
        folder = tessera.comm.all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0]

        def sections(path):
            return {name: {"enabled": True, "output_path": path, "job_name": "job"} for name in ("csv_monitor", "jsonl_monitor")}

        def beside(folder=folder):
            path = f"{folder}/../{Path(folder).name}"  # the same folder
            return MonitorMaster(deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **sections(path)}).monitor_config)

        master = None if engine_is_first else beside()
        engine = make(1, **sections(folder))[0]
        train(engine, [batch(0)], loss_of)
        engine.save_checkpoint(folder + "_saved")
        engine.load_checkpoint(folder + "_saved")  # ends the records, which stay the engine's
        master = master or beside()
        for step in (1, 2):
            master.write_events([("Train/mine", 0.5, 100 * step)])
            train(engine, [batch(step)], loss_of)
        if rank() == 0:
            for events, kind, part in (([("a", 1.0, 2.5)], TypeError, "the step of a is 2.5"), ([(None, 1.0, 1)], TypeError, "a name is None"),
                                       ([("s\udc80", 1.0, 1)], ValueError, "a name is 's\\udc80'"), ([("a", "x", 1)], TypeError, "the value of a is 'x'")):
                raises(kind, lambda e=events, m=master: m.write_events([("kept out", 1.0, 1), *e]), part)
        master.close()
        if rank() == 0:
            raises(tessera.Error, lambda m=master: m.write_events([("a", 1.0, 1)]), "closed")
        engine.destroy()
        if rank() == 0:
            records = {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in Path(folder).glob("*/events.jsonl")}
            steps = {name: [record["step"] for record in written if "scalars" in record] for name, written in records.items()}
            names = ("job", "job_2") if engine_is_first else ("job_2", "job")
            assert steps == dict(zip(names, ([2 * world() * step for step in (1, 2, 3)], [100, 200]))), steps
            found = {(path.parent.name, path.stem): len(path.read_text().splitlines()) - 1 for path in Path(folder).glob("*/*.csv")}
            assert found == {(names[0], "Train_Samples_lr"): 3, (names[0], "Train_Samples_train_loss"): 3, (names[1], "Train_mine"): 2}, found
        tessera.comm.barrier()


def engine_samples(more):
    return 2 * world() + more


if __name__ == "__main__":
    main()
