"""Models of PyTorch, transformers and torchvision, tiny, as their makers wrote them: (make, batch_of(i), loss_of(model, batch))."""
import torch
from torch import nn
from torch.nn import functional


def cases(family):
    """By name."""
    if family == "patterns":
        import patterns
        return patterns.cases()
    return {"torch": torch_cases, "transformers": transformers_cases, "torchvision": torchvision_cases, "peft": peft_cases}[family]()


def _generator(i):
    return torch.Generator().manual_seed(100 + i)


def _vectors(i, *shape, classes=5):
    generator = _generator(i)
    return torch.randn(*shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator)


def _tokens(i, batch=2, length=12, vocabulary=64):
    return torch.randint(1, vocabulary, (batch, length), generator=_generator(i))


def _classify(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


# ------------------------------------------------------------------------------------------------ PyTorch's own


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


class Recurrent(nn.Module):
    """A tied embedding, an LSTM and a GRU."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.narrow = nn.Linear(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        hidden, _ = self.lstm(self.table(tokens))
        hidden, _ = self.gru(hidden)
        return self.head(self.narrow(hidden))


class Experts(nn.Module):
    """A mixture of experts: which are used depends on the data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4))
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        top = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (top == number).nonzero().squeeze(-1)
            out = out.index_add(0, chosen, weights[chosen, number, None] * expert(x[chosen]))
        return self.head(out + x)


class Frozen(nn.Module):
    """Frozen and trainable layers in turns, nested, one of them shared."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(32, 32)
        self.first = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), shared)
        self.second = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), shared)
        self.head = nn.Linear(32, 5)
        self.second[1].requires_grad_(False)
        self.first[0].weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, groups=2),
                                  nn.GroupNorm(4, 16), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Bilinear(64, 64, 5)

    def forward(self, x):
        features = self.body(x)
        return self.head(features, features)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight, 2 * gradient.t() @ x


class Customized(nn.Module):
    """A function with a backward of its own, hooks, activation checkpointing, parameters in lists and dictionaries."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(32, 16) / 4), nn.Parameter(torch.randn(16, 32) / 6)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(16)), "b": nn.Parameter(torch.zeros(16))})
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.reentrant = nn.Linear(16, 16)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, 5))
        self.num_calls = 0
        self.inner.register_forward_hook(self.count)

    def count(self, module, arguments, result):
        self.num_calls += 1

    def forward(self, x):
        x = Doubled.apply(Doubled.apply(x, self.weights[0]).tanh(), self.weights[1])
        x = x * self.scales["a"] + self.scales["b"]
        x = x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        x = x + torch.utils.checkpoint.checkpoint(self.reentrant, x, use_reentrant=True)
        return self.head(x)


def _next_token(model, tokens):
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def torch_cases():
    return {
        "transformer_encoder": (Encoder, lambda i: _vectors(i, 2, 6, 32), _classify),
        "recurrent_and_tied": (Recurrent, _tokens, _next_token),
        "mixture_of_experts": (Experts, lambda i: _vectors(i, 8, 16), _classify),
        "frozen_and_shared": (Frozen, lambda i: _vectors(i, 4, 16), _classify),
        "convolutions": (Convolutions, lambda i: _vectors(i, 4, 3, 16, 16), _classify),
        "customized": (Customized, lambda i: _vectors(i, 4, 16), _classify),
    }


# ------------------------------------------------------------------------------------------------ transformers


def _language_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def _text_batch(i):
    return {"input_ids": _tokens(i), "attention_mask": torch.ones(2, 12, dtype=torch.long), "labels": torch.tensor([0, 1])}


def _loss_of_batch(model, batch):
    return model(**batch)["loss"]


def transformers_cases():
    import transformers as hf

    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "max_position_embeddings": 32}

    def gpt2():
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0,
                                                embd_pdrop=0, attn_pdrop=0))

    def gpt2_checkpointed():
        model = gpt2()
        model.gradient_checkpointing_enable()
        return model

    def bert():
        return hf.BertForSequenceClassification(hf.BertConfig(**text, hidden_dropout_prob=0, attention_probs_dropout_prob=0))

    def llama():
        return hf.LlamaForCausalLM(hf.LlamaConfig(**text, num_key_value_heads=2))

    def mixtral():
        return hf.MixtralForCausalLM(hf.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))

    def t5():
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                                         dropout_rate=0, decoder_start_token_id=0))

    return {"gpt2": (gpt2, _tokens, _language_loss), "gpt2_checkpointed": (gpt2_checkpointed, _tokens, _language_loss),
            "bert": (bert, _text_batch, _loss_of_batch), "llama": (llama, _tokens, _language_loss),
            "mixtral": (mixtral, _tokens, _language_loss), "t5": (t5, _tokens, _language_loss)}


# ------------------------------------------------------------------------------------------------- torchvision


def torchvision_cases():
    import torchvision.models as vision

    def vit():
        return vision.VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)

    def resnet():
        return vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)

    def convnext():
        return vision.ConvNeXt([vision.convnext.CNBlockConfig(16, 32, 2), vision.convnext.CNBlockConfig(32, None, 2)], num_classes=5)

    def images(i):  # large enough for batch norm: over 2 x 2 pixels at the end
        return _vectors(i, 8, 3, 64, 64)

    return {"resnet": (resnet, images, _classify), "convnext": (convnext, images, _classify),
            "vision_transformer": (vit, lambda i: _vectors(i, 4, 3, 16, 16), _classify)}


# -------------------------------------------------------------------------------------------------------- peft


def peft_cases():
    """LoRA adapters in fp32 over a frozen base in bf16."""
    import peft
    import transformers as hf

    def lora():
        base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                  intermediate_size=64, num_key_value_heads=2)).to(torch.bfloat16)
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=_generator(parameter.numel())) / 10
        return adapted

    return {"lora_over_a_frozen_bf16_base": (lora, _tokens, _language_loss)}
