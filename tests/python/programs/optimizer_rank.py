"""Optimizers of torch beside themselves: translated, and as they are."""
import functools
import types

import tessera
import torch
from checks import check, config, largest_difference, main, raises, standard_error, train, train_plainly
from optimizers import Named, batches, decay_groups, in_two, loss_of, mlp, rank, steps_together
from tessera.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from tessera.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tessera.deepspeed.ops.lamb import FusedLamb
from tessera.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from tessera.optimizer_options import NotBuiltIn, Options
from torch import nn
from torch.optim import lr_scheduler as schedulers


def translate_options(optimizer):
    options = Options.of(optimizer)
    return [options.values(group, f"{options.name}, param group {i}") for i, group in enumerate(optimizer.param_groups)]


@check
def options_count_or_are_refused():
    adam, adamw, sgd, adagrad, rmsprop = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop
    makers = [
        lambda m: adam(m.parameters(), 1e-2, weight_decay=0.5, decoupled_weight_decay=True),
        lambda m: adam(m.parameters(), 1e-2, weight_decay=0.5, foreach=False, fused=False, differentiable=False, capturable=False),
        lambda m: adamw(m.parameters(), torch.tensor(1e-2), betas=[0.8, 0.9], foreach=False),
        lambda m: adamw(in_two(m, {"eps": 1e-3, "betas": (0.5, 0.6)}, {"lr": torch.tensor(0.02), "weight_decay": 0.0}), 1e-2, foreach=False),
        lambda m: sgd(in_two(m, {"momentum": 0.9, "nesterov": True}), 0.05, weight_decay=0.1),
        lambda m: sgd(in_two(m, {}, {"momentum": 0.9, "dampening": 0.5}), 0.05),
        lambda m: adagrad(in_two(m, {"lr_decay": 0.3}, {"eps": 1e-2}), 0.02),
        lambda m: adam(in_two(m, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}), 1e-2),
        lambda m: adamw(m.parameters(), 1e-2, amsgrad=True, maximize=True),
        lambda m: sgd(in_two(m, {"maximize": True}, {"momentum": 0.9}), 0.05),
        lambda m: adagrad(m.parameters(), 0.02, maximize=True),
        lambda m: rmsprop(in_two(m, {"alpha": 0.9, "momentum": 0.9}, {"eps": 1e-4, "weight_decay": 0.1}), 1e-3, maximize=True),
        lambda m: rmsprop(m.parameters(), 1e-3, centered=True, eps=1e-3),
        lambda m: adam(m.parameters(), 1e-2, amsgrad=0, maximize=1),
    ]
    for i, maker in enumerate(makers):
        steps_together((0, 3)[i % 2], maker)
    for stage in (0, 3):
        steps_together(stage, lambda m: adamw(decay_groups(m), lr=1e-3, betas=(0.8, 0.95), eps=1e-6))
        steps_together(stage, lambda m: FusedLion(decay_groups(m), lr=1e-4), limit=2e-4)
        steps_together(stage, lambda m: DeepSpeedCPULion(decay_groups(m), lr=1e-4), limit=2e-4)
        steps_together(stage, lambda m: FusedLamb(decay_groups(m), lr=1e-2))
        steps_together(stage, lambda m: DeepSpeedCPUAdagrad(m.parameters(), 0.02, weight_decay=0.1))

    def of_deepspeed(stage, kind, option, decoupled):
        steps_together(stage, lambda m: kind(m.parameters(), lr=1e-2, weight_decay=0.5, **{option: decoupled}),
                       reference=lambda m: (adamw if decoupled else adam)(m.parameters(), lr=1e-2, weight_decay=0.5))

    for decoupled in (True, False):
        of_deepspeed(0, FusedAdam, "adam_w_mode", decoupled)
        of_deepspeed(3, DeepSpeedCPUAdam, "adamw_mode", decoupled)

    def not_built_in(make, *parts):
        """Such an optimizer runs as it is (whole_optimizer_rank.py)."""
        raises(NotBuiltIn, lambda: translate_options(make(mlp())), *parts)

    class AdamW(torch.optim.AdamW):
        """Derived of it, with its name and module."""

    AdamW.__module__ = torch.optim.AdamW.__module__
    not_built_in(lambda m: AdamW(m.parameters()), "is not an optimizer Tessera has")
    not_built_in(lambda m: rmsprop(m.parameters(), alpha=1.5), "alpha=1.5 is not built in")
    not_built_in(lambda m: sgd(m.parameters(), 0.1, momentum=1.5), "momentum=1.5 is not built in")
    not_built_in(lambda m: rmsprop(in_two(m, {}, {"centered": True})), "RMSprop: centered differs between its param groups")
    not_built_in(lambda m: adam(in_two(m, {"decoupled_weight_decay": True})), "some param groups decouple the weight decay")
    not_built_in(lambda m: adagrad(m.parameters(), initial_accumulator_value=0.1), "initial_accumulator_value=0.1")


