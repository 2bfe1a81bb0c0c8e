"""Models whose forward does more than call functional operators: each policy's gradients are plain PyTorch's, to the bit."""
import contextlib
import ctypes
import sys
import threading
from pathlib import Path

import numpy
import tessera
import torch
from checks import DEVICE, check, main, raises
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

WIDTH = ROWS = 64
rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
POLICIES = {"cheap": {"policy": "cheap"}, "block": {"policy": "block"}, "first_block": {"policy": "block", "number_checkpoints": 1},
            **({"offload": {"policy": "offload", "nvme_path": "spill"}} if DEVICE == "cpu" else {})}


class Net(nn.Module):
    """A layer, two blocks, a head; `then(self, x)` is the forward."""

    def __init__(self, then):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.cell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.mean_norm = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
        self.then = then

    def forward(self, x):
        return self.then(self, x)


def inputs_of(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, step):
    return model(inputs_of(step)).square().mean()


def engine_of(then, section):
    engine, *_ = tessera.initialize(model=Net(then), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "activation_checkpointing": section})
    return engine


def run(then, section, loss=loss_of, between=lambda: None, steps=2):
    """Losses, gradients and buffers of steps that change no weight."""
    engine, found = engine_of(then, section), []
    for step in range(steps):
        torch.manual_seed(step)
        value = loss(engine, step)
        between()
        engine.backward(value)
        found += [value.detach()] + [engine.full_gradient(name) for name, _ in engine.module.named_parameters()]
        engine.step()
    return found + list(engine.module.buffers())


def plain(then, loss=loss_of, between=lambda: None, steps=2):
    model, found = Net(then), []
    for step in range(steps):
        torch.manual_seed(step)
        value = loss(model, step)
        between()
        value.backward()
        grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in model.parameters()]
        found += [value.detach()] + [torch.from_numpy(numpy.mean(tessera.comm.all_gather(grad.tolist()), 0)).float() if world > 1 else grad for grad in grads]
        for parameter in model.parameters():
            parameter.grad = None
    return found + list(model.buffers())


def compare(then, exactly=True, **how):
    wanted = plain(then, **how)
    for name, section in POLICIES.items():
        for one, other in zip(run(then, section, **how), wanted, strict=True):
            torch.testing.assert_close(one, other, check_device=False, rtol=0 if exactly else 1e-6, atol=0 if exactly else 1e-6, msg=lambda text, name=name: f"{name}: {text}")


@check
def memory_that_no_operator_writes():
    buffer = numpy.zeros((ROWS, WIDTH), numpy.float32)

    def kept_view(self, x):  # one tensor over memory that changes
        c, memory = self.first(x), torch.from_numpy(buffer)
        for k in range(2):
            buffer[:] = numpy.cos(x.numpy() * k)
            c = c + self.layers[1](memory[:, 1:].sin().repeat(1, 2)[:, :WIDTH])
        return self.head(c)

    def thread(self, x):
        c, y = self.first(x), torch.empty(ROWS, WIDTH)
        worker = threading.Thread(target=lambda: y.copy_(x.detach() * 3))
        worker.start()
        worker.join()
        return self.head(self.layers[0]((y * 2).sin()) + c)

    for then in (kept_view, thread):
        compare(then)

    def staged(model, step):  # the next batch arrives before backward
        buffer[:] = inputs_of(step).numpy()
        return model(torch.from_numpy(buffer)).square().mean()

    def two_uses(self, x):
        return self.head(self.first(x * 1) + self.layers[1](x * 2 + 1).tanh())

    compare(two_uses, loss=staged, between=lambda: buffer.fill(0))


@check
def written_between_forward_and_backward():
    """By an operator, also of another thread or through .data, of which versions say nothing: plain PyTorch has its own copy."""
    memory = torch.zeros(ROWS, WIDTH)

    def then(self, x):
        memory.data.copy_(x)
        return self.head(self.layers[0]((memory + 1).sin() * 2) + self.first(x))

    def other_thread():
        worker = threading.Thread(target=lambda: memory.data.fill_(7))
        worker.start()
        worker.join()

    compare(then, between=lambda: memory.data.zero_())
    compare(then, between=other_thread)

    def hook(self, x):
        y = self.layers[1](self.layers[0](x * (self.table + 1.5)).tanh())
        y.register_hook(lambda gradient: (self.table.data.add_(0.5), gradient)[1])
        return self.head(y) + self.first(x)

    compare(hook)


