"""What other programs have saved, loaded and continued: beside the same training that goes on in plain PyTorch.

CONTINUED is the matrix: what has written a checkpoint, and how the training goes on. That other libraries themselves write such files is in
tests/checkpoint/foreign, and that whole trainings of theirs go on in tests/peers/continued_suite.py.
"""
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import tessera
import torch
import torch.distributed.checkpoint as dcp
from checks import check, config, largest_difference, main, raises, standard_error, train, train_plainly
from optimizers import ByParameter, batches, loss_of, rank, world
from safetensors.torch import save_file as save_file_of_safetensors
from tessera.deepspeed.ops.lion import FusedLion
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

FOLDER = Path(os.environ["SAVED"])
STEPS = 3
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "Lion": lambda groups: FusedLion(groups, lr=0.001, weight_decay=0.1),
}


class OneOfOurs(ByParameter):
    """States of another shape, numbers, flags, and one that is of the parameter's shape and no floating-point number."""

    def update(self, p, state, group):
        if not state:
            state.update(step=0, scale=1.0, even=True, rows=torch.zeros(p.shape[:1]), signs=torch.zeros(p.shape, dtype=torch.int8))
        state["step"] += 1
        state["even"] = not state["even"]
        state["scale"] *= 0.9
        state["rows"].lerp_(p.grad.flatten(1).mean(1) if p.ndim > 1 else p.grad, 0.1)
        state["signs"] = (state["signs"] + p.grad.sign().to(torch.int8)).clamp_(-3, 3)
        rows = state["rows"].view(-1, *[1] * (p.ndim - 1))
        p.sub_((0.1 * state["signs"] * state["scale"] + rows / state["step"] + 0.01 * state["even"]) * group["lr"])


class LowRank(ByParameter):
    """Moments of another shape than the parameter's, as GaLore has them."""

    def update(self, p, state, group):
        small = p.grad.flatten()[:2 * (p.numel() // 2)].view(2, -1).mean(1, keepdim=True).expand(2, 3)
        moment = state.setdefault("exp_avg", torch.zeros(2, 3))
        p.sub_(p.grad + moment.lerp_(small, 0.1).mean(), alpha=group["lr"])


# They run as they are, on whole parameters.
WHOLE = {
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01), "RAdam": lambda groups: torch.optim.RAdam(groups, lr=0.05),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01), "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=0.001), "ASGD": lambda groups: torch.optim.ASGD(groups, lr=0.05),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0), "OneOfOurs": lambda groups: OneOfOurs(groups, lr=0.01), "LowRank": lambda groups: LowRank(groups, lr=0.01),
}
MAKE = {**OPTIMIZERS, **WHOLE}


class Net(nn.Module):
    """A tied and a frozen parameter, a transposed one, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 33)
        self.norm = nn.BatchNorm1d(33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.again = nn.Linear(33, 33)
        self.tied = nn.Linear(33, 33)
        self.tied.weight = self.again.weight
        self.turned = nn.Parameter(torch.randn(7, 33).t() * 0.1)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        # In eval mode, because ranks have other statistics than one process.
        x = self.frozen(nn.functional.batch_norm(self.first(x), self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias))
        return self.head((self.tied(self.again(x).relu()) @ self.turned).tanh())


def groups_of(model, groups):
    """"decay": biases and vectors have none, as in the HF Trainer, "empty": and a third group has no parameter. "head": a group has as many parameters
    as betas has numbers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if groups == "head":
        head = list(model.head.parameters())
        return [{"params": [p for p in trained if not any(p is one for one in head)]}, {"params": head}]
    if groups in ("decay", "empty"):
        return [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
                *([{"params": [], "weight_decay": 0.5}] if groups == "empty" else [])]
    return trained


class Named(nn.Module):
    """A model with a part of its own that is called as wrappers call theirs."""

    def __init__(self, beside):
        super().__init__()
        self.module = Net()
        if beside:
            self.beside = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x):
        x = self.module(x)
        return self.beside(x) if hasattr(self, "beside") else x


def tessera_command(*words):
    return subprocess.run([os.environ["TESSERA"], *map(str, words)], check=True, capture_output=True, text=True).stdout


def linear_schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2 * STEPS)


