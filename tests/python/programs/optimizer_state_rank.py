"""The state of an optimizer and of schedulers: in state dicts, in checkpoints, and where two step."""
import os
import types
from pathlib import Path

import tessera
import torch
from checks import check, config, largest_difference, main, raises, standard_error, train, train_plainly
from optimizers import SCHEDULERS, batches, decay_groups, in_two, loss_of, mlp, rank, world
from tessera.deepspeed.utils import safe_get_full_optimizer_state
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers


@check
def a_rate_that_is_written_counts_beside_the_configurations_schedule():
    model, plain = mlp(), mlp()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine, ours, _, _ = tessera.initialize(model=model, config=config(
        1, optimizer={"type": "SGD", "params": {"lr": 0.1}},
        scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}))
    for rate, batch in zip((0.1, 0.3, 0.05, 0.05, 0.025), batches(5)):
        theirs.param_groups[0]["lr"] = rate
        if rate == 0.3:
            ours.param_groups[0]["lr"] = rate
        train_plainly(plain, theirs, [batch], loss_of)
        train(engine, [batch], loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5


@check
def moments_are_in_the_state_dict_as_torch_has_them():
    makers = {
        "AdamW": lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-2),
        "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
        "SGD": lambda m: torch.optim.SGD(in_two(m, {"momentum": 0.9}), lr=0.05, dampening=0.2),
        "plain SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
        "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02, lr_decay=0.1),
        "Adam with amsgrad": lambda m: torch.optim.Adam(in_two(m, {"amsgrad": True}), lr=1e-2),
        "RMSprop": lambda m: torch.optim.RMSprop(in_two(m, {"momentum": 0.9}), lr=1e-3, eps=1e-2, centered=True),
    }

    def alike(ours, theirs, limit):
        assert ours["param_groups"] == theirs["param_groups"], (ours["param_groups"], theirs["param_groups"])
        assert ours["state"].keys() == theirs["state"].keys()
        for index, expected in theirs["state"].items():
            state = ours["state"][index]
            assert state.keys() == expected.keys(), (state.keys(), expected.keys())
            for name, tensor in expected.items():
                assert state[name].dtype == tensor.dtype and state[name].shape == tensor.shape
                assert (state[name].cpu() - tensor.cpu()).abs().max() <= limit, (index, name)

    def make(maker, stage):
        model = mlp()
        return tessera.initialize(model=model, optimizer=maker(model), config=config(stage, 500))[0]

    for i, maker in enumerate(makers.values()):
        for stage in (0, 3) if i == 0 else ((0, 3)[i % 2],):
            plain = mlp()
            theirs = maker(plain)
            engine = make(maker, stage)
            alike(engine.optimizer.state_dict(), theirs.state_dict(), 0)  # before the first step
            train_plainly(plain, theirs, batches(3), loss_of)
            train(engine, batches(3), loss_of)
            saved = engine.optimizer.state_dict()
            alike(saved, theirs.state_dict(), 1e-6)

            # into another engine with the same weights, at another stage: it goes on to the bit
            other = make(maker, 3 - stage)
            with tessera.GatheredParameters(other.module, modifier_rank=0):
                with torch.no_grad():
                    for name, value in engine.state_dict().items():
                        if rank == 0:
                            other.module.get_parameter(name).copy_(value)
            other.optimizer.param_groups[0]["lr"] = 7.0  # is overruled
            other.optimizer.load_state_dict(saved)
            train(other, batches(6)[3:], loss_of)
            train(engine, batches(6)[3:], loss_of)
            assert largest_difference(engine.state_dict(), other.state_dict()) == 0, (i, stage)

            # and out of torch's, into torch's
            again = make(maker, stage)
            again.optimizer.load_state_dict(theirs.state_dict())
            alike(again.optimizer.state_dict(), theirs.state_dict(), 0)
            maker(mlp()).load_state_dict(saved)
    engine = make(makers["AdamW"], 3)
    train(engine, batches(1), loss_of)
    first, = (p for n, p in engine.module.named_parameters() if n == "0.weight")
    assert len(engine.optimizer.state) == 6
    state = engine.optimizer.state[first]
    assert state["step"] == 1 and state["exp_avg"].shape == (64, 16) and state["exp_avg"].abs().max() > 0
    raises(RuntimeError, lambda: state["exp_avg"].zero_(), "Inplace update to inference tensor")
    raises(tessera.Error, lambda: state.setdefault("max_exp_avg_sq", 1), "writing it would have no effect", "assign a whole dict")
    saved = engine.optimizer.state_dict()
    optimizer = engine.optimizer

    def changed(**changes):
        broken = {"state": {i: dict(s) for i, s in saved["state"].items()}, "param_groups": [dict(g) for g in saved["param_groups"]]}
        broken["state"][0] = {**broken["state"][0], **changes}
        return broken

    for broken, parts in ((changed(exp_avg=torch.zeros(2, 2)), ("parameter 0.weight", "exp_avg is [2, 2]", "expected a tensor of shape [64, 16]")),
                          (changed(max_exp_avg_sq=torch.zeros(64, 16)), ("max_exp_avg_sq is not a state of AdamW",)),
                          (changed(exp_avg_sq=None), ("exp_avg_sq is missing",)),
                          ({**saved, "param_groups": saved["param_groups"][:1]}, ("its param groups have",)),
                          ({"model": {}, "optimizer": saved}, ("has no state, but model, optimizer", "state_dict() of the optimizer")),
                          (None, ("it is None", "state_dict() of the optimizer")), ({**saved, "param_groups": [{"lr": 1}]}, ("param group 0: has no params",)),
                          ({**saved, "state": {**saved["state"], 0: 5}}, ("state of parameter 0.weight is a int; expected a dict",)),
                          ({**saved, "param_groups": [{**g, "amsgrad": True} for g in saved["param_groups"]]}, ("amsgrad is True", "no memory"))):
        raises(tessera.Error, lambda wrong=broken: optimizer.load_state_dict(wrong), *parts)
    alike(optimizer.state_dict(), saved, 0)  # nothing has changed
    optimizer.state[first] = {"step": 5, "exp_avg": torch.ones(64, 16), "exp_avg_sq": torch.ones(64, 16)}
    assert optimizer.state[first]["step"] == 5 and optimizer.state[first]["exp_avg"].equal(torch.ones(64, 16))
    optimizer.state.clear()
    assert optimizer.state_dict()["state"] == {} and len(optimizer.state) == 0
    raises(tessera.Error, lambda: optimizer.state[torch.zeros(1)], "not a parameter")


