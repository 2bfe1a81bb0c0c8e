"""What users do with parameters and modules between steps: hooks that come and go, freezing and unfreezing, averages of weights, vmap, modes;
and models that cannot be trained. Beside plain PyTorch, at every stage. The models that train as they are, are in patterns.py."""
import copy
import functools

import models
import tessera
import torch
from checks import STAGES, check, config, largest_difference, loss_of, main, mlp, raises, sgd, train, train_plainly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
BATCHES = [[models._vectors(step * world + r, 4, 16) for r in range(world)] for step in range(6)]
MINE = BATCHES[0][rank]


def make(stage, model=None):
    model = model if model is not None else mlp()
    return tessera.initialize(model=model, optimizer=sgd(model), config=config(stage, 500))[0]


@check
def hooks_that_come_after_initialize_and_go():
    for stage in STAGES:
        plain = mlp()
        engine = make(stage, copy.deepcopy(plain))
        optimizer, seen = sgd(plain), []

        def halve(gradient):
            return gradient * 0.5

        for module in (plain, engine.module):
            handle = module[0].weight.register_hook(halve)
            other = module[0].bias.register_post_accumulate_grad_hook(lambda p, to=seen: to.append(p.grad.shape))
            if module is plain:
                train_plainly(plain, optimizer, BATCHES[:2], loss_of)
            else:
                train(engine, BATCHES[:2], loss_of)
            handle.remove()
            other.remove()
        assert seen == [(64,)] * (2 * world + 2), seen  # plain PyTorch's stands for all ranks
        train_plainly(plain, optimizer, BATCHES[2:4], loss_of)
        train(engine, BATCHES[2:4], loss_of)
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 1e-5, stage
        assert len(seen) == 2 * world + 2


@check
def layers_are_frozen_and_unfrozen_between_steps():
    """Frozen for two steps, trained for two, frozen again: what has no gradient is left alone, as torch.optim does."""
    for stage in STAGES:
        plain = mlp()
        engine = make(stage, copy.deepcopy(plain))
        optimizer = sgd(plain)
        for trainable, batches in ((False, BATCHES[:2]), (True, BATCHES[2:4]), (False, BATCHES[4:])):
            for module in (plain, engine.module):
                module[0].requires_grad_(trainable)
            before = engine.full_parameter("0.weight").clone()
            expected = train_plainly(plain, optimizer, batches, loss_of)
            assert largest_difference(train(engine, batches, loss_of), expected) < 1e-5, stage
            assert engine.full_parameter("0.weight").equal(before) != trainable
        assert largest_difference(engine.state_dict(), plain.state_dict()) < 1e-5, stage


@check
def what_was_frozen_at_initialize_is_named_when_it_gets_a_gradient():
    for stage in STAGES:
        model = mlp()
        model[0].requires_grad_(False)
        engine = tessera.initialize(model=model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1), config=config(stage, 500))[0]
        train(engine, BATCHES[:1], loss_of)
        model[0].requires_grad_(True)
        engine.backward(loss_of(engine, MINE))
        raises(tessera.Error, engine.step, "parameter 0.weight was frozen at initialize()", "leave it trainable there")


@check
def a_model_that_is_frozen_as_a_whole_is_evaluated():
    for stage in STAGES:
        plain = mlp()
        model = copy.deepcopy(plain).requires_grad_(False)
        engine, optimizer, _, _ = tessera.initialize(model=model, config=config(stage, 500))
        assert [group["params"] for group in optimizer.param_groups] == [[]]
        engine.eval()
        assert engine(MINE[0]).equal(plain(MINE[0]))
        engine.train()
        raises(tessera.Error, lambda e=engine: e.backward(loss_of(e, MINE)))


@check
def averages_of_weights():
    """An exponential average by hand, and torch's AveragedModel: both read all parameters outside of the forward."""
    for stage in STAGES:
        plain = mlp()
        engine = make(stage, copy.deepcopy(plain))
        optimizer = sgd(plain)
        with tessera.GatheredParameters(engine.module):
            by_hand = copy.deepcopy(engine.module)
        averages = [torch.optim.swa_utils.AveragedModel(mlp()) for _ in range(2)]
        expected = copy.deepcopy(plain)
        for step in range(3):
            train_plainly(plain, optimizer, BATCHES[step:step + 1], loss_of)
            train(engine, BATCHES[step:step + 1], loss_of)
            with torch.no_grad():
                for average, module in ((expected, plain), (by_hand, engine.module)):
                    for ours, theirs in zip(average.parameters(), module.parameters()):
                        ours.lerp_(theirs, 0.1)
            averages[0].update_parameters(plain)
            averages[1].update_parameters(engine.module)
        assert largest_difference(by_hand.state_dict(), expected.state_dict()) < 1e-5, stage
        assert largest_difference(averages[1].module.state_dict(), averages[0].module.state_dict()) < 1e-5, stage


