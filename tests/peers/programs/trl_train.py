"""Ranks of a trainer of TRL: `trl_train.py sft|dpo|grpo ddp|STAGE FOLDER`, of a small model with random values. Prints JSON."""
import json
import os
import sys

import tessera.deepspeed  # noqa: F401
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

kind, strategy, folder = sys.argv[1:]
WORDS = ["<pad>", "<eos>", "<unk>", *"the cat dog sat ran on a mat red blue sky is was big small yes no".split()]
PROMPTS = ["the cat", "a big", "the sky", "no the"] * 8


def main():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=len(WORDS), n_positions=64, bos_token_id=1, eos_token_id=1,
                                       pad_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    deepspeed = None if strategy == "ddp" else {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": int(strategy), "stage3_gather_16bit_weights_on_model_save": True}}
    options = {"output_dir": f"{folder}/out", "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "report_to": [],
               "use_cpu": deepspeed is None, "deepspeed": deepspeed, "bf16": False, "learning_rate": 1e-2, "save_strategy": "no",
               "disable_tqdm": True, "gradient_checkpointing": False, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer
        data = Dataset.from_dict({"text": ["the cat sat on a mat", "a big dog ran", "the sky is blue", "no the red mat was small"] * 8})
        trainer = SFTTrainer(model=model, args=SFTConfig(max_length=16, **options), train_dataset=data, processing_class=tokenizer)
    elif kind == "dpo":
        from trl import DPOConfig, DPOTrainer
        own = f"{folder}/model{os.environ['RANK']}"
        model.save_pretrained(own)  # the reference model is made from a path
        data = Dataset.from_dict({"prompt": PROMPTS, "chosen": [" sat on a mat", " dog ran", " is blue", " red mat"] * 8,
                                  "rejected": [" was no", " yes yes", " mat ran", " sat sat"] * 8})
        config = DPOConfig(max_length=32, **options)
        trainer = DPOTrainer(model=AutoModelForCausalLM.from_pretrained(own), args=config, train_dataset=data, processing_class=tokenizer)
    else:
        from trl import GRPOConfig, GRPOTrainer
        trainer = GRPOTrainer(model=model, args=GRPOConfig(num_generations=2, max_completion_length=8, **options), processing_class=tokenizer,
                              reward_funcs=lambda completions, **_: [float(text.count("cat")) for text in completions],
                              train_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        saved = load_file(f"{folder}/out/model.safetensors")  # from_pretrained is a call of all ranks at stage 3
        saved.pop("lm_head.weight", None)  # tied: at stage 2 it is in the file, too, as with DeepSpeed, because the Trainer copies each tensor
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("numbers", json.dumps([*losses, float(sum(value.double().abs().sum() for value in saved.values()))]))


main()
