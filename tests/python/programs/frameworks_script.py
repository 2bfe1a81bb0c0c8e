"""Trains by Accelerate and by the Hugging Face Trainer: `frameworks_script.py LIBRARY JOB…`, on two ranks.

LIBRARY is "plain" (DistributedDataParallel) or "tessera". A JOB is "accelerate:STAGE" or "trainer:STAGE:FOLDER:WHAT", where WHAT is "train",
"cpu" (the same, and Accelerate is told to use the CPU), "resume" or "config" (optimizer and schedule come from the DeepSpeed configuration).
Rank 0 prints what the jobs found, in their order.
"""
import json
import os
import sys
import warnings

LIBRARY, *JOBS = sys.argv[1:]
PLAIN = LIBRARY == "plain"
if not PLAIN:
    import tessera.deepspeed  # noqa: F401  the one line
import accelerate
import safetensors.torch
import torch
import transformers as hf
from torch import nn

warnings.simplefilter("ignore")
torch.set_num_threads(1)
ENGINE = "torch.nn.parallel.distributed" if PLAIN else "tessera.deepspeed.runtime.engine"


def sums(state):
    return {name: value.double().sum().item() for name, value in state.items()}


def by_accelerate(stage):
    if PLAIN:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=accelerate.DeepSpeedPlugin(
            zero_stage=stage, gradient_clipping=0.1, gradient_accumulation_steps=2, zero3_save_16bit_model=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.TensorDataset(torch.randn(68, 8, generator=torch.Generator().manual_seed(1)), torch.arange(68) % 4)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert accelerator.num_processes == 2 and type(model).__module__ == ENGINE
    losses, rates = [], []
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(schedule.get_last_lr()[0])
        if epoch == 1:  # there and back
            accelerator.save_state(f"state{stage}")
            accelerator.wait_for_everyone()
            accelerator.load_state(f"state{stage}")
    found = {"losses": losses, "rates": rates, "weights": sums(accelerator.get_state_dict(model) or {}),
             "unwrapped": type(accelerator.unwrap_model(model)).__name__}
    if not PLAIN and JOBS[-1].startswith("accelerate"):
        accelerator.end_training()
    return found


class Parity(torch.utils.data.Dataset):
    """Whether the sum of the tokens is odd."""

    def __init__(self, size):
        self.tokens = torch.randint(1, 64, (size, 12), generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": int(self.tokens[i].sum() % 2)}


def deepspeed_config(stage, what):
    config = {"zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": "auto",
                                    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
              "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
              "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    if what == "config":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto",
                                                                   "warmup_num_steps": "auto"}}
    return config


def by_trainer(stage, out, what):
    hf.set_seed(3)
    given = {"use_cpu": os.environ.get("TESSERA_TEST_DEVICE") != "cuda"} if PLAIN else {"deepspeed": deepspeed_config(stage, what)}
    if what == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        given["use_cpu"] = True
    arguments = hf.TrainingArguments(
        output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-3,
        logging_steps=1, eval_strategy="epoch", save_strategy="epoch", report_to=[], disable_tqdm=True, weight_decay=0.01, seed=3, **given)
    model = hf.BertForSequenceClassification(hf.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=Parity(72), eval_dataset=Parity(20))
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-10" if what == "resume" else None)
    trainer.save_model(out + "/final")
    predictions = trainer.predict(Parity(20)).predictions
    if not PLAIN:
        assert type(trainer.deepspeed).__module__ == ENGINE
    if what == "cpu":
        from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
        weights = trainer.deepspeed.state_dict()
        loaded = load_state_dict_from_zero_checkpoint(trainer.model, f"{out}/checkpoint-{trainer.state.global_step}").state_dict()
        assert all(torch.equal(weights[name], value) for name, value in loaded.items())
    return {"log": [{key: value for key, value in entry.items() if key in ("loss", "grad_norm", "learning_rate", "eval_loss", "step")}
                    for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
            "weights": sums(safetensors.torch.load_file(out + "/final/model.safetensors")) if trainer.is_world_process_zero() else {},
            "prediction": float(predictions.sum())}


def main():
    found = []
    for job in JOBS:
        by, stage, *words = job.split(":")
        environment = dict(os.environ)
        found.append({"accelerate": by_accelerate, "trainer": by_trainer}[by](int(stage), *words))
        for name in os.environ.keys() - environment.keys():  # Accelerate keeps what it was told there, and in its states
            del os.environ[name]
        for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
            state._reset_state()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found))


main()
if PLAIN:  # the result is out: Gloo's threads abort the interpreter's end now and then
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)