@check
def states_of_options_that_come_with_what_is_loaded():
    """amsgrad is one group's at initialize(), and both groups' in what is loaded; or the other way round."""
    folder = Path(tessera.comm.all_gather(os.getcwd())[0]) / "amsgrad"

    def make(*groups, stage=2):
        model = mlp()
        return tessera.initialize(model=model, optimizer=torch.optim.Adam(in_two(model, *groups), lr=1e-2), config=config(stage, 500))[0]

    def largest(state):
        return {i: one["max_exp_avg_sq"] for i, one in state["state"].items() if "max_exp_avg_sq" in one}

    both = make({"amsgrad": True}, {"amsgrad": True})
    train(both, batches(3), loss_of)
    both.save_checkpoint(folder)
    saved = both.optimizer.state_dict()
    assert len(largest(saved)) == 6
    for by_checkpoint in (True, False):
        first = make({"amsgrad": True}, stage=3)
        train(first, batches(1), loss_of)
        assert len(largest(first.optimizer.state_dict())) == len(first.optimizer.param_groups[0]["params"]) < 6
        second = next(p for group in first.optimizer.param_groups[1:] for p in group["params"])
        raises(tessera.Error, lambda p=second: safe_get_full_optimizer_state(p, "max_exp_avg_sq"), "has no state 'max_exp_avg_sq'", "exp_avg_sq")
        if by_checkpoint:
            first.load_checkpoint(folder)
        else:
            first.optimizer.load_state_dict(saved)
        again = first.optimizer.state_dict()
        assert all(value.equal(largest(again)[i]) for i, value in largest(saved).items()) and len(largest(again)) == 6
        assert safe_get_full_optimizer_state(second, "max_exp_avg_sq").max() > 0
        plain = mlp()
        theirs = torch.optim.Adam(in_two(plain, {}), lr=1e-2)
        theirs.load_state_dict(again)
        train_plainly(plain, theirs, batches(1), loss_of)
    broken = {**saved, "state": {i: {key: value for key, value in one.items() if key != "max_exp_avg_sq"} for i, one in saved["state"].items()}}
    raises(tessera.Error, lambda: both.optimizer.load_state_dict(broken), "max_exp_avg_sq is missing")
    plain = mlp()
    theirs = torch.optim.Adam(in_two(plain, {}), lr=1e-2)
    train_plainly(plain, theirs, batches(2), loss_of)
    both.optimizer.load_state_dict(theirs.state_dict())  # without: as in torch, the option is off then
    assert not any(group["amsgrad"] for group in both.optimizer.param_groups)
    train(both, batches(1), loss_of)

    mine, best = {"factors": [1]}, both.optimizer.state_dict()
    best["param_groups"][0].update(lr=torch.tensor(0.25, device="cpu"), mine=mine)
    both.optimizer.load_state_dict(best)
    both.optimizer.param_groups[0]["lr"].mul_(0.5)  # as torch's schedulers do
    both.optimizer.param_groups[0]["mine"]["factors"].append(2)
    assert best["param_groups"][0]["lr"].item() == 0.25 and mine == {"factors": [1]}  # what was loaded can be loaded again

    model = mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=config(1))
    wrong = torch.optim.RMSprop(mlp().parameters(), centered=True).state_dict()
    raises(tessera.Error, lambda: ours.load_state_dict(wrong), "param group 0: centered is True, and was False at initialize()")
    assert not ours.param_groups[0]["centered"]
    train(engine, batches(1), loss_of)


