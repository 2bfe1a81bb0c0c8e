"""What ddp_rank.py trains: (make, batch_of(i), loss_of(model, batch), options). "quick" models take seconds in all; "full" ones have
the sizes that people train. Options: "unused" for DDP's find_unused_parameters, "rate" of the optimizer, "not_in" precisions that the model itself cannot do,
"ill_conditioned" precisions: see [Note: tolerance in bf16]."""
import models
import torch

# Batch norm over few samples is ill-conditioned: with larger steps, or images of 48 x 48, one last bit in the weights at the start moves
# DDP's own losses by 3e-4 in four steps (a ReLU falls on the other side).
BATCH_NORM = {"rate": 0.002, "ill_conditioned": ("adamw",)}
UNUSED = {"unused": True}
MIXES_TYPES = ("autocast",)  # its own operators take one type only
OWN_TYPES = ("bf16",)  # base and adapters have theirs


def _images(size, batch=4):
    return lambda i: models._vectors(i, batch, 3, size, size)


def _timm(name, **options):
    def make():
        import timm
        return timm.create_model(name, pretrained=False, num_classes=5, **options)
    return make


def _resnet18():
    import torchvision
    return torchvision.models.resnet18(num_classes=5)


def reordered(batch, turn):
    """The same samples in another order: backwards, or moved on by one."""
    def order(value):
        return value.flip(0) if turn == 1 else value.roll(1, 0)

    if isinstance(batch, torch.Tensor):
        return order(batch)
    if isinstance(batch, dict):
        return {name: order(value) for name, value in batch.items()}
    return tuple(order(value) for value in batch)


def quick():
    torchs, hf, peft = models.torch_cases(), models.transformers_cases(), models.peft_cases()
    return {
        "gpt2": (*hf["gpt2"], {}),
        "bert": (*hf["bert"], {}),
        "resnet18": (_resnet18, _images(64), models._classify, BATCH_NORM),
        "timm_vit": (_timm("test_vit"), _images(160, 2), models._classify, {}),
        "timm_efficientnet": (_timm("test_efficientnet"), _images(64), models._classify, BATCH_NORM),
        "mixture_of_experts": (*torchs["mixture_of_experts"], {**UNUSED, "not_in": MIXES_TYPES}),
        "mixtral": (*hf["mixtral"], UNUSED),
        "recurrent_and_tied": (*torchs["recurrent_and_tied"], {}),
        "frozen_and_shared": (*torchs["frozen_and_shared"], {}),
        "customized": (*torchs["customized"], {"not_in": MIXES_TYPES}),
        "lora_over_a_frozen_bf16_base": (*peft["lora_over_a_frozen_bf16_base"], {"not_in": OWN_TYPES}),
    }


# ------------------------------------------------------------------------------------------------------- full


def _tokens(vocabulary, length, batch=1):
    return lambda i: models._tokens(i, batch, length, vocabulary)


def _gpt2_small():
    import transformers as hf
    return hf.GPT2LMHeadModel(hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def _bert_base():
    import transformers as hf
    return hf.BertForSequenceClassification(hf.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def _text_batch(i):
    return {"input_ids": models._tokens(i, 2, 48, 30_000), "attention_mask": torch.ones(2, 48, dtype=torch.long), "labels": torch.tensor([0, 1])}


def _mixtral():
    import transformers as hf
    return hf.MixtralForCausalLM(hf.MixtralConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512,
        num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=128))


def _lora():
    import peft
    import transformers as hf
    base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
                                              intermediate_size=1376, num_key_value_heads=4)).to(torch.bfloat16)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=models._generator(parameter.numel())) / 50
    return adapted


def full():
    return {
        "gpt2_small_124m": (_gpt2_small, _tokens(50_257, 48), models._language_loss, {}),
        "bert_base_109m": (_bert_base, _text_batch, models._loss_of_batch, {"rate": 0.01}),
        "resnet18_12m": (_resnet18, _images(112, 8), models._classify, {**BATCH_NORM, "ill_conditioned": ("fp32", "adamw")}),
        "timm_vit_tiny_6m": (_timm("vit_tiny_patch16_224"), _images(224, 2), models._classify, {"rate": 0.01}),
        "timm_convnext_atto_3m": (_timm("convnext_atto"), _images(96), models._classify, {"rate": 0.01}),
        "timm_efficientnet_b0_4m": (_timm("efficientnet_b0"), _images(96), models._classify, {**BATCH_NORM, "ill_conditioned": ("fp32", "adamw")}),
        "mixtral_15m": (_mixtral, _tokens(4096, 64), models._language_loss, UNUSED),
        "lora_llama_24m": (_lora, _tokens(8192, 64), models._language_loss, {"not_in": OWN_TYPES, "ill_conditioned": ("adamw",)}),
    }
