"""The models, data and optimizers of begin_elsewhere.py and continue_here.py: fp32, the same global batch on any number of ranks."""
import importlib

import torch
from torch import nn
from torch.nn import functional

STEPS, BATCH = 10, 6


class Gpt2(nn.Module):
    """transformers' GPT-2, whose output layer is tied to its embedding."""

    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=65, n_positions=16, n_embd=24, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                                                attn_pdrop=0.0))

    def forward(self, x):
        return self.model(x).logits


class Bert(nn.Module):
    """transformers' BERT with frozen embeddings."""

    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(BertConfig(vocab_size=65, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=50,
                                                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                                                tie_word_embeddings=False))
        self.model.bert.embeddings.requires_grad_(False)

    def forward(self, x):
        return self.model(x).logits


class Lora(nn.Module):
    """GPT-2 with LoRA, whose base is frozen."""

    def __init__(self):
        super().__init__()
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(Gpt2().model, LoraConfig(r=3, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"]))

    def forward(self, x):
        return self.model(input_ids=x).logits


class Norms(nn.Module):
    """Sizes that no number of ranks divides, and buffers of a BatchNorm that uses its running statistics."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(65, 23)
        self.norm = nn.BatchNorm1d(23).eval()
        self.norm.running_mean.normal_()
        self.blocks = nn.ModuleList(nn.Linear(23, 23) for _ in range(2))
        self.head = nn.Linear(23, 65)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        h = self.norm(self.embedding(x).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(h)


MODELS = {"gpt2": Gpt2, "bert": Bert, "lora": Lora, "norms": Norms}
OPTIMIZERS = {"AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)),
              "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
              "bitsandbytes": lambda groups: in_8_bits("bitsandbytes", groups), "tessera": lambda groups: in_8_bits("tessera", groups)}


def in_8_bits(package, groups):
    """AdamW8bit of a package, with 8 bits for parameters as small as these."""
    return importlib.import_module(f"{package}.optim").AdamW8bit(groups, lr=3e-3, betas=(0.9, 0.95), min_8bit_size=100)


def blocks_of(model):
    return next((list(child) for child in model.modules() if isinstance(child, nn.ModuleList)), [])


def groups_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            *([{"params": few, "weight_decay": 0.0}] if (few := [p for p in trained if p.ndim <= 1]) else [])]


def schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)


def data(model, step, rank, world):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(65, (BATCH, 13), generator=generator)
    return tokens[rank * (BATCH // world):(rank + 1) * (BATCH // world)]


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
