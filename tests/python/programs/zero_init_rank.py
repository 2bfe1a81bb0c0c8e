"""One rank: zero.Init, GatheredParameters before initialize, and transformers under a stage 3 configuration."""
import contextlib
import os
import sys
import tempfile

import tessera.deepspeed  # noqa: F401  before the others

# isort: split
import deepspeed
import tessera
import torch
import transformers as hf
from checks import check, config, main, raises
from tessera.comm import get_rank as rank
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

hf.utils.logging.set_verbosity_error()
LLAMA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def same_everywhere(named):
    """Whether all ranks have the same bits; and none of them is NaN."""
    named = list(named)
    assert all(not torch.isnan(value.float()).any() for _, value in named)
    values = tessera.comm.all_gather([value.detach().double().flatten().tolist() for _, value in named])
    return all(mine == values[0] for mine in values)


def tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 6, bias=False).to(torch.bfloat16)
        self.third = nn.Linear(6, 5)
        self.third.weight = self.first.weight
        self.register_buffer("noise", torch.randn(3))
        self.register_buffer("order", torch.randperm(9))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.scalar = nn.Parameter(torch.randn(()))


@check
def values_of_rank_0():
    """Ranks that draw different numbers."""
    for make in (lambda: Net(), lambda: nn.Sequential(Net(), nn.BatchNorm1d(4))):
        torch.manual_seed(1000)
        expected = make()
        torch.manual_seed(1000 + rank())
        with deepspeed.zero.Init(config_dict_or_path=config(3)):
            model = make()
        for (name, value), (_, other) in zip(tensors(model), tensors(expected)):
            assert torch.equal(value, other), name
        assert same_everywhere(tensors(model))
    torch.manual_seed(rank())
    made = Net()
    deepspeed.zero.Init(module=made)
    assert same_everywhere(tensors(made))
    torch.manual_seed(rank())
    with deepspeed.zero.Init(enabled=False):
        made = Net()
    assert same_everywhere(tensors(made)) == (tessera.comm.get_world_size() == 1)
    with tessera.zero.Init(dtype=torch.bfloat16):
        made = Net()
    assert made.first.weight is made.third.weight
    assert all(parameter.dtype == torch.bfloat16 for parameter in made.parameters())


@check
def errors_of_init():
    raises(tessera.Error, lambda: deepspeed.zero.Init(mpu=object()), "mpu")
    raises(tessera.Error, lambda: deepspeed.zero.Init(zero_quantized_weights=True), "zero_quantized_weights")
    raises(tessera.Error, lambda: deepspeed.zero.Init(dtype=torch.int8), "torch.int8")
    if tessera.comm.get_world_size() > 1:
        def differs():
            with deepspeed.zero.Init():
                nn.Linear(3, 4 + (rank() == 1))
        raises(tessera.Error, differs, "Linear.weight of module 0 (float32, [5, 3]) on rank 1")
    with contextlib.suppress(ZeroDivisionError), deepspeed.zero.Init():
        nn.Linear(3 + rank(), 2)
        raise ZeroDivisionError
    nn.Linear(3 + rank(), 2)  # nobody listens any more


@check
def gathered_before_initialize():
    for root in {0, tessera.comm.get_world_size() - 1}:
        torch.manual_seed(rank())
        model = Net()
        before = model.first.bias.detach().clone()
        with deepspeed.zero.GatheredParameters([model.first.weight, None, model.second.weight, model.transposed], modifier_rank=root):
            if rank() == root:
                with torch.no_grad():
                    for parameter in (model.first.weight, model.second.weight, model.transposed):
                        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
        assert torch.equal(model.first.bias, before)
        for parameter in (model.first.weight, model.second.weight, model.transposed):
            assert torch.equal(parameter.float().flatten(), torch.arange(parameter.numel()).float())
        with deepspeed.zero.GatheredParameters(model, modifier_rank=root):
            with deepspeed.zero.GatheredParameters(model.scalar, modifier_rank=root):  # nested
                if rank() == root:
                    model.scalar.data.fill_(3)
            assert model.scalar == 3
        assert same_everywhere(model.named_parameters())
        with deepspeed.zero.GatheredParameters(model.parameters()):
            model.scalar.data.fill_(rank())
        assert model.scalar == rank()
        with contextlib.suppress(ZeroDivisionError), deepspeed.zero.GatheredParameters([model.scalar], modifier_rank=root):
            raise ZeroDivisionError
        assert model.scalar == rank()
        with deepspeed.zero.GatheredParameters(nn.Linear(3, 3, device="meta").weight, modifier_rank=root), \
                deepspeed.zero.GatheredParameters([], modifier_rank=root):
            pass
    raises(tessera.Error, lambda: tessera.GatheredParameters("head.weight"), "str")
    raises(tessera.Error, lambda: tessera.GatheredParameters(model.named_parameters()), "tuple")

    def enter(*args, **kwargs):
        with tessera.GatheredParameters(*args, **kwargs):
            pass
    raises(tessera.Error, lambda: enter(model.scalar, modifier_rank=99), "modifier_rank 99")
    if tessera.comm.get_world_size() > 1:
        raises(tessera.Error, lambda: enter({model.scalar, model.first.bias}, modifier_rank=0), "set")
        raises(tessera.Error, lambda: enter([model.scalar, model.first.bias][:1 + rank()], modifier_rank=0), "ranks differ")