@check
def groups_are_their_parameters_and_not_patterns():
    def make(model):
        layers = model.layers.items()
        return torch.optim.AdamW([{"params": model.head.parameters(), "lr": 0.01}, {"params": []},
                                  *({"params": layer.parameters(), "lr": 0.001 * i, "weight_decay": 0.1 * i, "name": name}
                                    for i, (name, layer) in enumerate(layers))])

    for stage in (0, 3):
        engine = steps_together(stage, make, make=Named)
        assert [group.get("name") for group in engine.optimizer.param_groups] == [None, None, *Named.NAMES]
    plain, model = Named(), Named()
    theirs = make(plain)
    given = [{key: group[key] for key in ("params", "lr", "weight_decay", "name") if key in group} for group in make(model).param_groups]
    engine, ours, _, _ = tessera.initialize(model=model, model_parameters=given,
                                            config=config(2, optimizer={"type": "AdamW", "params": {"lr": 7, "weight_decay": 0.01}}))
    assert [group.get("name") for group in ours.param_groups] == [None, None, *Named.NAMES]
    assert [len(group["params"]) for group in ours.param_groups] == [2, 0] + [2] * len(Named.NAMES)
    train_plainly(plain, theirs, batches(3), loss_of)
    train(engine, batches(3), loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5


@check
def subsets_frozen_parameters_and_what_cannot_be_grouped():
    def head_only(model):
        return torch.optim.AdamW(model[3].parameters(), lr=1e-2)

    for stage in (0, 3):
        engine = steps_together(stage, head_only)
        fresh = mlp().state_dict()
        assert all(engine.state_dict()[name].equal(fresh[name]) for name in ("0.weight", "1.bias"))
        assert all(p.grad is None for p in engine.module[0].parameters())
    model = mlp()
    engine = tessera.initialize(model=model, model_parameters=model[3].parameters(),
                                config=config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}))[0]
    train(engine, batches(2), loss_of)
    assert engine.state_dict()["0.weight"].equal(mlp()[0].weight)

    def frozen_first(model):
        model[0].requires_grad_(False)
        return torch.optim.SGD(in_two(model, {"lr": 7.0}, {"lr": 0.05}), 0.1, momentum=0.9)

    for stage in (0, 3):
        steps_together(stage, frozen_first)
    section = {"type": "AdamW", "params": {"lr": 1e-2}}

    def refused(groups, *parts, section=section):
        raises(tessera.ConfigError, lambda: tessera.initialize(model=model, model_parameters=groups, config=config(0, optimizer=section)), *parts)

    model = mlp()
    everything = list(model.parameters())
    refused([{"params": everything}, {"params": everything[:1]}], "parameter 0.weight is in model_parameters[0] and model_parameters[1]")
    refused([{"params": []}], "has no parameters")
    refused([{"params": everything, "weight_dacay": 1}], "AdamW has no option weight_dacay", 'did you mean "weight_decay"?')
    refused([{"params": everything, "momentum": 0.9}], "AdamW has no option momentum")
    refused([{"params": everything, "amsgrad": "x"}], "amsgrad")
    refused([{"params": everything, "initial_accumulator_value": 1}], "initial_accumulator_value")
    refused([{"params": everything, "centered": True}], "centered is not a group's option", "momentum, maximize", section={"type": "RMSprop"})
    for type_, warns in (("RMSprop", True), ("SGD", True), ("Adam", False)):
        with standard_error() as said:
            tessera.initialize(model=mlp(), config=config(1, optimizer={"type": type_}, scheduler={
                "type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}))
        assert (f"cycle_momentum has no effect on {type_}" in said[0]) == (warns and rank == 0), said
    refused(everything + [torch.zeros(3)], "[3]", "not a parameter of the model")
    refused([{"lr": 1}], 'expected a dict with "params"')


@check
def what_is_changed_after_initialize_counts_or_is_an_error():
    def hyper_parameters(step, optimizer, model):
        optimizer.param_groups[0].update(lr=0.01 / (step + 1), eps=10.0 ** -(step + 3), betas=(0.9 - 0.1 * step, 0.99), weight_decay=0.1 * step)

    def momentum(step, optimizer, model):
        optimizer.param_groups[0].update(momentum=0.9 if step != 2 else 0.0, nesterov=step > 3)
        optimizer.param_groups[1]["lr"] = 0.01 * step

    def amsgrad(step, optimizer, model):
        optimizer.param_groups[0].update(amsgrad=step != 2, maximize=step > 2)

    for stage in (0, 3):
        steps_together(stage, lambda m: torch.optim.Adam(in_two(m, {"amsgrad": True}), lr=1e-2), amsgrad)
        steps_together(stage, lambda m: torch.optim.AdamW(in_two(m, {}), lr=1e-2), hyper_parameters)
        steps_together(stage, lambda m: torch.optim.SGD(in_two(m, {"momentum": 0.9}), lr=0.05), momentum)

    def refused(stage, change, *parts, make=lambda m: torch.optim.AdamW(in_two(m, {}), lr=1e-2), kept=types.MappingProxyType({})):
        """The step after the change is an error, and after the change is undone training goes on as if nothing had been. `kept`: what is
        written into group 0 as well, and counts."""
        plain, model = mlp(), mlp()
        theirs, client = make(plain), make(model)
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=client, config=config(stage))
        train_plainly(plain, theirs, batches(1), loss_of)
        train(engine, batches(1), loss_of)
        engine.backward(loss_of(engine, batches(2)[1][rank]))
        ours.param_groups[0].update(kept)
        undo = change(ours, client, model)
        raises(tessera.Error, engine.step, *parts)
        undo()
        engine.step()
        theirs.param_groups[0].update(kept)
        train_plainly(plain, theirs, batches(2)[1:], loss_of)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5

    def write(index, **values):
        def change(ours, client, model):
            group = ours.param_groups[index]
            before = {key: group[key] for key in values}
            group.update(values)
            return lambda: group.update(before)
        return change

    def move(ours, client, model):
        moved = ours.param_groups[0]["params"].pop()
        ours.param_groups[1]["params"].append(moved)
        return lambda: ours.param_groups[0]["params"].append(ours.param_groups[1]["params"].pop())

    def add(ours, client, model):
        client.param_groups.append({"params": [], "lr": 1.0})
        return client.param_groups.pop

    refused(1, write(1, amsgrad=True), "optimizer.param_groups[1]: amsgrad, which no param group had at initialize()")
    refused(3, write(0, centered=True), "optimizer.param_groups[0]: centered was changed after initialize()",
            make=lambda m: torch.optim.RMSprop(in_two(m, {}), lr=1e-3))
    refused(0, write(0, lr=float("nan")), "lr is nan")
    refused(2, write(0, decoupled_weight_decay=False), "weight decay is that of Adam now")
    refused(0, move, "0.bias was taken out after initialize()")
    refused(3, add, "has 3 param groups, and had 2 at initialize()")
    refused(1, write(0, momentum=0.9), "optimizer.param_groups[0]: momentum 0.9, which no param group had at initialize()",
            make=lambda m: torch.optim.SGD(in_two(m, {}), lr=0.05))
    def write_into_both(*arguments):
        undo = [write(0, lr=1.0, weight_decay=0.5)(*arguments), write(1, momentum=0.9)(*arguments)]
        return lambda: [one() for one in undo]

    refused(2, write_into_both, "optimizer.param_groups[1]: momentum 0.9", make=lambda m: torch.optim.SGD(in_two(m, {}), lr=0.05))
    refused(0, write(1, momentum=0.9), "optimizer.param_groups[1]: momentum 0.9", make=lambda m: torch.optim.SGD(in_two(m, {}), lr=0.05),
            kept={"lr": 0.5, "weight_decay": 0.5})
    model = mlp()
    client = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    client.add_param_group({"params": [p for layer in model[1:] for p in layer.parameters()], "lr": 1e-3})  # before: it counts
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=client, config=config(2))
    for optimizer in (ours, client):
        raises(tessera.Error, lambda to=optimizer: to.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}), "would not be trained")
    plain = mlp()
    theirs = torch.optim.AdamW([{"params": plain[0].parameters()},
                                {"params": [p for layer in plain[1:] for p in layer.parameters()], "lr": 1e-3}], lr=1e-2)
    train_plainly(plain, theirs, batches(3), loss_of)
    train(engine, batches(3), loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5


@check
def the_configurations_optimizer_shows_its_groups_and_schedule():
    model = mlp()
    given = config(1, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1},
                                 "param_groups": [{"match": ["*.bias", "1.*"], "weight_decay": 0.0}]},
                   scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}})
    engine, optimizer, _, schedule = tessera.initialize(model=model, config=given)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(model[0].weight), id(model[3].weight)}
    assert_shows_the_rates_of_warm_up(engine, 2)


