"""DPO with TRL at ZeRO-3: a small GPT-2 learns to prefer one answer to another. TRL's script is what it would be for DeepSpeed, but for the first
import line. The reference model is the same model before training. The preferences are of a rule: the answer that names the animal of the question.

    pip install trl==1.9.2
    tessera launch -n 2 -- python examples/gallery/dpo.py
    the chosen answer has the larger reward in 0.92 of the pairs, by 2.09
"""
import tessera.deepspeed  # noqa: F401  isort: skip  the one line
import itertools
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

ANIMALS, WISHES = "cat dog bird fish".split(), "show draw find name paint".split()
WORDS = ["<pad>", "<eos>", "<unk>", *ANIMALS, *WISHES, "a", "please", "here", "is", "the"]


def pairs():
    rows = [{"prompt": f"please {wish} a {animal}", "chosen": f" here is the {animal}", "rejected": f" here is the {other}"}
            for wish, animal, other in itertools.product(WISHES, ANIMALS, ANIMALS) if animal != other]
    return Dataset.from_list(rows)


def tokenizer_of_words():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def policy():
    """TRL makes the reference model from the policy's folder."""
    torch.manual_seed(0)
    shape = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=len(WORDS), n_positions=32, bos_token_id=1, eos_token_id=1, pad_token_id=0,
                       resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    folder = f"runs/dpo/start_{os.environ['RANK']}"
    GPT2LMHeadModel(shape).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def main():
    model = policy()  # before the configuration, under which all ranks would write one folder together
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    arguments = DPOConfig(
        output_dir="runs/dpo", deepspeed={"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": zero},
        per_device_train_batch_size=10, max_steps=60, learning_rate=5e-3, lr_scheduler_type="constant", max_length=16, beta=0.1, logging_steps=20,
        gradient_checkpointing=False, bf16=False, save_strategy="no", report_to=[], disable_tqdm=True, seed=42)
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=pairs(), eval_dataset=pairs(), processing_class=tokenizer_of_words())
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"the chosen answer has the larger reward in {found['eval_rewards/accuracies']:.2f} of the pairs, by "
              f"{found['eval_rewards/margins']:.2f}", flush=True)


if __name__ == "__main__":
    main()