def begun(kind, groups="one", make_model=Net, schedule=linear_schedule):
    """A training in plain PyTorch: model, optimizer, schedule, and the batches of the second half, in whose middle it is."""
    torch.manual_seed(0)
    model = make_model()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
    optimizer = MAKE[kind](groups_of(model, groups))
    scheduler = schedule(optimizer)
    all_batches = batches(2 * STEPS)
    for batch in all_batches[:STEPS]:
        train_plainly(model, optimizer, [batch], loss_of)
        scheduler.step()
    return model, optimizer, scheduler, all_batches[STEPS:]


def go_on(model, optimizer, scheduler, rest):
    losses = []
    for batch in rest:
        losses += train_plainly(model, optimizer, [batch], loss_of)
        scheduler.step()
    return losses


def continued(path, stage, kind, rest, groups="one", make_model=Net, schedule=linear_schedule, allow=False, **changes):
    """The same in an engine that begins with other weights and loads what is in `path`."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 if p.is_floating_point() else 1)
    optimizer = MAKE[kind](groups_of(model, groups))
    scheduler = schedule(optimizer)
    engine, *_ = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(stage, 700, **changes))
    with standard_error() as said:
        engine.load_checkpoint(path, allow_partial_load=allow)
    losses = []
    for batch in rest:
        losses += train(engine, [batch], loss_of)
    return engine, losses, said[0]


def on_rank_0(write, *arguments):
    """Calls it on rank 0, before others go on."""
    if rank == 0:
        write(*arguments)
    tessera.comm.barrier()


def compare(path, stage, kind, source, limit=1e-6, **how):
    """Goes on from `path` as plain PyTorch does from `source`. Returns what was said."""
    model, optimizer, scheduler, rest = source
    expected = go_on(model, optimizer, scheduler, rest)
    engine, losses, said = continued(path, stage, kind, rest, **how)
    assert largest_difference(losses, expected) < limit, (path, stage, losses, expected, said)
    assert largest_difference(engine.state_dict(), model.state_dict()) < 20 * limit, (path, stage)
    assert engine.global_steps == 2 * STEPS, engine.global_steps
    return said


def scale(scheduler):
    return {key: value for key, value in scheduler.state_dict().items() if not callable(value)}


def save_file(source, path):
    model, optimizer, scheduler, _ = source
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS, "scheduler": scale(scheduler)}, path)


def save_as_tutorials_do(source, path):
    model, optimizer, scheduler, _ = source
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3, "step": STEPS,
                "scheduler": scale(scheduler)}, path, _use_new_zipfile_serialization=False)


def save_dcp(source, path, at_top=False, flat=False, **beside):
    """`at_top`: the model's entries are beside the others. `flat`: the optimizer's have names of parameters."""
    state, of_optimizer = get_state_dict(*source[:2], options=StateDictOptions(flatten_optimizer_state_dict=flat))
    values = {**(state if at_top else {"model": state}), "optimizer": of_optimizer, "lr_scheduler": scale(source[2]), **beside}
    dcp.save(values, checkpoint_id=path, no_dist=True)


def save_both_ways(name, source):
    """A file of torch.save and a folder of DCP."""
    file, folder = FOLDER / f"{name}_{world}.pt", FOLDER / f"{name}_{world}_dcp"
    on_rank_0(lambda: (save_file(source, file), save_dcp(source, folder, global_steps=STEPS)))
    return file, folder


class Decay:
    """A schedule that is an object, whose attributes its state has."""

    def __init__(self):
        self.rate, self.table = np.float32(0.25), np.linspace(1, 0.1, 2 * STEPS + 1)

    def __call__(self, step):
        return self.table[step] * (1 - self.rate)


LR = torch.optim.lr_scheduler
SCHEDULES = {  # numpy's scalars and arrays in them are data
    "linear": linear_schedule,
    # MultiStepLR looks its step up in a Counter: with texts as keys its rate would never change.
    "steps": lambda o: LR.MultiStepLR(o, [2, STEPS + 1, STEPS + 3], gamma=0.3),
    "cosine": lambda o: LR.LambdaLR(o, lambda i: 0.5 * (1 + np.cos(np.pi * i / 20))),
    "object": lambda o: LR.LambdaLR(o, Decay()),
    "cycle": lambda o: LR.OneCycleLR(o, max_lr=np.float64(0.02), total_steps=3 * STEPS),
    "sequence": lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 0.5, 1.0, 3), LR.MultiStepLR(o, [1, 4], gamma=0.3)], milestones=[3]),
    "chain": lambda o: LR.ChainedScheduler([LR.LambdaLR(o, lambda i: np.float64(0.9) ** i), LR.ExponentialLR(o, 0.95)]),
}


def save_deepspeed(kind, source, path):
    """What DeepSpeed writes of a run with fp32 and no ZeRO ("plain"), and with the elastic checkpoints of stage 2, on one rank."""
    model, optimizer, scheduler, _ = source
    folder = path / f"global_step{STEPS}"
    state, names = optimizer.state_dict(), {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]

    def flat(values):
        return torch.cat([value.detach().reshape(-1) for value in values])

    moments = [{key: flat(optimizer.state[p][key] for p in group) for key in ("exp_avg", "exp_avg_sq")} for group in groups]
    file = {"module": model.state_dict(), "buffer_names": [name for name, _ in model.named_buffers()], "optimizer": state if kind == "plain" else None,
            "param_shapes": None, "shared_params": {"tied.weight": "again.weight"}, "lr_scheduler": scale(scheduler), "skipped_steps": 0,
            "global_steps": STEPS, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8"}
    zero = {}
    if kind == "elastic":
        file["param_shapes"] = [{names[id(p)]: p.shape for p in group} for group in groups]
        zero = {"zero_stage": 2, "partition_count": [1] * len(groups), "group_paddings": [0] * len(groups), "base_optimizer_state": moments,
                "base_optimizer_state_step": STEPS, "single_partition_of_fp32_groups": [flat(group) for group in groups]}

    folder.mkdir(parents=True)
    torch.save(file, folder / "mp_rank_00_model_states.pt")
    if zero:
        torch.save({"optimizer_state_dict": zero, "ds_version": "0.19.8"}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (path / "latest").write_text(folder.name)


class Scaled(nn.Module):
    """Names without a period, and a frozen parameter of integers, as quantized weights are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale = nn.Linear(16, 5), nn.Parameter(torch.ones(5))
        self.whole = nn.Parameter(torch.arange(1, 6), requires_grad=False)

    def forward(self, x):
        return self.fc(x) * self.scale * self.whole


