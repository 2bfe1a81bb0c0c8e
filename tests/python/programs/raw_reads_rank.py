"""Reads of parameters past the engine: at stage 3 an error that says what to do, elsewhere the values."""
import copy
import io
import pickle

import safetensors.torch
import tessera
import torch
from checks import check, config, largest_difference, main, raises, train
from torch import nn
from torch.nn import functional

world = tessera.comm.get_world_size()


def make(stage, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    return tessera.initialize(model=model, config=config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, **changes))[0]


def batch(step):
    """By rank."""
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + r)) for r in range(world)]


def loss_of(model, x):
    return functional.cross_entropy(model(x), x.argmax(-1) % 5)


@check
def released_parameters_are_not_read_past_the_engine():
    ways = ("engine.state_dict()", "save_model(", "GatheredParameters")
    engine = make(3, zero_optimization={"stage": 3, "unit_numel": 1000, "stage3_param_persistence_threshold": 0,
                                        "stage3_max_live_parameters": 0})
    model, whole = engine.module, engine.state_dict()
    weight = model[3].weight
    if not engine._engine.shards_parameters:  # one copy on this host
        return
    assert tessera._engine.is_released(weight)
    plain_model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    for part, name in ((model, "3.weight"), (model[3], "weight")):
        state = part.state_dict()
        assert list(state) == list(part.state_dict(keep_vars=True))
        assert state[name].shape == (64, 64) and state[name].dtype == torch.float32 and state[name].numel() == 64 * 64
        for read in (lambda s=state: torch.save(s, io.BytesIO()), lambda s=state: copy.deepcopy(s), lambda s=state: pickle.dumps(s),
                     lambda s=state: safetensors.torch.save(s), lambda s=state, n=name: s[n].sum(), lambda s=state, n=name: s[n].cpu(),
                     lambda s=state, n=name: s[n].numpy(), lambda s=state, n=name: s[n].tolist(), lambda s=state, n=name: s[n].data_ptr(),
                     lambda s=state, n=name: s[n][0], lambda s=state, n=name: torch.stack([s[n]]), lambda s=state, n=name: s[n] + 1,
                     lambda s=state, n=name: s[n].untyped_storage(), lambda s=state, n=name: s[n].data, lambda s=state, n=name: s[n].clone()):
            assert "\n" not in raises(tessera.Error, read, "weight is not in memory", *ways)
        assert "weight" in repr(state[name])
    raises(RuntimeError, lambda: plain_model.load_state_dict(model.state_dict()), "weight is not in memory", *ways)
    assert model.state_dict()["2.running_mean"].sum() == 0  # a buffer is as it was
    if world > 1 and engine.global_rank == 0:
        list(model.state_dict())  # asks nothing of other ranks
    tessera.comm.barrier()
    assert list(model.state_dict(keep_vars=True)) == list(whole)  # names and shapes
    for read in (lambda: weight.data_ptr(), lambda: weight.untyped_storage().data_ptr(), lambda: pickle.dumps(weight),
                 lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO()),
                 lambda: torch.save(dict(model.named_parameters()), io.BytesIO()), lambda: copy.deepcopy(weight.data),
                 lambda: safetensors.torch.save(dict(model.named_parameters())), lambda: bytes(weight.untyped_storage())):
        with tessera.GatheredParameters(model):
            pass
        assert tessera._engine.is_released(weight)
        raises(RuntimeError, read, "is not in memory", *ways)
    assert (weight.data.numpy() == whole["3.weight"].numpy()).all()  # begins with an operator, which gathers

    plain = copy.deepcopy(model)  # copies by operators, which gather; a collective
    assert largest_difference(plain.state_dict(), whole) == 0 and type(plain[3].weight) is nn.Parameter
    plain[3].weight.data.zero_()
    pickle.dumps(plain)
    with tessera.GatheredParameters(model):
        assert largest_difference(model.state_dict(), whole) == 0
        assert weight.detach().numpy().sum() == whole["3.weight"].numpy().sum()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    assert largest_difference(torch.load(io.BytesIO(file.getvalue())), whole) == 0
    other = {name: value + 1 for name, value in whole.items()}
    with tessera.GatheredParameters(model, modifier_rank=0):
        model.load_state_dict(other)
    assert largest_difference(engine.state_dict(), other) == 0
    raises(tessera.Error, lambda: model.state_dict()["3.weight"].sum(), *ways)
    train(engine, [batch(1)], loss_of)
    for stage in range(3):  # whole on each rank
        engine = make(stage)
        train(engine, [batch(0)], loss_of)
        assert largest_difference(engine.module.state_dict(), engine.state_dict()) == 0
        pickle.dumps(engine.module)


if __name__ == "__main__":
    main()