@contextlib.contextmanager
def setting(change, value, back):
    change(value)
    yield
    change(back)


CONJUGATED, WEIGHT = torch.full((4, ROWS), 1 + 2j).conj(), torch.linspace(-1, 1, WIDTH ** 3).view(WIDTH, WIDTH, WIDTH)
SETTINGS = {  # around a part of the forward: the context, and what is computed in it
    "default dtype": (lambda: setting(torch.set_default_dtype, torch.double, torch.float), lambda h: h * ((h > 0) / 3).float()),
    "autocast of a kernel's own operators": (lambda: torch.autocast("cpu", torch.bfloat16),
                                             lambda h: functional.bilinear(h.float(), h.float().sin(), WEIGHT).float()),
    "oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False),
               lambda h: functional.conv2d(h.view(16, 16, 4, 4), WEIGHT[:16, :16, :3, None], padding=(1, 0)).view(ROWS, WIDTH)),
    "denormal numbers": (lambda: setting(torch.set_flush_denormal, True, False), lambda h: h * 1e-20 * 1e-20 * 1e38),
    "threads": (lambda: setting(torch.set_num_threads, 2, 1), lambda h: h * h.repeat(32, 32).sum())}


@check
def what_belongs_to_a_call_besides_its_values():
    torch.set_num_threads(1)
    compare(lambda self, x: self.head(functional.gelu((h := self.layers[0](self.first(x))) + (CONJUGATED @ torch.complex(h, h.sin())).abs().mean(0))))
    for name, (context, compute) in SETTINGS.items():
        def then(self, x, context=context, compute=compute):
            h = self.layers[0](self.first(x))
            with context():
                h = compute(h)
            return self.head(h.tanh().sin())

        print(name)
        compare(then)


