"""One rank of a peer: trains the GPT of peer.py for two steps, then saves and loads a few times.

    tessera launch -n 2 -- python checkpoint_peer.py deepspeed|dcp DIR 33m|110m STAGE REPEATS

Rank 0 prints seconds as one JSON line. What is saved: fp32 weights and AdamW's two moments. The full model is made by
each peer's own function, called here, so that the start of an interpreter isn't counted.
"""
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
from peer import SHAPES, Gpt, fused_adamw, leave, load_deepspeed, sharded


def timed(body):
    """Seconds from one barrier to the next: the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start


def size_of(folder):
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(folder) for name in names)


def measure(folder, repeats, save, load, consolidate):
    out = {"save_s": [], "load_s": [], "consolidate_s": []}
    on_rank_0 = (lambda body: body()) if dist.get_rank() == 0 else (lambda body: None)
    full = os.path.join(folder, "full")
    for i in range(repeats):
        tag, last = f"save{i}", os.path.join(folder, f"save{i - 1}")
        out["save_s"].append(timed(lambda: save(tag)))
        on_rank_0(lambda: shutil.rmtree(last, ignore_errors=True))  # one is kept, as in Tessera's configuration
        out["load_s"].append(timed(lambda: load(tag)))
        out["consolidate_s"].append(timed(lambda: on_rank_0(lambda: consolidate(tag, full))))
    out["bytes"] = size_of(os.path.join(folder, f"save{repeats - 1}"))
    return out


def run_deepspeed(folder, shape, stage, repeats):
    deepspeed = load_deepspeed()
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    model = Gpt(*shape)
    engine, *_ = deepspeed.initialize(model=model, optimizer=fused_adamw(model.parameters()), dist_init_required=False, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9})
    for _ in range(2):
        tokens = torch.randint(shape[3], (1, shape[4]))
        engine.backward(engine(tokens, tokens))
        engine.step()
    return measure(folder, repeats, lambda tag: engine.save_checkpoint(folder, tag=tag),
                   lambda tag: engine.load_checkpoint(folder, tag=tag),
                   lambda tag, full: convert_zero_checkpoint_to_fp32_state_dict(folder, full, max_shard_size=None, tag=tag))


def run_dcp(folder, shape, repeats):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = Gpt(*shape)
    sharded(model, model.blocks)
    optimizer = fused_adamw(model.parameters())
    for _ in range(2):
        tokens = torch.randint(shape[3], (1, shape[4]))
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load(tag):
        loaded = state()
        dcp.load(loaded, checkpoint_id=os.path.join(folder, tag))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    return measure(folder, repeats, lambda tag: dcp.save(state(), checkpoint_id=os.path.join(folder, tag)), load,
                   lambda tag, full: dcp_to_torch_save(os.path.join(folder, tag), full + ".pt"))


def main():
    peer, folder, size, stage, repeats = sys.argv[1:6]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    if peer == "deepspeed":
        out = run_deepspeed(folder, SHAPES[size], int(stage), int(repeats))
    else:
        out = run_dcp(folder, SHAPES[size], int(repeats))
    leave(out if dist.get_rank() == 0 else None)


if __name__ == "__main__":
    main()
