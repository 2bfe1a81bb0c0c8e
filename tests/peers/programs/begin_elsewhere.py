"""A training of ten steps by another library, saved, and ten more: `begin_elsewhere.py WRITER MODEL OPTIMIZER FOLDER`, on the ranks of a launcher.

Rank 0 prints the losses of the last ten steps, means over the global batch of `begun.data`. continue_here.py goes on from FOLDER.
"""
import json
import sys
from pathlib import Path

import begun
import torch
import torch.distributed as dist


def deepspeed(stage, model, make, folder, dtype):
    import deepspeed as library

    precision = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    config = {"train_micro_batch_size_per_gpu": begun.BATCH // dist.get_world_size(), "zero_optimization": {"stage": stage}, **precision,
              "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = make(begun.groups_of(model))
    scheduler = begun.schedule(optimizer)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)

    def step(batch):
        loss = begun.loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step, lambda: engine.save_checkpoint(str(folder), client_state={"note": "of the caller"})


def fsdp2(_, model, make, folder, dtype):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in begun.blocks_of(model):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make(begun.groups_of(model))
    scheduler = begun.schedule(optimizer)

    def step(batch):
        optimizer.zero_grad()
        loss = begun.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    def save():
        weights, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": of_optimizer, "lr_scheduler": scheduler.state_dict(), "step": begun.STEPS}, checkpoint_id=folder)

    return step, save


def accelerate(_, model, make, folder, dtype):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)  # a step of it is one, on any number of ranks
    optimizer = make(begun.groups_of(model))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, begun.schedule(optimizer))

    def step(batch):
        optimizer.zero_grad()
        loss = begun.loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return step, lambda: accelerator.save_state(str(folder))


def plain(_, model, make, folder, dtype):
    """DistributedDataParallel and torch.save."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # BERT has one
    optimizer = make(begun.groups_of(model))
    scheduler = begun.schedule(optimizer)

    def step(batch):
        optimizer.zero_grad()
        loss = begun.loss_of(wrapped, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    def save():
        if dist.get_rank() == 0:
            torch.save({"state_dict": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": begun.STEPS},
                       folder / "checkpoint.pt")

    return step, save


WRITERS = {"deepspeed": deepspeed, "fsdp2": fsdp2, "accelerate": accelerate, "plain": plain}


def main():
    writer, model, optimizer, folder = sys.argv[1:5]
    library, _, rest = writer.partition(":")
    stage, _, dtype = rest.partition(":")
    dist.init_process_group("gloo")
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    made = begun.MODELS[model]()
    step, save = WRITERS[library](int(stage or 0), made, begun.OPTIMIZERS[optimizer], folder, dtype or "fp32")
    losses = []
    for i in range(2 * begun.STEPS):
        loss = step(begun.data(model, i, dist.get_rank(), dist.get_world_size())).detach().float().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if i == begun.STEPS - 1:
            save()
    dist.barrier()
    if dist.get_rank() == 0:
        print("numbers " + json.dumps(losses[begun.STEPS:]), flush=True)


if __name__ == "__main__":
    main()
