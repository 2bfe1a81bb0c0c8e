"""One rank of a run that trains a small model with DeepSpeed and saves its checkpoints: deepspeed_checkpoints.py starts it.

    deepspeed_writer.py FOLDER CASES.json

Of each case of CASES.json ({name: case}) FOLDER/NAME has the checkpoint, and truth.pt: what the engine itself says of each parameter
(safe_get_full_fp32_param and the like), counters, the module's buffers. A case that fails leaves FOLDER/NAME/failed.txt.
"""
import json
import os
import sys
import traceback
from pathlib import Path

import torch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FUSED_ADAM = None
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Norm(torch.nn.BatchNorm1d):
    """A batch norm that computes in fp32: torch's, on the CPU, has no half types."""

    def forward(self, x):
        x = x.float()
        mean, variance = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.mul_(0.9).add_(0.1 * mean)
            self.running_var.mul_(0.9).add_(0.1 * variance)
        return ((x - mean) / (variance + self.eps).sqrt()).to(self.weight.dtype) * self.weight + self.bias


class Model(torch.nn.Module):
    """Sizes that no number of ranks divides; a tied parameter, buffers, and one that is not trained where it is asked for."""

    def __init__(self, frozen, tied):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.norm = Norm(5)
        self.gain = torch.nn.Parameter(torch.full((1,), 1.25))
        self.hidden = torch.nn.Linear(5, 7)
        self.back = torch.nn.Linear(7, 5)
        self.head = torch.nn.Linear(5, 11)
        self.register_buffer("table", torch.arange(6).reshape(2, 3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.back.weight.requires_grad_(False)
            self.embed.weight.requires_grad_(tied)

    def forward(self, tokens, labels):
        x = self.norm(self.embed(tokens).mean(1)) * self.gain
        return torch.nn.functional.cross_entropy(self.head(self.back(torch.tanh(self.hidden(x)))).float(), labels)


def groups_of(model, number):
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if number == 1:
        return [one for _, one in trained]
    return [{"params": [one for _, one in trained if one.dim() > 1], "weight_decay": 0.1, "lr": 0.01},
            {"params": [one for _, one in trained if one.dim() <= 1], "weight_decay": 0.0, "lr": 0.02}]


def config_of(case):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 5}}}
    if case["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale": case.get("loss_scale", 0)}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True, **case.get("bf16", {})}
    if case["optimizer"] == "config":
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.05}}
    return {**config, **case.get("config", {})}


def optimizer_of(case, model):
    groups = groups_of(model, case.get("groups", 1))
    if case["optimizer"] == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05)
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return None


def has_names(engine, case):
    """Whether the checkpoint says whose the optimizer's states are: without ZeRO, FP16_Optimizer and FP16_UnfusedOptimizer do not save it."""
    return case["stage"] > 0 or not (hasattr(engine.optimizer, "fp32_groups_flat") or hasattr(engine.optimizer, "fp32_groups"))


def unsharded_truth(engine):
    """Of a run in fp32 without ZeRO."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return {id(one): {"fp32": one.detach(), **{key: value for key, value in inner.state[one].items() if key in STATES}}
            for group in inner.param_groups for one in group["params"]}


def grouped_states(engine, keys):
    """Of stages 1 and 2 where safe_get_full_optimizer_state does not know them: of a second group, and with round_robin_gradients."""
    wrapper, found = engine.optimizer, {}
    groups = getattr(wrapper, "round_robin_bit16_groups", None) or wrapper.bf16_groups
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None) or wrapper.fp32_groups_flat_partition
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        paddings = getattr(wrapper, "round_robin_bit16_padding", None)
        for key in keys:
            own = wrapper.optimizer.state[flat][key]
            parts = [torch.empty_like(own) for _ in range(WORLD)]
            torch.distributed.all_gather(parts, own)
            whole, offset = torch.cat(parts), 0
            for place, one in enumerate(group):
                found.setdefault(id(one), {})[key] = whole[offset:offset + one.numel()].reshape(one.shape)
                offset += one.numel() + (paddings[index][place] if paddings else 0)
    return found


def truth(engine, case, deepspeed):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    named = has_names(engine, case)
    is_plain = named and case["stage"] == 0 and not hasattr(engine.optimizer, "fp32_groups_flat_partition")
    parameters, whole = {}, unsharded_truth(engine) if is_plain else {}
    keys = () if case.get("steps") == 0 else STATES[2:] if case["optimizer"] == "sgd" else STATES[:2]
    grouped = grouped_states(engine, keys) if case["stage"] in (1, 2) and (case.get("groups") == 2 or case.get("shuffled")) else {}
    for name, one in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([one], enabled=case["stage"] == 3):
            saved = {"dtype": str(one.dtype), "trainable": one.requires_grad, "compute": one.detach().clone()}
        if not named:
            pass
        elif one.requires_grad and whole:
            saved.update(whole[id(one)])
        elif one.requires_grad and case.get("shuffled"):  # fp32: the module has the masters
            saved.update(fp32=saved["compute"], **grouped[id(one)])
        elif one.requires_grad:
            saved["fp32"] = safe_get_full_fp32_param(one)
            for key in keys if not grouped else ():
                saved[key] = safe_get_full_optimizer_state(one, key)
            saved.update(grouped.get(id(one), {}))
        parameters[name] = {key: value.clone() if torch.is_tensor(value) else value for key, value in saved.items()}
    buffers = {name: one.clone() for name, one in engine.module.state_dict().items() if name in dict(engine.module.named_buffers())}
    return {"named": named, "parameters": parameters, "buffers": buffers, "steps": engine.global_steps, "samples": engine.global_samples,
            "skipped": engine.skipped_steps, "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None}


def run(deepspeed, folder, case):
    from deepspeed.runtime import engine as engines
    engines.FusedAdam = torch.optim.AdamW if case.get("fused") else FUSED_ADAM  # whose wrapper keeps flat masters
    torch.manual_seed(7)
    model = Model(case.get("frozen", False), case.get("tied", True))
    optimizer = optimizer_of(case, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case),
                                      model_parameters=None if optimizer else groups_of(model, case.get("groups", 1)))
    source = torch.Generator().manual_seed(100 + RANK)
    for _ in range(case.get("steps", 3)):
        tokens, labels = torch.randint(0, 11, (2, 4), generator=source), torch.randint(0, 11, (2,), generator=source)
        engine.backward(engine(tokens, labels))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 3, "note": "größe", "numbers": [1, 2.5, None], "rng": torch.arange(5)},
                           **case.get("save", {}))
    found = truth(engine, case, deepspeed)
    if RANK == 0:
        torch.save(found, folder / "truth.pt")
    if hasattr(engine, "destroy"):
        engine.destroy()


def main():
    import old_deepspeed  # what old releases ask of torch and Python
    old_deepspeed.prepare()
    import deepspeed
    from deepspeed.runtime import engine as engines
    global FUSED_ADAM
    FUSED_ADAM = engines.FusedAdam
    old_deepspeed.complete()
    deepspeed.init_distributed(dist_backend="gloo")
    for name, case in json.loads(Path(sys.argv[2]).read_text()).items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run(deepspeed, folder, case)
        except Exception:
            (folder / "failed.txt").write_text(traceback.format_exc())
            traceback.print_exc()
        torch.distributed.barrier()
    (Path(sys.argv[1]) / "version.txt").write_text(deepspeed.__version__)


if __name__ == "__main__":
    main()
