"""The configuration's optimizers of whole parameters: Adafactor beside torch's, AdamW8bit beside fp32's, Python's beside C++'s."""
import os
from pathlib import Path

import tessera
import torch
from checks import check, config, largest_difference, main, raises, train
from optimizers import batches, loss_of, world
from tessera import optim
from torch import nn

ADAFACTOR = {"type": "Adafactor", "params": {"lr": 0.02, "weight_decay": 0.1, "d": 1.5}}
EIGHT_BITS = {"type": "AdamW8bit", "params": {"lr": 0.01, "weight_decay": 0.1, "min_8bit_size": 100}}


class Net(nn.Module):
    """A matrix in 8 bits and a name that is an embedding's; a bias; a tied and a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_in = nn.Linear(16, 64)
        self.first = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.frozen(self.again(self.first(self.embed_in(x)).relu())))


def engine_of(stage, optimizer, **changes):
    model = Net()
    engine, *_ = tessera.initialize(model=model, config=config(stage, 500, optimizer=optimizer, **changes))
    return engine


def weights_after(stage, optimizer, samples=None, **changes):
    engine = engine_of(stage, optimizer, **changes)
    losses = train(engine, samples or batches(4), loss_of)
    return losses, engine.state_dict(), engine


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_cpp(function):
    """Calls it with the formulas that C++ programs have, where Python's are optimizers of torch."""
    kept, optim.WHOLE = optim.WHOLE, ()
    try:
        return function()
    finally:
        optim.WHOLE = kept


@check
def the_class_of_the_configuration_is_torchs():
    for stage in (0, 3):
        model = Net()
        engine, *_ = tessera.initialize(model=model, optimizer=torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1, d=1.5),
                                        config=config(stage, 500))
        expected = train(engine, batches(4), loss_of), engine.state_dict()
        losses, weights, ours = weights_after(stage, ADAFACTOR)
        assert losses == expected[0] and equal(weights, expected[1]), stage
        assert type(ours.optimizer).__name__ and ours.config["optimizer"]["type"] == "Adafactor"
        assert not ours._whole_optimizer.on_one_rank or world == 1
        own, theirs = ours.optimizer.state[ours.module.first.weight], engine.optimizer.state[engine.module.first.weight]
        assert own.keys() == theirs.keys() == {"step", "row_var", "col_var"} and all(torch.equal(own[key], theirs[key]) for key in own)


@check
def python_and_cpp_have_the_same_bits():
    """Of C++'s Adafactor, torch's: the reference is the code of torch that runs in the same process."""
    for optimizer in (ADAFACTOR, EIGHT_BITS, {**ADAFACTOR, "params": {"lr": 0.02, "maximize": True, "eps": [1e-5, 1e-2], "beta2_decay": -0.5}}):
        for stage, clipping in ((0, 0.0), (3, 0.1)):
            python = weights_after(stage, optimizer, gradient_clipping=clipping)
            cpp = in_cpp(lambda o=optimizer, s=stage, c=clipping: weights_after(s, o, gradient_clipping=c))
            assert cpp[2]._whole_optimizer is None and python[2]._whole_optimizer is not None
            assert python[0] == cpp[0] and equal(python[1], cpp[1]), (stage, optimizer, largest_difference(python[1], cpp[1]))


@check
def eight_bits_are_near_fp32_and_their_bytes_are_the_formula():
    again = batches(2) * 15
    losses, weights, engine = weights_after(2, EIGHT_BITS, again)
    fp32, full, _ = weights_after(2, {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, again)
    assert fp32[-1] < fp32[0] - 0.3 and abs(losses[-1] - fp32[-1]) < 0.05, (losses[-1], fp32[-1])
    assert not equal(weights, full)
    state = engine.optimizer.state[engine.module.first.weight]
    assert state["state1"].dtype == torch.uint8 and state["state1"].shape == (64, 64) and state["absmax1"].shape == (16,)
    for name in ("embed_in.weight", "head.bias"):
        assert engine.optimizer.state[dict(engine.module.named_parameters())[name]]["state1"].dtype == torch.float32, name
    # head.weight has 320 elements
    eight = {"first.weight": 64 * 64, "head.weight": 320}
    expected = sum(2 * n + 2 * 4 * -(-n // 256) for n in eight.values()) + 8 * (16 * 64 + 64 + 64 + 64 + 5)
    steps = 7 * 4  # a fp32 number of each parameter, in Python
    total = sum(tessera.comm.all_gather(engine.measured_bytes()["optimizer"], "bytes"))
    assert total == expected + steps, (total, expected)
    assert engine.measured_bytes()["optimizer"] == engine.formula_bytes()["optimizer"], engine.formula_bytes()
    assert in_cpp(lambda: check_formula(expected))


def check_formula(expected):
    _, _, engine = weights_after(2, EIGHT_BITS)
    mine = engine.measured_bytes()["optimizer"]
    assert mine == engine.formula_bytes()["optimizer"], (mine, engine.formula_bytes())
    assert sum(tessera.comm.all_gather(mine, "bytes")) == expected
    return True


@check
def groups_rates_and_state_dicts():
    optimizer = {**EIGHT_BITS, "param_groups": [{"match": ["head*"], "lr": 0.5, "optim_bits": 32}, {"match": ["nothing*"], "lr": 3.0}, {"match": ["*bias"], "lr": 0.25}]}
    engine = engine_of(1, optimizer, scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0, 0, 0], "warmup_max_lr": [0.01, 0.02, 0.03, 0.04],
                                                                               "warmup_num_steps": 4, "warmup_type": "linear"}})
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [2, 2, 0, 3], engine.optimizer.param_groups
    assert engine.optimizer.param_groups[1]["optim_bits"] == 32
    rates = []
    for batch in batches(3):
        rates.append(engine.get_lr()[0])
        train(engine, [batch], loss_of)
    assert rates[0] <= rates[1] < rates[2], rates
    rate = engine.optimizer.param_groups[0]["lr"]  # of the group without parameters in the middle nothing is asked
    assert rate == engine.get_lr()[0] and [engine.optimizer.param_groups[i]["lr"] / rate for i in (1, 3)] == [2, 4], engine.get_lr()
    assert engine.optimizer.state[engine.module.head.weight]["state1"].dtype == torch.float32
    saved, expected = engine.optimizer.state_dict(), engine.state_dict()
    model = Net()
    model.load_state_dict(expected)
    other, *_ = tessera.initialize(model=model, config=config(3, 500, optimizer=optimizer))
    other.optimizer.load_state_dict(saved)
    more = batches(2)
    # The schedules are apart, so the rates are set.
    for one in (engine, other):
        for group in one.optimizer.param_groups:
            group["lr"] = 0.01
        train(one, more[:1], loss_of)
    assert equal(engine.state_dict(), other.state_dict())
    model = Net()
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if not any(p is one for one in head)]
    engine, ours, *_ = tessera.initialize(model=model, model_parameters=[{"params": rest, "name": "rest"}, {"params": head, "lr": 0.5, "optim_bits": 32}],
                                          config=config(2, 500, optimizer=EIGHT_BITS))
    assert [group["lr"] for group in ours.param_groups] == [0.01, 0.5] and ours.param_groups[0]["name"] == "rest"
    train(engine, batches(2), loss_of)
    assert ours.state[model.head.weight]["state1"].dtype == torch.float32


