"""Two ranks with models of equal parameters, which compute the same or not."""
import functools

import tessera
import torch
from checks import check, config, main
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

rank = tessera.comm.get_rank()
NAMES = {"a", "b", "c", "d"}  # in another order in each process


def refused(models, *words):
    """`models`: by rank. initialize() raises on both alike, with these words; without words it does not."""
    try:
        tessera.initialize(model=models[rank], config=config(2))
    except tessera.CommError as error:
        assert words and all(word in str(error) for word in ("rank 1's model", *words)), str(error)
        assert "\n" not in str(error)
    else:
        assert not words, words


def sequential(*others):
    return nn.Sequential(nn.Linear(8, 8), *others)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.started, self.rank = nn.Linear(8, 8), object(), rank  # what differs between ranks

    def extra_repr(self):
        return f"names={NAMES}, hook={self.started}, device=cuda:{rank}"


def block(**methods):
    return type("Net", (Block,), methods)()


def activation(x):
    return functional.relu(x)


def other_activation(x):
    return functional.gelu(x)


def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call


@check
def other_modules_are_refused():
    refused([sequential(nn.ReLU()), sequential(nn.GELU())], " 1", "GELU", "ReLU")
    refused([sequential(nn.Dropout(0.1)), sequential(nn.Dropout(0.5))], " 1", "p=0.5", "p=0.1")
    refused([sequential(nn.LayerNorm(8, eps=1e-5)), sequential(nn.LayerNorm(8, eps=1e-6))], "eps=1e-06")
    refused([sequential(nn.ReLU()), sequential()], "has no 1")


@check
def other_code_is_refused():
    refused([block(forward=lambda self, x: functional.relu(self.fc(x))), block(forward=lambda self, x: functional.gelu(self.fc(x)))],
            "the code of the model itself", "class Net")
    refused([block(forward=lambda self, x: functional.dropout(self.fc(x), 0.1)),
             block(forward=lambda self, x: functional.dropout(self.fc(x), 0.5))], "the code of")
    refused([block(helper=lambda self, x: x, forward=lambda self, x: self.helper(self.fc(x))),
             block(helper=lambda self, x: x + x, forward=lambda self, x: self.helper(self.fc(x)))], "the code of")
    refused([block(forward=lambda self, x: activation(self.fc(x))), block(forward=lambda self, x: other_activation(self.fc(x)))],
            "the code of")
    refused([block(forward=wrapped(lambda self, x: activation(x))), block(forward=wrapped(lambda self, x: other_activation(x)))],
            "the code of")


@check
def other_scripts_are_refused():
    def traced(function):
        module = block(forward=lambda self, x: function(self.fc(x)))
        return torch.jit.trace(module, torch.ones(2, 8))

    refused([traced(functional.relu), traced(torch.tanh)], "forward", "aten::tanh", "aten::relu")


@check
def equal_models_are_not():
    refused([block(forward=lambda self, x: activation(self.fc(x))) for _ in range(2)])
    refused([sequential(nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, 16)) for _ in range(2)])
    refused([torch.fx.symbolic_trace(sequential(nn.ReLU())) for _ in range(2)])
    for kind, sizes in ((BertModel, BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                               intermediate_size=32)),
                        (GPT2LMHeadModel, GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))):
        refused([kind(sizes) for _ in range(2)])


main()
