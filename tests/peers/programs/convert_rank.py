"""One rank of a run of convert_suite.py: trains a small model by Tessera, FSDP2 or DeepSpeed, and prints the loss of each step.

    convert_rank.py FRAMEWORK '{"optimizer": …, "stage": …, "load": FOLDER or null, "save": FOLDER or null, "begin": …, "end": …}'

A step's batch depends on its number alone, and each rank takes its part of it: the losses do not depend on the number of ranks.
"""
import json
import os
import sys

import torch
from torch import nn
from torch.nn import functional

BATCH, WIDTH, CLASSES = 8, 24, 5


class Net(nn.Module):
    """Has a tied parameter, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.full((1,), 0.7))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = functional.gelu(self.embedding(x)) * self.scale
        return self.head(self.tied(self.norm(self.frozen(x) + x)))


def make_model(seed):
    torch.manual_seed(seed)
    return Net()


def make_optimizer(kind, model):
    """Of two groups where the kind says so."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "AdamW, two groups":
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        rest = [parameter for parameter in trained if parameter.dim() <= 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.95))
    if kind == "AdamW":
        return torch.optim.AdamW(trained, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    if kind == "AdamW, amsgrad":
        return torch.optim.AdamW(trained, lr=1e-2, amsgrad=True)
    if kind == "SGD":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True)
    if kind == "Adagrad":
        return torch.optim.Adagrad(trained, lr=0.05)
    if kind == "AdamW of the configuration":
        return None
    raise SystemExit(f"unknown optimizer {kind}")


def make_scheduler(optimizer):
    """None where the configuration has one. DeepSpeed makes another Adagrad of the one that it is given, which a schedule does not see."""
    if optimizer is None:
        return None
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=1.0 if isinstance(optimizer, torch.optim.Adagrad) else 0.7)


def batch(step, rank, world):
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    return x[rank::world], y[rank::world]


def config(given, world):
    by_itself = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}},
                 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20, "warmup_max_lr": 1e-2}}}
    return {**(by_itself if given["optimizer"] == "AdamW of the configuration" else {}),
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world, "zero_optimization": {"stage": given["stage"]},
            "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "steps_per_print": 1000}


def engine_steps(engine, given, rank, world, mean):
    losses = []
    for step in range(given["begin"], given["end"]):
        x, y = batch(step, rank, world)
        loss = functional.cross_entropy(engine(x), y)
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
    return losses


def by_tessera(given):
    import tessera
    model = make_model(0)
    optimizer = make_optimizer(given["optimizer"], model)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    engine, *_ = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=make_scheduler(optimizer), config=config(given, world))
    rank = tessera.comm.get_rank()
    if given["load"]:
        engine.load_checkpoint(given["load"])
    losses = engine_steps(engine, given, rank, world, lambda loss: sum(tessera.comm.all_gather(loss.item())) / world)
    if given["save"]:
        engine.save_checkpoint(given["save"], client_state={"epoch": 3, "best": (0.5, "x")})
    return rank, losses


def mean_of_ranks(loss):
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean.item() / torch.distributed.get_world_size()


def by_deepspeed(given):
    import deepspeed
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = make_model(0)  # DeepSpeed's universal checkpoints restore neither frozen parameters nor buffers
    options = config(given, world)
    options["checkpoint"] = {"load_universal": bool(given["load"])}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and given["load"]:
                parameter.zero_()
    optimizer = make_optimizer(given["optimizer"], model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=make_scheduler(optimizer), config=options)
    if given["load"]:
        path, client_state = engine.load_checkpoint(given["load"])
        assert path is not None
        assert (client_state["epoch"], client_state["best"]) == (3, (0.5, "x")), client_state
        assert engine.global_steps == given["begin"] and engine.global_samples == given["begin"] * BATCH
    return rank, engine_steps(engine, given, rank, world, mean_of_ranks)


def by_fsdp2(given):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = make_model(1)  # other values: all come from the checkpoint
    model.scale.zero_()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = make_optimizer(given["optimizer"], model)
    scheduler = make_scheduler(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=given.get("flatten", False))
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    state = {"model": of_model, "optimizer": of_optimizer, "lr_scheduler": scheduler.state_dict(), "global_steps": 0}
    dcp.load(state, checkpoint_id=given["load"])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    scheduler.load_state_dict(state["lr_scheduler"])
    assert state["global_steps"] == given["begin"]
    losses = []
    for step in range(given["begin"], given["end"]):
        x, y = batch(step, rank, world)
        loss = functional.cross_entropy(model(x), y)
        losses.append(mean_of_ranks(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return rank, losses


def main():
    framework, given = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    rank, losses = {"tessera": by_tessera, "deepspeed": by_deepspeed, "fsdp2": by_fsdp2}[framework](given)
    if rank == 0:
        print("losses", json.dumps(losses), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
