"""One script trains each model by torch.nn.parallel.DistributedDataParallel over gloo and by Tessera at every stage, on the same ranks.

    ddp_rank.py BACKEND quick|full [PRECISION_MODEL...]        such as fp32_gpt2 or autocast_resnet18; all by default

fp32     losses of every step and weights under SGD: within 1e-5
adamw    losses and gradient norms under AdamW with clipping: within 1e-5 (weights: AdamW blows up the rounding noise of gradients that are zero)
autocast weights in fp32, operators in bf16 under torch.autocast
bf16     weights in bf16, masters and their update in fp32, gradients summed in fp32

[Note: tolerance in bf16] Where operators round to 8 bits no fixed number says what is right. But the order of a sum is free: with the
samples of a micro-batch in another order DDP computes the same function, and ends elsewhere. So DDP is run three more times, with noise
of one last bit in the fp32 weights at the start, twice also in another order (a micro-batch of one sample has none); and Tessera may be no
further from DDP than twice what DDP is from itself, or than fp32's limit where that is more. (Twice: a fourth such run of DDP would exceed
the largest of three in one of four cases.) The same holds for models that are marked "ill_conditioned" in fp32 or under AdamW, where
batch norm or a bf16 base makes a last bit large.

[Note: DDP's norm] clip_grad_norm_ sums squares in fp32: of GPT-2's 124 million gradients that is 5e-5 off in the first step, where all
weights are equal, and AdamW carries it on. So DDP's gradients are clipped here with a norm that is summed in fp64.

Between stages the losses' bits are compared. Prints a JSON line for each case on rank 0.
"""
import copy
import json
import os
import sys
from pathlib import Path

import ddp_models
import tessera
import torch
import torch.distributed as dist
from checks import STAGES, config, largest_difference, main
from checks import check as _check
from tessera.comm import get_rank as rank
from tessera.comm import get_world_size as world
from tessera.containers import map_tensors
from torch.nn.parallel import DistributedDataParallel

STEPS, LIMIT, LAST_BIT = 4, 1e-5, 2.0**-24
CLIPPING = 0.5
SECTIONS = {"fp32": {}, "adamw": {"gradient_clipping": CLIPPING}, "autocast": {"torch_autocast": {"enabled": True}},
            "bf16": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}}  # as .to(bfloat16) converts them


def optimizer_of(parameters, precision, rate):
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if precision == "adamw":
        return torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.1)
    return torch.optim.SGD(trainable, lr=rate, momentum=0.9)


def mean(loss):
    values = tessera.comm.all_gather(loss.item())
    return sum(values) / len(values)


# --------------------------------------------------------------------------------------------------------- DDP


def summed_in_fp32(gradients, bucket):
    """A hook for DDP that sums a bucket of bf16 in fp32, keeps the sums by parameter and gives DDP their bf16."""
    flat = bucket.buffer()
    wide = flat.float().div_(world())
    work = dist.all_reduce(wide, async_op=True)

    def take(future):
        offset = 0
        for parameter in bucket.parameters():
            gradients[parameter] = wide[offset:offset + parameter.numel()].view(parameter.shape).clone()
            offset += parameter.numel()
        return wide.to(flat.dtype)

    return work.get_future().then(take)


def narrow(tensor):
    """Floating tensors as bf16."""
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def clip(model):
    """As clip_grad_norm_, see [Note: DDP's norm]. Returns the norm."""
    norm = sum(parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIPPING, norm)
    return norm.item()


def train_by_ddp(model, batches, loss_of, precision, rate, unused):
    """Losses, gradient norms, and the state with fp32 weights. In bf16 the masters are the optimizer's parameters."""
    masters = {}
    if precision == "bf16":
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                masters[name] = torch.nn.Parameter(parameter.detach().clone())
        model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
    gradients = {}
    if precision == "bf16":
        wrapped.register_comm_hook(gradients, summed_in_fp32)
    optimizer = optimizer_of(masters.values() if masters else model.parameters(), precision, rate)
    losses, norms = [], []
    for batch in batches:
        mine = map_tensors(batch[rank()], narrow) if masters else batch[rank()]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = loss_of(wrapped, mine)
        loss.backward()
        for name, parameter in model.named_parameters():
            if name in masters:
                masters[name].grad = gradients.get(parameter)
        if precision == "adamw":
            norms.append(clip(model))
        optimizer.step()
        if masters:
            with torch.no_grad():
                for name, master in masters.items():
                    model.get_parameter(name).copy_(master)
        wrapped.zero_grad()
        gradients.clear()
        losses.append(mean(loss))
    state = {name: value.detach().float() for name, value in model.state_dict().items()}
    state.update({name: master.detach() for name, master in masters.items()})
    return losses, norms, state