@check
def a_state_dict_is_loaded_wholly_or_not_at_all():
    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    for stage in (0, 3):
        model = mlp()
        engine, ours, _, _ = tessera.initialize(model=model, optimizer=adam(model), config=config(stage, 500))
        train(engine, batches(1), loss_of)
        before = ours.state_dict()

        def changed(state=None, group=None, before=before):
            broken = {"state": {i: dict(s) for i, s in before["state"].items()}, "param_groups": [dict(g) for g in before["param_groups"]]}
            broken["state"][0]["exp_avg"] = torch.full_like(broken["state"][0]["exp_avg"], 7.0)
            broken["param_groups"][0]["lr"] = 5.0
            broken["state"][max(broken["state"])].update(state or {})
            broken["param_groups"][0].update(group or {})
            return broken

        moment = before["state"][5]["exp_avg"]
        for state, part in (({"step": 1e30}, "step is 1e+30"), ({"step": torch.tensor(-3.0)}, "step is -3.0"), ({"step": float("nan")}, "step is nan"),
                            ({"step": 1.5}, "step is 1.5"), ({"step": "1"}, "step is '1'"), ({"exp_avg": moment.to_sparse()}, "sparse_coo"),
                            ({"exp_avg": moment.to("meta")}, "on meta"), ({"exp_avg": moment.to(torch.complex64)}, "complex64")):
            raises(tessera.Error, lambda s=state, o=ours: o.load_state_dict(changed(s)), "state of parameter 3.bias: ", part)
        for group, part in (({"lr": "x"}, "lr is 'x'"), ({"lr": float("nan")}, "lr is nan"), ({"betas": 0.9}, "betas is 0.9"), ({"eps": None}, "eps is None"),
                            ({"decoupled_weight_decay": False}, "weight decay is that of Adam")):
            raises(tessera.Error, lambda g=group, o=ours: o.load_state_dict(changed(group=g)), "load_state_dict(): param group 0", part)
        after = ours.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(after["state"][i][name].equal(value) for i, state in before["state"].items() for name, value in state.items())
        ours.load_state_dict(changed())
        assert ours.state_dict()["state"][0]["exp_avg"].eq(7).all() and engine.get_lr() == [5.0]
        train(engine, batches(1), loss_of)
    model = mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(1))
    saved = ours.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    raises(tessera.Error, lambda: ours.load_state_dict(saved), "param group 0: momentum is 0.9", "no memory")


