"""An exception of the user's in a forward or a backward, on all ranks: training goes on as if the step had not been begun."""
import functools
import os
import tempfile

import tessera
import torch
from checks import STAGES, check, config, main, raises
from tessera import _engine
from tessera.deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.nn import functional

world, rank = tessera.comm.get_world_size(), tessera.comm.get_rank()


class Trap(torch.autograd.Function):
    """The identity, which raises in forward or backward when it is told to."""

    armed = {}

    @staticmethod
    def forward(ctx, x):
        Trap.spring("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Trap.spring("backward")
        return gradient

    @staticmethod
    def spring(place):
        if place in Trap.armed:
            raise Trap.armed.pop(place)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)])

    def forward(self, x):
        for layer in self.layers[:2]:
            x = Trap.apply(torch.tanh(layer(x)))
        return self.layers[2](x)


def make(stage, accumulation, lr_scheduler=None):
    torch.manual_seed(0)
    return tessera.initialize(model=Net(), lr_scheduler=lr_scheduler, config=config(
        stage, unit_numel=300, gradient_accumulation_steps=accumulation, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}))[0]


def micro_step(engine, number):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(number * world + rank))
    engine.backward(functional.cross_entropy(engine(x), x.argmax(-1) % 5))
    engine.step()


def trained(stage, accumulation, recover=None, place=None, error=None):
    engine = make(stage, accumulation)
    folder = tessera.comm.all_gather(tempfile.mkdtemp(prefix="tessera_failed_steps_"))[0] if recover == "load" else None
    for step in range(3):
        if step == 2 and recover is not None:
            if recover == "load":
                engine.save_checkpoint(folder)
            fail(engine, accumulation, place, error)
            {"engine": lambda: engine.zero_grad(), "optimizer": lambda: engine.optimizer.zero_grad(),
             "load": lambda: engine.load_checkpoint(folder)}[recover]()
        for micro in range(accumulation):
            micro_step(engine, step * accumulation + micro)
    return engine.state_dict()


def fail(engine, accumulation, place, error):
    """In the last micro-step of another step."""
    for micro in range(accumulation - 1):
        micro_step(engine, 90 + micro)
    Trap.armed[place] = error
    try:
        micro_step(engine, 99)
    except type(error):
        return
    raise AssertionError("nothing was raised")


def expect_equal(stage, accumulation, *failure):
    expected, found = trained(stage, accumulation), trained(stage, accumulation, *failure)
    assert all(torch.equal(found[name], value) for name, value in expected.items()), (stage, accumulation, failure)


@check
def a_backward_that_raised_is_dropped():
    for stage in STAGES:
        for accumulation, recover in ((1, "engine"), (2, "optimizer"), (2, "load")):
            expect_equal(stage, accumulation, recover, "backward", RuntimeError("no memory"))
    expect_equal(3, 2, "engine", "backward", KeyboardInterrupt())


@check
def a_forward_that_raised_leaves_a_checkpoint_that_can_be_loaded():
    for stage in STAGES:
        expect_equal(stage, 2, "load", "forward", KeyboardInterrupt())
        expect_equal(stage, 1, "engine", "forward", ValueError("no memory"))


def interrupt_after(name):
    """The next call of the compiled engine's method, as Python does it: what came in the call is raised when it has returned."""
    method = getattr(_engine.Engine, name)

    def interrupted(self):
        setattr(_engine.Engine, name, method)
        method(self)
        raise KeyboardInterrupt

    setattr(_engine.Engine, name, interrupted)


@check
def an_interrupt_between_two_calls_of_the_engine_leaves_it_whole():
    for stage in STAGES:
        for name in ("begin_forward", "step"):
            plain, engine = (make(stage, 1, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)) for _ in range(2))
            for number in range(4):
                micro_step(plain, number)
                if number == 1:
                    interrupt_after(name)
                    raises(KeyboardInterrupt, functools.partial(micro_step, engine, number))
                    engine.zero_grad()
                if number != 1 or name != "step":  # else it was taken
                    micro_step(engine, number)
            assert engine.lr_scheduler.last_epoch == engine.global_steps == 4 and engine.get_lr() == plain.get_lr(), (stage, name)
            assert engine.global_samples == plain.global_samples
            expected, found = plain.state_dict(), engine.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (stage, name)


