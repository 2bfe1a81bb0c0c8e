"""loss.backward() in place of engine.backward(loss), gradients that are read and set between backward and step, and steps that take any
number of backward passes. Beside engine.backward() and plain PyTorch, at every stage."""
import contextlib
import dataclasses

import models
import tessera
import torch
from checks import check, config, each_stage, loss_of, main, mlp, raises, same, train_plainly
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
BATCHES = [[models._vectors(step * world + r, 4, 16) for r in range(world)] for step in range(12)]
FP16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 8}


def make(stage, model=None, lr=0.05, **changes):
    model = model if model is not None else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    zero = {"stage": stage, "unit_numel": 500, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return tessera.initialize(model=model, optimizer=optimizer, config=config(stage, 500, **{**changes, "zero_optimization": zero}))[0]


def run(engine, batches, backward, loss_of=loss_of):
    for batch in batches:
        backward(engine, loss_of(engine, batch[rank]))
        engine.step()


def own(engine, loss):
    engine.backward(loss)


def callers(engine, loss):
    loss.backward()


def scaled(engine, loss):
    engine.scale(loss).backward()


@each_stage
def it_gives_the_bits_of_engine_backward(stage):
    for changes in ({}, {"gradient_accumulation_steps": 4}, {"bf16": {"enabled": True, "auto_cast": True}}, {"gradient_clipping": 0.1},
                    {"zero_optimization": {"reduce_bucket_size": 1000}}, {"communication_data_type": "bf16"}):
        engines = [make(stage, **changes) for _ in range(2)]
        run(engines[0], BATCHES[:8], own)
        run(engines[1], BATCHES[:8], callers)
        assert engines[0].global_steps == engines[1].global_steps == 8 // changes.get("gradient_accumulation_steps", 1)
        same(*engines)
    engines = [make(stage, gradient_accumulation_steps=3) for _ in range(2)]
    run(engines[0], BATCHES[:6], own)
    run(engines[1], BATCHES[:6], callers)
    same(*engines, limit=1e-6)  # a third of each gradient is not a third of the loss


class Added(nn.Module):
    """Its parameters are added in other shapes, and their gradients have one memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.row, self.square = (nn.Parameter(torch.randn(shape)) for shape in ((16,), (1, 16), (4, 4)))

    def forward(self, x):
        return (self.flat + self.row.view(16) + self.square.view(16)) * x


@each_stage
def gradients_may_share_memory(stage):
    engines = [make(stage, Added(), gradient_accumulation_steps=2) for _ in range(2)]
    kept = []
    engines[1].module.flat.register_hook(lambda gradient: kept.append((gradient.view(-1), gradient.clone())))
    for engine, backward in zip(engines, (own, callers)):
        run(engine, BATCHES[:4], backward, lambda module, batch: module(batch[0][0]).square().mean())
    same(*engines, limit=1e-6)
    assert kept and all(torch.equal(given, before) for given, before in kept), "what a hook has kept is as it was"


@each_stage
def hooks_of_all_parameters_may_come_late(stage):
    engines, seen = [make(stage) for _ in range(2)], []
    for engine in engines:
        for p in engine.module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    run(engines[0], BATCHES[:3], own)
    run(engines[1], BATCHES[:3], callers)
    same(*engines)
    assert len(seen) == 2 * 3 * len(list(engines[0].module.parameters()))


@each_stage
def fp16_needs_scale(stage):
    engines = [make(stage, fp16=FP16) for _ in range(2)]
    loss = loss_of(engines[0], BATCHES[0][rank])
    raises(RuntimeError, loss.backward, "Loss scaling is required", "engine.scale(loss)")
    engines[0].zero_grad()
    run(engines[0], BATCHES[:4], own)
    run(engines[1], BATCHES[:4], scaled)
    same(*engines)
    raises(tessera.Error, lambda: engines[1].scale(torch.ones(2)), "scalar loss")
    raises(tessera.Error, lambda: engines[1].scale(1.0), "expected a tensor")


@each_stage
def what_was_scaled_and_given_up_does_not_count_as_scaled(stage):
    for engine in (make(stage, fp16=FP16), make(stage, fp16=FP16, gradient_accumulation_steps=2)):
        samples = BATCHES[0][rank]
        engine.scale(loss_of(engine, samples))
        engine.zero_grad()
        raises(RuntimeError, lambda e=engine, s=samples: loss_of(e, s).backward(), "Loss scaling is required")
        engine.zero_grad()
        lost = engine.scale(loss_of(engine, samples)) * torch.ones((), requires_grad=True)
        lost.register_hook(lambda gradient: 1 / 0)
        raises(ZeroDivisionError, lost.backward)
        engine.zero_grad()
        raises(RuntimeError, lambda e=engine, s=samples: loss_of(e, s).backward(), "Loss scaling is required")
        engine.zero_grad()
        scaled(engine, loss_of(engine, samples))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Returns(nn.Module):
    """What a module may return."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp()
        self.kind = kind

    def forward(self, x):
        logits = self.inner(x)
        self.result = logits
        return {"tensor": logits, "dict": {"logits": [logits]}, "dataclass": Output(logits), "object": type("Any", (), {"logits": logits})(),
                "in_place": logits, "none": None}[self.kind]


@each_stage
def whatever_the_module_returns(stage):
    for kind in ("tensor", "dict", "dataclass", "object", "in_place", "none"):
        for changes in ({}, {"activation_checkpointing": {"policy": "cheap"}}) if kind in ("tensor", "in_place") else ({},):
            def loss(model, samples, kind=kind):
                found = model(samples[0])
                logits = {"tensor": lambda: found, "dict": lambda: found["logits"][0], "dataclass": lambda: found.logits,
                          "object": lambda: found.logits, "in_place": lambda: found.mul_(1.5), "none": lambda: model.result}[kind]()
                return functional.cross_entropy(logits, samples[1])
            engines = [make(stage, Returns(kind), **changes) for _ in range(2)]
            run(engines[0], BATCHES[:4], own, loss)
            run(engines[1], BATCHES[:4], callers, loss)
            same(*engines)
        plain = Returns(kind)
        train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), BATCHES[:4], loss)
        same(engines[0], plain, 1e-5)


