"""Ways in which modules are put together and used, which sharded training has to bear: (make, batch_of(i), loss_of(model, batch)).
FSDP's own tests look at the same ways; the cases are ours."""
import torch
from models import _classify, _vectors
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize


def _numbered(i):
    """Vectors, their classes and the number of the batch."""
    return (*_vectors(i, 4, 16), i)


def _vector_batch(i):
    return _vectors(i, 4, 16)


def block(width=16, inner=64):
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


# ------------------------------------------------------------------------------------------- how modules are nested


class Wrapper(nn.Module):
    """What a user's wrapper does: it passes on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Nested(nn.Module):
    """Wrappers in wrappers; one module at three places; one parameter in two modules and under a name of its own."""

    def __init__(self):
        super().__init__()
        shared = Wrapper(block())
        self.first = Wrapper(Wrapper(nn.Sequential(nn.Linear(16, 16), shared)))
        self.second = nn.ModuleDict({"a": Wrapper(nn.Sequential(shared, nn.Tanh())), "b": nn.ModuleList([shared])})
        self.head = Wrapper(nn.Linear(16, 5))
        self.last = nn.Linear(16, 5, bias=False)
        self.last.weight = self.head.inner.weight
        self.register_parameter("also", self.head.inner.bias)

    def forward(self, x):
        x = x + self.first(x)
        x = x + self.second["a"](x) + self.second["b"][0](x)
        return self.head(x) + self.last(x).tanh() + self.also


class CalledOften(nn.Module):
    """One module called several times in a forward, with other shapes, under no_grad too."""

    def __init__(self):
        super().__init__()
        self.body, self.head = block(), nn.Linear(16, 5)

    def forward(self, x):
        with torch.no_grad():
            offset = self.body(x[:1]).mean()
        y = self.body(x[:3]).mean(0, keepdim=True)
        for _ in range(3):
            x = x + self.body(x + y)
        return self.head(x) + self.head(x[:1]) + offset


class OddShapes(nn.Module):
    """Scalars, empty and 1-element parameters, transposed and channels_last ones."""

    def __init__(self):
        super().__init__()
        self.gain, self.one, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(0, 16))
        self.transposed = nn.Parameter((torch.randn(64, 16) / 8).t())
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        images = self.convolution(x.view(-1, 1, 4, 4)).amax(1).flatten(1)
        x = torch.cat([x + images, self.none])
        return self.head((x @ self.transposed).relu() * self.gain + self.one)


class BufferOnly(nn.Module):
    """No parameters; it counts and keeps a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls += 1
        return x * self.scratch[0]


class Empty(nn.Module):
    def forward(self, x):
        return x


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(BufferOnly(), Empty(), nn.Linear(16, 16), nn.Identity(), BufferOnly(), nn.Sequential(), nn.Linear(16, 5))

    def forward(self, x):
        return self.parts(x)


# ---------------------------------------------------------------------------------------- which parameters are used


