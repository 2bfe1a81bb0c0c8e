"""Checkpoints of trainers, written by Accelerate, transformers' Trainer and torch, compared with what torch loads from them.

Lightning is no requirement of ours: its files are written in its layout.
"""
import argparse
import io
import json
import math
import shutil
import tempfile
import time
import unittest
import warnings
from collections import Counter, OrderedDict
from contextlib import redirect_stdout
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from trainers_testing import TrainersTest, decoded

warnings.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.fc = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.fc2 = nn.Linear(7, 6)
        self.register_buffer("places", torch.arange(5))

    def forward(self, x):
        return self.fc2(self.norm(self.fc(self.embed(x))))


def trained(make=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), steps=3, model=None):
    torch.manual_seed(0)
    model = model or Model()
    optimizer = make(model)
    for _ in range(steps):
        model(torch.randint(0, 11, (5,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def decay_groups(model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
                              {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}], lr=1e-2)


def by_name(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def order_of(model):
    return [name for name, _ in model.named_parameters()]


class Files(TrainersTest):
    """What programs write with torch.save."""

    def save(self, state, **options):
        path = self.folder / "checkpoint.pt"
        torch.save(state, path, **options)
        return path

    def assert_is(self, found, model, optimizer):
        self.assert_same(found.entries(), model.state_dict())
        self.assertEqual(found.names, order_of(model))
        self.assert_states(found, by_name(model, optimizer))

    def saved_and_read(self, model, optimizer, **more):
        found = self.read("trainer", self.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}))
        self.assert_is(found, model, optimizer)
        return found

    def test_usual_keys(self):
        model, optimizer = trained()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for keys in (("model", "optimizer", "scheduler", "step"), ("state_dict", "optim", "lr_scheduler", "iteration"), ("net", "optimizer", "scheduler", "step"),
                     ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "global_step")):
            for legacy in (False, True):
                state = dict(zip(keys, (model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), 3), strict=True))
                found = self.read("trainer", self.save({**state, "epoch": 1, "args": {"lr": 0.1, "name": "run"}},
                                                       _use_new_zipfile_serialization=not legacy))
                self.assert_is(found, model, optimizer)
                self.assertEqual(sorted(found.buffers), ["norm.num_batches_tracked", "norm.running_mean",
                                                         "norm.running_var", "places"])
                self.assertEqual((found["global_steps"], found["lr_scheduler"]["step_size"], found["optimizer"]), (3, 2, "AdamW"))
                self.assertEqual(found["client_state"], {"epoch": 1, "args": {"lr": 0.1, "name": "run"}, keys[3]: 3})
                self.assertEqual(found["groups"][0]["betas"], [0.9, 0.999])
                self.assert_all_read(found)

    def test_the_weights_alone_under_a_key(self):
        model = Model()
        state = model.state_dict()
        for more in ({}, {"ema": dict(state)}, {"optimizer": None}, {"scaler": {}}, {"best": torch.tensor(1.0)}):
            for key in ("model", "state_dict", "params"):
                found = self.read("trainer", self.save({key: state, **more}))
                self.assert_same(found.entries(), state)
                self.assertEqual(any("ema" in line for line in found["not_read"]), "ema" in more, found["not_read"])
        order = [f"model.{name}" for name in order_of(model)]  # of a model that has a part of this name
        self.assertIsNone(self.ask("trainer", self.save({"model": state}), order=order))

    def test_optimizers(self):
        for name, make in {"SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
                           "Adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
                           "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
                           "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.1),
                           "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
                           "Adadelta": lambda m: torch.optim.Adadelta(m.parameters())}.items():
            self.assertEqual(self.saved_and_read(*trained(make))["optimizer"], name)

    def test_names_of_the_optimizers_own(self):
        self.saved_and_read(*trained(lambda m: torch.optim.AdamW(list(m.named_parameters())[::-1])))

    def test_two_groups(self):
        found = self.saved_and_read(*trained(decay_groups))
        self.assertEqual({name: found.groups[name] for name in ("embed.weight", "fc.bias")}, {"embed.weight": 0, "fc.bias": 1})

    def test_two_optimizers_of_one_model(self):
        model, first = trained(lambda m: torch.optim.SGD(m.embed.parameters(), lr=0.1, momentum=0.9))
        rest = [p for name, p in model.named_parameters() if not name.startswith("embed")]
        _, second = trained(lambda m: torch.optim.AdamW(rest), model=model)
        found = self.read("trainer", self.save({"model": model.state_dict(),
                                                "optimizers": [first.state_dict(), second.state_dict()]}))
        self.assert_states(found, {**by_name(model, first), **by_name(model, second)})
        self.assertEqual(len(found["groups"]), 2)

    def test_frozen_parameters(self):
        model = Model()
        model.embed.requires_grad_(False)
        found = self.saved_and_read(*trained(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]), model=model))
        self.assertEqual(found.frozen, {"embed.weight"})

    def test_wrappers_prefixes(self):
        model, optimizer = trained()
        for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_forward_module."):
            state = {prefix + name: value for name, value in model.state_dict().items()}
            found = self.read("trainer", self.save({"model": state, "optimizer": optimizer.state_dict()}))
            self.assert_is(found, model, optimizer)
        state = {name.replace("fc.", "fc._orig_mod."): value for name, value in model.state_dict().items()}
        self.assert_is(self.read("trainer", self.save({"model": state, "optimizer": optimizer.state_dict()})), model, optimizer)

    def test_tied_parameters(self):
        model = Model()
        model.out = nn.Linear(6, 11, bias=False)
        model.out.weight = model.embed.weight
        found = self.saved_and_read(*trained(model=model))
        self.assertEqual(found.aliases, {"out.weight": "embed.weight"})

    def test_a_buffer_among_the_parameters(self):
        """As nanoGPT has a mask of floating-point numbers in each layer, and names of torch.compile."""
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
                self.register_buffer("mask", torch.tril(torch.ones(3, 3)))

            def forward(self, x):
                return self.b(self.a(x))

        model, optimizer = trained(decay_groups, model=nn.Sequential(nn.Embedding(11, 6), Layer(), Layer()))
        state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
        found = self.read("trainer", self.save({"model": state, "optimizer": optimizer.state_dict(), "iter_num": 3,
                                                "best_val_loss": torch.tensor(2.5), "model_args": {"n_layer": 2}}))
        self.assert_same(found.entries(), model.state_dict())
        self.assert_states(found, by_name(model, optimizer))
        self.assertEqual(found.frozen, {"1.mask", "2.mask"})
        self.assertEqual((found["global_steps"], found["client_state"]["best_val_loss"]), (3, 2.5))

    def test_groups_that_may_be_others_are_said(self):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}])
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        path = self.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        found = self.read("trainer", path)
        self.assert_same(found.parameters, model.state_dict())
        self.assertEqual(found.states, {})
        self.assertIn("several orders of the model's parameters have these shapes", found["not_read"][0])

    def test_what_is_not_read_is_said(self):
        model, optimizer = trained()
        found = self.saved_and_read(model, optimizer, ema=model.state_dict(), rng=torch.get_rng_state(), best=float("inf"), path=Path("/data"),
                                    args=transformers.GPT2Config().to_dict(), names={"a", "b"}, flags=argparse.Namespace(lr=0.1))
        lines = "\n".join(found["not_read"])
        for word in ("ema", "rng", "path", "flags"):
            self.assertIn(f"checkpoint.pt: {word}", lines)
        self.assertEqual(found["client_state"]["args"]["n_embd"], 768)
        values = {key: decoded(value) for key, value in found["client_state"].items()}
        self.assertEqual((values["best"], values["names"]), (float("inf"), {"a", "b"}))

    def test_values_that_json_has_not_are_as_they_were(self):
        model, optimizer = trained()
        extras = {"tuples": (1, (2.5, None)), "by number": {1: "a", 2: {3: [4]}, -1: ()}, "both": {1: "a", "1": "b"}, "counts": Counter({2: 1, 5: 3}),
                  "order": OrderedDict([("z", 1), ("a", 2)]), "numbers": [math.inf, -math.inf], "type": torch.bfloat16, "keys": {(1, "x"): 2, None: 3, 0.5: 4},
                  "sets": {frozenset({1}), 2}, "frozen": frozenset("ab"), "$tessera": "no tag", "inside": {"$tessera": "tuple", "value": 3}}
        found = self.read("trainer", self.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **extras}))
        lost = extras.pop("$tessera")
        values = decoded(found["client_state"])
        self.assertEqual(values, extras)
        self.assertEqual([type(values[key]) for key in ("tuples", "counts", "order")], [tuple, Counter, OrderedDict])
        self.assertEqual(list(values["order"]), ["z", "a"])
        self.assertEqual(len(found["not_read"]), 1, (found["not_read"], lost))

    def test_a_key_that_has_itself_in_it_again_and_again_takes_no_time(self):
        class Keyed:
            def __reduce__(self):  # Python itself could not make the dict: it would compute the key's hash
                key = (1, 2)
                for _ in range(40):
                    key = (key, key)
                return dict, ([(key, 1)],)

        begin = time.monotonic()
        found = self.read("trainer", self.save({"model": trained()[0].state_dict(), "table": Keyed()}))
        self.assertLess(time.monotonic() - begin, 20)
        self.assertIn("table: the key a tuple of 2", "\n".join(found["not_read"]))

    def test_files_that_are_something_else(self):
        for state in ({"epoch": 3}, [1, 2], {"optimizer": trained()[1].state_dict()}, trained()[0].state_dict()):
            self.assertIsNone(self.ask("trainer", self.save(state)))
        (self.folder / "text.pt").write_text("hello")
        self.assertIsNone(self.ask("trainer", self.folder / "text.pt"))
        self.assertIsNone(self.ask("trainer", self.folder))

    def test_a_whole_module_is_refused(self):
        self.assert_refused("trainer", self.save({"model": Model(), "epoch": 1}), "expected its state_dict()")

    def test_damage(self):
        model, optimizer = trained()
        path = self.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        content = path.read_bytes()
        for size in (len(content) // 2, len(content) - 30):
            path.write_bytes(content[:size])
            self.assertFalse(self.ask("trainer", path))  # no archive: its directory is at the end
        state = optimizer.state_dict()
        state["param_groups"][0]["params"][1] = 0
        self.assert_refused("trainer", self.save({"model": model.state_dict(), "optimizer": state}), "#0 is there twice")


class Lightning(TrainersTest):
    def state(self):
        model, optimizer = trained()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return model, optimizer, {
            "epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "/x"}},
            "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
            "MixedPrecision": {"scale": 1024.0, "growth_factor": 2.0, "_growth_tracker": 3},
            "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.01}}

    def test_a_file(self):
        model, optimizer, state = self.state()
        torch.save(state, self.folder / "epoch=1-step=3.ckpt")
        found = self.read("trainer", self.folder / "epoch=1-step=3.ckpt")
        self.assert_same(found.entries(), state["state_dict"])
        self.assert_states(found, {f"model.{name}": value for name, value in by_name(model, optimizer).items()})
        self.assertEqual((found["format"], found["version"], found["global_steps"]), ("Lightning", "2.6.6", 3))
        self.assertEqual(found["lr_scheduler"]["step_size"], 2)
        self.assertEqual((found["loss_scaler"]["cur_scale"], found["client_state"]["epoch"]), (1024.0, 1))
        self.assertEqual(found["client_state"]["hyper_parameters"], {"lr": 0.01})
        self.assert_all_read(found)

    def test_a_folder(self):
        import torch.distributed.checkpoint as dcp
        model, optimizer, state = self.state()
        named = optimizer.state_dict()
        named["state"] = dict(zip(order_of(model), named["state"].values(), strict=True))
        named["param_groups"][0]["params"] = order_of(model)
        del state["state_dict"], state["optimizer_states"]
        path = self.folder / "step.ckpt"
        dcp.save({"model": model.state_dict(), "optimizer_0": named}, checkpoint_id=path, no_dist=True)
        torch.save(state, path / "meta.pt")
        found = self.read("trainer", path)
        self.assert_same(found.entries(), model.state_dict())
        self.assert_states(found, by_name(model, optimizer))
        self.assertEqual((found["format"], found["global_steps"], found["lr_scheduler"]["step_size"]), ("Lightning", 3, 2))
        self.assert_all_read(found)


class Accelerate(TrainersTest):
    def save(self, make=decay_groups, model=None, safe=True):
        accelerator = Accelerator(cpu=True)
        model, optimizer = trained(make, model=model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 7))
        accelerator.save_state(self.folder / "saved", safe_serialization=safe)
        return model, optimizer.optimizer, self.folder / "saved"

    def assert_rest(self, found):
        self.assertEqual((found["format"], found["optimizer"]), ("Accelerate", "AdamW"))
        self.assertEqual(found["lr_scheduler"]["step_size"], 2)
        self.assertEqual(found["client_state"]["custom_checkpoint_0"]["step_size"], 7)

    def test_pytorch_model_bin(self):
        model, optimizer, path = self.save(safe=False)
        found = self.read("trainer", path)
        self.assert_same(found.entries(), model.state_dict())
        self.assert_states(found, by_name(model, optimizer))
        self.assert_rest(found)
        self.assertEqual(found["not_read"], ["random_states_0.pkl: states of generators of random numbers"])

    def test_safetensors_need_the_order(self):
        model, optimizer, path = self.save()
        found = self.read("trainer", path)
        self.assert_same(found.entries(), model.state_dict())
        self.assertEqual(found.states, {})
        self.assertIn("the file of the weights does not have the model's order", "\n".join(found["not_read"]))
        self.assert_rest(found)
        found = self.read("trainer", path, order_of(model))
        self.assertEqual(found.names, order_of(model))
        self.assert_states(found, by_name(model, optimizer))
        swapped = [name for name, _ in model.named_parameters()][::-1]
        found = self.read("trainer", path, swapped)
        self.assertEqual(found.states, {})
        self.assertIn("its shapes are not those of the model in order", "\n".join(found["not_read"]))

    def test_safetensors_whose_shapes_differ(self):
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3), nn.Linear(3, 5))
        model, optimizer, path = self.save(model=model)
        found = self.read("trainer", path)
        self.assert_states(found, by_name(model, optimizer))

    def test_fsdp_full_state(self):
        """As save_fsdp_model and save_fsdp_optimizer write it with FULL_STATE_DICT: names in place of numbers."""
        model, optimizer = trained()
        path = self.folder / "saved"
        path.mkdir()
        state = optimizer.state_dict()
        torch.save(model.state_dict(), path / "pytorch_model_fsdp.bin")
        torch.save({"state": dict(zip(order_of(model), state["state"].values(), strict=True)),
                    "param_groups": [{**state["param_groups"][0], "params": order_of(model)}]}, path / "optimizer.bin")
        torch.save({"step": 0}, path / "random_states_0.pkl")
        torch.save({"step": 0}, path / "random_states_1.pkl")
        found = self.read("trainer", path)
        self.assert_same(found.entries(), model.state_dict())
        self.assert_states(found, by_name(model, optimizer))
        self.assertEqual(found["world_size"], 2)
        (path / "pytorch_model_fsdp.bin").rename(path / "pytorch_model_fsdp_0_rank0.bin")
        self.assert_refused("trainer", path, "use_dcp=False")

    def test_the_newest_of_automatic_names(self):
        _, _, path = self.save(safe=False)
        for number in (2, 10, 9):
            shutil.copytree(path, self.folder / "checkpoints" / f"checkpoint_{number}")
        for folder in (self.folder, self.folder / "checkpoints"):
            self.assertTrue(self.read("trainer", folder)["path"].endswith("checkpoint_10"))

    def test_without_weights(self):
        _, _, path = self.save()
        (path / "model.safetensors").unlink()
        self.assert_refused("trainer", path, "has no file of weights")
        _, _, path = self.save()
        (path / "optimizer.bin").write_bytes((path / "optimizer.bin").read_bytes()[:300])
        self.assert_refused("trainer", path, "optimizer.bin")