def linear():
    torch.manual_seed(0)
    return nn.Linear(16, 5)


MODELS = {"net": Net, "scaled": Scaled, "linear": linear, "named": lambda: Named(False), "beside": lambda: Named(True)}
FORMATS = {
    "file": save_file,
    "tutorial": save_as_tutorials_do,
    "dcp": lambda source, path: save_dcp(source, path, global_steps=STEPS),
    "torchtitan": lambda source, path: save_dcp(
        source, path / f"step-{STEPS}", at_top=True, flat=True, dataloader={"dp_rank_0": b"at 7", "world_size": 1},
        train_state={"step": torch.tensor(STEPS, dtype=torch.int32), "ntokens_seen": torch.tensor(640)}),
    "dcp_at_top": lambda source, path: save_dcp(source, path, at_top=True, epoch=3),
    "dcp_flat": lambda source, path: save_dcp(source, path, at_top=True, flat=True, step=torch.tensor(STEPS)),
    **{f"deepspeed_{kind}": lambda source, path, kind=kind: save_deepspeed(kind, source, path) for kind in ("plain", "elastic")},
}
# What has written it, the optimizer, the stage that goes on; groups of parameters, schedule and model; a format that the command converts it to first.
# DeepSpeed's folders have two groups and a frozen parameter of another one's shape: the engine's optimizer says which is which.
CONTINUED = """
tutorial           AdamW      0
tutorial           AdamW      1  groups=decay
tutorial           SGD        2
tutorial           Adagrad    3  groups=decay
tutorial           Lion       0
file               AdamW      2  groups=decay
file               AdamW      1  groups=empty
file               SGD        3  groups=decay
file               Adagrad    1
file               Lion       2  groups=decay
file               AdamW      3  schedule=steps
file               AdamW      0  schedule=cosine
file               AdamW      2  schedule=cycle
file               AdamW      0  schedule=chain
file               AdamW      3  model=named
file               AdamW      0  model=beside
file               AdamW      2  model=scaled
file               NAdam      1  groups=decay
file               NAdam      2  groups=head
file               Adafactor  3
file               Adafactor  2  groups=head
file               Rprop      2  groups=head
file               Adamax     3  groups=decay
file               ASGD       1
file               OneOfOurs  1
file               LowRank    2  groups=decay
dcp                AdamW      0
dcp                AdamW      2  groups=empty  via=dcp
dcp                SGD        1
dcp                Adagrad    2
dcp                Lion       3
dcp                AdamW      0  schedule=steps
dcp                AdamW      1  schedule=steps  via=dcp
dcp                AdamW      1  schedule=object
dcp                AdamW      3  schedule=sequence
dcp                AdamW      0  model=named
dcp                AdamW      3  model=beside
dcp                NAdam      0
dcp                RAdam      3
dcp                Rprop      0
dcp                Adadelta   3
dcp                ASGD       2
dcp                OneOfOurs  3
dcp                LowRank    0
torchtitan         AdamW      0
torchtitan         AdamW      3  groups=decay
dcp_at_top         AdamW      0  model=scaled
dcp_at_top         AdamW      3  model=linear
dcp_flat           AdamW      3  model=scaled
deepspeed_plain    AdamW      0  groups=decay
deepspeed_elastic  AdamW      2  groups=decay
"""