@check
def a_step_that_was_interrupted_before_its_update_is_discarded():
    def make():
        torch.manual_seed(0)
        model = Net()
        return tessera.initialize(model=model, optimizer=torch.optim.Adafactor(model.parameters(), 1e-2), config=config(2))[0]

    def interrupted():
        raise KeyboardInterrupt

    plain, engine = make(), make()
    for number in range(3):
        micro_step(plain, number)
        if number == 1:
            engine._whole_optimizer.digest = interrupted  # it is asked before the update
            raises(KeyboardInterrupt, lambda: micro_step(engine, 99))
            del engine._whole_optimizer.digest
            engine.zero_grad()
        micro_step(engine, number)
    expected, found = plain.state_dict(), engine.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def expect_no_gradient(engine):
    try:
        engine.full_gradient("layers.1.weight")
        raise AssertionError("no error")
    except tessera.Error as error:
        assert "has discarded" in str(error), error


@check
def a_checkpoint_repairs_what_an_exception_in_gathered_parameters_has_left():
    for stage in STAGES:
        expected, engine = trained(stage, 1), make(stage, 1)
        folder = tessera.comm.all_gather(tempfile.mkdtemp(prefix="tessera_failed_steps_"))[0]
        for step in range(2):
            micro_step(engine, step)
        engine.save_checkpoint(folder)
        try:
            with tessera.GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    engine.module.layers[1].weight.fill_(7)
                raise ValueError("changed my mind")
        except ValueError:
            pass
        if rank == 0:
            try:
                engine.step()
                raise AssertionError("no error")
            except tessera.Error as error:
                assert "was left by an exception" in str(error), error
        alone = "rank 0: " if world > 1 else ""  # the others do not wait for it
        for name, call in (("state_dict", engine.state_dict), ("state_dict", lambda engine=engine: engine.state_dict(only_rank=0)),
                           ("save_model", lambda engine=engine, folder=folder: engine.save_model(f"{folder}/no.safetensors"))):
            raises(tessera.Error, call, f"{name}(): {alone}parameter layers.1.weight was written", "was left by an exception")
        first = next(engine.module.parameters())
        for call in (engine.eval, lambda engine=engine: engine.full_gradient("layers.0.weight"), lambda first=first: safe_get_full_grad(first),
                     engine.optimizer.state_dict):
            raises(tessera.Error, call, "was left by an exception")
        assert not os.path.exists(f"{folder}/no.safetensors")
        engine.load_checkpoint(folder)
        expect_no_gradient(engine)
        micro_step(engine, 2)
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), stage
        assert engine.full_gradient("layers.1.weight").any()
        torch.save(found, f"{folder}/weights{rank}.pt")
        engine.load_weights(f"{folder}/weights{rank}.pt")
        expect_no_gradient(engine)


@check
def destroy_ends_also_where_one_rank_has_failed_alone():
    for stage in STAGES:
        for alone in (True, False) if stage < 3 else (False,):
            engine = make(stage, 2)
            for number in range(2):
                micro_step(engine, number)
            before = engine.state_dict()
            if not alone:
                fail(engine, 2, "backward", ValueError("mine"))
            elif rank == 0:
                Trap.armed["backward"] = ValueError("mine")
                x = torch.zeros(2, 16)
                loss = Trap.apply(engine.module.layers[2](x[:, :1].expand(2, 32))).mean()  # it fails before the first gradient
                try:
                    engine.backward(loss)
                except ValueError:
                    assert engine._engine.has_failed
            engine.destroy()
            assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()), (stage, alone)
            again = tessera.initialize(model=engine.module, config=config(stage, unit_numel=300, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
            micro_step(again, 7)
            assert not torch.equal(again.state_dict()["layers.0.weight"], before["layers.0.weight"])
            again.destroy()
        if world == 1:
            engine = make(stage, 2)
            before = engine.state_dict()
            raises(RuntimeError, lambda e=engine, b=before: e.module.load_state_dict({name: value + 1 for name, value in b.items()}), "writes into")
            engine.destroy()
            assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()), stage


main()
