"""Trains six steps at the stage that is argument 1, saves after three, and trains the last three again from the checkpoint."""
import json
import sys

import tessera
import torch
from torch import nn
from torch.nn import functional

STAGE = int(sys.argv[1])


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 4))
    return tessera.initialize(model=model, config={
        "train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": STAGE, "unit_numel": 5000, "stage3_param_persistence_threshold": 0}})[0]


def train(engine, steps):
    losses = []
    for step in steps:
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        share = 12 // engine.world_size
        mine = x[engine.global_rank * share:][:share]
        loss = functional.cross_entropy(engine(mine), mine.argmax(-1) % 4)
        engine.backward(loss)
        engine.step()
        losses.append(tessera.comm.all_reduce(loss.item()))
    return losses


whole = make()
losses = train(whole, range(3))
whole.save_checkpoint(f"checkpoints{STAGE}", tag="middle")
losses += train(whole, range(3, 6))
second = make()
second.load_checkpoint(f"checkpoints{STAGE}")
second.save_model(f"saved{STAGE}.safetensors")
resumed = train(second, range(3, 6))
if tessera.comm.get_rank() == 0:
    print(json.dumps({"file": tessera.__file__, "losses": losses, "resumed": resumed}))
