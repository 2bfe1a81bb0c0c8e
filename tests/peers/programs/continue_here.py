"""Ten steps of an engine from what begin_elsewhere.py has saved: `continue_here.py MODEL OPTIMIZER FOLDER DTYPE STAGE…`, on the ranks of a launcher.

Rank 0 prints the losses by stage.
"""
import json
import sys

import begun
import tessera
import torch


def main():
    model, optimizer, folder, dtype, *stages = sys.argv[1:]
    tessera.comm.init_distributed(backend="auto")
    rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
    found = {}
    for stage in map(int, stages):
        torch.manual_seed(1)  # other weights than those of the checkpoint
        made = begun.MODELS[model]()
        client = begun.OPTIMIZERS[optimizer](begun.groups_of(made))
        engine, *_ = tessera.initialize(model=made, optimizer=client, lr_scheduler=begun.schedule(client), config={
            "train_micro_batch_size_per_gpu": begun.BATCH // world, "gradient_clipping": 1.0, "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage, "unit_numel": 2000, "stage3_param_persistence_threshold": 0}})
        engine.load_checkpoint(folder)
        losses = []
        for i in range(begun.STEPS, 2 * begun.STEPS):
            loss = begun.loss_of(engine, begun.data(model, i, rank, world))
            engine.backward(loss)
            engine.step()
            losses.append(tessera.comm.all_reduce(loss.item()))  # the mean
        found[stage] = losses
        engine.destroy()
    if rank == 0:
        print("numbers " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
