"""A user's script, as README-like as it gets; prints what it trained. Argument 1, if any: what to do in place of a plain run."""
import json
import os
import sys
import time

import tessera
import torch
from torch import nn
from torch.nn import functional


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    engine, *_ = tessera.initialize(model=model, config={"train_batch_size": 12, "zero_optimization": {"stage": 3},
                                                         "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})
    inputs = torch.randn(5, 12, 8, generator=torch.Generator().manual_seed(1))
    share = 12 // engine.world_size
    losses = []
    for x in inputs:
        mine = x[engine.global_rank * share:][:share]
        loss = functional.cross_entropy(engine(mine), mine.argmax(-1) % 4)
        engine.backward(loss)
        engine.step()
        losses.append(tessera.comm.all_reduce(loss.item()))
    return {"world": engine.world_size, "losses": losses, "weights": [p.sum().item() for p in engine.state_dict().values()]}


def only_rank_0_reads():
    """At stage 3 a forward is a collective: what rank 0 alone does is an error that says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 4))
    engine, *_ = tessera.initialize(model=model, config={"train_batch_size": 12, "zero_optimization": {
        "stage": 3, "unit_numel": 1000, "stage3_param_persistence_threshold": 0}})
    if tessera.comm.get_rank() == 0:
        model(torch.ones(1, 8)).sum().item()
        engine.backward(model(torch.ones(1, 8)).sum())
    else:
        tessera.comm.barrier("rank 1 waits here")


def wait_for_others():
    """Rank 0 waits somewhere for rank 1, which sleeps."""
    if sys.argv[3] == "rendezvous":
        print("waiting", flush=True)
        time.sleep(60 * int(os.environ["RANK"]))
    tessera.comm.init_distributed(backend=sys.argv[2])
    if tessera.comm.get_rank() == 0:
        print("waiting", flush=True)
        if sys.argv[3] == "barrier":
            tessera.comm.barrier("never")
        elif sys.argv[3] == "exchange":
            tessera.comm.all_gather(1)
        elif sys.argv[3] == "large all_reduce":
            tessera.comm.all_reduce(torch.ones(4 << 20))
        else:
            torch.manual_seed(0)
            tessera.initialize(model=nn.Linear(3, 3), config={"train_micro_batch_size_per_gpu": 1})
    time.sleep(60)


def wait_in_backward():
    engine, *_ = tessera.initialize(model=nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "unit_numel": 1000, "stage3_param_persistence_threshold": 0}})
    tessera.comm.barrier("ready")
    if tessera.comm.get_rank() == 0:
        loss = None
        print("waiting", flush=True)
        for _ in range(3):
            loss = engine(torch.ones(2, 64)).sum()
            engine.backward(loss)
            engine.step()
    time.sleep(60)


if __name__ == "__main__":
    result = globals()[sys.argv[1] if len(sys.argv) > 1 else "train"]()
    if tessera.comm.get_rank() == 0:
        print(json.dumps(result))
