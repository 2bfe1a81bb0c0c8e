"""Models as they are, beside plain PyTorch: losses of every step and weights at the end, at every stage."""
import sys

import models
import patterns
import tessera
import torch
from checks import STAGES, config, largest_difference, main, train, train_plainly
from checks import check as _check

FAMILY, STEPS = sys.argv[2], 4
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-5

# Batch norm over a few pixels is ill-conditioned: with large steps plain PyTorch's own rounding decides the losses.
RATE = 0.002 if FAMILY == "torchvision" else 0.05
UNIT_NUMEL = 500 if FAMILY == "patterns" else 20_000  # several units in the smallest of them


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)


def compare(make, batch_of, loss_of, stages):
    world, backend = tessera.comm.get_world_size(), tessera.comm.group().backend
    batches = [[batch_of(step * world + rank) for rank in range(world)] for step in range(STEPS)]
    torch.manual_seed(0)
    plain = make()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = train_plainly(plain, sgd(plain), batches, loss_of)
    weights = dict(plain.state_dict())
    buffers = {name for name, _ in plain.named_buffers()}
    bits = {}
    for stage in stages:
        model = make()
        model.load_state_dict(start)
        if tessera.comm.get_rank() > 0:  # rank 0's values count
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        engine, _, _, _ = tessera.initialize(model=model, optimizer=sgd(model), config=config(stage, UNIT_NUMEL))
        assert engine.module is model
        bits[stage] = train(engine, batches, loss_of)
        state = engine.state_dict()
        apart = largest_difference(bits[stage], expected)
        assert apart <= LOSS_LIMIT, f"stage {stage}: losses {bits[stage]}, plain PyTorch's {expected}"
        trained = {name: value for name, value in state.items() if name not in buffers}
        apart = largest_difference(trained, {name: weights[name] for name in trained})
        assert apart <= WEIGHT_LIMIT, f"stage {stage}: weights {apart} apart"
        del engine, model
    same = stages if backend in ("self", "shm") or world == 2 else stages[1:]
    assert all(bits[stage] == bits[same[0]] for stage in same), bits


for _name, _case in models.cases(FAMILY).items():
    def _run(name=_name, case=_case):
        refused = FAMILY == "patterns" and name in patterns.UNEVEN and tessera.comm.group().backend == "gloo"
        compare(*case, STAGES[:-1] if refused else STAGES)
    _run.__name__ = _name
    _check(_run)

if __name__ == "__main__":
    del sys.argv[2]
    main()
