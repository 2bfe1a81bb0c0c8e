"""transformers' Trainer on DeepSpeed's stages: `continued_trainer.py LIBRARY STAGE FOLDER CHECKPOINT`, on the ranks of a launcher.

LIBRARY: "deepspeed", the real one, or "tessera". CHECKPOINT: one of FOLDER, from which it goes on, or "". Rank 0 prints losses, norms and rates by
step.
"""
import json
import sys
import warnings

LIBRARY, STAGE, FOLDER, CHECKPOINT = sys.argv[1:]
if LIBRARY == "tessera":
    import tessera.deepspeed  # noqa: F401  the one line
import torch
import transformers as hf

warnings.simplefilter("ignore")
torch.set_num_threads(1)
CONFIG = {"zero_optimization": {"stage": int(STAGE), "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0},
          "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
          "gradient_clipping": "auto", "bf16": {"enabled": False}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class Copy(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self):
        self.tokens = torch.randint(65, (96, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main():
    hf.set_seed(3 if LIBRARY == "deepspeed" else 4)  # other weights than those of the checkpoint; the order of the data is `seed`'s
    arguments = hf.TrainingArguments(
        output_dir=FOLDER if LIBRARY == "deepspeed" else FOLDER + "_tessera", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        num_train_epochs=3, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=3, logging_steps=1, save_strategy="steps", save_steps=8,
        report_to=[], disable_tqdm=True, weight_decay=0.01, seed=3, max_grad_norm=1.0, deepspeed=CONFIG)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=65, n_positions=16, n_embd=24, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                                             attn_pdrop=0.0))
    if LIBRARY == "tessera":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=Copy())
    trainer.train(resume_from_checkpoint=CHECKPOINT or None)
    assert type(trainer.deepspeed).__module__.startswith("tessera" if LIBRARY == "tessera" else "deepspeed")
    if trainer.is_world_process_zero():
        steps = {entry["step"]: [entry["loss"], float(entry["grad_norm"]), entry["learning_rate"]] for entry in trainer.state.log_history if "loss" in entry}
        print("numbers " + json.dumps(steps), flush=True)


main()
