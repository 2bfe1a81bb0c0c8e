"""Two ranks use different parameters in their first forward at stage 3, where parameters travel. Argument: "plain", which is an error on both
ranks, "held": the branches are held by a GatheredParameters, and training equals stage 2's to the bit, or "leaf": blocks of experts are leaf
modules, and training equals plain PyTorch's."""
import contextlib
import sys
import unittest.mock
import warnings

import patterns
import tessera
import torch
from checks import config, largest_difference, train_plainly
from tessera.deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return out


class Routed(nn.Module):
    """Two blocks of experts; which one a sample uses is given."""

    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.again = nn.Linear(16, 16), nn.Linear(16, 5), again
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(16), "mlp": Experts()}) for _ in range(2))

    def forward(self, x, chosen):
        x = self.first(x)
        for block in self.blocks:
            def run(x, block=block):
                return x + block["mlp"](block["norm"](x), chosen)
            x = checkpoint(run, x, use_reentrant=False) if self.again and self.training else run(x)
        return self.last(x)


def routed_batches():
    """By step and rank; ranks have no expert in common, then some, then all of their samples go to one."""
    generator, routes = torch.Generator().manual_seed(0), (([0, 1], [2, 3]), ([0, 2], [2, 1]), ([3, 3], [3, 3]), ([1, 0], [3, 2]), ([2, 0], [1, 0]))
    return [[(torch.randn(6, 16, generator=generator), torch.randint(0, 5, (6,), generator=generator), torch.tensor(route * 3)) for route in ranks]
            for ranks in routes]


def routed_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0], batch[2]), batch[1])


def train_leaves():
    batches, plain = routed_batches(), Routed()
    expected = train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.2), batches, routed_loss)
    by_section = {"zero_optimization": {**config(3, 500)["zero_optimization"], "leaf_module": {"classes": "Experts", "names": []}}}
    cases = [(False, [Experts], {}), (False, [nn.ModuleList], {}), (False, (), by_section), (True, ["Experts"], {}),
             (False, [Experts], {"activation_checkpointing": {"policy": "block"}})]
    for again, marked, changes in cases:
        model = Routed(again)
        if marked:
            set_z3_leaf_modules(model, marked)
        engine = tessera.initialize(model=model, config=config(3, 500, **{"optimizer": {"type": "SGD", "params": {"lr": 0.2}}, **changes}))[0]
        losses, gathered = [], []
        for step, batch in enumerate(batches):
            mine = batch[engine.global_rank]
            if step == 2:
                engine.eval()
                with torch.no_grad():
                    engine(mine[0], batches[0][engine.global_rank][2])
                engine.train()
            loss = routed_loss(engine, mine)
            gathered.append(len(tessera.zero._gathered))
            loss.backward() if step % 2 else engine.backward(loss)
            engine.step()
            assert not tessera.zero._gathered, "all are closed after a step"
            losses.append(sum(tessera.comm.all_gather(loss.item())) / 2)
        assert max(gathered) == (2 if "activation_checkpointing" in changes else 0), gathered  # in between only where it recomputes
        assert max(abs(a - b) for a, b in zip(losses, expected)) < 1e-5, (losses, expected, marked, changes)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 1e-5, (marked, changes)


def leaves_leave_nothing_behind():
    """An input that outlives the steps has no more hooks than before, and a forward that fails at any place closes what it has opened."""
    batches, failing = routed_batches(), []
    model = Routed()

    def fail(*_):
        if failing:
            raise failing.pop()

    model.blocks[1]["mlp"].register_forward_pre_hook(fail)  # before the leaf's own
    set_z3_leaf_modules(model, [Experts])
    model.blocks[0]["mlp"].register_forward_pre_hook(fail, prepend=True)
    engine = tessera.initialize(model=model, config=config(3, 500, optimizer={"type": "SGD", "params": {"lr": 0.2}}))[0]
    x = batches[0][engine.global_rank][0].requires_grad_()
    leaf, chosen = engine.module.blocks[0]["mlp"], batches[0][engine.global_rank][2]
    for number in range(8):
        for error in (KeyError("mine"), KeyboardInterrupt(), None) if number == 4 else (None,):
            raising = contextlib.nullcontext() if error is None else unittest.TestCase().assertRaises(type(error))
            with warnings.catch_warnings(), raising:
                warnings.simplefilter("error")
                failing.extend([] if error is None else [error])
                loss = (engine(x, chosen).square().mean() + leaf(x, chosen).square().mean())
            if error is None and number % 2:
                engine.backward(loss)
                engine.step()
            else:
                engine.zero_grad()
            assert not tessera.zero._gathered and not any(one._open for one in hooks_of(engine.module)), (number, error)
    del loss
    assert len(x._backward_hooks) == 0, x._backward_hooks
    with unittest.mock.patch.object(tessera.zero.GatheredParameters, "__enter__", side_effect=MemoryError("no memory")), warnings.catch_warnings():
        warnings.simplefilter("error")
        unittest.TestCase().assertRaises(MemoryError, engine, x, chosen)
    assert not any(one._open for one in hooks_of(engine.module))


def hooks_of(model):
    leaves = [getattr(hook, "__self__", None) for module in model.modules() for hook in module._forward_pre_hooks.values()]
    leaves = [one for one in leaves if hasattr(one, "_open")]
    assert len(leaves) == 2
    return leaves


if sys.argv[1] == "leaf":
    train_leaves()
    leaves_leave_nothing_behind()
    sys.exit()
losses, weights = train(3, sys.argv[1] == "held")
expected_losses, expected = train(2, False)
assert losses == expected_losses, (losses, expected_losses)
assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in expected)