@each_stage
def of_tensors_of_several_elements(stage):
    engines = [make(stage) for _ in range(2)]
    for batch in BATCHES[:4]:
        x, weights = batch[rank][0], torch.linspace(0, 1, 20).view(4, 5)
        engines[0].backward((engines[0](x) * weights).sum())
        engines[1](x).backward(weights)
        for engine in engines:
            engine.step()
    same(*engines, limit=1e-7)


@each_stage
def one_loss_over_several_engines(stage):
    plain = [mlp() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in plain]
    engines = [make(stage) for _ in range(3)]
    for batch in BATCHES[:5]:
        sum(loss_of(engine, batch[rank]) / (i + 1) for i, engine in enumerate(engines)).backward()
        for engine in engines:
            engine.step()
        for i, (model, optimizer) in enumerate(zip(plain, optimizers)):
            train_plainly(model, optimizer, [batch], lambda m, s, i=i: loss_of(m, s) / (i + 1))
    for engine, model in zip(engines, plain):
        same(engine, model, 1e-5)


@each_stage
def a_generator_against_a_discriminator(stage):
    """The generator's loss goes through the discriminator, whose gradients zero_grad() discards; a gradient penalty reads autograd.grad()."""
    def nets():
        torch.manual_seed(3)
        return (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))

    def loss_of_discriminator(generator, discriminator, real, noise):
        fake = generator(noise)
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        slope, = torch.autograd.grad(discriminator(mixed).sum(), mixed, create_graph=True)
        return discriminator(fake.detach()).mean() - discriminator(real).mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    def loss_of_generator(generator, discriminator, real, noise):
        return -discriminator(generator(noise)).mean()

    batches = [[(samples[0], torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + r))) for r, samples in enumerate(batch)]
               for step, batch in enumerate(BATCHES[:4])]
    plain = nets()
    for batch in batches:
        for net, loss in zip(plain[::-1], (loss_of_discriminator, loss_of_generator)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            (sum(loss(*plain, *samples) for samples in batch) / world).backward()
            optimizer.step()
            plain[0].zero_grad()
            plain[1].zero_grad()
    for backward in (own, callers):
        engines = [tessera.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), config=config(stage, 300))[0] for net in nets()]
        for batch in batches:
            for engine, loss in zip(engines[::-1], (loss_of_discriminator, loss_of_generator)):
                backward(engine, loss(*engines, *batch[rank]))
                engine.step()
            assert engines[1].module[0].weight.grad is not None  # of the generator's loss
            if backward is own:
                raises(tessera.Error, lambda d=engines[1], x=batch[rank][0]: d.backward(d(x).mean()), "has a gradient that did not come from", "zero_grad()")
            engines[1].optimizer.zero_grad()
        for engine, net in zip(engines, plain):
            same(engine, net, 1e-5)