def go_on_from(written):
    """A check of a format's rows."""
    def each_row():
        for number, row in enumerate(CONTINUED.strip().splitlines()):
            by, kind, stage, *options = row.split()
            if by != written:
                continue
            how = dict(option.split("=") for option in options)
            via = how.pop("via", None)
            how = {"groups": how.get("groups", "one"), "make_model": MODELS[how.get("model", "net")], "schedule": SCHEDULES[how.get("schedule", "linear")]}
            source, path = begun(kind, **how), FOLDER / f"{written}_{number}_{world}"
            on_rank_0(FORMATS[written], source, path)
            if via:
                on_rank_0(tessera_command, "convert", path, FOLDER / f"{path.name}_via", "--to", via)
                path = FOLDER / f"{path.name}_via"
            print(row, flush=True)
            said = compare(path, int(stage), kind, source, limit=2e-6 if kind in WHOLE else 1e-6, **how)
            assert "schedule" not in said, (row, said)
            assert rank > 0 or ("states" in said) == (kind in ("OneOfOurs", "LowRank")) == ("do not say of which class" in said), (row, said)

    each_row.__name__ = f"from_{written}"
    return check(each_row)


for _format in FORMATS:
    go_on_from(_format)


class Code:
    """An object of a program's own, which is no data."""


def group_value(saved, key, value):
    saved["optimizer"]["param_groups"][0][key] = value


def state_value(saved, key, value):
    saved["optimizer"]["state"][2][key] = value


@check
def what_cannot_be_taken_over():
    """A value that is no data leaves the others: it is an error that names it where it would have been used, before anything has changed; what
    nobody asks for, or the schedule says, too, is none."""
    cases = {
        "base_lrs": (lambda saved: saved["scheduler"].update(base_lrs=[Code()]), "load_lr_scheduler_states", "scheduler.base_lrs[0]: __main__.Code"),
        "another": (lambda saved: saved.update(scheduler={**scale(LR.StepLR(torch.optim.SGD([torch.ones(1)]), 2)), "last_epoch": STEPS}),
                    "load_lr_scheduler_states", "another scheduler"),
        "epochs": (lambda saved: saved["scheduler"].update(last_epoch=2), "load_lr_scheduler_states", f"was stepped 2 times in {STEPS} updates"),
        "whole": (lambda saved: saved.update(scheduler=Code()), "load_lr_scheduler_states", "scheduler: __main__.Code"),
        "decay": (lambda saved: group_value(saved, "weight_decay", Code()), "load_optimizer_states", "weight_decay: __main__.Code"),
        "moment": (lambda saved: state_value(saved, "exp_avg", Code()), "load_optimizer_states", "'exp_avg' of 1 parameter: __main__.Code"),
        "sparse": (lambda saved: state_value(saved, "exp_avg_sq", torch.eye(2).to_sparse()), "load_optimizer_states", "a sparse tensor"),
        "step": (lambda saved: state_value(saved, "step", Code()), "load_optimizer_states", "'step' of 1 parameter"),
        "numbers": (lambda saved: saved["optimizer"].update(param_groups=[{**saved["optimizer"]["param_groups"][0], "params": list(range(9))}]),
                    "load_optimizer_states", "in no group"),
        "groups": (lambda saved: saved["optimizer"].update(param_groups=[{**saved["optimizer"]["param_groups"][0], "params": [0, 1, 4, 5, 6, 2, 7, 8, 3, 9]}]),
                   "load_optimizer_states", "param groups: the checkpoint has 1, and the optimizer 2"),  # in the model's order
        "lr": (lambda saved: group_value(saved, "lr", Code()), None, ""),
        "others": (lambda saved: (state_value(saved, "why", Code()), group_value(saved, "why", Code()), saved.update(why=Code()), saved["scheduler"].update(why=Code())), None, ""),
    }
    for i, (name, (change, flag, part)) in enumerate(cases.items()):
        source = begun("AdamW", "decay")
        path = FOLDER / f"lost_{name}_{world}.pt"

        def write(source=source, path=path, change=change):
            save_file(source, path)
            saved = torch.load(path, weights_only=False)
            change(saved)
            torch.save(saved, path)

        on_rank_0(write)
        if flag is None:
            compare(path, i % 4, "AdamW", source, groups="decay")
            continue
        model = Net()
        optimizer = MAKE["AdamW"](groups_of(model, "decay"))
        engine, *_ = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=linear_schedule(optimizer), config=config(i % 4, 700))
        before = {key: value.clone() for key, value in engine.state_dict().items()}
        raises(tessera.CheckpointError, lambda engine=engine, path=path: engine.load_checkpoint(path), path.name, part, "allow_partial_load=True", flag)
        assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items()), name
        for options in ({flag: False}, {"allow_partial_load": True}):
            with standard_error() as said:
                engine.load_checkpoint(path, **options)
            assert torch.equal(engine.state_dict()["head.weight"], source[0].head.weight), (name, options)
            assert rank > 0 or part in said[0] or flag in options, (name, options, said)