@check
def the_configurations_schedule_shows_its_rates_in_an_optimizer_of_torch():
    model = mlp()
    engine = tessera.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), config=config(1, scheduler={
        "type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}))[0]
    assert_shows_the_rates_of_warm_up(engine, 1)


def assert_shows_the_rates_of_warm_up(engine, num_groups):
    rates = []
    for batch in batches(7):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        assert engine.lr_scheduler.get_last_lr() == engine.get_lr() == [rates[-1]] * num_groups
        train(engine, [batch], loss_of)
        engine.lr_scheduler.step()
    assert rates == [0, 0, 0.0025, 0.005, 0.0075, 0.01, 0.01], rates
    assert engine.lr_scheduler.last_epoch == 7


@check
def groups_of_model_parameters_and_makers_of_optimizers():
    plain = mlp()
    theirs = torch.optim.AdamW(decay_groups(plain), lr=1e-2)
    train_plainly(plain, theirs, batches(3), loss_of)
    section = {"type": "AdamW", "params": {"lr": 1e-2}}
    model = mlp()
    engines = [tessera.initialize(model=model, model_parameters=decay_groups(model), config=config(2, optimizer=section))[0]]
    model = mlp()
    engines.append(tessera.initialize(model=model, model_parameters=decay_groups(model), config=config(2),
                                      optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
                                      lr_scheduler=lambda o: schedulers.LambdaLR(o, lambda step: 1.0))[0])
    for engine in engines:
        train(engine, batches(3), loss_of)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5
    model = mlp()
    tessera.initialize(model=model, model_parameters=model.parameters(), config=config(0))


@check
def what_cannot_be_translated_is_refused_by_name():
    def refused(make, *parts):
        model = mlp()
        raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=make(model), config=config(1)), *parts)

    class Mine(torch.optim.AdamW):
        pass

    raises(NotBuiltIn, lambda: translate_options(torch.optim.Adagrad(mlp().parameters(), initial_accumulator_value=1.0)),
           "torch.optim.adagrad.Adagrad", "param group 0", "initial_accumulator_value=1.0", "expected False")
    raises(NotBuiltIn, lambda: translate_options(torch.optim.Rprop(mlp().parameters())), "Rprop is not an optimizer Tessera has")
    raises(NotBuiltIn, lambda: translate_options(Mine(mlp().parameters())), "Mine is not an optimizer")
    refused(lambda m: torch.optim.SGD(mlp().parameters()), "[64, 16]", "not a parameter of the model")
    refused(lambda m: "AdamW", "expected an optimizer of torch.optim")