class HuggingFace(TrainersTest):
    @classmethod
    def setUpClass(cls):
        cls.saved = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_trainer_")))
        config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2)
        torch.manual_seed(0)
        cls.model = transformers.GPT2LMHeadModel(config)
        rows = [{"input_ids": torch.randint(0, 31, (8,))} for _ in range(16)]
        data = [{**row, "labels": row["input_ids"]} for row in rows]
        arguments = transformers.TrainingArguments(
            output_dir=str(cls.saved), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            weight_decay=0.01, logging_steps=1, disable_tqdm=True)
        cls.trainer = transformers.Trainer(cls.model, arguments, train_dataset=data)
        with redirect_stdout(io.StringIO()):
            cls.trainer.train()

    def assert_last(self, found):
        self.assertEqual(found["path"], str(self.saved / "checkpoint-4"))
        self.assert_same(found.parameters, load_file(self.saved / "checkpoint-4" / "model.safetensors"))
        self.assertEqual(found.names, order_of(self.model))
        self.assert_states(found, by_name(self.model, self.trainer.optimizer.optimizer))
        self.assertEqual((found["format"], found["global_steps"], found["optimizer"]), ("Hugging Face Trainer", 4, "AdamW"))
        self.assertEqual([group["weight_decay"] for group in found["groups"]], [0.01, 0.0])
        self.assertEqual({found.groups[name] for name in found.names if "ln_" in name or "bias" in name}, {1})
        self.assertEqual(found["lr_scheduler"]["last_epoch"], 4)
        self.assertEqual(found["client_state"]["trainer_state"]["max_steps"], 4)
        self.assertEqual(found["not_read"], ["rng_state.pth: states of generators of random numbers",
                                             "training_args.bin: an object of the trainer's program"])

    def test_the_newest(self):
        self.assert_last(self.read("trainer", self.saved, order_of(self.model)))
        self.assert_last(self.read("trainer", self.saved / "checkpoint-4", order_of(self.model)))
        self.assertEqual(self.read("trainer", self.saved / "checkpoint-2")["global_steps"], 2)

    def copy(self):
        return Path(shutil.copytree(self.saved, self.folder / "copy", dirs_exist_ok=True))

    def test_without_the_model_the_states_have_numbers_only(self):
        found = self.read("trainer", self.saved / "checkpoint-4")  # safetensors has the names sorted
        self.assert_same(found.parameters, load_file(self.saved / "checkpoint-4" / "model.safetensors"))
        self.assertEqual(found.states, {})
        self.assertIn("which it has by number", found["not_read"][0])
        self.assertIn("an engine's load_checkpoint()", found["not_read"][0])

    def test_the_final_model_beside_the_checkpoints(self):
        path = self.copy()
        shutil.copy(path / "checkpoint-4" / "model.safetensors", path)
        shutil.copy(path / "checkpoint-4" / "trainer_state.json", path)
        self.assertEqual(self.read("trainer", path)["path"], str(path / "checkpoint-4"))
        shutil.rmtree(path / "checkpoint-4")
        shutil.rmtree(path / "checkpoint-2")
        found = self.read("trainer", path)
        self.assertEqual(found["global_steps"], 4)
        self.assertIn("has no optimizer's state", found["not_read"][0])

    def test_damage(self):
        path = self.copy() / "checkpoint-4"
        (path / "trainer_state.json").unlink()
        (path / "optimizer.pt").unlink()
        self.assert_refused("trainer", path.parent, "checkpoint-4 is the newest checkpoint", "give an older one")
        path = self.copy() / "checkpoint-4"
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])
        self.assert_refused("trainer", path, "model.safetensors", "truncated")
        path = self.copy() / "checkpoint-4"
        (path / "trainer_state.json").write_text('{"global_step": "many"}')
        self.assert_refused("trainer", path, "trainer_state.json", "global_step")

    def test_a_run_that_trained_with_tessera_is_no_foreign_one(self):
        path = self.copy()
        (path / "checkpoint-4" / "global_step4").mkdir()
        (path / "checkpoint-4" / "global_step4" / "manifest.json").write_text("{}")
        for given in (path, path / "checkpoint-4"):
            self.assertIsNone(self.ask("trainer", given))

    def test_a_log_with_nan(self):
        path = self.copy() / "checkpoint-4"
        state = json.loads((path / "trainer_state.json").read_text())
        state["log_history"] = [{"loss": float("nan"), "note": "NaN \\\" Infinity"}, {"loss": float("-inf")}, *[{"loss": float("nan")}] * 500_000]
        (path / "trainer_state.json").write_text(json.dumps(state))
        found = self.read("trainer", path)  # in minutes, if each of them moved what comes behind it
        self.assertEqual(found["client_state"]["trainer_state"]["log_history"],
                         [{"loss": None, "note": "NaN \\\" Infinity"}, {"loss": None}, *[{"loss": None}] * 500_000])


if __name__ == "__main__":
    unittest.main()