@check
def loss_scales():
    """GradScaler's goes on as it does in plain PyTorch, and changes at the same step. One that cannot be read is an error for a run in fp16 alone."""
    def step():
        scaler.scale(model.weight.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    def load(path, stage=2, **changes):
        return continued(path, stage, "SGD", [], make_model=linear, **changes)

    model, optimizer, *_ = begun("SGD", make_model=linear)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=4)
    step(), step()
    saved, expected = scaler.state_dict(), [step() for _ in range(7)]
    fp16 = {"fp16": {"enabled": True, "auto_cast": True, "loss_scale_window": 4, "initial_scale_power": 8, "hysteresis": 1}}
    lost = [{"scale": Code()}, {"scale": float("inf")}, {"scale": "much"}, {"scale": 0.0}, {"_growth_tracker": Code()}, None]
    for i, change in enumerate([{}, {}, {"growth_factor": Code()}, *lost, lost[0], None]):
        path = FOLDER / f"scale_{i}_{world}"
        state = {"model": model.state_dict(), "grad_scaler": Code() if change is None else {**saved, **change}, "step": 2, "scaler": {"mean": [0.5]}}
        on_rank_0(lambda i=i, path=path, state=state: torch.save(state, path) if i % 2 else dcp.save(state, checkpoint_id=path, no_dist=True))
        if change not in lost:
            engine, scales = load(path, i % 4, **fp16)[0], []
            for batch in batches(7):
                train(engine, [batch], loss_of)
                scales.append(engine.loss_scale)
            assert scales == expected, (change, scales, expected)
            continue
        raises(tessera.CheckpointError, lambda path=path: load(path, **fp16), "the loss scaler: ", "allow_partial_load=True")
        if i in (3, 4):  # of each format
            said = load(path)[2]  # in fp32 none is used
            assert rank > 0 or "the loss scaler: " in said, (change, said)
            assert load(path, allow=True, **fp16)[0].loss_scale == 2 ** 8, change


@check
def client_states_of_python_types():
    values = {"by number": {1: "a", 2: {3: (4, 5)}}, "counts": Counter(a=2), "best": float("inf"), "kinds": {"x"}}
    path = FOLDER / f"values_{world}.pt"
    model = Net()
    on_rank_0(lambda: torch.save({"model": model.state_dict(), **values}, path))
    engine = tessera.initialize(model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), config=config(2, 700))[0]
    _, found = engine.load_checkpoint(path)
    assert found == values and type(found["counts"]) is Counter, found


