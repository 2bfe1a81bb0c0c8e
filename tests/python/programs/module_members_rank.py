"""Tensors that lie in a parameter's memory, and what is written there: taken, or refused by name, at every stage and in every precision."""
import copy
import functools

import tessera
import torch
from checks import STAGES, check, config, main, raises
from torch import nn
from torch.nn.utils import prune

rank = tessera.comm.get_rank()


def make(model, stage=0, **changes):
    engine, *_ = tessera.initialize(model=model, config=config(stage, **changes))
    return engine


def step(engine):
    torch.manual_seed(rank)
    engine.backward(engine(torch.randn(4, 8)).float().square().mean())
    engine.step()


# ----------------------------------------------------------------------------------------------- views of parameters


class Tied(nn.Module):
    """Uses a view of a weight that it has kept somewhere."""

    def __init__(self, keep):
        super().__init__()
        self.enc, self.fc = nn.Linear(8, 8), nn.Linear(8, 8)
        keep(self)

    def forward(self, x):
        return self.fc(self.enc(x))


@check
def a_view_that_the_module_keeps_is_refused_by_name():
    class Holder:
        pass

    def with_view(view):
        return lambda module, inputs, output: output @ view

    def held(module, value):
        module.holder = Holder()
        module.holder.value = value

    keeps = {
        "attribute dec": lambda m: setattr(m, "dec", m.enc.weight.t()),
        "attribute dec ": lambda m: setattr(m, "dec", m.enc.weight.data),
        "attribute rows[1]": lambda m: setattr(m, "rows", [1, m.enc.weight[2:4]]),
        "attribute table['a'][0]": lambda m: setattr(m, "table", {"a": (m.enc.weight.detach(),)}),
        "attribute array": lambda m: setattr(m, "array", m.enc.weight.detach().numpy()[1:]),
        "attribute second[0]": lambda m: setattr(m, "second", [nn.Parameter(m.enc.weight.data)]),
        "attribute fc.other": lambda m: setattr(m.fc, "other", m.enc.weight.view(-1)),
        "attribute holder.value": lambda m: held(m, m.enc.weight.flatten()),
        "buffer dec": lambda m: m.register_buffer("dec", m.enc.weight.t()),
        "attribute _forward_hooks": lambda m: m.register_forward_hook(with_view(m.enc.weight.t())),
        "attribute scorer": lambda m: setattr(m, "scorer", functools.partial(torch.mm, m.enc.weight.t())),
        "attribute aside[0].bias_copy": lambda m: setattr(m, "aside", [Tied(lambda t: t.register_buffer("bias_copy", m.enc.weight[0]))]),
    }
    for stage in (0, 3):
        for name, keep in keeps.items():
            text = raises(tessera.ConfigError, lambda k=keep, s=stage: make(Tied(k), s), name.strip(), "parameter enc.weight", "forward()")
            assert "clone()" in text
    raises(tessera.ConfigError, lambda: make(lambda: Tied(keeps["attribute dec"])), "attribute dec", "parameter enc.weight")


@check
def ordinary_modules_are_not_refused():
    spectral = Tied(lambda m: torch.nn.utils.spectral_norm(m.enc))
    norm = Tied(lambda m: torch.nn.utils.weight_norm(m.enc))
    parametrized = Tied(lambda m: torch.nn.utils.parametrizations.orthogonal(m.enc))
    pruned = Tied(lambda m: prune.l1_unstructured(m.enc, "weight", 0.5))
    tied = Tied(lambda m: setattr(m.fc, "weight", m.enc.weight))
    listed = Tied(lambda m: setattr(m, "all", [*m.parameters()]))
    sliced = Tied(lambda m: setattr(m, "copy", m.enc.weight.t().clone()))
    loaded = Tied(lambda m: None)
    loaded.load_state_dict({k: v.clone() for k, v in loaded.state_dict().items()}, assign=True)
    ran = Tied(lambda m: None)
    ran.last = ran(torch.ones(1, 8))  # its graph is alive
    for model in (spectral, norm, parametrized, pruned, tied, listed, sliced, loaded, ran, torch.compile(Tied(lambda m: None)),
                  Tied(lambda m: setattr(m, "attention", nn.MultiheadAttention(8, 2)))):
        engine = make(deepcopied(model), 3)
        if not isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            step(engine)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        make(kind(8, 8, 2))


@check
def a_view_that_is_held_outside_of_the_module_is_a_warning():
    said = []

    def warnings_of(model):
        said.clear()
        before, tessera._engine.log_warning = tessera._engine.log_warning, said.append
        try:
            make(model)
        finally:
            tessera._engine.log_warning = before
        return said

    taken, viewed, array, plain = (Tied(lambda m: None) for _ in range(4))
    held = [taken.state_dict(), viewed.enc.weight[1:3], array.enc.weight.detach().numpy()]
    plain.enc.weight.untyped_storage()
    for model in (taken, viewed, array):
        assert len(warnings_of(model)) == (rank == 0) and all("parameter enc.weight" in text for text in said), said
    assert len(held) == 3
    for model in (plain, Tied(lambda m: torch.nn.utils.spectral_norm(m.enc)), nn.LSTM(8, 8)):
        assert warnings_of(model) == []


def deepcopied(model):
    try:
        return copy.deepcopy(model)
    except RuntimeError:  # of tensors with a graph
        return model


# ------------------------------------------------------------------------------------------------ writes into parameters


@check
def a_write_into_a_parameter_is_an_error_of_the_operator_and_of_the_next_call():
    writes = {"data": lambda p: p.data.clamp_(-0.05, 0.05), "no_grad": lambda p: p.clamp_(-0.05, 0.05), "detached": lambda p: p.detach().mul_(2),
              "foreach": lambda p: torch._foreach_mul_([p.data], 2.0), "view": lambda p: p.data[1:].zero_(), "copy": lambda p: p.data.copy_(p * 2),
              "out": lambda p: torch.mul(p.detach(), 2, out=p.data), "index": lambda p: p.data.__setitem__(0, 1.0)}
    for stage in STAGES:
        for precision in ({}, {"bf16": {"enabled": True, "auto_cast": True}}):
            for write in list(writes.values())[:len(writes) if stage == 0 else 2]:
                model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
                engine = make(model, stage, **precision)
                step(engine)
                with torch.no_grad():
                    raises(RuntimeError, lambda p=model[1].weight, w=write: w(p), "parameter 1.weight belongs to the engine")
                raises(tessera.Error, lambda e=engine: e(torch.ones(2, 8)), "1.weight", "GatheredParameters")
                raises(tessera.Error, engine.step, "1.weight")


@check
def an_embedding_that_renormalises_is_refused_with_advice_that_helps():
    for stage in STAGES:
        engine = make(nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), nn.Linear(8, 4)), stage)
        raises(tessera.Error, lambda e=engine: e.backward(e(torch.arange(16).view(4, 4)).square().mean()), "parameter 0.weight",
               "Leave max_norm out")


if __name__ == "__main__":
    main()
