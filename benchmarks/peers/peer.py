"""What the peers' ranks share: the GPT of examples/language_model/model.h, with its names and numbers, and how FSDP2 and DeepSpeed are used."""
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# dim, layers, heads, vocabulary, sequence; micro-batch
SHAPES = {"small": (256, 4, 4, 4096, 128), "33m": (512, 8, 8, 8192, 128), "110m": (768, 12, 12, 16384, 128)}
MICRO_BATCH = {"small": 2, "33m": 2, "110m": 1}


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

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

    def forward(self, tokens, target):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def load_deepspeed():
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # imports torch._inductor, whose memory is not the training's
    # This operator, an all-reduce for inference, would be compiled when the group is made. Training has no use for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def fused_adamw(parameters, lr=1e-3, **params):
    """torch's fused AdamW for all peers. DeepSpeed's own would have to be compiled, and without "fused" torch's is slower."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **params)


def sharded(model, blocks, device="cpu", **options):
    """The model, with each of its blocks and the rest sharded by fully_shard over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def leave(result=None):
    """Reports and ends this rank without running destructors: after DeepSpeed's stage 3 one of them sometimes aborts."""
    if result is not None:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)
