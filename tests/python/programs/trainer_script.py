"""A script for the Hugging Face Trainer. Arguments: "plain" or a ZeRO stage, the output folder, and what to do: "train", "cpu" (the
same, and Accelerate is told to use the CPU), "resume" or "config" (optimizer and schedule from the DeepSpeed configuration). Prints what was logged and the saved model's sums."""
import json
import os
import sys
import warnings

KIND, OUT, WHAT = sys.argv[1:]
if KIND != "plain":
    import tessera.deepspeed  # noqa: F401  the one line
import safetensors.torch
import torch
import transformers as hf

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Parity(torch.utils.data.Dataset):
    """Whether the sum of the tokens is odd."""

    def __init__(self, size):
        self.tokens = torch.randint(1, 64, (size, 12), generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": int(self.tokens[i].sum() % 2)}


def deepspeed_config():
    config = {"zero_optimization": {"stage": int(KIND), "stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": "auto",
                                    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
              "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
              "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    if WHAT == "config":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto",
                                                                   "warmup_num_steps": "auto"}}
    return config


def main():
    hf.set_seed(3)
    given = {"use_cpu": os.environ.get("TESSERA_TEST_DEVICE") != "cuda"} if KIND == "plain" else {"deepspeed": deepspeed_config()}
    if WHAT == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        given["use_cpu"] = True
    arguments = hf.TrainingArguments(
        output_dir=OUT, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-3,
        logging_steps=1, eval_strategy="epoch", save_strategy="epoch", report_to=[], disable_tqdm=True, weight_decay=0.01, seed=3, **given)
    model = hf.BertForSequenceClassification(hf.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=Parity(72), eval_dataset=Parity(20))
    trainer.train(resume_from_checkpoint=f"{OUT}/checkpoint-10" if WHAT == "resume" else None)
    trainer.save_model(OUT + "/final")
    predictions = trainer.predict(Parity(20)).predictions
    if trainer.is_world_process_zero():
        saved = safetensors.torch.load_file(OUT + "/final/model.safetensors")
        print(json.dumps({
            "log": [{key: value for key, value in entry.items() if key in ("loss", "grad_norm", "learning_rate", "eval_loss", "step")}
                    for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
            "weights": {name: value.double().sum().item() for name, value in saved.items()},
            "prediction": float(predictions.sum())}))
    if KIND != "plain":
        assert type(trainer.deepspeed).__module__ == "tessera.deepspeed.runtime.engine"
    if WHAT == "cpu":
        from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
        step = trainer.state.global_step
        weights = trainer.deepspeed.state_dict()
        loaded = load_state_dict_from_zero_checkpoint(trainer.model, f"{OUT}/checkpoint-{step}").state_dict()
        assert all(torch.equal(weights[name], value) for name, value in loaded.items())


main()
if KIND == "plain":  # the result is out: Gloo's threads abort the interpreter's end now and then
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)
