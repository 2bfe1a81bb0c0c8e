"""The configuration's Muon: beside torch.optim.Muon and AdamW in one process, given the same gradients. Its bits at every stage and number of
ranks are C++'s tests (zero/optimizer/whole_parameters_test.cc), and so are its checkpoints (engine/checkpoint/checkpoint_test.cc)."""
import os

import tessera
import torch
from checks import check, config, main, raises, standard_error
from optimizers import batches, gradients_of_a_step, loss_of, rank
from torch import nn

PARAMS = {"lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-8}


class Model(nn.Module):
    """An embedding, tall and wide matrices, filters, a batch of matrices, vectors, a tied and a frozen matrix, and one without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_in = nn.Linear(16, 24, bias=False)
        self.up = nn.Linear(24, 40)
        self.again = nn.Linear(24, 40)
        self.again.weight = self.up.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.down = nn.Linear(40, 12, bias=False)
        self.filters = nn.Conv2d(1, 3, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 12, 6) / 4)
        self.unused = nn.Linear(4, 4)
        self.lm_head = nn.Linear(18, 5, bias=False)

    def forward(self, x):
        x = self.frozen(self.up(self.embed_in(x)) + self.again(self.embed_in(x).tanh()))
        x = self.down(x.tanh())
        x = self.filters(x.unflatten(1, (1, 3, 4))).flatten(2)
        return self.lm_head(torch.einsum("bei,eij->bej", x, self.experts).flatten(1))


MATRICES = ("up.weight", "down.weight", "filters.weight", "experts")


def muon_config(stage, params=None, accumulation=1, clipping=0.0, groups=(), **changes):
    return config(stage, 500, gradient_accumulation_steps=accumulation, gradient_clipping=clipping,
                  optimizer={"type": "Muon", "params": PARAMS if params is None else params, "param_groups": list(groups)}, **changes)


def muon_engine(*arguments, model=None, **options):
    return tessera.initialize(model=Model() if model is None else model, config=muon_config(*arguments, **options))[0]


class Plain:
    """The parameters in one process: each matrix, and each matrix of a batch, is a parameter of torch.optim.Muon, the others of AdamW."""

    def __init__(self, model, matrices=MATRICES, muon=(), adam=()):
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **dict(muon)}
        self.parts, others = {}, []
        for name, weight in self.weights.items():
            if name not in matrices:
                self.parts[name] = [weight.requires_grad_()]
                others += self.parts[name]
            elif weight.ndim == 3:
                self.parts[name] = [part.detach().requires_grad_() for part in weight]
            else:
                self.parts[name] = [weight.view(len(weight), -1).detach().requires_grad_()]
        self.optimizers = [torch.optim.AdamW(others, **{"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, **dict(adam)})]
        in_muon = [part for name in self.parts if name in matrices for part in self.parts[name]]
        if in_muon:
            self.optimizers.append(torch.optim.Muon(in_muon, **options))

    def step(self, gradients):
        for name, parts in self.parts.items():
            pieces = gradients[name] if len(parts) > 1 else [gradients[name]] if name in gradients else [None] * len(parts)
            for part, piece in zip(parts, pieces):
                part.grad = None if piece is None else piece.reshape(part.shape)
        for optimizer in self.optimizers:
            optimizer.step()


def beside_torch(stage, plain_options=(), steps=3, accumulation=1, clipping=0.0, make=Model, matrices=MATRICES, given=None, **changes):
    """Trains the engine, and gives its gradients to torch's optimizers: matrices have their bits, other parameters 1e-6."""
    plain = Plain(Model(), matrices, **dict(plain_options))
    model = make()
    engine = tessera.initialize(model=model, model_parameters=given(model) if given else None,
                                config=muon_config(stage, accumulation=accumulation, clipping=clipping, **changes))[0]
    samples = batches(steps * accumulation)
    for step in range(steps):
        plain.step(gradients_of_a_step(engine, samples[step * accumulation:(step + 1) * accumulation], plain.weights, clipping))
        for name, expected in plain.weights.items():
            found = engine.full_parameter(name)
            if name in matrices:
                assert torch.equal(found, expected), (name, stage, step, (found - expected).abs().max())
                if not name.startswith("unused"):
                    theirs = torch.cat([plain.optimizers[1].state[part]["momentum_buffer"].flatten() for part in plain.parts[name]])
                    ours = engine.optimizer.state[dict(engine.module.named_parameters())[name]]["exp_avg"].flatten()
                    assert torch.equal(ours, theirs), (name, stage, step)
            else:
                torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@check
def stages_have_the_bits_of_torch():
    for stage in (0, 3):
        beside_torch(stage)
        beside_torch(stage, accumulation=3, clipping=0.01)


def knows_unclamped():
    """torch 2.11 to 2.13 do not."""
    try:
        torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="spectral_unclamped")
        return True
    except ValueError:
        return False


