"""torch.compile: GPT-2 compiled before and after initialize, whole and layer by layer, in training and evaluation. Argument 2 is the
compiler, argument 3 the stages."""
import copy
import sys

import models
import tessera
import torch
from checks import check, config, largest_difference, main, sgd, train, train_plainly
from torch import nn

COMPILER, STAGES = sys.argv[2], [int(stage) for stage in sys.argv[3]]
world = tessera.comm.get_world_size()
make, tokens, loss_of = models.transformers_cases()["gpt2"]


def compile_whole(model):
    model.compile(backend=COMPILER)
    return model


def compile_layers(model):
    for layer in model.transformer.h:
        layer.compile(backend=COMPILER)
    return model


def wrap(model):
    return torch.compile(model, backend=COMPILER)


def compare(stage, compile_model):
    torch.manual_seed(0)
    plain = make()
    model = compile_model(copy.deepcopy(plain))
    batches = [[tokens(step * world + r) for r in range(world)] for step in range(4)]
    expected = train_plainly(plain, sgd(plain), batches, loss_of)
    engine, *_ = tessera.initialize(model=model, optimizer=sgd(model), config=config(stage))
    got = train(engine, batches, loss_of)
    assert largest_difference(got, expected) < 1e-5, (stage, got, expected)
    engine.eval()
    plain.eval()
    for _ in range(2):
        with torch.no_grad():
            apart = (engine(tokens(9)).logits - plain(tokens(9)).logits).abs().max()
        assert apart < 1e-5, (stage, apart)
    engine.train()
    train(engine, batches[:1], loss_of)


@check
def a_whole_model():
    for stage in STAGES:
        torch._dynamo.reset()
        compare(stage, compile_whole)


@check
def layers():
    torch._dynamo.reset()
    compare(STAGES[-1], compile_layers)


@check
def a_wrapped_model():
    torch._dynamo.reset()
    compare(STAGES[-1], wrap)


class Norms(nn.Module):
    """Inductor's own kernels read its parameters, and no operator does. (A Sequential of torch's own would not be compiled.)"""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(2048), nn.LayerNorm(2048)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


class HalfFrozen(nn.Module):
    """A frozen part before a trainable one."""

    def __init__(self):
        super().__init__()
        self.body = Norms()
        self.head = nn.Linear(2048, 4)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def inputs(step):
    return torch.randn(4, 2048, generator=torch.Generator().manual_seed(step))


@check
def a_frozen_part_compiled_alone():
    """No input of its graph requires a gradient, so that autograd does not announce it, in training either."""
    for stage in STAGES:
        for break_graph in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            plain = HalfFrozen()
            model = copy.deepcopy(plain)
            zero = {"stage": stage, "unit_numel": 3000, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
            (model if break_graph else model.body).compile(backend=COMPILER)
            if break_graph:  # in front of the trainable part: the first graph is of the frozen one alone
                model.head.register_forward_pre_hook(torch._dynamo.disable(lambda module, args: None))
            batches = [[inputs(step * world + r) for r in range(world)] for step in range(4)]
            mean_square = lambda model, x: model(x).square().mean()  # noqa: E731
            expected = train_plainly(plain, sgd(plain), batches, mean_square)
            engine, *_ = tessera.initialize(model=model, optimizer=sgd(model), config=config(stage, zero_optimization=zero))
            got = train(engine, batches, mean_square)
            assert largest_difference(got, expected) < 1e-5, (stage, got, expected)
            with torch.no_grad():  # and without the engine's forward
                apart = (model(inputs(9)) - plain(inputs(9))).abs().max()
            assert apart < 1e-5, (stage, apart)
            train(engine, batches[:1], mean_square)


if __name__ == "__main__":
    del sys.argv[2:4]
    main()