class Alternating(nn.Module):
    """Which of two branches is used depends on the batch's number: on the step, and with several ranks on the rank."""

    def __init__(self, period):
        super().__init__()
        self.branches = nn.ModuleList([block(), block()])
        self.head, self.never, self.period = nn.Linear(16, 5), nn.Linear(16, 16), period

    def forward(self, x, number):
        return self.head(x + self.branches[number // self.period % 2](x))


def _numbered_loss(model, batch):
    return functional.cross_entropy(model(batch[0], batch[2]), batch[1])


class Rarely(nn.Module):
    """Every second batch uses nothing but a bias; the rest is unused on some ranks or all."""

    def __init__(self):
        super().__init__()
        self.body, self.head = block(), nn.Linear(16, 5)

    def forward(self, x, number):
        return self.head(self.body(x)) if number % 2 == 0 else self.head.bias.expand(len(x), 5)


def _penalised(model, batch):
    """Parameters outside of the forward: a penalty on all of them, and one weight used by hand."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad)
    by_hand = functional.linear(batch[0], model.get_parameter("0.weight")).abs().mean()
    return functional.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * penalty + 0.1 * by_hand + model.get_parameter("2.weight").norm() / 100


def _contrastive(model, batch):
    """Two forwards and one in evaluation before one backward."""
    with torch.no_grad():
        target = model(batch[0] + 1)
    return (model(batch[0]) - target).square().mean() + functional.cross_entropy(model(batch[0].flip(0)), batch[1])


def _gradient_penalty(model, batch):
    """A backward through the backward, and the gradient of the input."""
    x = batch[0].clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.logsumexp(-1).sum(), x, create_graph=True)
    return functional.cross_entropy(out, batch[1]) + (slope.norm(dim=-1) - 1).square().mean()


def _adversarial(model, batch):
    """FGSM: a gradient of the input alone, then a step on what it gives."""
    x = batch[0].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(functional.cross_entropy(model(x), batch[1]), x)
    return functional.cross_entropy(model(batch[0] + 0.1 * slope.sign()), batch[1])


# --------------------------------------------------------------------------------------------- shapes of batches


def _changing_shapes(i):
    return _vectors(i, 2 + i % 5, 16)


def _changing_tokens(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randint(1, 64, (1 + i % 3, 6 + 3 * (i % 4)), generator=generator)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 16, padding_idx=0)
        self.bag = nn.EmbeddingBag(64, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        hidden, _ = self.recurrent(self.table(tokens) + self.bag(tokens)[:, None])
        return self.head(hidden)


def _next_token(model, tokens):
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# ------------------------------------------------------------------------------------- hooks and parametrizations


class Hooked(nn.Module):
    """Hooks on parameters that change their gradients or look at them; hooks on modules, forwards and backwards."""

    def __init__(self):
        super().__init__()
        self.body, self.head = block(), nn.Linear(16, 5)
        self.body[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.head.bias.register_post_accumulate_grad_hook(self.look)
        self.body.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.body.register_forward_hook(lambda module, args, result: result + args[0])
        self.body[2].register_full_backward_hook(lambda module, inner, outer: tuple(g * 0.9 for g in inner))
        self.head.register_full_backward_pre_hook(lambda module, outer: tuple(g * 1.1 for g in outer))
        self.seen = []

    def look(self, parameter):
        assert parameter.grad is not None and parameter.grad.shape == (5,)
        self.seen.append(parameter.grad.abs().sum().item())

    def forward(self, x):
        return self.head(self.body(x))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    """torch's own parametrizations, one of ours, and one over another."""

    def __init__(self):
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="cayley")
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.symmetric = nn.Linear(16, 16)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        parametrize.register_parametrization(self.symmetric, "weight", nn.Tanh())
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        with parametrize.cached():
            x = self.symmetric(self.symmetric(x))
        return self.head(self.normed(self.orthogonal(self.spectral(x))))


def sequential():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))


# Ranks use different parameters in one forward: where parameters travel, stage 3 refuses it (uneven_rank.py).
UNEVEN = ("a_branch_by_rank", "rarely_used")


def cases():
    return {
        "a_branch_by_rank": (lambda: Alternating(1), _numbered, _numbered_loss),
        "rarely_used": (Rarely, _numbered, _numbered_loss),
        "nested_and_shared": (Nested, _vector_batch, _classify),
        "called_often": (CalledOften, _vector_batch, _classify),
        "odd_shapes": (OddShapes, _vector_batch, _classify),
        "modules_of_buffers_and_of_nothing": (Buffers, _vector_batch, _classify),
        "a_branch_by_step": (lambda: Alternating(6), _numbered, _numbered_loss),
        "parameters_outside_of_forward": (sequential, _vector_batch, _penalised),
        "several_forwards": (sequential, _vector_batch, _contrastive),
        "gradient_penalty": (sequential, _vector_batch, _gradient_penalty),
        "adversarial": (sequential, _vector_batch, _adversarial),
        "changing_shapes": (sequential, _changing_shapes, _classify),
        "changing_lengths": (Tokens, _changing_tokens, _next_token),
        "hooks": (Hooked, _vector_batch, _classify),
        "parametrized": (Parametrized, _vector_batch, _classify),
    }