@check
def values_of_groups_that_do_not_fit_stay_as_they_are():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])

    def make(kind, **options):
        model = mlp()
        return tessera.initialize(model=model, optimizer=kind(model.parameters(), lr=1e-2, **options), config=config(1))[0]

    first = make(torch.optim.AdamW, eps=1e-5)
    train(first, batches(1), loss_of)
    first.save_checkpoint(folder, "adamw")
    second = make(torch.optim.Adam)
    with standard_error() as said:
        second.load_checkpoint(folder, "adamw")
    for part in ("param group 0", "decoupled_weight_decay stays False"):
        assert (part in said[0]) == (rank == 0), said
    group = second.optimizer.param_groups[0]
    assert group["decoupled_weight_decay"] is False and group["eps"] == 1e-5 and group["weight_decay"] == 0.01
    train(second, batches(1), loss_of)
    model = mlp()
    third = tessera.initialize(model=model, config=config(1, optimizer={"type": "AdamW", "params": {"lr": 0.5}}))[0]
    third.load_checkpoint(folder, "adamw")
    assert "decoupled_weight_decay" not in third.optimizer.param_groups[0] and third.get_lr() == [0.01]
    train(third, batches(1), loss_of)


@check
def a_closure_is_called_with_gradients():
    model = mlp()
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(1))

    def closure():
        loss = loss_of(engine, batches(1)[0][rank])
        engine.backward(loss)
        return loss

    with torch.no_grad():
        loss = ours.step(closure)
    assert loss.requires_grad and engine.global_steps == 1 and engine.was_step_applied()


@check
def the_translated_optimizer_and_its_hooks_stand_for_the_engines():
    model, plain = mlp(), mlp()
    client, theirs = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    calls = []
    client.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("client", optimizer is client)))
    engine, ours, _, _ = tessera.initialize(model=model, optimizer=client, config=config(2, gradient_accumulation_steps=2))
    ours.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("pre", optimizer is ours)))
    ours.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(("post", engine.global_steps)))

    def halve(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] /= 2

    ours.register_step_pre_hook(halve)
    theirs.register_step_pre_hook(halve)
    for step, batch in enumerate(batches(4)):  # the loop of plain PyTorch, with the optimizer that was given
        client.zero_grad()
        engine.backward(loss_of(engine, batch[rank]))
        (client if step < 2 else ours).step()
    assert calls == [("pre", True), ("client", True), ("post", 1), ("pre", True), ("client", True), ("post", 2)], calls
    train_plainly(plain, theirs, [batches(4)[0] + batches(4)[1], batches(4)[2] + batches(4)[3]], loss_of)
    assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5
    assert client.state_dict()["state"].keys() == ours.state_dict()["state"].keys() and len(client.state) == 6


@check
def schedulers_of_torch_and_their_place_in_checkpoints():
    """Rates, betas and momentum that a scheduler writes count; a run that is resumed in the middle ends with the same bits. A scheduler is
    given as an object of the given optimizer, or as a callable."""
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])

    def sgd(model):
        return torch.optim.SGD(in_two(model, {}), lr=0.05, momentum=0.9)

    def adamw(model):
        return torch.optim.AdamW(in_two(model, {}), lr=1e-2)

    def start(make_optimizer, make_scheduler, stage, as_object):
        model = mlp()
        given = make_optimizer(model)
        schedule = make_scheduler(given) if as_object else make_scheduler
        engine, _, _, returned = tessera.initialize(model=model, optimizer=given, lr_scheduler=schedule, config=config(stage))
        assert not as_object or returned is schedule
        return engine

    def shown(optimizer):
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    for i, (name, make) in enumerate(SCHEDULERS.items()):
        for make_optimizer in (sgd, adamw) if "Cyc" in name else (sgd,):
            plain = mlp()
            theirs = make_optimizer(plain)
            their_schedule = make(theirs)
            stage, as_object = (0, 3)[i % 2], i % 4 < 2
            engine, second = start(make_optimizer, make, stage, as_object), start(make_optimizer, make, 3 - stage, as_object)
            for step, batch in enumerate(batches(5)):
                assert shown(engine.optimizer) == shown(theirs)
                train_plainly(plain, theirs, [batch], loss_of)
                train(engine, [batch], loss_of)
                their_schedule.step()
                if step == 2:
                    engine.save_checkpoint(folder, name, client_state=[1, 2])
                    _, client_state = second.load_checkpoint(folder, name)
                    assert client_state == [1, 2]
                    assert second.get_lr() == engine.get_lr() == [group["lr"] for group in theirs.param_groups]
                elif step > 2:
                    train(second, [batch], loss_of)
            assert largest_difference(engine.state_dict(), plain.state_dict()) < 2e-5, name
            assert largest_difference(engine.state_dict(), second.state_dict()) == 0, name
            assert second.get_lr() == engine.get_lr()


