"""torch.compile: GPT-2 compiled before and after initialize, whole and layer by layer, in training and evaluation. Argument 2 is the
compiler, argument 3 the stages."""
import copy
import sys

import models
import tessera
import torch
from checks import check, config, largest_difference, main, train, train_plainly

COMPILER, STAGES = sys.argv[2], [int(stage) for stage in sys.argv[3]]
world = tessera.comm.get_world_size()
make, tokens, loss_of = models.transformers_cases()["gpt2"]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


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


if __name__ == "__main__":
    del sys.argv[2:4]
    main()
