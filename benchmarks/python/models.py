"""DDP, FSDP2, DeepSpeed and Tessera: two models as their makers wrote them, and the ways in which a user trains them.

GPT-2 of transformers (7 million parameters, 128 tokens) and ResNet18 of torchvision (11 million, 4 images of 64 x 64), in fp32 on the
CPU with one thread a rank, AdamW and clipping at norm 1. Peers have torch's fused AdamW and their default settings, but for views into
buckets in DDP, which are faster. On a busy machine compare the minima.

min, median  ms of a step of the slowest rank, over all rounds
ratio        of the minimum to DDP's
MiB          the most a rank holds in a step, over what it held before it had a model: private memory and its share of shared
             memory, libraries left out; the mean over the ranks, and the median of the rounds
layer        the part of a step that is in Tessera's Python code: neither in C++ nor in the module's forward. The smallest of all steps
loss         the largest difference to DDP's loss (mean over the ranks) in any step. AdamW and batch norm over few samples make last
             bits large in ResNet18: tests/python/programs/ddp_rank.py compares it properly
"""
import contextlib
import gc
import statistics
import sys
from pathlib import Path

import forked
import layer
import tessera
import torch
import torchvision
import transformers
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import results  # noqa: E402
import step_peer  # noqa: E402
from peer import fused_adamw, load_deepspeed, sharded  # noqa: E402
from step_peer import ADAMW, CLIPPING, EngineTraining, Training, data_parallel  # noqa: E402

DOCUMENT, COMMAND = "performance.md", "make bench-python"
LAYER_STEPS = 3
COLUMNS = [("min", "min", ".1f"), ("median", "median", ".1f"), ("ratio", "ratio", ".3f"), ("MiB", "mib", ".0f"), ("layer ms", "layer_ms", ".2f"),
           ("layer %", "layer_percent", ".2f"), ("loss", "loss", ".1e")]
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


# ------------------------------------------------------------------------------------------------- measurement


def add_arguments(parser):
    parser.add_argument("--steps", type=int, default=6, help="timed ones, in each round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--optimizer", choices=("AdamW", "Muon"), default=OPTIMIZER, help="Muon: of matrices, and AdamW of the rest")


def is_special(args):
    return args.optimizer != OPTIMIZER


def rows(args, with_deepspeed):
    """{name: (model, backend of Tessera or None, make(model, micro batch))}."""
    global OPTIMIZER
    OPTIMIZER = args.optimizer
    found = {"DDP": (None, lambda model, _: ddp(model)), "FSDP2": (None, lambda model, _: fsdp2(model))}
    if with_deepspeed:
        for stage in STAGES:
            found[f"DeepSpeed stage {stage}"] = (None, lambda model, size, stage=stage: deepspeed(model, stage, size))
    for backend in ("shm", "gloo"):
        for stage in STAGES:
            found[f"Tessera stage {stage}, {backend}"] = (backend, lambda model, size, stage=stage: own(model, stage, size))
    return {f"{model} {name}": (model, *row) for model in MODELS for name, row in found.items()}


def join(backend):
    """Returns the barrier of the group that a row uses."""
    if backend:
        tessera.comm.init_distributed(backend=backend, timeout_s=60)
        return lambda: tessera.comm.barrier("benchmark")
    torch.distributed.init_process_group("gloo")
    return torch.distributed.barrier


def measure(args, model_name, backend, make):
    """One row in one round."""
    def body(rank):
        barrier = join(backend)
        gc.collect()  # touches what the fork has left shared, before memory is read
        barrier()
        idle = step_peer.Idle()
        torch.manual_seed(1)
        model = MODELS[model_name]()
        num_batches = step_peer.WARM_UP_STEPS + args.steps + step_peer.MEMORY_STEPS + LAYER_STEPS
        batches = iter([batch_of(model_name, rank, i) for i in range(num_batches)])
        training = make(model, MICRO_BATCH[model_name])
        report = step_peer.measure(training, batches, args.steps, idle, step_peer.Device("cpu"), barrier)
        report["layer"] = layer.layer_ms(training.engine, loss_of, batches) if backend else []
        barrier()
        return report

    reports = forked.run(args.ranks, body)
    layers = [[round(part, 4), round(whole, 3)] for report in reports for part, whole in report["layer"]]
    return {**results.joined(reports, means=("mib",)), "layer": layers}


def summary(rounds, reference):
    """A row of the table."""
    fastest = results.minimum(rounds)
    parts = [part for measured in rounds for part, _ in measured["layer"]]
    return {"min": fastest, "median": results.median(rounds), "ratio": fastest / results.minimum(reference) if reference else None,
            "mib": statistics.median(measured["mib"] for measured in rounds), "layer_ms": min(parts) if parts else None,
            "layer_percent": 100 * min(parts) / fastest if parts else None, "loss": results.largest_difference(rounds, reference)}


def tables(args, measured):
    """(title, what it is of, rows)"""
    for model in MODELS:
        found = {name.removeprefix(f"{model} "): rounds for name, rounds in measured.items() if name.startswith(f"{model} ")}
        if not found:
            continue
        results.check_first_losses(found)
        yield (model, f"{args.ranks} ranks, fp32, {args.optimizer}; {args.rounds} rounds of {args.steps} steps, in turns.",
               {name: summary(rounds, found.get("DDP")) for name, rounds in found.items()})