@check
def checkpoints_go_from_python_to_cpp_and_back():
    folder = Path(os.environ["SAVED"]) / f"world_{world}"
    for optimizer in (ADAFACTOR, EIGHT_BITS):
        for there, back in ((lambda f: f(), in_cpp), (in_cpp, lambda f: f())):
            _, _, engine = there(lambda o=optimizer: weights_after(2, o))
            engine.save_checkpoint(folder, tag="both")
            more = batches(6)[4:]
            expected = train(engine, more, loss_of), engine.state_dict()
            other = back(lambda o=optimizer: engine_of(3, o))
            other.load_checkpoint(folder, tag="both")
            assert train(other, more, loss_of) == expected[0] and equal(other.state_dict(), expected[1]), optimizer["type"]
            wrong = engine_of(1, {"type": "AdamW"})
            raises(tessera.Error, lambda engine=wrong: engine.load_checkpoint(folder, tag="both"), optimizer["type"], "AdamW")


@check
def without_an_engine():
    torch.manual_seed(1)
    plain, ours = nn.Linear(64, 64), nn.Linear(64, 64)
    ours.load_state_dict(plain.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    eight = optim.AdamW8bit(ours.named_parameters(), lr=0.01)
    for _ in range(20):
        x = torch.randn(8, 64)
        for model, optimizer in ((plain, theirs), (ours, eight)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert (plain.weight - ours.weight).abs().max() < 0.02 and not torch.equal(plain.weight, ours.weight)
    assert eight.state[ours.bias]["state2"].dtype == torch.float32  # it is small
    assert eight.state[ours.weight]["state2"].dtype == torch.uint8
    kept = eight.state_dict()
    again = optim.AdamW8bit(ours.named_parameters(), lr=0.01)
    again.load_state_dict(kept)
    assert again.state[ours.weight]["state1"].dtype == torch.uint8
    assert torch.equal(again.state[ours.weight]["state1"], eight.state[ours.weight]["state1"])
    again.step()
    saved = eight.state_dict()
    inner = {index: {key: value for key, value in state.items() if key != "step"} for index, state in saved["state"].items()}
    nested = {index: {"step": int(state["step"]), "__bnb_optimizer_quant_state__": inner[index]} for index, state in saved["state"].items()}
    again.load_state_dict({**saved, "state": nested})
    for index, state in again.state_dict()["state"].items():
        assert state.keys() == saved["state"][index].keys()
        assert all(torch.equal(value, saved["state"][index][key]) and value.dtype == saved["state"][index][key].dtype for key, value in state.items())
    for wrong, *parts in (({"gnorm_vec": torch.zeros(100)}, "gnorm_vec"), ({"state1": torch.zeros(3)}, "state1"), ({"beta": 0.5}, "beta"),
                          ({"step": 1.0, "__bnb_optimizer_quant_state__": {**inner[0], "step": 2}}, "step", "twice")):
        raises(tessera.Error, lambda wrong=wrong: again.load_state_dict({**saved, "state": {**saved["state"], 0: {**saved["state"][0], **wrong}}}), *parts)
    raises(tessera.ConfigError, lambda: optim.AdamW8bit(ours.parameters(), optim_bits=4), "optim_bits", "8 or 32")
    half = nn.Linear(4, 4).bfloat16()
    half(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    raises(tessera.ConfigError, lambda: optim.AdamW8bit(half.parameters()).step(), "bfloat16", "fp32")


@check
def wrong_values_are_named():
    for params, parts in (({"optim_bits": 4}, ("optim_bits",)), ({"min_8bit_size": -1}, ("min_8bit_size",)), ({"amsgrad": True}, ("amsgrad",))):
        raises(tessera.ConfigError, lambda params=params: engine_of(0, {"type": "AdamW8bit", "params": params}), *parts)
    raises(tessera.ConfigError, lambda: engine_of(0, {"type": "Adafactor", "params": {"betas": [0.9, 0.99]}}), "betas")


if __name__ == "__main__":
    main()