@check
def options_mean_those_of_torch():
    unclamped = ({"adjust_lr_fn": "spectral_unclamped"},) if knows_unclamped() else ()
    for muon in ({"adjust_lr_fn": "match_rms_adamw"}, *unclamped, {"nesterov": False}, {"ns_steps": 3},
                 {"momentum": 0.5, "weight_decay": 0.0}):
        adam = {"weight_decay": muon["weight_decay"]} if "weight_decay" in muon else {}
        beside_torch(2, {"muon": muon, "adam": adam}, params={**PARAMS, **muon})


@check
def half_precision_updates_masters():
    """The update is of the accumulated fp32 gradient, once a step, and bf16 parameters are the masters' cast."""
    for stage in (0, 3):
        model = Model()
        plain = Plain(model)
        engine = muon_engine(stage, model=model, accumulation=2, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
        samples = batches(6)
        before = {name: engine.full_parameter(name) for name in plain.weights}
        for name, weight in plain.weights.items():
            assert torch.equal(before[name], weight.detach()), name
        for step in range(3):
            plain.step(gradients_of_a_step(engine, samples[2 * step:2 * step + 2], plain.weights, loss_of=lambda model, sample:
                                           nn.functional.cross_entropy(model(sample[0].bfloat16()).float(), sample[1])))
            for name in MATRICES:
                assert torch.equal(engine.full_parameter(name), plain.weights[name]), (name, stage, step)
                with tessera.GatheredParameters(dict(model.named_parameters())[name]):
                    assert torch.equal(dict(model.named_parameters())[name], plain.weights[name].bfloat16()), (name, stage, step)
        engine.destroy()


@check
def groups_choose():
    """`use_muon` false, and a group's own rate, which is that of all its parameters."""
    by_name = [{"match": ["down*"], "use_muon": False}, {"match": ["up*"], "lr": 0.005, "weight_decay": 0}]
    for stage in (1, 3):
        engine = muon_engine(stage, groups=by_name)
        groups = engine.optimizer.param_groups
        assert [group["lr"] for group in groups] == [0.02, 0.02, 0.005], groups
        assert [group["adam_lr_ratio"] for group in groups] == [0.5, 0.5, 1.0], groups
        assert [group["use_muon"] for group in groups] == [True, False, True]
        engine.destroy()

    def given(model):
        down = [p for name, p in model.named_parameters() if name.startswith("down")]
        return [{"params": [p for p in model.parameters() if p.requires_grad and all(p is not one for one in down)]},
                {"params": down, "use_muon": False}]

    without = tuple(name for name in MATRICES if name != "down.weight")
    beside_torch(2, matrices=without, given=given)
    beside_torch(2, matrices=without, groups=by_name[:1])
    slow = {"muon": {"lr": 0.005, "weight_decay": 0}, "adam": {"lr": 0.005, "weight_decay": 0}}
    beside_torch(3, slow, groups=[{"match": ["*"], "lr": 0.005, "weight_decay": 0}])
    beside_torch(3, slow, given=lambda model: [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 0.005, "weight_decay": 0}])
    for key, value in {"adam_lr": 0.1, "muon_lr": 0.1, "ns_steps": 3, "ns_method": "gram", "adjust_lr_fn": "original"}.items():
        raises(tessera.ConfigError, lambda key=key, value=value: tessera.initialize(
            model=(model := Model()), model_parameters=[{"params": [p for p in model.parameters() if p.requires_grad], key: value}],
            config=muon_config(1)), key, "optimizer.params")


@check
def parameters_say_whose_they_are():
    """DeepSpeed's mark, beside groups that say the same."""
    results = []
    for marks in (True, False):
        model = Model()
        if marks:
            model.up.weight.use_muon = model.experts.use_muon = model.up.bias.use_muon = False
            model.embed_in.weight.use_muon = model.down.weight.use_muon = True
        groups = () if marks else ({"match": ["up.weight", "experts"], "use_muon": False},)
        with standard_error() as said:
            engine = muon_engine(2, groups=groups, model=model)
        assert ("embed_in.weight" in said[0] and "use_muon=True" in said[0] and "down" not in said[0]) == (marks and rank == 0), said
        trained(engine, batches(2))
        results.append(engine.state_dict())
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())
    model = Model()
    model.up.weight.use_muon = False
    raises(tessera.ConfigError, lambda: muon_engine(1, groups=({"match": "*bias", "lr": 0.1},), model=model), "use_muon=False", "optimizer.param_groups")
    raises(tessera.ConfigError, lambda: tessera.initialize(model=model, model_parameters=[{"params": list(model.parameters())}], config=muon_config(1)),
           "model_parameters[0]: parameter up.weight has use_muon=False")


