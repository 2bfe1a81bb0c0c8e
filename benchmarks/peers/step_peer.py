"""One rank of a peer: trains the GPT of peer.py in one way after another and reports the times of its steps. The arguments are those of
benchmarks/step_rank.cc, which does the same with Tessera.

    tessera launch -n 2 -- python step_peer.py --device cpu --precision fp32 --ways plain ddp fsdp2 deepspeed_3
    python step_peer.py --layers 12 --dim 768 --heads 12 --micro-batch 16 --ways forward_backward ddp fsdp2 bf16 bf16_compiled

All ways but the first clip at norm 1 and step torch's fused AdamW.

forward_backward         the model in the given precision, no optimizer
plain                    fp32 weights, forward in bf16 under autocast; it does not communicate
ddp                      the same in DistributedDataParallel
zero_redundancy          the same with ZeroRedundancyOptimizer
fsdp2                    fully_shard: in bf16 with bf16 parameters, fp32 reduction and fp32 masters
deepspeed_0 to _3        DeepSpeed's stages
bf16, bf16_compiled      pure bf16 weights, gradients and moments: less memory and other numbers than the rest; with torch.compile

[What a way reports] One JSON line: {"way": name, "step_ms": [...], "forward_ms": [...], "backward_ms": [...], "update_ms": [...], "losses": [...],
"received_bytes": z, "mib": x, "resident_mib": y, "peak_bytes": of the device's tensors}. On the CPU the phases are those of the timed steps. On a
device they are those of further steps, in which each waits for the device, so that their sum is more than a step. losses are those of the warm-up
too, and of the two steps after the timed ones in which memory is sampled (on the CPU). mib is the most that the rank held in these over what it
held before it had a model: private memory and its share of shared memory, libraries left out. resident_mib is how much VmHWM has grown, set-up
included; it counts shared pages in full. A way that fails on a single rank reports {"way": name, "error": line}, and the next ones follow.
"""
import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).resolve().parent))
from peer import Gpt, fused_adamw, load_deepspeed, sharded  # noqa: E402

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIPPING = 1.0
WARM_UP_STEPS, MEMORY_STEPS = 3, 2


# ------------------------------------------------------------------------------------------------- measurement


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


class Idle:
    """The memory of this process before it has a model."""

    def __init__(self):
        self.own, self.resident = own_mib(), peak_resident_mib()


class Training:
    """The phases of a micro-step with optimizers of torch's; the last micro-step of a step updates. `forward(batch)` computes the loss."""

    def __init__(self, model, forward, optimizers, accumulation=1, no_sync=contextlib.nullcontext):
        self.forward, self.optimizers, self.accumulation, self.no_sync = forward, optimizers, accumulation, no_sync
        self.parameters = list(model.parameters())

    def backward(self, loss):
        (loss if self.accumulation == 1 else loss / self.accumulation).backward()

    def update(self, is_last):
        if not is_last:
            return
        if self.optimizers:
            clip_grad_norm_(self.parameters, CLIPPING)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None


class EngineTraining:
    """The same with an engine, DeepSpeed's or Tessera's, which counts micro-steps itself."""
    no_sync = contextlib.nullcontext

    def __init__(self, engine, forward, accumulation=1):
        self.engine, self.forward, self.accumulation = engine, forward, accumulation
        self.backward = engine.backward

    def update(self, _):
        self.engine.step()


class Steps:
    """Runs steps and keeps their losses."""

    def __init__(self, training, batches, device):
        self.training, self.batches, self.device, self.losses = training, batches, device, []

    def run(self, num_steps, waiting=False):
        """The steps' times. `waiting`: each phase waits for the device."""
        times = {f"{name}_ms": [] for name in ("step", "forward", "backward", "update")}
        for _ in range(num_steps):
            for name, ms in self._step(waiting).items():
                times[name].append(ms)
        return times

    def _step(self, waiting):
        ms, losses = {"forward_ms": 0.0, "backward_ms": 0.0, "update_ms": 0.0}, []

        def timed(name, body, *args):
            start = time.perf_counter()
            result = body(*args)
            if waiting:
                self.device.synchronize()
            ms[name] += 1e3 * (time.perf_counter() - start)
            return result

        start = time.perf_counter()
        for i in range(self.training.accumulation):
            is_last = i + 1 == self.training.accumulation
            with contextlib.nullcontext() if is_last else self.training.no_sync():
                loss = timed("forward_ms", self.training.forward, next(self.batches))
                timed("backward_ms", self.training.backward, loss)
            timed("update_ms", self.training.update, is_last)
            losses.append(loss.detach())
        self.device.synchronize()
        ms["step_ms"] = 1e3 * (time.perf_counter() - start)
        self.losses.append(torch.stack(losses).double().mean().item())
        return ms


