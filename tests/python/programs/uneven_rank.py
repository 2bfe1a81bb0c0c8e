"""Two ranks use different parameters in their first forward at stage 3, where parameters travel. Argument: "plain", which is an error on both
ranks, or "held": the branches are held by a GatheredParameters, and training equals stage 2's to the bit."""
import contextlib
import sys

import patterns
import tessera
import torch
from checks import config

torch.set_num_threads(1)
tessera.comm.init_distributed(backend="gloo", timeout_s=60, rendezvous_timeout_s=120)
make, batch_of, loss_of = patterns.cases()["a_branch_by_rank"]


def train(stage, held):
    """Losses and weights of steps in which ranks use a branch each, or the same one."""
    torch.manual_seed(0)
    engine, *_ = tessera.initialize(model=make(), config=config(stage, 500, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    losses = []
    for branches in ((0, 1), (0, 0), (1, 0), (1, 1), (0, 1)):  # by rank
        x, y, _ = batch_of(len(losses))
        with tessera.GatheredParameters(list(engine.module.branches.parameters())) if held else contextlib.nullcontext():
            loss = loss_of(engine, (x, y, branches[engine.global_rank]))
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


losses, weights = train(3, sys.argv[1] == "held")
expected_losses, expected = train(2, False)
assert losses == expected_losses, (losses, expected_losses)
assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in expected)