@check
def buffers_of_a_converted_checkpoint():
    """A buffer of floating-point numbers is a parameter that is not trained for a command, which has no model."""
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.frozen = nn.Linear(16, 5), nn.Linear(5, 7).requires_grad_(False)
            self.register_buffer("mask", torch.rand(7))

        def forward(self, x):
            return self.frozen(self.fc(x)) * self.mask

    source = begun("AdamW", make_model=Masked)
    for which, path in enumerate(save_both_ways("masked", source)):
        converted, back, again = (FOLDER / f"masked_{step}_{which}_{world}" for step in ("converted", "back", "again"))
        on_rank_0(tessera_command, "convert", path, converted, "--to", "tessera")
        on_rank_0(tessera_command, "convert", converted, back, "--to", "dcp")
        on_rank_0(tessera_command, "convert", back, again, "--to", "tessera")
        on_rank_0(lambda back=back: dcp_to_torch_save(back, FOLDER / "back.pt"))
        groups = torch.load(FOLDER / "back.pt", weights_only=True)["optimizer"]["param_groups"]
        assert [group["params"] for group in groups] == [["fc.weight", "fc.bias"]], groups
        for folder in (converted, back, again):
            mask = source[0].mask.clone()
            engine, _, said = continued(folder, 2, "AdamW", [], make_model=Masked)
            assert torch.equal(engine.module.mask, mask), (folder, said)
            assert largest_difference(engine.state_dict(), source[0].state_dict()) == 0
            assert engine.global_steps == STEPS, (folder, engine.global_steps)
    own, said = engine.save_checkpoint(FOLDER / f"masked_own_{world}"), []
    on_rank_0(lambda: said.append(tessera_command("convert", own, FOLDER / f"of_own_{world}", "--to", "dcp")))
    assert "lr_scheduler" not in "".join(said), said


@check
def states_that_a_format_leaves_out_are_said():
    folder = save_both_ways("nadam", begun("NAdam"))[1]
    if rank == 0:
        for words in (["inspect", folder], ["convert", folder, FOLDER / f"converted_{world}", "--to", "universal"]):
            said = tessera_command(*words)
            assert re.search(r'(other state|left out:) .*the state "?.?mu_product.? of \d+ parameters: has the shape \[\]', said), said


class Listed(OneOfOurs):
    """A state is a list of tensors."""

    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["basis"] = [torch.eye(2), torch.eye(3)]


class Momentless(ByParameter):
    """Nobody's: it has AdamW's names of states, and one of them is enough for it."""

    def update(self, p, state, group):
        p.sub_(state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1), alpha=group["lr"])


MAKE.update(Listed=lambda groups: Listed(groups, lr=0.01), Momentless=lambda groups: Momentless(groups, lr=0.01))


@check
def states_of_another_optimizer():
    """Are refused before anything has changed, or are said to be."""
    adamax = save_both_ways("adamax", begun("Adamax"))[0]
    raises(tessera.CheckpointError, lambda: continued(adamax, 3, "NAdam", []), "Adamax", "NAdam", "load_optimizer_states")
    for path in save_both_ways("listed", begun("Listed")):
        raises(tessera.CheckpointError, lambda path=path: continued(path, 2, "Listed", []), "basis", "load_optimizer_states")
    adamw = save_both_ways("adamw", begun("AdamW"))
    said = continued(adamw[1], 2, "Momentless", [])[2]
    assert rank > 0 or "look like those of AdamW; they are taken for" in said, said
    for path in adamw:
        model = Net()
        engine, *_ = tessera.initialize(model=model, optimizer=OneOfOurs([p for p in model.parameters() if p.requires_grad], lr=0.01), config=config(3, 700))
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        raises(tessera.CheckpointError, lambda path=path, engine=engine: engine.load_checkpoint(path), "has the states exp_avg, exp_avg_sq, step", "rows, scale")
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        engine.load_checkpoint(path, load_optimizer_states=False)
        assert not torch.equal(engine.state_dict()["head.weight"], before["head.weight"])
    bomb = FOLDER / f"bomb_{world}.pt"

    def write():
        model, optimizer, *_ = begun("OneOfOurs")
        state = optimizer.state_dict()
        state["state"][0]["rows"] = torch.ones(1).expand(1 << 35)
        torch.save({"model": model.state_dict(), "optimizer": state}, bomb)

    on_rank_0(write)
    raises(tessera.CheckpointError, lambda: continued(bomb, 2, "OneOfOurs", []), "more bytes than the files")


def dynamic_map(is_signed):
    """What bitsandbytes' codes of 8 bits stand for: create_dynamic_map of its functional.py."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if is_signed else exponent + 1) + 1)
        means = (10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += means + ([-mean for mean in means] if is_signed else [])
    return torch.tensor(sorted(values))


class Bitsandbytes(tessera.optim.AdamW8bit):
    """Saves what bitsandbytes' AdamW8bit does: states in a dict, with what the codes stand for, and the step as a number."""

    change = None  # a state that is saved otherwise, and how

    def state_dict(self):
        saved = super().state_dict()
        for number, state in saved["state"].items():
            maps = {f"qmap{i}": dynamic_map(i == 1) for i in (1, 2) if f"absmax{i}" in state}
            inner = {**{key: value for key, value in state.items() if key != "step"}, **maps}
            if self.change and "qmap1" in inner:
                inner[self.change[0]] = self.change[1](inner.get(self.change[0]))
            saved["state"][number] = {"step": int(state["step"]), "__bnb_optimizer_quant_state__": inner}
        return saved


