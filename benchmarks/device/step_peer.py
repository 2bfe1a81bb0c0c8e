"""A training step of PyTorch's own ways on one rank and its device, for the shapes that benchmarks/device_step.cc trains.

    python step_peer.py --layers 12 --dim 768 --heads 12 --micro-batch 16 --ways forward_backward ddp_autocast fsdp2 bf16 bf16_compiled

The model is the GPT of benchmarks/peers/peer.py, the same as that of benchmarks/gpt.h. All ways but the first clip at norm 1 and step
torch's fused AdamW.

forward_backward   the model in pure bf16, no optimizer
ddp_autocast       DistributedDataParallel over fp32 weights, forward under bf16 autocast
fsdp2              fully_shard with bf16 parameters, fp32 reduction and fp32 masters, on a mesh of one rank
bf16               pure bf16 weights, gradients and moments: less memory and other numbers than the rest
bf16_compiled      the same, with torch.compile

[What a way reports] One JSON line: {"way": name, "ms": x, "forward_ms": ..., "backward_ms": ..., "step_ms": ..., "loss": of the first
step, "peak_bytes": of the device's tensors}; times are medians. A step is timed as a whole; its phases are timed in further
steps, in which each waits for the device, so that their sum is more than `ms`. A way that fails reports {"way": name, "error": line}.
"""
import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "peers")]
from peer import Gpt, fused_adamw  # noqa: E402

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIPPING = 1.0


class Device:
    """Waits for the device and counts its tensors' bytes; on the CPU there is nothing to wait for and nothing is counted."""

    def __init__(self, name):
        self.name, self.is_cuda = name, name == "cuda"

    def description(self):
        return {"device_name": f"{torch.cuda.get_device_name()}, torch {torch.__version__}"} if self.is_cuda else {}

    def synchronize(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def reset_peak(self):
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self):
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0

    def ms(self, body):
        start = time.perf_counter()
        body()
        self.synchronize()
        return 1e3 * (time.perf_counter() - start)


class Training:
    """The phases of a step. forward() keeps the loss."""

    def __init__(self, model, batch, optimizer=None, autocast=None):
        self.model, self.batch, self.optimizer, self.autocast = model, batch, optimizer, autocast
        self.parameters = list(model.parameters())

    def forward(self):
        if self.autocast is None:
            self.loss = self.model(*self.batch)
        else:
            with torch.autocast(self.autocast, torch.bfloat16):
                self.loss = self.model(*self.batch)

    def backward(self):
        self.loss.backward()

    def step(self):
        if self.optimizer is not None:
            clip_grad_norm_(self.parameters, CLIPPING)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def whole(self):
        self.forward()
        self.backward()
        self.step()


def make_model(args, dtype=torch.float32):
    torch.manual_seed(1)
    with torch.device(args.device):
        return Gpt(args.dim, args.layers, args.heads, args.vocabulary, args.sequence).to(dtype)


def forward_backward(args, batch):
    return Training(make_model(args, torch.bfloat16), batch)


def ddp_autocast(args, batch):
    model = torch.nn.parallel.DistributedDataParallel(make_model(args), gradient_as_bucket_view=True)
    return Training(model, batch, fused_adamw(model.parameters(), **ADAMW), autocast=args.device)


def fsdp2(args, batch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    options = {"mesh": init_device_mesh(args.device, (1,)),
               "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    model = make_model(args)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Training(model, batch, fused_adamw(model.parameters(), **ADAMW))


def bf16(args, batch):
    model = make_model(args, torch.bfloat16)
    return Training(model, batch, fused_adamw(model.parameters(), **ADAMW))


def bf16_compiled(args, batch):
    model = make_model(args, torch.bfloat16)
    return Training(torch.compile(model), batch, fused_adamw(model.parameters(), **ADAMW))


WAYS = {way.__name__: way for way in (forward_backward, ddp_autocast, fsdp2, bf16, bf16_compiled)}


def measure(args, training, device):
    training.whole()
    first_loss = training.loss.item()
    for _ in range(args.warm_up - 1):
        training.whole()
    device.synchronize()
    device.reset_peak()
    ms = [device.ms(training.whole) for _ in range(args.steps)]
    phases = {name: [] for name in ("forward", "backward", "step")}
    for _ in range((args.steps + 1) // 2):
        for name, times in phases.items():
            times.append(device.ms(getattr(training, name)))
    return {"ms": statistics.median(ms), **{f"{name}_ms": statistics.median(times) for name, times in phases.items()},
            "loss": first_loss, "peak_bytes": device.peak_bytes(), **device.description()}


def parse_arguments():
    parser = argparse.ArgumentParser(description="A training step of PyTorch's own ways on one rank's device")
    for name, size in (("dim", 768), ("layers", 12), ("heads", 12), ("vocabulary", 50304), ("sequence", 1024), ("micro-batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main():
    args = parse_arguments()
    device = Device(args.device)
    if device.is_cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokens = torch.randint(args.vocabulary, (args.micro_batch, args.sequence + 1), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].contiguous().to(args.device), tokens[:, 1:].contiguous().to(args.device)
    for way in args.ways:
        try:
            training = WAYS[way](args, batch)
            row = measure(args, training, device)
        except Exception as error:  # the other rows are worth having
            row = {"error": one_line(error)}
        training = None
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
        print(json.dumps({"way": way, **row}), flush=True)
    os._exit(0)  # without destructors, which may wait for NCCL


if __name__ == "__main__":
    main()