@check
def gathered_beside_an_engine():
    """Parameters of an engine and others in one list."""
    torch.manual_seed(rank())
    model, other = Net().float(), nn.Linear(4, 4)
    engine, *_ = tessera.initialize(model=model, config=config(3))
    with tessera.GatheredParameters([model.first.weight, other.weight, model.first.weight], modifier_rank=0):
        if rank() == 0:
            with torch.no_grad():
                model.first.weight.fill_(2)
                other.weight.fill_(4)
    assert torch.equal(engine.full_parameter("first.weight"), torch.full((5, 6), 2.0))
    assert torch.equal(other.weight, torch.full((4, 4), 4.0))


@check
def init_inside_of_a_function():
    """initialize(model=function) whose function uses zero.Init, and rank 0 alone fills a parameter."""
    def make():
        with deepspeed.zero.Init():
            net = Net().float()
        with deepspeed.zero.GatheredParameters(net.first.weight, modifier_rank=0):
            if rank() == 0:
                nn.init.constant_(net.first.weight, 3)
        return net
    torch.manual_seed(4)
    expected = make() if rank() == 0 and tessera.comm.get_world_size() == 1 else None
    torch.manual_seed(4)
    engine, *_ = tessera.initialize(model=make, config=config(3))
    assert torch.equal(engine.full_parameter("first.weight"), torch.full((5, 6), 3.0))
    if expected is not None:
        assert torch.equal(engine.full_parameter("transposed"), expected.transposed)


def folder_of(model):
    """Where rank 0 has saved it."""
    folder = tessera.comm.all_gather(tempfile.mkdtemp(dir="."))[0]
    if rank() == 0:
        model.save_pretrained(folder)
    tessera.comm.barrier("saved")
    return os.path.abspath(folder)


def models(folders, seed):
    """Made in all ways in which transformers makes models."""
    llama, bert = folders
    torch.manual_seed(seed)
    yield hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**LLAMA))
    yield hf.AutoModelForCausalLM.from_config(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                                                            eos_token_id=0))
    yield hf.AutoModelForCausalLM.from_pretrained(llama)
    yield hf.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    yield hf.AutoModelForCausalLM.from_pretrained(llama, tie_word_embeddings=True)
    yield hf.AutoModelForSequenceClassification.from_pretrained(llama, num_labels=3)  # a head that is not in the file
    yield hf.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=5, ignore_mismatched_sizes=True)
    model = hf.AutoModelForCausalLM.from_pretrained(llama)
    model.resize_token_embeddings(70)
    yield model
    model = hf.AutoModelForCausalLM.from_pretrained(llama)
    model.resize_token_embeddings(70, mean_resizing=False)
    yield model


@check
def from_pretrained():
    torch.manual_seed(3)
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    bert = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                                          intermediate_size=48, num_labels=2))
    folders = folder_of(llama), folder_of(bert)
    size = tessera.comm.get_world_size()
    for same_seed in (True, False) if size > 1 else (True,):
        plain = list(models(folders, 5))
        state = torch.get_rng_state()
        kept = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
        made = list(models(folders, 5 if same_seed else 5 + rank()))
        if same_seed:
            assert torch.equal(torch.get_rng_state(), state)
        for ours, expected in zip(made, plain):
            assert same_everywhere(tensors(ours))  # before initialize, without an engine
            for (name, value), (other_name, other) in zip(tensors(ours), tensors(expected), strict=True):
                assert name == other_name and value.dtype == other.dtype
                assert torch.equal(value, other) or not (same_seed or rank() == 0), f"{type(ours)} {name}"
        ids = torch.arange(8)[None]
        with torch.no_grad():
            assert torch.equal(made[2].eval()(ids).logits, llama.eval()(ids).logits)
        del kept
    assert torch.distributed.is_initialized()
    engine, *_ = tessera.initialize(model=made[2], config=config(3))
    for name, expected in llama.named_parameters():
        assert torch.equal(engine.full_parameter(name), expected), name


@check
def other_models_of_transformers():
    """That have code of their own for stage 3, which fills tables on rank 0 alone."""
    bert = hf.DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=32, sinusoidal_pos_embds=True)
    wav = hf.Wav2Vec2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
                            conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)
    for kind, of_kind in ((hf.DistilBertModel, bert), (hf.Wav2Vec2Model, wav)):
        torch.manual_seed(7)
        plain = kind(of_kind)
        kept = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
        for make in (kind, kind._from_config):
            torch.manual_seed(7)
            for (name, value), (_, expected) in zip(tensors(make(of_kind)), tensors(plain), strict=True):
                assert torch.equal(value, expected), name
        del kept


@check
def from_pretrained_in_a_function():
    torch.manual_seed(3)
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    folder = folder_of(llama)
    kept = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    torch.manual_seed(8)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    torch.manual_seed(8)
    engine, *_ = tessera.initialize(
        model=lambda: hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3), config=config(3))
    for name, expected in plain.named_parameters():
        assert torch.equal(engine.full_parameter(name), expected), name
    for name, expected in plain.named_buffers():
        assert torch.equal(engine.module.get_buffer(name), expected), name
    del kept


if __name__ == "__main__":
    main(sys.argv[1])