class Shared(nn.Module):
    """All layers are under recomputation; one is used outside of it too where `outside`: its gradient comes in parts."""

    def __init__(self, use_reentrant, outside):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.use_reentrant, self.outside = use_reentrant, outside

    def forward(self, x):
        def part(function, x):
            return checkpoint(function, x, use_reentrant=self.use_reentrant)

        x = part(lambda x: self.shared(self.first(x)).tanh(), x.clone().requires_grad_())
        if self.outside:
            x = self.shared(x).tanh()
        return part(lambda x: self.head(part(lambda x: self.shared(x).tanh(), x)), x)


def simcse(model, samples):
    """Two forwards of one batch, one backward."""
    a, b = model(samples[0]), model(samples[0] * 0.9)
    return functional.cross_entropy(a @ b.t(), torch.arange(len(a)))


def dpo(model, samples):
    """The policy twice, and once as its own reference."""
    with torch.no_grad():
        reference = model(samples[0])
    chosen, rejected = model(samples[0]), model(samples[0] * 0.9)
    return -functional.logsigmoid((chosen - rejected).mean(1) + reference.mean(1)).mean()


@each_stage
def of_a_layer_used_twice_and_of_several_forwards(stage):
    """Also where the model is called without its engine, so that the first gradient comes in a backward inside of a node of another one."""
    ways = {"engine": lambda e: (e, e.backward), "loss": lambda e: (e, torch.Tensor.backward), "module": lambda e: (e.module, torch.Tensor.backward)}
    for way, loss, use_reentrant, accumulation, outside in (("engine", simcse, True, 2, True), ("engine", dpo, False, 1, True), ("loss", dpo, True, 1, True),
                                                            ("module", dpo, True, 2, True), ("module", simcse, True, 1, False)):
        plain, engine = Shared(use_reentrant, outside), make(stage, Shared(use_reentrant, outside), gradient_accumulation_steps=accumulation)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        model, backward = ways[way](engine)
        for step in range(3):
            optimizer.zero_grad()
            for batch in BATCHES[step * accumulation:(step + 1) * accumulation]:
                for samples in batch:
                    (loss(plain, samples) / (world * accumulation)).backward()
                backward(loss(model, batch[rank]))
                if step != 1:
                    for name, parameter in plain.named_parameters():
                        apart = (engine.full_gradient(name) - parameter.grad).abs().max().item()
                        assert apart < 1e-6, (way, loss.__name__, use_reentrant, step, name, apart)
                engine.step()
                engine.zero_grad()  # discards nothing after step()
            optimizer.step()
        same(engine, plain, 1e-5)
        engine.destroy()


@each_stage
def it_does_nothing_in_evaluation(stage):
    engine = make(stage)
    engine.eval()
    loss_of(engine, BATCHES[0][rank]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in engine.module.parameters())
    engine.train()
    loss = loss_of(engine, BATCHES[0][rank])
    raises(RuntimeError, loss.backward, "has a gradient that did not come from", "zero_grad()")
    engine.zero_grad()
    other = make(stage)
    run(engine, BATCHES[:2], callers)
    run(other, BATCHES[:2], own)
    same(engine, other)


@each_stage
def what_is_wrong_is_said(stage):
    engine = make(stage, gradient_accumulation_steps=2)
    other = make(stage, gradient_accumulation_steps=2)
    loss_of(engine, BATCHES[0][rank]).backward()
    engine.step()
    loss = loss_of(engine, BATCHES[1][rank])
    raises(tessera.Error, lambda: engine.backward(loss), "in one accumulation")
    raises(tessera.Error, lambda: engine.backward(loss, retain_graph=True), "retain_graph")
    loss.backward()
    again = loss_of(engine, BATCHES[2][rank])
    raises(RuntimeError, again.backward, "after the last backward of a step", "managed_gradient_accumulation")
    engine.zero_grad()
    run(engine, BATCHES[:4], callers)
    run(other, BATCHES[:4], own)
    same(engine, other)
    handle = engine.module[0].weight.register_hook(lambda gradient: 1 / 0)  # the last gradient but one
    loss = loss_of(engine, BATCHES[4][rank])
    raises(ZeroDivisionError, loss.backward)
    for call in (engine.step, lambda: engine(BATCHES[4][rank][0]), lambda: engine.full_gradient("0.weight")):
        raises(tessera.Error, call, "failed half-way", "zero_grad()")
    handle.remove()
    engine.zero_grad()
    run(engine, BATCHES[4:8], callers)
    run(other, BATCHES[4:8], own)
    same(engine, other)


@check
def an_output_may_outlive_its_engine():
    engine = make(3)
    output = engine(BATCHES[0][rank][0])
    engine.destroy()
    del engine
    with contextlib.suppress(RuntimeError):  # its parameters have other memory now
        output.sum().backward()