@check
def a_scheduler_that_needs_a_metric_is_stepped_by_the_loop():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])

    def make():
        model = mlp()
        return tessera.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(2),
                                  lr_scheduler=lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5))

    engine, _, _, plateau = make()
    rates = []
    for metric, batch in zip((3.0, 4.0, 2.0, 5.0), batches(4)):
        train(engine, [batch], loss_of)
        plateau.step(metric)
        rates.append(engine.get_lr()[0])
    assert rates == [0.1, 0.05, 0.05, 0.025], rates
    engine.backward(loss_of(engine, batches(1)[0][rank]))
    engine.step(lr_kwargs={"metrics": 6.0})  # DeepSpeed's way
    assert engine.get_lr() == [0.0125]
    model = mlp()
    stepped = tessera.initialize(model=model, optimizer=(sgd := torch.optim.SGD(model.parameters(), lr=0.1)), config=config(2),
                                 lr_scheduler=schedulers.StepLR(sgd, 1))[0]
    for one, wrong, part in ((engine, {"metric": 6.0}, "ReduceLROnPlateau.step(): "), (stepped, {"metrics": 6.0}, "StepLR.step(): "),
                             (tessera.initialize(model=mlp(), config=config(2))[0], {"metrics": 6.0}, "the engine has no scheduler")):
        one.backward(loss_of(one, batches(1)[0][rank]))
        steps = one.global_steps
        raises(tessera.Error, lambda e=one, w=wrong: e.step(lr_kwargs=w), "lr_kwargs", part)
        assert one.global_steps == steps
        one.zero_grad()
    by_attribute = schedulers.StepLR(sgd, 1)
    own = types.SimpleNamespace(step=by_attribute.step, state_dict=by_attribute.state_dict, load_state_dict=by_attribute.load_state_dict)
    model = mlp()
    train(tessera.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(2), lr_scheduler=own)[0],
          batches(1), loss_of)
    assert by_attribute.last_epoch == 1
    engine.save_checkpoint(folder, "plateau")
    second, _, _, again = make()
    second.load_checkpoint(folder, "plateau")
    assert again.best == 2.0 and again.state_dict() == plateau.state_dict() and second.get_lr() == [0.0125]
    fresh = make()[0]
    fresh.save_checkpoint(folder, "infinite")  # its best is inf
    second.load_checkpoint(folder, "infinite")
    assert again.best == float("inf")


@check
def a_second_step_of_a_scheduler_is_an_error():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, ours, _, schedule = tessera.initialize(model=model, optimizer=optimizer, config=config(1),
                                                   lr_scheduler=schedulers.StepLR(optimizer, 1, 0.5))
    train(engine, batches(1), loss_of)
    assert isinstance(schedule, schedulers.StepLR) and type(schedule).__name__ == "StepLR" and engine.get_lr() == [0.05]
    raises(tessera.Error, schedule.step, "StepLR.step()", "would be a second step")
    assert engine.get_lr() == [0.05]
    engine.lr_scheduler = None  # as Lightning does, which steps it itself
    train(engine, batches(1), loss_of)
    schedule.step()
    assert engine.get_lr() == [0.025]
    mine = schedulers.StepLR(ours, 1, 0.5)  # made afterwards, stepped by the loop
    train(engine, batches(1), loss_of)
    mine.step()
    assert engine.get_lr() == [0.0125]
    model, other = mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1)
    raises(tessera.ConfigError, lambda: tessera.initialize(
        model=model, config=config(0, optimizer={"type": "SGD"}), lr_scheduler=schedulers.StepLR(other, 1)), "of another optimizer")


