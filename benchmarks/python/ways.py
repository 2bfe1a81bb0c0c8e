"""What train_step.py measures: two models as their makers wrote them, and the ways in which a user trains them. A way makes, of a model
and its optimizer (OPTIMIZER), a Training or EngineTraining of step_peer.py, which forwards, reduces, clips at norm 1 and updates."""
import contextlib
import sys
from pathlib import Path

import tessera
import torch
import torchvision
import transformers
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from peer import fused_adamw, load_deepspeed, sharded  # noqa: E402
from step_peer import ADAMW, CLIPPING, EngineTraining, Training, data_parallel  # noqa: E402

MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01}
OPTIMIZER = "AdamW"  # or "Muon": with AdamW for embeddings and vectors, of the same parameters in all ways
MICRO_BATCH = {"gpt2": 1, "resnet18": 4}
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


def is_matrix(name, parameter):
    """Whether Muon updates it: Tessera's rule."""
    return parameter.ndim >= 2 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head"))


@contextlib.contextmanager
def flattened(parameters):
    """Filters of convolutions as matrices, a filter a row: torch's Muon takes no others. Their gradients are dropped at the end."""
    shapes = [(p, p.shape) for p in parameters if p.ndim > 2]
    for p, _ in shapes:
        p.data, p.grad = p.data.flatten(1), None if p.grad is None else p.grad.flatten(1)
    yield
    for p, shape in shapes:
        p.grad = None
        p.data = p.data.view(shape)


class FlatMuon(torch.optim.Muon):
    def step(self, closure=None):
        with flattened([p for group in self.param_groups for p in group["params"]]):
            super().step(closure)


def flat_muon(parameters):
    with flattened(parameters):
        return FlatMuon(parameters, **MUON)


def client_optimizers(model):
    if OPTIMIZER == "AdamW":
        return [fused_adamw(model.parameters(), **ADAMW)]
    named = list(model.named_parameters())
    return [flat_muon([p for name, p in named if is_matrix(name, p)]), fused_adamw([p for name, p in named if not is_matrix(name, p)], **ADAMW)]


def torch_training(model, optimizers):
    return Training(model, lambda batch: loss_of(model, batch), optimizers)


def ddp(model):
    return torch_training(data_parallel(model), client_optimizers(model))


def fsdp2(model):
    return torch_training(sharded(model, blocks(model)), client_optimizers(model))


def engine_training(engine):
    return EngineTraining(engine, lambda batch: loss_of(engine, batch))


def settings(stage, micro_batch, more=None):
    return {**(more or {}), "train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9}


def muon_section(**more):
    """The configuration's `optimizer`, in DeepSpeed's keys."""
    return {"optimizer": {"type": "Muon", "params": {"lr": MUON["lr"], "momentum": MUON["momentum"], "weight_decay": MUON["weight_decay"], "adam_lr": ADAMW["lr"],
                                                     "betas": ADAMW["betas"], "eps": ADAMW["eps"], "ns_method": "standard", **more}}}


def deepspeed(model, stage, micro_batch):
    library = load_deepspeed()
    if OPTIMIZER == "AdamW":
        given, more = {"optimizer": fused_adamw(model.parameters(), **ADAMW)}, {}
    else:
        def mark(_, marked):  # in place of its own, which takes wte and wpe for matrices
            for name, parameter in marked.named_parameters():
                parameter.use_muon = is_matrix(name, parameter)

        library.set_optimizer_flags = mark
        given, more = {"model_parameters": model.parameters()}, muon_section(torch_adam=True)  # its own AdamW would have to be compiled
    config = settings(stage, micro_batch, more)
    if OPTIMIZER == "Muon" and stage == 3:
        config["zero_optimization"]["reduce_scatter"] = False  # with it, it is an error there
    engine, *_ = library.initialize(model=model, **given, config=config, dist_init_required=False)
    return engine_training(engine)


def own(model, stage, micro_batch):
    if OPTIMIZER == "AdamW":
        given, more = {"optimizer": torch.optim.AdamW(model.parameters(), **ADAMW)}, {}
    else:
        given, more = {}, muon_section()
    engine, *_ = tessera.initialize(model=model, **given, config=settings(stage, micro_batch, more))
    return engine_training(engine)


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