MAKE["Bitsandbytes"] = lambda groups: Bitsandbytes(groups, lr=0.01, weight_decay=0.1, min_8bit_size=100)


@check
def states_of_bitsandbytes():
    """Codes, scales and what the codes stand for, in a dict of their own: into the class, and into the configuration's AdamW8bit."""
    source = begun("Bitsandbytes")
    assert len(dynamic_map(True)) == len(dynamic_map(False)) == 256
    paths = save_both_ways("bitsandbytes", source)
    model, optimizer, scheduler, rest = source
    expected = go_on(model, optimizer, scheduler, rest)
    for stage, path in zip((0, 3), paths):
        engine, losses, said = continued(path, stage, "Bitsandbytes", rest)
        assert largest_difference(losses, expected) < 2e-6, (path, stage, losses, expected, said)
        named = {"type": "AdamW8bit", "params": {"lr": 0.01, "weight_decay": 0.1, "min_8bit_size": 100}}
        engine, *_ = tessera.initialize(model=Net(), config=config(stage, 700, optimizer=named))
        with standard_error():
            engine.load_checkpoint(path, load_lr_scheduler_states=False)
        losses = []
        for i, batch in enumerate(rest):
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.01 * (1 - 0.5 * (STEPS + i) / (2 * STEPS))
            losses += train(engine, [batch], loss_of)
        assert largest_difference(losses, expected) < 2e-6, (path, stage, losses, expected)
    changes = {"qmap1": (lambda maps: maps + 0.01, "qmap1 stand for other numbers"), "absmax1": (lambda scales: scales[:-1], "absmax1", "one for each 256"),
               "state1": (lambda codes: codes[:-1], "state"), "state2": (lambda codes: codes.flatten()[1:], "state"),
               "gnorm_vec": (lambda _: torch.zeros(100), "gnorm_vec")}
    for i, (state, (change, *parts)) in enumerate(changes.items()):
        Bitsandbytes.change = state, change
        try:
            path = save_both_ways(f"changed_{state}", begun("Bitsandbytes"))[i % 2]
        finally:
            Bitsandbytes.change = None
        engine, *_ = tessera.initialize(model=Net(), config=config(2, 700, optimizer=named))
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        raises(tessera.Error, lambda path=path, engine=engine: engine.load_checkpoint(path), "load_optimizer_states", *parts)
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items()), (path, "has changed")


@check
def a_state_dict_alone():
    alone = FOLDER / f"alone_{world}"
    trained = begun("AdamW", make_model=linear)[0]
    on_rank_0(lambda: dcp.save({**trained.state_dict(), "step": torch.tensor(STEPS)}, checkpoint_id=alone, no_dist=True))
    engine, *_ = continued(alone, 3, "AdamW", [], make_model=linear)
    assert largest_difference(engine.state_dict(), trained.state_dict()) == 0
    assert engine.global_steps == STEPS, engine.global_steps


@check
def weights_alone():
    model, _, _, rest = begun("AdamW")
    file, both, apart = (FOLDER / f"{name}_{world}.safetensors" for name in ("weights", "both_names", "apart"))
    folder, sharded = FOLDER / f"hf_{world}", FOLDER / f"dcp_weights_{world}"

    def write():
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        copies = {name: value.clone() for name, value in state.items()}
        save_file_of_safetensors(copies, both)
        dcp.save({"model": copies}, checkpoint_id=sharded, no_dist=True)
        save_file_of_safetensors({**copies, "tied.weight": copies["tied.weight"] + 1}, apart)
        del state["tied.weight"]
        save_file_of_safetensors(state, file)
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps({"model_type": "net"}))

    on_rank_0(write)
    expected = train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.0), rest[:1], loss_of)
    for stage, path in enumerate((file, folder, both, sharded)):
        _, losses, said = continued(path, stage, "AdamW", rest[:1])
        assert largest_difference(losses, expected) < 1e-6
        assert rank > 0 or "states of the optimizer" in said, said
    raises(tessera.CheckpointError, lambda: continued(apart, 3, "AdamW", rest[:1]), "tied.weight")


