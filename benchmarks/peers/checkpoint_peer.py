"""One rank of a peer: trains the GPT of benchmarks/gpt.h for two steps, then saves and loads a few times.

    torchrun --nproc-per-node 2 checkpoint_peer.py deepspeed|dcp DIR 33m|110m STAGE REPEATS

Rank 0 prints seconds as one JSON line. What is saved: fp32 weights and AdamW's two moments.
"""
import json
import os
import shutil
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SHAPES = {"33m": (512, 8, 8, 8192, 128), "110m": (768, 12, 12, 16384, 128)}


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Gpt(nn.Module):
    def __init__(self, dim, layers, heads, vocabulary, sequence):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(sequence, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def timed(body):
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start


def size_of(folder):
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(folder) for name in names)


def run_deepspeed(folder, shape, stage, repeats):
    import deepspeed
    model = Gpt(*shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "steps_per_print": 10**9})
    for _ in range(2):
        loss = engine(torch.randint(shape[3], (1, shape[4])))
        engine.backward(loss)
        engine.step()
    out = {"save_s": [], "load_s": [], "consolidate_s": []}
    for i in range(repeats):
        out["save_s"].append(timed(lambda: engine.save_checkpoint(folder, tag=f"save{i}")))
        out["load_s"].append(timed(lambda: engine.load_checkpoint(folder, tag=f"save{i}")))
    if dist.get_rank() == 0:
        out["bytes"] = size_of(os.path.join(folder, f"save{repeats - 1}"))
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, os.path.join(folder, "zero_to_fp32.py"), folder, os.path.join(folder, "full")],
                           check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            out["consolidate_s"].append(time.perf_counter() - start)
    dist.barrier()
    return out


def run_dcp(folder, shape, repeats):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    model = Gpt(*shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randint(shape[3], (1, shape[4]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    out = {"save_s": [], "load_s": []}
    for i in range(repeats):
        where = os.path.join(folder, f"save{i}")

        def save():
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=where)

        def load():
            weights, moments = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=where)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

        out["save_s"].append(timed(save))
        out["load_s"].append(timed(load))
    out["bytes"] = size_of(os.path.join(folder, f"save{repeats - 1}"))
    return out


def main():
    peer, folder, size, stage, repeats = sys.argv[1:6]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()
    if peer == "deepspeed":
        out = run_deepspeed(folder, SHAPES[size], int(stage), int(repeats))
    else:
        out = run_dcp(folder, SHAPES[size], int(repeats))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(out), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