@check
def the_loader_resumes_at_the_same_sample():
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])
    data = torch.utils.data.TensorDataset(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 5,
                                          torch.arange(50))

    def make():
        return tessera.initialize(model=mlp(), training_data=data, config=config(2, gradient_accumulation_steps=2, seed=3))[0]

    def run(engine, num_batches):
        seen = []
        while len(seen) < num_batches:
            for x, y, number in engine.training_dataloader:
                seen.append(number.tolist())
                engine.backward(functional.cross_entropy(engine(x), y))
                engine.step()
                if len(seen) == num_batches:
                    break
        return seen

    per_epoch = len(make().training_dataloader)
    assert per_epoch == 50 // (4 * world) * 2
    whole, first, second = make(), make(), make()
    seen = run(whole, 2 * per_epoch)
    assert len({n for batch in seen[:per_epoch] for n in batch}) == 2 * per_epoch
    assert run(first, per_epoch + 4) == seen[:per_epoch + 4]
    first.save_checkpoint(folder, "loader")
    second.load_checkpoint(folder, "loader")
    assert run(second, per_epoch - 4) == seen[per_epoch + 4:]
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0
    raises(tessera.ConfigError, lambda: second.training_dataloader.load_state_dict({"_num_yielded": 3}), "has no epoch, but _num_yielded")


def saved_by(engine, tag):
    """Three steps of an engine and its checkpoint, for engines that `load_checkpoint(*saved_by(...))`."""
    folder = Path(tessera.comm.all_gather(os.getcwd())[0])
    train(engine, batches(3), loss_of)
    engine.save_checkpoint(folder, tag)
    return folder, tag


def of_sgd(groups, schedule=None, stage=2):
    model = mlp()
    return tessera.initialize(model=model, optimizer=torch.optim.SGD(groups(model), lr=0.1), lr_scheduler=schedule, config=config(stage, 500))[0]


@check
def options_of_a_group_do_not_go_to_other_parameters():
    saved = saved_by(of_sgd(decay_groups), "groups")
    for groups in (lambda m: decay_groups(m)[::-1],
                   lambda m: [{"params": [m[0].weight], "weight_decay": 0.5}, {"params": [p for name, p in m.named_parameters() if name != "0.weight"]}]):
        engine = of_sgd(groups)
        before, own = engine.state_dict(), engine.optimizer.values()
        raises(tessera.CheckpointError, lambda engine=engine: engine.load_checkpoint(*saved), "groups: cannot be taken over: param groups: they have other parameters",
               "allow_partial_load=True")
        assert largest_difference(engine.state_dict(), before) == 0 and engine.global_steps == 0
        engine.load_checkpoint(*saved, allow_partial_load=True)
        assert engine.optimizer.values() == own and engine.global_steps == 3
    engine = of_sgd(lambda m: m.parameters())
    with standard_error() as said:
        engine.load_checkpoint(*saved)
    assert said[0].count("param groups: the checkpoint has 2, and the optimizer 1") == said[0].count("stay") == (rank == 0), said
    frozen = of_sgd(decay_groups)
    saved = saved_by(frozen, "again")
    engine = of_sgd(lambda m: [{**group, "weight_decay": 0.25} for group in decay_groups(m)])
    engine.load_checkpoint(*saved)
    assert engine.optimizer.values() == frozen.optimizer.values()
    with_amsgrad = tessera.initialize(model=mlp(), optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True), config=config(0))[0]
    without = tessera.initialize(model=mlp(), optimizer=lambda p: torch.optim.AdamW(p), config=config(0))[0]
    saved = saved_by(with_amsgrad, "of amsgrad")
    text = raises(tessera.CheckpointError, lambda: without.load_checkpoint(*saved), "max_exp_avg_sq (of amsgrad); AdamW needs exp_avg, exp_avg_sq",
                  "load_optimizer_states=False")
    assert "load_module_strict" not in text, text