@check
def what_a_name_promises_is_tried_out():
    """Whatever a class of torch's is given, it is translated; what is called so and updates otherwise runs as it is."""
    def is_translated(make, model=None, **changes):
        model = model or mlp()
        engine = tessera.initialize(model=model, optimizer=make(model), config=config(1, **changes))[0]
        return engine._whole_optimizer is None

    for make in (lambda m: torch.optim.AdamW(m.parameters(), capturable=True), lambda m: torch.optim.Adam(m.parameters(), fused=True),
                 lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(100.0), weight_decay=0.3), lambda m: torch.optim.SGD(m.parameters(), lr=0.0),
                 lambda m: torch.optim.RMSprop(m.parameters(), lr=1.0, centered=True, momentum=0.5, weight_decay=0.1),
                 lambda m: torch.optim.Adam([{"params": [p], "lr": 10.0 ** -i} for i, p in enumerate(m.parameters())])):
        assert is_translated(make), make(mlp())
    assert is_translated(lambda m: torch.optim.Adagrad(m.parameters()), mlp().bfloat16(), bf16={"enabled": True})

    def by_sign(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.sub_(p.grad.sign(), alpha=0.01)

    def fresh():
        """As when no optimizer of the class was made: torch puts its hooks around step() with the first."""
        return getattr(before, "__wrapped__", before)

    before = torch.optim.AdamW.step
    for original in (before, fresh()):
        for replacement in (by_sign, functools.wraps(original)(by_sign), torch.no_grad()(by_sign)):
            torch.optim.AdamW.step = replacement
            try:
                assert not is_translated(lambda m: torch.optim.AdamW(m.parameters()))
            finally:
                torch.optim.AdamW.step = before
    assert is_translated(lambda m: torch.optim.AdamW(m.parameters()))
    if tessera.comm.get_world_size() > 1:
        def by_sign_on_one(m):
            optimizer = torch.optim.AdamW(m.parameters())
            if rank == 0:
                optimizer.step = types.MethodType(by_sign, optimizer)
            return optimizer

        assert not is_translated(by_sign_on_one)  # on all ranks


@check
def one_that_has_taken_steps_goes_on():
    """As a script has it that loads into its optimizer before it calls initialize()."""
    makers = [lambda m: torch.optim.AdamW(decay_groups(m), lr=0.01, amsgrad=True), lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9),
              lambda m: torch.optim.Adagrad(m.parameters(), 0.02), lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.9, centered=True),
              lambda m: FusedLion(m.parameters(), 1e-3)]
    for i, make in enumerate(makers):
        stage = (0, 3)[i % 2]
        plain, model = mlp(), mlp()
        theirs, given = make(plain), make(model)
        train_plainly(plain, theirs, batches(3), loss_of)
        model.load_state_dict(plain.state_dict())
        given.load_state_dict(theirs.state_dict())
        engine, ours, *_ = tessera.initialize(model=model, optimizer=given, config=config(stage, 500))
        assert engine._whole_optimizer is None
        expected = train_plainly(plain, theirs, batches(6)[3:], loss_of)
        assert largest_difference(train(engine, batches(6)[3:], loss_of), expected) < 2e-5, (i, stage)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5, (i, stage)
    if tessera.comm.get_world_size() > 1:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, batches(1)[0][0]).backward()
        for p in model.parameters():
            p.grad.add_(rank)
        optimizer.step()
        raises(tessera.ConfigError, lambda: tessera.initialize(model=model, optimizer=optimizer, config=config(1)), "states differ between ranks")


if __name__ == "__main__":
    main()