def measure(training, batches, num_steps, idle, device, barrier=dist.barrier, num_warm_up_steps=WARM_UP_STEPS):
    """What a way reports. Collective."""
    steps = Steps(training, batches, device)
    steps.run(num_warm_up_steps)
    device.reset_peak()
    barrier()
    received_before = network_bytes()
    times = steps.run(num_steps)
    barrier()
    received, peak = network_bytes() - received_before, idle.own
    if device.is_cuda:
        times = {**steps.run((num_steps + 1) // 2, waiting=True), "step_ms": times["step_ms"]}
    else:
        peak = peak_mib(lambda: steps.run(MEMORY_STEPS))
    return {**times, "losses": steps.losses, "received_bytes": received, "mib": peak - idle.own,
            "resident_mib": peak_resident_mib() - idle.resident, "peak_bytes": device.peak_bytes(), **device.description()}


# -------------------------------------------------------------------------------------------------------- ways


def make_model(args, dtype=torch.float32):
    torch.manual_seed(1)
    with torch.device(args.device):
        model = Gpt(args.dim, args.layers, args.heads, args.vocabulary, args.sequence).to(dtype)
    if args.weights:
        from safetensors.torch import load_file
        model.load_state_dict(load_file(args.weights))
    return model


def torch_training(args, model, optimizers=None, autocast=False, **more):
    def forward(batch):
        with torch.autocast(args.device, torch.bfloat16, enabled=autocast):
            return model(*batch)

    if optimizers is None:
        optimizers = [fused_adamw(model.parameters(), **ADAMW)]
    return Training(model, forward, optimizers, args.accumulation, **more)


def data_parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def forward_backward(args):
    return torch_training(args, make_model(args, torch.bfloat16 if args.precision == "bf16" else torch.float32), [])


def plain(args):
    return torch_training(args, make_model(args), autocast=args.precision == "bf16")


def ddp(args):
    model = data_parallel(make_model(args))
    return torch_training(args, model, autocast=args.precision == "bf16", no_sync=model.no_sync)


def zero_redundancy(args):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = data_parallel(make_model(args))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW)
    return torch_training(args, model, [optimizer], args.precision == "bf16", no_sync=model.no_sync)


def fsdp2(args):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.precision == "bf16" else MixedPrecisionPolicy()
    model = make_model(args)
    return torch_training(args, sharded(model, model.blocks, args.device, mp_policy=policy))


def deepspeed(args, stage):
    config = {"train_micro_batch_size_per_gpu": args.micro_batch, "gradient_accumulation_steps": args.accumulation, "gradient_clipping": CLIPPING,
              "bf16": {"enabled": args.precision == "bf16"}, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9}
    if stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # refused at stage 0; gradients are then summed in bf16
    model = make_model(args)
    optimizer = fused_adamw(model.parameters(), **ADAMW)
    engine, *_ = load_deepspeed().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return EngineTraining(engine, lambda batch: engine(*batch), args.accumulation)


def bf16(args):
    return torch_training(args, make_model(args, torch.bfloat16))


def bf16_compiled(args):
    return torch_training(args, torch.compile(make_model(args, torch.bfloat16)))


WAYS = {**{way.__name__: way for way in (forward_backward, plain, ddp, zero_redundancy, fsdp2, bf16, bf16_compiled)},
        **{f"deepspeed_{stage}": lambda args, stage=stage: deepspeed(args, stage) for stage in range(4)}}


# -------------------------------------------------------------------------------------------------------- rank


def read_batches(args):
    """This rank's micro-batches, in turns."""
    if args.tokens:
        flat = torch.from_file(str(args.tokens), size=args.tokens.stat().st_size // 8, dtype=torch.long)
        tokens = flat.view(-1, dist.get_world_size(), args.micro_batch, args.sequence + 1)[:, dist.get_rank()]
    else:
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(args.vocabulary, (1, args.micro_batch, args.sequence + 1), generator=generator)
    return itertools.cycle([(batch[:, :-1].contiguous().to(args.device), batch[:, 1:].contiguous().to(args.device)) for batch in tokens])


def join(device):
    """By the launcher's variables; without them, as a single rank."""
    backend = "nccl" if device.is_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def train(args, way, device):
    try:
        dist.barrier()
        idle = Idle()
        return measure(WAYS[way](args), read_batches(args), args.steps, idle, device, num_warm_up_steps=args.warm_up)
    except Exception as error:  # the other rows are worth having
        if dist.get_world_size() > 1:
            raise
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in (("dim", 768), ("layers", 12), ("heads", 12), ("vocabulary", 50304), ("sequence", 1024), ("micro-batch", 16), ("accumulation", 1)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["forward_backward", "ddp", "fsdp2", "bf16", "bf16_compiled"])
    parser.add_argument("--weights", type=Path, metavar="FILE", help="safetensors (default: random ones)")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="of (batches, ranks, micro-batch, sequence + 1) int64 (default: one random batch)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="timed ones")
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS)
    return parser.parse_args()


def main():
    args = parse_arguments()
    device = Device(args.device)
    if device.is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    if any(way.startswith("deepspeed") for way in args.ways):
        load_deepspeed()
    join(device)
    for way in args.ways:
        report = train(args, way, device)
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
        print(json.dumps({"way": way, **report}), flush=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    os._exit(0)  # without destructors: some wait for NCCL, and after DeepSpeed's stage 3 one sometimes aborts


if __name__ == "__main__":
    main()
