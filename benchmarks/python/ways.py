"""What train_step.py measures: two models as their makers wrote them, and the ways in which a user trains them. A way makes, of a model
and its AdamW, a function step(batch) -> loss that forwards, reduces, clips at norm 1 and updates; and the engine or None."""
import sys
from pathlib import Path

import tessera
import torch
import torch.distributed as dist
import torchvision
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from peer import fused_adamw, load_deepspeed  # noqa: E402

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIPPING, MICRO_BATCH = 1.0, {"gpt2": 1, "resnet18": 4}
STAGES = range(4)


# ------------------------------------------------------------------------------------------------------ models


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=8192, n_positions=128, n_embd=256, n_layer=6, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0))


def resnet18():
    return torchvision.models.resnet18(num_classes=10)


MODELS = {"gpt2": gpt2, "resnet18": resnet18}


def blocks(model):
    """What FSDP2 shards one by one."""
    if isinstance(model, transformers.GPT2LMHeadModel):
        return list(model.transformer.h)
    return [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]


def batch_of(model, rank, i):
    generator = torch.Generator().manual_seed(1000 * rank + i)
    if model == "gpt2":
        return torch.randint(8192, (MICRO_BATCH[model], 128), generator=generator)
    size = MICRO_BATCH[model]
    return torch.randn(size, 3, 64, 64, generator=generator), torch.randint(10, (size,), generator=generator)


def loss_of(model, batch):
    if isinstance(batch, torch.Tensor):
        return model(input_ids=batch, labels=batch).loss
    return functional.cross_entropy(model(batch[0]), batch[1])


# -------------------------------------------------------------------------------------------------------- ways


def torch_step(model, optimizer):
    parameters = list(model.parameters())

    def step(batch):
        loss = loss_of(model, batch)
        loss.backward()
        clip_grad_norm_(parameters, CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, None


def ddp(model):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(wrapped, fused_adamw(model.parameters(), **ADAMW))


def fsdp2(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, fused_adamw(model.parameters(), **ADAMW))


def engine_step(engine):
    def step(batch):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, engine


def settings(stage, micro_batch):
    return {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9}


def deepspeed(model, stage, micro_batch):
    optimizer = fused_adamw(model.parameters(), **ADAMW)
    engine, *_ = load_deepspeed().initialize(model=model, optimizer=optimizer, config=settings(stage, micro_batch), dist_init_required=False)
    return engine_step(engine)


def own(model, stage, micro_batch):
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = tessera.initialize(model=model, optimizer=optimizer, config=settings(stage, micro_batch))
    return engine_step(engine)


def rows(with_deepspeed):
    """{name: (backend of Tessera or None, make(model, micro batch))}."""
    found = {"DDP": (None, lambda model, _: ddp(model)), "FSDP2": (None, lambda model, _: fsdp2(model))}
    if with_deepspeed:
        for stage in STAGES:
            found[f"DeepSpeed stage {stage}"] = (None, lambda model, size, stage=stage: deepspeed(model, stage, size))
    for backend in ("shm", "gloo"):
        for stage in STAGES:
            found[f"Tessera stage {stage}, {backend}"] = (backend, lambda model, size, stage=stage: own(model, stage, size))
    return found