@check
def a_schedule_that_is_taken_over_without_the_optimizers_state_has_its_rates():
    makers = {"lr": lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 5)], [2]),
              "momentum": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20)}
    for key, schedule in makers.items():
        whole = of_sgd(lambda m: [{"params": list(m.parameters()), "momentum": 0.9}], schedule)
        saved = saved_by(whole, f"schedule_{key}")
        engine = of_sgd(lambda m: [{"params": list(m.parameters()), "momentum": 0.9, "weight_decay": 0.25}], schedule)
        engine.load_checkpoint(*saved, load_optimizer_states=False)
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.25
        for _ in range(3):
            assert engine.get_lr() == whole.get_lr() == engine.lr_scheduler.get_last_lr()
            assert engine.optimizer.param_groups[0][key] == whole.optimizer.param_groups[0][key]
            for one in (engine, whole):
                train(one, batches(1), loss_of)


class Picky(schedulers.LambdaLR):
    """A schedule of one's own, whose state another rank than the first does not take."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 0.5 ** step)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        if rank == world - 1 and state_dict["last_epoch"] > 0:
            raise KeyError("mine")


@check
def a_schedule_or_loader_that_refuses_its_state_changes_nothing():
    def in_parts(*milestones):
        return lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.1, total_iters=2)] + [schedulers.ExponentialLR(o, 0.9) for _ in milestones], list(milestones))

    cases = (("parts", in_parts(2, 5), in_parts(2), "the state of another scheduler than SequentialLR: it has no _schedulers of 2, but of 3"),
             ("class", lambda o: schedulers.LambdaLR(o, lambda step: 0.5 ** step), lambda o: schedulers.CosineAnnealingLR(o, 20), "than CosineAnnealingLR: it is of LambdaLR"),
             ("picky", Picky, Picky, "picky: lr_scheduler.load_state_dict(): KeyError: 'mine' at optimizer_state_rank.py:"))
    for name, before, after, part in cases:
        saved = saved_by(of_sgd(decay_groups, before), name)
        engine = of_sgd(decay_groups, after)
        weights, own = engine.state_dict(), [engine.optimizer.values(), engine.lr_scheduler.state_dict(), engine.global_steps]
        raises(tessera.CheckpointError, lambda engine=engine, saved=saved: engine.load_checkpoint(*saved), part)
        assert largest_difference(engine.state_dict(), weights) == 0
        assert [engine.optimizer.values(), engine.lr_scheduler.state_dict(), engine.global_steps] == own, name
        train(engine, batches(1), loss_of)
    engine = of_sgd(decay_groups, lambda o: schedulers.StepLR(o, 2))
    engine.lr_scheduler.best = 0.5
    saved = saved_by(engine, "an attribute more")
    engine = of_sgd(decay_groups, lambda o: schedulers.StepLR(o, 2))
    engine.load_checkpoint(*saved)
    assert engine.lr_scheduler.best == 0.5
    engine, loaded = of_sgd(decay_groups), of_sgd(decay_groups)
    for one in (engine, loaded):
        one.training_dataloader = Picky(torch.optim.SGD([torch.ones(1)], lr=1.0))
    engine.training_dataloader.last_epoch = 4
    saved = saved_by(engine, "loader")
    raises(tessera.CheckpointError, lambda: loaded.load_checkpoint(*saved), "training_dataloader.load_state_dict(): KeyError: 'mine'")
    assert loaded.training_dataloader.last_epoch == 0 and loaded.global_steps == 0


@check
def a_schedule_that_goes_on_where_it_is_keeps_its_rates():
    def configured():
        return tessera.initialize(model=mlp(), config=config(1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler={
            "type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}))[0]

    saved = saved_by(configured(), "configured")
    engine = of_sgd(lambda m: m.parameters(), lambda o: schedulers.CosineAnnealingLR(o, 20))
    rate = engine.get_lr()
    with standard_error() as said:
        engine.load_checkpoint(*saved)
    assert engine.get_lr() == rate == [0.1] and engine.lr_scheduler.last_epoch == 0
    assert ("goes on where it is" in said[0]) == (rank == 0), said
    saved = saved_by(engine, "torchs")
    with standard_error() as said:
        configured().load_checkpoint(*saved)
    assert ("the configuration's schedule sets the rates" in said[0]) == (rank == 0), said


if __name__ == "__main__":
    main()
