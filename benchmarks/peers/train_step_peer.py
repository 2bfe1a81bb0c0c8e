"""One rank of a peer: trains the GPT of benchmarks/gpt.h with what train_step.py has put into a folder.

    tessera launch -n 2 -- python train_step_peer.py plain|ddp|zero_redundancy|fsdp2|deepspeed FOLDER 33m|110m STEPS

Prints one JSON line: see [What a rank reports] in train_step.py. FOLDER/ds_config.json holds for all, not only for DeepSpeed.
"""
import contextlib
import json
import re
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peer import SHAPES, Gpt, fused_adamw, leave, load_deepspeed
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

WARM_UP_STEPS = 3
MEMORY_STEPS = 2


class Batches:
    """This rank's micro-batches, in turns."""

    def __init__(self, folder, shape, micro_batch):
        self.num_used, path = 0, folder / "tokens.bin"
        flat = torch.from_file(str(path), size=path.stat().st_size // 8, dtype=torch.long)
        self.tokens = flat.view(-1, dist.get_world_size(), micro_batch, shape[4] + 1)[:, dist.get_rank()].clone()

    def next(self):
        tokens = self.tokens[self.num_used % len(self.tokens)]
        self.num_used += 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def torch_step(model, optimizer, config, no_sync=contextlib.nullcontext, autocast=False):
    """One step of everything but DeepSpeed."""
    parameters, num_micro_steps = list(model.parameters()), config["gradient_accumulation_steps"]

    def step(batches):
        total = 0.0
        for i in range(num_micro_steps):
            with contextlib.nullcontext() if i + 1 == num_micro_steps else no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(*batches.next())
                (loss / num_micro_steps).backward()
            total += loss.item()
        clip_grad_norm_(parameters, config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        return total / num_micro_steps

    return step


def plain(model, config, bf16):
    return torch_step(model, fused_adamw(model.parameters(), **config["optimizer"]["params"]), config, autocast=bf16)


def ddp(model, config, bf16):
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = fused_adamw(wrapped.parameters(), **config["optimizer"]["params"])
    return torch_step(wrapped, optimizer, config, wrapped.no_sync, bf16)


def zero_redundancy(model, config, bf16):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True,
                                        **config["optimizer"]["params"])
    return torch_step(wrapped, optimizer, config, wrapped.no_sync, bf16)


def fsdp2(model, config, bf16):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch_step(model, fused_adamw(model.parameters(), **config["optimizer"]["params"]), config)


def deepspeed(model, config, bf16):
    optimizer = fused_adamw(model.parameters(), **config.pop("optimizer")["params"])
    if config["zero_optimization"]["stage"] == 0:
        del config["data_types"]  # refused there; gradients are then summed in bf16
    engine, *_ = load_deepspeed().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batches):
        total = 0.0
        for _ in range(config["gradient_accumulation_steps"]):
            loss = engine(*batches.next())
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / config["gradient_accumulation_steps"]

    return step


WAYS = {way.__name__: way for way in (plain, ddp, zero_redundancy, fsdp2, deepspeed)}


def own_mib():
    """This process's memory and its share of what it shares, without files (libraries)."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return sum(int(kib) for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.MULTILINE)) / 1024


def peak_resident_mib():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8")).group(1)) / 1024


def network_bytes():
    """What the interfaces of this host (or network namespace) have received, without the loopback one."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return sum(int(numbers.split()[0]) for name, _, numbers in (line.partition(":") for line in lines) if numbers and name.strip() != "lo")


def peak_mib(body):
    """The largest own_mib() while `body` runs."""
    peak, done = 0.0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, own_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    body()
    done.set()
    thread.join()
    return peak


def main():
    way, folder, size, num_steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    if way == "deepspeed":
        load_deepspeed()
    dist.init_process_group("gloo")
    dist.barrier()
    idle, idle_resident = own_mib(), peak_resident_mib()
    config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    model = Gpt(*SHAPES[size])
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    batches = Batches(folder, SHAPES[size], config["train_micro_batch_size_per_gpu"])
    step = WAYS[way](model, config, config["bf16"]["enabled"])
    losses = [step(batches) for _ in range(WARM_UP_STEPS)]
    dist.barrier()
    step_ms, received_before = [], network_bytes()
    for _ in range(num_steps):
        start = time.perf_counter()
        losses.append(step(batches))
        step_ms.append(1e3 * (time.perf_counter() - start))
    dist.barrier()
    received = network_bytes() - received_before
    peak = peak_mib(lambda: losses.extend(step(batches) for _ in range(MEMORY_STEPS)))
    leave({"step_ms": step_ms, "losses": losses, "received_bytes": received, "mib": peak - idle,
           "resident_mib": peak_resident_mib() - idle_resident})


if __name__ == "__main__":
    main()