@check
def forward_mode():
    def then(self, x):
        x = self.first(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            for layer in self.layers:
                dual = functional.softplus(layer(dual)).sin()
            primal, tangent = forward_ad.unpack_dual(dual)
        return self.head(primal + tangent)

    compare(then)


@check
def tensors_without_memory():
    compare(lambda self, x: self.head(torch.func.functionalize(lambda t: self.layers[1](self.layers[0](t).relu_()).sin())(self.first(x))))


@check
def collectives_in_the_forward():
    """Synchronized statistics, in place and as an operator that is differentiated."""
    import torch.distributed as dist
    import torch.distributed.nn.functional as with_gradients

    def in_place(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            mean = x.detach().mean(0) * 2
            dist.all_reduce(mean)
            wide = x.detach() * 0.5  # large enough to be dropped
            work = dist.all_reduce(wide, async_op=True)
            work.wait()
            x = x * mean.repeat(ROWS, 1).sin() + wide.sin() * x
        return self.head(x)

    def differentiated(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            mean = with_gradients.all_reduce(x.mean(0)) / world
            variance = with_gradients.all_reduce((x - mean).square().mean(0)) / world
            x = (x - mean) / (variance + 1e-5).sqrt()
        return self.head(x)

    def functional_collective(self, x):
        import torch.distributed._functional_collectives as collectives
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x = x * collectives.all_reduce(x.detach() * 0.5, "sum", dist.group.WORLD).sin()
        return self.head(x)

    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=world)
    for then in (in_place, differentiated, functional_collective):
        wanted = run(then, {})
        for name, section in POLICIES.items():
            for one, other in zip(run(then, section), wanted, strict=True):
                assert torch.equal(one, other), name


@check
def compiled_functions_with_fallback_kernels():
    import torch._inductor.config as inductor
    inductor.compile_threads = 1
    for function in (lambda x: torch.fft.fft(x).abs() * 2, lambda x: torch.sort(x, 1)[0] * 2, lambda x: x.sin().cumsum(1) * 2):
        compiled = torch.compile(function, dynamic=False)

        def then(self, x, compiled=compiled):
            x = self.first(x)
            with torch.no_grad():
                x = x + compiled(x)
            for layer in self.layers:
                x = compiled(layer(x)).tanh()
            return self.head(x)

        compare(then)

    @torch.compile(dynamic=False)
    def update(average, x):
        average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x * 2

    def averaging(self, x):
        y = self.first(x) - self.mean * 2
        with torch.no_grad():
            update(self.mean, x)
        return self.head(self.layers[0](y).tanh() * (self.mean + 1))

    compare(averaging)


# ---------------------------------------------------------------------------------------- verification


def lies(self, x):
    """A clone that memory without operators changes: nothing tells, but the bits."""
    h = self.layers[0](self.first(x))
    y = h.detach().clone()
    ctypes.memset(y.data_ptr(), 0, 1024)
    return self.head(h * (y * 2).sin())


@check
def a_difference_is_an_error_that_names_the_operator():
    engine = engine_of(lies, {"policy": "block"})
    raises(RuntimeError, lambda: engine.backward(loss_of(engine, 0)), "aten::clone was run again in backward, and its result differs: other values in the float 64x64",
           '"activation_checkpointing": {"keep": ["aten::clone"]}')


@check
def a_difference_of_dtype_or_shape_is_an_error_that_says_both():
    for change, said in ((torch.Tensor.double, "double 64x64"), (lambda x: x[:, :32].clone(), "float 64x32")):
        results = iter((torch.clone, change))
        changing = torch.library.Library("aten", "IMPL")
        changing.impl("erfc", lambda x, results=results: next(results)(x), "CPU")
        engine = engine_of(lambda self, x: self.head((h := self.layers[0](self.first(x))) * (torch.erfc(h.detach()) * 2).sin()), {"policy": "block"})
        raises(RuntimeError, lambda engine=engine: engine.backward(loss_of(engine, 0)),
               f"aten::erfc was run again in backward, and its result differs: float 64x64 in the forward, {said} again", "keep its results")
        changing._destroy()


@check
def what_is_kept_is_not_made_again():
    wanted = plain(lies)
    for one, other in zip(run(lies, {"policy": "block", "keep": ["aten::clone"]}), wanted, strict=True):
        assert torch.equal(one, other)


@check
def torch_func_grad_names_activation_checkpointing():
    def then(self, x):
        return self.head(self.first(x) + torch.func.grad(lambda t: t.sin().sum())(x))

    engine = engine_of(then, {"policy": "cheap"})
    raises(tessera.Error, lambda: loss_of(engine, 0), "activation_checkpointing: torch.func.grad", "torch.autograd.grad", '"policy": "none"')


@check
def names_to_keep_are_checked():
    raises(tessera.ConfigError, lambda: engine_of(lies, {"policy": "block", "keep": ["aten::gelu", "aten::clonee"]}),
           "activation_checkpointing.keep", 'did you mean "aten::clone"')


@check
def the_first_forwards_are_verified_and_one_of_256_later():
    def then(self, x):
        return self.head(functional.gelu(self.layers[0](x)) * 2)

    def verified(engine, forwards):
        """By forward: whether tensors were compared."""
        found = []
        for step in range(forwards):
            before = engine._engine.activation_counts()["num_verified"] if step else 0
            engine.backward(loss_of(engine, step))
            engine.step()
            found.append(engine._engine.activation_counts()["num_verified"] > before)
        return found

    def input_is_kept(section):  # x, which comes from outside, is compared in every forward
        return verified(engine_of(lambda self, x: then(self, self.first(x)), section), 258)

    assert [i for i, yes in enumerate(input_is_kept({"policy": "block"})) if yes] == [0, 256]
    assert [i for i, yes in enumerate(input_is_kept({"policy": "block", "verify": 3})) if yes] == [0, 1, 2, 256]
    assert not any(input_is_kept({"policy": "block", "verify": 0}))


@check
def a_backward_that_writes_what_it_has_saved():
    """Allowed, as nobody else has saved it; but what was dropped may be made of it."""
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y * y

        @staticmethod
        def backward(ctx, gradient):
            y, = ctx.saved_tensors
            return y.mul_(2).mul_(gradient)

    def then(self, x):
        y = self.layers[0](self.first(x)).sin() * 1.5
        return self.head((y + 1).tanh() * 2 + Square.apply(y))

    compare(then)


if __name__ == "__main__":
    main(sys.argv[1])