@check
def load_weights_takes_them():
    """Of each format, with the names of another model, and with what may differ."""
    model, optimizer, *_ = begun("AdamW")
    dict_file, folder, renamed = FOLDER / f"dict_{world}.pt", FOLDER / f"both_{world}", FOLDER / f"renamed_{world}.bin"
    variant = FOLDER / f"variant_{world}" / "model.safetensors.index.fp16.json"

    def write():
        variant.parent.mkdir()
        state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
        parts = {"model-1.fp16.safetensors": dict(list(state.items())[:3]), "model-2.fp16.safetensors": dict(list(state.items())[3:])}
        for name, part in parts.items():
            save_file_of_safetensors(part, variant.parent / name)
        variant.write_text(json.dumps({"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}, dict_file, _use_new_zipfile_serialization=False)
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder, no_dist=True)
        torch.save({**{name: value for name, value in model.state_dict().items() if name != "head.bias"}, "extra": torch.ones(2)}, renamed)

    on_rank_0(write)
    for stage in (0, 3):
        for path, options in ((dict_file, {}), (folder, {}), (variant, {}), (renamed, {"ignore_missing": ["head.b*"], "ignore_unexpected": ["extra"]})):
            other = Net()
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(0.5)
                kept = other.head.bias.detach().clone()
            engine, *_ = tessera.initialize(model=other, config=config(stage, 700, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
            engine.load_weights(path, **options)
            expected = {**model.state_dict(), **({"head.bias": kept} if options else {})}
            found = engine.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (stage, path)
            if options:
                raises(tessera.CheckpointError, lambda engine=engine: engine.load_weights(renamed), "head.bias: not in the file", "extra: not in the model")


@check
def what_does_not_fit_is_named():
    model, optimizer, _, rest = begun("AdamW")
    other = FOLDER / f"other_{world}.pt"
    on_rank_0(lambda: torch.save({"model": {**model.state_dict(), "extra": torch.zeros(3)}, "optimizer": optimizer.state_dict()}, other))
    message = raises(tessera.CheckpointError, lambda: continued(other, 2, "AdamW", rest), "extra")
    assert "other" in message
    hostile = FOLDER / f"hostile_{world}.pt"
    on_rank_0(lambda: torch.save({"model": model.state_dict(), "x": Payload()}, hostile))
    raises(tessera.CheckpointError, lambda: continued(hostile, 2, "AdamW", rest), "system")
    assert not (FOLDER / "executed").exists()
    on_rank_0(lambda: (FOLDER / f"cut_{world}.pt").write_bytes(other.read_bytes()[:-500]))
    raises(tessera.CheckpointError, lambda: continued(FOLDER / f"cut_{world}.pt", 2, "AdamW", rest), "cut_")
    raises(tessera.CheckpointError, lambda: continued(FOLDER / "nowhere", 2, "AdamW", rest), "nowhere")


@check
def what_cannot_be_read_changes_nothing():
    """A number that is too large, and bytes that are not those that were written: the last ones of a file."""
    model, optimizer, _, rest = begun("AdamW")
    wide, own = FOLDER / f"wide_{world}.pt", FOLDER / f"own_{world}.safetensors"
    engine, *_ = tessera.initialize(model=Net(), config=config(3, 700, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    engine.save_model(own)
    ours = engine.save_checkpoint(FOLDER / f"ours_{world}")

    def write():
        state = model.state_dict()
        last = list(state)[-1]
        torch.save({"model": {**state, last: torch.full(state[last].shape, 1e300, dtype=torch.float64)}, "optimizer": optimizer.state_dict()}, wide)
        content = bytearray(own.read_bytes())
        content[-1] ^= 1
        own.write_bytes(content)

    on_rank_0(write)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    for load, words in ((lambda: engine.load_checkpoint(wide, load_module_only=True), "too large for fp32"), (lambda: engine.load_weights(wide), "too large for fp32"),
                        (lambda: engine.load_weights(own), "own_"), (lambda: engine.load_weights(ours), "tessera consolidate"),
                        (lambda: engine.load_weights(Path(ours).parent), "tessera consolidate")):
        raises(tessera.CheckpointError, load, words)
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())
    train(engine, rest[:1], loss_of)


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {FOLDER / 'executed'}",)


if __name__ == "__main__":
    main()
