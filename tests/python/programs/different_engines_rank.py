"""Ranks that are in the same call of two engines: an error on all of them, which names the engine, and no other values.

    different_engines_rank.py BACKEND STAGE gather|state_dict|eval
"""
import os
import sys
import time

import tessera
import torch
from checks import config
from torch import nn

backend, stage, call = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tessera.comm.init_distributed(backend=backend, timeout_s=60)
rank = tessera.comm.get_rank()


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))


engines = [tessera.initialize(model=net(seed), config=config(stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}))[0] for seed in range(2)]
mine = engines[rank]
start = time.monotonic()
try:
    if call == "gather":
        with tessera.GatheredParameters(list(mine.module.parameters()), modifier_rank=0):
            pass
    elif call == "state_dict":
        mine.state_dict()
    else:
        mine.eval()
    tessera.comm.barrier("end")
except RuntimeError as error:
    assert "engine 1" in str(error), error
    assert time.monotonic() - start < 30
    assert stage == 3 or mine.module[0].weight.detach().equal(net(rank)[0].weight)
    print(f"{call} at stage {stage}: {error}", flush=True)
    time.sleep(2 if rank == 0 else 0)  # its store is here
    os._exit(0)  # the group has failed
raise AssertionError(f"{call} at stage {stage} of two engines: no error")