@check
def rates():
    """Which of the keys means which rate, as DeepSpeed's; a schedule moves both."""
    for params, (matrices, others) in (({}, (0.02, 3e-4)), ({"lr": 0.1}, (0.1, 0.1)), ({"muon_lr": 0.1}, (0.1, 3e-4)),
                                       ({"adam_lr": 0.1}, (0.02, 0.1)), ({"lr": 0.3, "muon_lr": 0.1}, (0.1, 0.3)),
                                       ({"lr": 0.3, "adam_lr": 0.1}, (0.3, 0.1)), ({"lr": 0.4, "muon_lr": 0.1, "adam_lr": 0.2}, (0.1, 0.2))):
        engine = muon_engine(1, params=params)
        group = engine.optimizer.param_groups[0]
        assert group["lr"] == matrices and abs(group["lr"] * group["adam_lr_ratio"] - others) < 1e-12, (params, group)
        engine.destroy()
    for params, words in (({"adam_lr": 1, "adam_lr_ratio": 1}, "optimizer.params.adam_lr"), ({"ns_method": "gram"}, "Gram"),
                          ({"muon_lr": 0, "adam_lr": 1}, "optimizer.params.muon_lr")):
        raises(tessera.ConfigError, lambda params=params: muon_engine(1, params=params), words)


def trained(engine, samples):
    for sample in samples:
        engine.backward(loss_of(engine, sample[rank % len(sample)]))
        engine.step()
    return {name: engine.full_parameter(name) for name, p in engine.module.named_parameters() if p.requires_grad}


@check
def a_scheduler_moves_both_rates():
    engine = tessera.initialize(model=Model(), config=muon_config(1), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if step == 0 else 0.0))[0]
    samples = batches(2)
    before = {name: p.detach().clone() for name, p in Model().named_parameters()}
    after = trained(engine, samples[:1])
    again = trained(engine, samples[1:])
    for name, value in again.items():
        assert torch.equal(value, after[name]), name  # at a rate of 0 nothing moves
        assert name.startswith("unused") or not torch.equal(value, before[name]), name
    engine.destroy()


@check
def states_of_another_meaning_are_refused():
    """AdamW's states have the same names, and so has a matrix that AdamW updates."""
    folder = os.environ["SAVED"]
    adam = tessera.initialize(model=Model(), config=config(1, 500))[0]
    muon, others = muon_engine(1), muon_engine(1, groups=[{"match": ["down*"], "use_muon": False}])
    for engine in (adam, muon, others):
        trained(engine, batches(1))
    adam.save_checkpoint(folder, tag="adam")
    muon.save_checkpoint(folder, tag="muon")
    for engine, tag, words in ((adam, "muon", "states are not those of AdamW"), (muon, "adam", "states are not those of Muon"),
                               (others, "muon", "Muon updated the parameter down.weight")):
        raises(tessera.Error, lambda engine=engine, tag=tag: engine.load_checkpoint(folder, tag=tag), words)
        engine.load_checkpoint(folder, tag=tag, load_optimizer_states=False)
    raises(tessera.Error, lambda: adam.optimizer.load_state_dict(muon.optimizer.state_dict()), "use_muon")
    muon.optimizer.param_groups[0]["use_muon"] = False
    muon.backward(loss_of(muon, batches(1)[0][rank]))
    raises(tessera.Error, muon.step, "use_muon")
    for engine in (adam, muon, others):
        engine.destroy()


@check
def what_is_around_a_step_changes_nothing():
    """A caller's autocast; OneCycle's momentum, which is for Adam."""
    weights = []
    for dtype in (None, torch.float16):
        engine = muon_engine(2)
        engine.backward(loss_of(engine, batches(1)[0][rank]))
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            engine.step()
        weights.append({name: engine.full_parameter(name) for name in MATRICES})
        engine.destroy()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in MATRICES)
    with standard_error() as said:
        engine = muon_engine(1, scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}})
    assert ("cycle_momentum" in said[0]) == (rank == 0)
    trained(engine, batches(2))
    assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    engine.destroy()


@check
def the_log_says_who_updates_what():
    with standard_error() as said:
        muon_engine(1)
    assert ("Muon: 5 of the parameters (1699 elements); AdamW: 6 (561)" in said[0]) == (rank == 0), said[0]


if __name__ == "__main__":
    main()
