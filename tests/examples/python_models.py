"""Models and data of the tests with PyTorch, equal in every process."""
import torch
from torch import nn
from torch.nn import functional as F

NUM_SAMPLES, BATCH, STEPS = 40, 12, 10
LEARNING_RATE = 0.01


class Classifier(nn.Module):
    """A convolution, a norm and a frozen layer, as in the state dicts of real models."""

    def __init__(self, num_classes=5):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.fixed = nn.Linear(8, 8)
        self.fixed.requires_grad_(False)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        x = F.gelu(self.conv(images)).mean((2, 3))
        return self.head(torch.tanh(self.fixed(self.norm(x))))


class Segmenter(nn.Module):
    """Scores for every position, in a dictionary as torchvision's models give them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images):
        return {"out": self.conv(images)}


class Regressor(nn.Module):
    """Two inputs, and an extra output."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 2)

    def forward(self, x, weight):
        hidden = torch.tanh(self.first(x)) * weight
        return self.second(hidden), hidden


class OwnLoss(nn.Module):
    """Computes its loss, as Hugging Face's models do when they get labels; numbers of tokens in, a tied output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        logits = self.head(F.gelu(self.mix(self.embed(tokens))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(high, *shape, seed):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def classification():
    torch.manual_seed(1)
    return Classifier(), {"x": random(NUM_SAMPLES, 3, 6, 6, seed=2), "y": numbers(5, NUM_SAMPLES, seed=3)}


def segmentation():
    torch.manual_seed(1)
    labels = numbers(4, NUM_SAMPLES, 5, 5, seed=3)
    labels[:, 0, :2] = -100
    return Segmenter(), {"x": random(NUM_SAMPLES, 3, 5, 5, seed=2), "y": labels}


def regression(target=None):
    torch.manual_seed(1)
    y = random(NUM_SAMPLES, 2, seed=3) if target is None else target
    return Regressor(), {"x": random(NUM_SAMPLES, 6, seed=2), "w": random(NUM_SAMPLES, 1, seed=4).abs(), "y": y}


def own_loss():
    torch.manual_seed(1)
    tokens = numbers(17, NUM_SAMPLES, 7, seed=2)
    return OwnLoss(), {"x": tokens, "y": tokens.roll(1, dims=1)}


def optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.01)