@each_stage
def each_step_takes_all_backward_passes_where_they_are_not_managed(stage):
    for changes in ({}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}):
        free = make(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=4, **changes)
        counted = make(stage, gradient_accumulation_steps=4, **changes)
        for backward in (own, callers):
            run(counted, BATCHES, backward)
            for i, batch in enumerate(BATCHES):
                backward(free, loss_of(free, batch[rank]))
                if i % 4 == 3:
                    free.step()
                    assert free.was_step_applied()
            same(free, counted, 0.0 if stage < 2 else 1e-6)
        assert free.global_steps == counted.global_steps and free.global_samples == counted.global_samples
        for number in (2, 5, 3):
            samples = free.global_samples
            for i in range(number):
                free.backward(loss_of(free, BATCHES[i][rank]) / number, scale_wrt_gas=False)
                counted.set_gradient_accumulation_boundary(i == number - 1)
                counted.backward(loss_of(counted, BATCHES[i][rank]) / number, scale_wrt_gas=False)
            free.step()
            counted.step()
            assert free.global_samples == samples + 2 * world * number
            same(free, counted, 1e-6)
        free.step()  # no backward since: nothing
        free.zero_grad()
        raises(tessera.Error, lambda e=free: e.set_gradient_accumulation_boundary(True), "managed_gradient_accumulation")


@each_stage
def gradients_are_summed_over_the_ranks_where_the_configuration_says_so(stage):
    for changes in ({}, {"prescale_gradients": True}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}):
        engine, plain = make(stage, gradient_allreduce_op="sum", **changes), mlp()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        run(engine, BATCHES[:4], own)
        for batch in BATCHES[:4]:
            optimizer.zero_grad()
            sum(loss_of(plain, samples) for samples in batch).backward()
            optimizer.step()
        same(engine, plain, 1e-5)


@each_stage
def gradients_are_read_before_the_boundary(stage):
    for changes in ({}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}):
        engine, plain = make(stage, gradient_accumulation_steps=3, **changes), mlp()
        for i in range(3):
            engine.backward(loss_of(engine, BATCHES[i][rank]))
            (sum(loss_of(plain, samples) for samples in BATCHES[i]) / (3 * world)).backward()
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(engine.full_gradient(name), parameter.grad)
            engine.step()


@each_stage
def gradients_and_masters_are_set_before_the_step(stage):
    for changes in ({}, {"bf16": {"enabled": True, "auto_cast": True}}, {"fp16": FP16}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                    {"gradient_accumulation_steps": 2}):
        model = mlp()
        engine = tessera.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config(
            stage, 500, **{**changes, "zero_optimization": {"stage": stage, "unit_numel": 500, **changes.get("zero_optimization", {})}}))[0]
        for i in range(changes.get("gradient_accumulation_steps", 1)):
            if i > 0:
                engine.step()
                raises(tessera.Error, lambda e=engine: e._engine.set_full_gradient("0.weight", torch.zeros(64, 16)), "at the accumulation boundary")
            engine.backward(loss_of(engine, BATCHES[i][rank]))
        gradient = torch.linspace(-1, 1, 1024).view(64, 16) + rank  # rank 0's counts
        engine._engine.set_full_gradient("0.weight", gradient)
        torch.testing.assert_close(engine.full_gradient("0.weight"), gradient - rank, rtol=0, atol=1e-6)
        master = torch.linspace(1, 2, 1024).view(64, 16)
        engine._engine.set_full_parameter("0.weight", master + rank)
        assert torch.equal(engine.full_parameter("0.weight"), master)
        other = engine.full_parameter("2.weight") - 0.5 * engine.full_gradient("2.weight")
        norm = torch.stack([engine.full_gradient(name).norm() for name, _ in model.named_parameters()]).norm().item()
        engine.step()
        assert abs(engine.get_global_grad_norm() - norm) < 1e-4 * norm
        torch.testing.assert_close(engine.full_parameter("0.weight"), master - 0.5 * (gradient - rank), rtol=0, atol=2e-6)
        torch.testing.assert_close(engine.full_parameter("2.weight"), other, rtol=0, atol=2e-6)
        raises(tessera.Error, lambda e=engine: e._engine.set_full_gradient("0.weight", torch.zeros(3)), "at the accumulation boundary")
        raises(tessera.Error, lambda e=engine: e._engine.set_full_parameter("0.weight", torch.zeros(3)), "expected a floating tensor of shape [64, 16]")
        raises(tessera.Error, lambda e=engine: e._engine.set_full_parameter("none", torch.zeros(3)), "no parameter named none")


main()
