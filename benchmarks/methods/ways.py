"""Python's ways to train, a function each.

    python ways.py WAY RECIPE WEIGHTS      RECIPE: a configuration as plain JSON; WEIGHTS: what every method starts from
    torchrun --nproc-per-node 2 ways.py WAY RECIPE WEIGHTS
    python ways.py initial_weights RECIPE WEIGHTS      makes them, and prints the vocabulary's hash

Rank 0 prints the result as one JSON line (loop.train).
"""
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loop import Run, Way, autocast_if, bert, train
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from peer import leave, load_deepspeed  # noqa: E402


def plain(run, wrap=lambda model: model, autocast=False):
    """What one process does, and each of many with its model wrapped."""
    model = run.model()
    wrapped, optimizer, loader = wrap(model), run.optimizer(model), run.loader()
    schedule = run.schedule(optimizer)

    def step(batch):
        with autocast_if(autocast):
            loss = wrapped(**batch).loss.mean()  # of DataParallel's replicas; there it is a vector
        loss.backward()
        clip_grad_norm_(model.parameters(), run.clipping)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    def save(path):
        if run.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, path)
        if dist.is_initialized():
            dist.barrier()

    def load(path):
        model.load_state_dict(torch.load(path)["model"])

    return train(run, Way(model, step, save, load, loader, loader.sampler, autocast))


def single(run):
    return plain(run)


def data_parallel(run):
    """Without GPUs it calls the module it wraps, in this process."""
    return plain(run, torch.nn.DataParallel)


DDP_OPTIONS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}


def distributed(model):
    return torch.nn.parallel.DistributedDataParallel(model, **DDP_OPTIONS)


def ddp(run):
    dist.init_process_group("gloo")
    return plain(run, distributed)


def ddp_amp(run):
    dist.init_process_group("gloo")
    return plain(run, distributed, autocast=True)


def ddp_spawn(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (run, 2, port), nprocs=2)


def spawned(rank, run, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    finish(ddp(run))


def accelerate(run):
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS)])
    order = run.order(0, 1)  # of all samples: prepare() deals batches out to the ranks
    loader = torch.utils.data.DataLoader(run.reviews.parts["train"], batch_size=run.batch_size // run.world, sampler=order, drop_last=True,
                                         collate_fn=run.reviews.collate)
    model = run.model()
    optimizer = run.optimizer(model)
    schedule = run.schedule(optimizer)  # not prepared: it would step once for every rank
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), run.clipping)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    def save(path):
        accelerator.save_state(str(path))
        accelerator.wait_for_everyone()

    return train(run, Way(accelerator.unwrap_model(model), step, save, lambda path: accelerator.load_state(str(path)), loader, order))


def deepspeed(run):
    library = load_deepspeed()
    dist.init_process_group("gloo")
    model, loader = run.model(), run.loader()
    schedule = {**run.recipe["scheduler"], "params": {**run.recipe["scheduler"]["params"], "total_num_steps": run.total_steps}}
    engine, *_ = library.initialize(model=model, optimizer=run.optimizer(model), dist_init_required=False, config={
        "train_batch_size": run.batch_size, "gradient_clipping": run.clipping, "scheduler": schedule, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2}})

    def step(batch):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def save(path):
        engine.save_checkpoint(str(path))

    return train(run, Way(engine.module, step, save, lambda path: engine.load_checkpoint(str(path)), loader, loader.sampler))


def hf_trainer(run):
    from transformers import Trainer, TrainerCallback, TrainingArguments
    parts, trainer, seconds = run.reviews.parts, run.trainer, []

    class Clock(TrainerCallback):
        """Epochs without the evaluations and checkpoints between them."""
        def on_epoch_begin(self, *_, **__):
            seconds.append(-time.perf_counter())

        def on_epoch_end(self, *_, **__):
            seconds[-1] += time.perf_counter()

    class SameOrder(Trainer):
        def _get_train_sampler(self, _=None):
            return run.order(0, 1)  # it deals batches out to the ranks

    arguments = TrainingArguments(
        output_dir=trainer["output_dir"], use_cpu=True, seed=run.recipe["seed"], report_to="none", disable_tqdm=True,
        per_device_train_batch_size=run.batch_size // run.world, max_grad_norm=run.clipping,
        per_device_eval_batch_size=trainer["eval_batch_size"],
        max_steps=trainer.get("max_steps", -1), num_train_epochs=trainer.get("epochs", 1),
        logging_steps=run.recipe["steps_per_print"], eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="accuracy", ddp_find_unused_parameters=False, ddp_broadcast_buffers=False,
        # Otherwise the loss is multiplied by the number of ranks, for models that divide it by all ranks' items. BERT does not.
        average_tokens_across_devices=False)
    model = run.model()
    optimizer = run.optimizer(model)
    job = SameOrder(model, arguments, data_collator=lambda samples: run.reviews.collate(samples), train_dataset=parts["train"],
                    eval_dataset=parts["validation"], callbacks=[Clock()], optimizers=(optimizer, run.schedule(optimizer)),
                    compute_metrics=lambda outputs: {"accuracy": (outputs.predictions.argmax(-1) == outputs.label_ids).mean().item()})
    job.train()
    return {"train_s": sum(seconds), "validation_accuracy": job.state.best_metric,
            "test_accuracy": job.evaluate(parts["test"])["eval_accuracy"],
            "losses": [entry["loss"] for entry in job.state.log_history if "loss" in entry]}


def initial_weights(run):
    from safetensors.torch import save_file
    save_file(bert(run.recipe, run.reviews).state_dict(), run.weights_file)
    vocabulary = "".join(token + "\n" for token in run.reviews.tokens)
    return {"vocab_sha256": hashlib.sha256(vocabulary.encode()).hexdigest()}


WAYS = {way.__name__: way for way in (single, data_parallel, ddp, ddp_amp, ddp_spawn, accelerate, deepspeed, hf_trainer, initial_weights)}


def finish(result):
    if dist.is_initialized():
        leave(result if dist.get_rank() == 0 else None)
    elif result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    finish(WAYS[sys.argv[1]](Run(sys.argv[2], sys.argv[3])))