# ----------------------------------------------------------------------------------------------------- Tessera


def train_by_tessera(model, batches, loss_of, precision, rate, stage):
    engine, *_ = tessera.initialize(model=model, optimizer=optimizer_of(model.parameters(), precision, rate),
                                    config=config(stage, max(2000, sum(p.numel() for p in model.parameters()) // 20), **SECTIONS[precision]))
    losses, norms = [], []
    for batch in batches:
        mine = map_tensors(batch[engine.global_rank], narrow) if precision == "bf16" else batch[engine.global_rank]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):  # the loss too: DDP's is inside of its autocast
            loss = loss_of(engine, mine)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
        norms.append(engine.get_global_grad_norm())
    state = {name: value.float() for name, value in engine.state_dict().items()}
    if precision == "bf16":
        state.update({name: engine.full_parameter(name).cpu() for name, _ in engine.named_tensors})
    return losses, norms if precision == "adamw" else [], state


# -------------------------------------------------------------------------------------------------- comparison


def apart(ours, theirs):
    """Largest differences of losses, norms (relative) and weights. Buffers are compared on rank 0, whose values are the model's."""
    losses = largest_difference(ours[0], theirs[0])
    norms = max([abs(a - b) / b for a, b in zip(ours[1], theirs[1])], default=0.0)
    parameters, buffers = ours[3]
    names = parameters + (buffers if rank() == 0 else [])
    weights = max(((ours[2][name] - theirs[2][name]).abs() / theirs[2][name].abs().clamp(min=1)).max().item() for name in names
                  if theirs[2][name].numel() > 0)
    return {"loss": losses, "norm": norms, "weights": weights}


def compare(make, batch_of, loss_of, options, precision, name):
    rate = options.get("rate", 0.05)
    batches = [[batch_of(step * world() + r) for r in range(world())] for step in range(STEPS)]
    torch.manual_seed(0)
    start = make()
    state = start.state_dict()
    names = [name for name, _ in start.named_parameters()], [name for name, _ in start.named_buffers() if name in state]

    def ddp(these, noise=0.0, seed=0):
        model, generator = copy.deepcopy(start), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
        return train_by_ddp(model, these, loss_of, precision, rate, options.get("unused", False))

    reference = ddp(batches)
    limit = {"loss": LIMIT, "norm": LIMIT, "weights": LIMIT}
    if precision in ("bf16", "autocast") or precision in options.get("ill_conditioned", ()):  # [Note: tolerance in bf16]
        orders = [[[ddp_models.reordered(batch, turn) for batch in step] for step in batches] for turn in (1, 2)]
        spreads = [apart((*ddp(order, LAST_BIT, seed), names), reference) for seed, order in enumerate((batches, *orders), 1)]
        limit = {key: max(LIMIT, *(2 * max(tessera.comm.all_gather(spread[key])) for spread in spreads)) for key in limit}
    if precision == "adamw":
        limit["weights"] = float("inf")
    found, bits = {}, {}
    for stage in STAGES:
        model = copy.deepcopy(start)
        ours = train_by_tessera(model, batches, loss_of, precision, rate, stage)
        bits[stage] = ours[0]
        found[stage] = apart((*ours, names), reference)
        del model
        assert all(found[stage][key] <= limit[key] for key in limit), f"stage {stage}: {found[stage]}, expected at most {limit}"
    same = STAGES if tessera.comm.group().backend in ("self", "shm") or world() == 2 else STAGES[1:]
    assert all(bits[stage] == bits[same[0]] for stage in same), bits
    if rank() == 0:
        largest = {key: max(row[key] for row in found.values()) for key in limit}
        print(json.dumps({"model": name, "precision": precision, "world": world(), "backend": tessera.comm.group().backend,
                          "apart": largest, "limit": limit, "same_bits": list(same)}).replace("Infinity", "null"), flush=True)


for _precision in SECTIONS:
    for _name, _case in getattr(ddp_models, sys.argv[2])().items():
        if _precision in _case[3].get("not_in", ()):
            continue

        def _run(case=_case, precision=_precision, name=_name):
            compare(*case, precision, name)
        _run.__name__ = f"{_precision}_{_name}"
        _check(_run)


def join_torch():
    """torch.distributed's group for DDP, as scripts make it: before Tessera's, which takes another port then."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{Path.cwd() / 'torch_group'}", rank=0, world_size=1)


if __name__ == "__main__":
    del sys.argv[2]
    join_torch()
    main()
    dist.destroy_process_group()
