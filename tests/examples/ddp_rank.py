"""One rank of PyTorch's DistributedDataParallel over Gloo: prints the losses of every step as JSON. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT define the group."""
import json
import os

import python_models
import torch
from sampler import batches
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, data = python_models.classification()
    model = DistributedDataParallel(model)
    optimizer = python_models.optimizer(model)
    losses = []
    for rows in batches(python_models.NUM_SAMPLES, python_models.BATCH, python_models.STEPS):
        share = len(rows) // world
        mine = rows[rank * share:(rank + 1) * share]
        loss = F.cross_entropy(model(data["x"][mine]), data["y"][mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(loss.detach_())
        losses.append(loss.item() / world)
    if rank == 0:
        print(json.dumps(losses), flush=True)
    distributed.barrier()
    os._exit(0)  # the result is out: what Gloo's threads do when the interpreter ends (now and then they abort it) is not the test's matter


if __name__ == "__main__":
    main()
