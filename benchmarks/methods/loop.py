"""What all of Python's ways share: the recipe (model, optimizer, schedule, data) and a training loop as users write it."""
import contextlib
import fnmatch
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from reviews import PAD, Order, Reviews
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from peer import fused_adamw  # noqa: E402


class Run:
    """One run of a recipe: a configuration of the command's as plain JSON (methods.py writes it). Data are read when first asked for."""

    def __init__(self, recipe_file, weights_file):
        self.recipe = json.loads(Path(recipe_file).read_text(encoding="utf-8"))
        self.weights_file = weights_file
        self.batch_size, self.trainer = self.recipe["train_batch_size"], self.recipe["trainer"]
        self.clipping = self.recipe["gradient_clipping"]
        transformers.logging.set_verbosity_error()

    @property
    def rank(self):
        return int(os.environ.get("RANK", 0))

    @property
    def world(self):
        return int(os.environ.get("WORLD_SIZE", 1))

    @functools.cached_property
    def reviews(self):
        return Reviews(self.recipe["data"])

    @property
    def steps_per_epoch(self):
        return len(self.reviews.parts["train"]) // self.batch_size

    @property
    def total_steps(self):
        return self.trainer.get("max_steps") or self.trainer["epochs"] * self.steps_per_epoch

    @property
    def num_epochs(self):
        return -(-self.total_steps // self.steps_per_epoch)

    def model(self):
        """With the weights every method starts from. From here on ranks draw different numbers, for dropout."""
        model = bert(self.recipe, self.reviews)
        model.load_state_dict(load_file(self.weights_file))
        torch.manual_seed(self.recipe["seed"] + self.rank)
        return model.train()

    def optimizer(self, model):
        params = self.recipe["optimizer"]["params"]
        groups = [{"params": [], **{key: value for key, value in group.items() if key != "match"}}
                  for group in self.recipe["optimizer"].get("param_groups", [])] + [{"params": []}]
        matches = [group["match"] for group in self.recipe["optimizer"].get("param_groups", [])]
        for name, parameter in model.named_parameters():
            place = next((i for i, patterns in enumerate(matches) if any(fnmatch.fnmatchcase(name, p) for p in patterns)), -1)
            groups[place]["params"].append(parameter)
        return fused_adamw([group for group in groups if group["params"]], **params)

    def schedule(self, optimizer):
        """DeepSpeed's WarmupDecayLR, linear, as the command has it: the first step's rate is 0."""
        warmup = self.recipe["scheduler"]["params"]["warmup_num_steps"]

        def factor(num_steps):
            count = num_steps - 1
            if count < warmup:
                return max(0, count) / warmup
            return max(0.0, (self.total_steps - count) / max(1, self.total_steps - warmup))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def order(self, rank, world):
        return Order(len(self.reviews.parts["train"]), self.batch_size, self.recipe["seed"], self.num_epochs, rank, world)

    def loader(self):
        """Of this rank's slices of the global batches."""
        return DataLoader(self.reviews.parts["train"], batch_size=self.batch_size // self.world, sampler=self.order(self.rank, self.world),
                          collate_fn=self.reviews.collate)


def bert(recipe, reviews):
    """Hugging Face's model, initialised by itself, under the command's names and defaults."""
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "type_vocab_size": 2,
             **{key: value for key, value in recipe["model"].items() if key != "type"}}
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    shape.setdefault("classifier_dropout", shape.get("hidden_dropout_prob", 0.1))
    torch.manual_seed(recipe["seed"])
    return BertForSequenceClassification(BertConfig(**{"vocab_size": len(reviews.tokens), "num_labels": len(reviews.options["labels"]),
                                                       "pad_token_id": PAD, **shape}))


@dataclass
class Way:
    """What the loop needs of a way."""
    model: Any  # to evaluate
    step: Callable  # batch -> loss, detached: forward, backward, update
    save: Callable  # (path): a checkpoint to resume from
    load: Callable  # (path): its weights
    loader: Any  # this rank's batches of an epoch
    order: Order  # of the loader, also if a wrapper is around it
    autocast: bool = False


class Losses:
    """The mean over steps and ranks, at the steps at which the command reports it."""

    def __init__(self, run):
        self.every, self.windows, self.sum, self.count = run.recipe["steps_per_print"], [], torch.zeros(()), 0

    def add(self, loss):
        self.sum += loss
        self.count += 1
        if self.count == self.every:
            if dist.is_initialized():
                dist.all_reduce(self.sum)
                self.sum /= dist.get_world_size()
            self.windows.append(self.sum.item() / self.count)
            self.sum, self.count = torch.zeros(()), 0


def accuracy(run, way, part):
    """Over all ranks, each sample once."""
    counts = torch.zeros(2, dtype=torch.float64)
    way.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
        for batch in run.reviews.eval_loader(part, run.trainer["eval_batch_size"], run.rank, run.world):
            labels = batch.pop("labels")
            counts += torch.tensor([(way.model(**batch).logits.argmax(-1) == labels).sum(), len(labels)])
    way.model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train(run, way):
    """The result of a row. Evaluations and checkpoints are not in train_s, as in the command's train_runtime."""
    folder = Path(run.trainer["output_dir"])
    losses, validation, train_s, steps_left = Losses(run), [], 0.0, run.total_steps
    for epoch in range(run.num_epochs):
        start = time.perf_counter()
        way.order.set_epoch(epoch)
        for batch in way.loader:
            losses.add(way.step(batch))
            steps_left -= 1
            if steps_left == 0:
                break
        train_s += time.perf_counter() - start
        validation.append(accuracy(run, way, "validation"))
        way.save(folder / f"epoch_{epoch}")
    way.load(folder / f"epoch_{validation.index(max(validation))}")
    return {"train_s": train_s, "validation_accuracy": max(validation), "test_accuracy": accuracy(run, way, "test"),
            "losses": losses.windows}


def autocast_if(enabled):
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()