@check
def gradients_of_each_sample_by_vmap():
    for stage in STAGES:
        plain = mlp()
        engine = make(stage, copy.deepcopy(plain))
        found = []
        for module in (plain, engine.module):
            def one(parameters, x, y, module=module):
                return functional.cross_entropy(torch.func.functional_call(module, parameters, (x[None],)), y[None])
            found.append(torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(dict(module.named_parameters()), *MINE))
        assert found[1]["0.weight"].shape == (4, 64, 16)
        assert largest_difference(found[1], found[0]) < 1e-6, stage


def _fake(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(x)).shape


def _operators(model, x):
    class Hears(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            heard.append(str(function))
            return function(*args, **(kwargs or {}))

    heard = []
    with Hears():
        model(x)
    return heard


def _saves_products(model, samples):
    """The loss of a torch.utils.checkpoint that saves some results."""
    saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    layers = getattr(model, "module", model)
    return functional.cross_entropy(checkpoint(layers, samples[0], use_reentrant=False, context_fn=saved), samples[1])


@check
def modes_of_the_caller_do_not_hear_the_engine():
    """torch.func, a fake forward, a mode that hears operators, selective checkpoints: none of them has a part in gathers."""
    ways = [lambda model, x: torch.func.jvp(model, (x,), (x,))[1], lambda model, x: torch.func.jacrev(model)(x[0]),
            _fake, _operators]
    for stage in STAGES:
        plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 5))
        model, optimizer = copy.deepcopy(plain), sgd(plain)
        engine = tessera.initialize(model=model, optimizer=sgd(model), config=config(stage, zero_optimization={
            "stage": stage, "unit_numel": 300, "stage3_param_persistence_threshold": 0, "communication_buffers": 1}))[0]
        for way in ways:
            found, expected = way(model, MINE[0]), way(plain, MINE[0])
            assert found == expected if isinstance(found, (list, torch.Size)) else torch.allclose(found, expected, atol=1e-5), (stage, found, expected)
        for loss in (_saves_products, loss_of):
            expected = train_plainly(plain, optimizer, BATCHES[:2], loss)
            assert largest_difference(train(engine, BATCHES[:2], loss), expected) < 1e-5, stage


@check
def sparse_gradients_of_a_table():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.table(x))

    def loss(model, tokens):
        return functional.cross_entropy(model(tokens), tokens % 5)

    batches = [[models._tokens(step * world + r, 1, 6, 32)[0] for r in range(world)] for step in range(3)]
    for stage in STAGES:
        torch.manual_seed(0)
        plain = Table()
        engine = make(stage, copy.deepcopy(plain))
        plain.table.sparse = False
        expected = train_plainly(plain, sgd(plain), batches, loss)
        assert largest_difference(train(engine, batches, loss), expected) < 1e-5, stage


class ProductOfAll(torch.autograd.Function):
    """Takes all weights at once. apply() holds the GIL, unlike libtorch's operators, while the weights are gathered."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return x * torch.stack(weights).prod(0)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        product = torch.stack(weights).prod(0)
        return grad * product, *((grad * x).sum(0) * product / weight for weight in weights)


@check
def functions_of_python_that_take_all_weights():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.linspace(0.9, 1.1, 600) for _ in range(12)])

        def forward(self, x):
            return ProductOfAll.apply(x, *self.weights)

    batches = [[models._vectors(step * world + r, 4, 600)[0] for r in range(world)] for step in range(10)]
    for stage in STAGES:
        plain = Products()
        engine = make(stage, copy.deepcopy(plain))
        expected = train_plainly(plain, sgd(plain), batches, lambda model, x: model(x).square().mean())
        assert largest_difference(train(engine, batches, lambda model, x: model(x).square().mean()), expected) < 1e-5, stage


@check
def models_that_cannot_be_trained_are_refused():
    for stage in (0, 3):
        settings = config(stage)
        for kind, said in ((torch.float64, "is Double"), (torch.complex64, "is ComplexFloat")):
            model = mlp()
            model.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=kind)))
            raises(tessera.ConfigError, lambda m=model, s=settings: tessera.initialize(model=m, config=s), f"parameter odd {said}",
                   "must be fp32, bf16 or fp16")
        model = mlp()
        model.register_parameter("packed", nn.Parameter(torch.zeros(3, dtype=torch.uint8).view(torch.bits8), requires_grad=False))
        raises(tessera.ConfigError, lambda m=model, s=settings: tessera.initialize(model=m, config=s), "parameter packed is Bits8")
        raises(tessera.ConfigError, lambda s=settings: tessera.initialize(model=nn.Sequential(nn.ReLU(), nn.Flatten()), config=s),
               "the model has no parameters")
        lazy = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(5))
        raises(tessera.ConfigError, lambda m=lazy, s=settings: tessera.initialize(model=m, config=s), "parameter 0.weight has no shape yet",
               "run the model once")
        lazy(MINE[0])
        engine = make(stage, lazy)
        for wrong in (None, 1.5):
            raises(tessera.Error, lambda e=engine, w=wrong: e.backward(w), f"the loss is a {type(wrong).__name__}; expected a tensor")
        train(engine, BATCHES[:1], loss_of)


if __name__ == "__main__":
    main()
