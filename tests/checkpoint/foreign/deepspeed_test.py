"""Folders of DeepSpeed's layouts, of several releases, written here with torch.save alone, are read by Tessera.

tests/peers/deepspeed_checkpoints.py has folders that DeepSpeed itself writes.
"""
import json
import math
import shutil
import sys
import types
import unittest
from collections import OrderedDict

import numpy as np
import torch
from trainers_testing import TrainersTest, bits, decoded

SHAPES = OrderedDict([("embed.weight", (11, 5)), ("norm.weight", (5,)), ("norm.bias", (5,)), ("hidden.weight", (7, 5)), ("gain", (1,)),
                      ("hidden.bias", (7,)), ("out.weight", (3, 7))])
GROUPS = [["embed.weight", "hidden.weight", "out.weight"], ["norm.weight", "norm.bias", "gain", "hidden.bias"]]
OPTIONS = [{"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, {"lr": 0.2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]
STATES = ("exp_avg", "exp_avg_sq")


def _class(name):
    """A class that the pickle calls by its name, as DeepSpeed's module has it."""
    module_name, _, kind = name.rpartition(".")
    module = sys.modules.setdefault(module_name, types.ModuleType(module_name))
    made = type(kind, (), {"__module__": module_name})
    setattr(module, kind, made)
    return made


for _parent in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.utils"):
    sys.modules.setdefault(_parent, types.ModuleType(_parent))
DynamicLossScaler = _class("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler")
fragment_address = _class("deepspeed.utils.tensor_fragment.fragment_address")


def made(kind, **state):
    one = kind()
    one.__dict__.update(state)
    return one


class Run:
    """What a run has: fp32 masters, moments, and what the model computed in."""

    def __init__(self, world, dtype=torch.bfloat16):
        source = torch.Generator().manual_seed(world)
        self.world, self.dtype, self.steps = world, dtype, 12
        self.values = {key: {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()} for key in ("fp32", *STATES)}
        self.frozen = OrderedDict([("body.weight", torch.randn(4, 3, generator=source).to(dtype)), ("body.bias", torch.randn(3, generator=source).to(dtype))])
        self.buffers = {"norm.running_mean": torch.randn(5, generator=source), "norm.num_batches_tracked": torch.tensor(9)}

    def module(self, tied=True, partitioned=False):
        entries = OrderedDict((name, self.values["fp32"][name].to(self.dtype)) for name in SHAPES)
        entries.update(self.frozen)
        if partitioned:
            entries = OrderedDict((name, torch.empty(0, dtype=self.dtype)) for name in entries)
        entries.update(self.buffers)
        if tied:
            entries["head.weight"] = entries["embed.weight"]
        return entries

    def model(self, stage, groups=GROUPS, **more):
        state = {"module": self.module(partitioned=stage == 3), "buffer_names": list(self.buffers), "optimizer": None,
                 "param_shapes": [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in groups],
                 "frozen_param_shapes": None, "shared_params": {"head.weight": "embed.weight"}, "frozen_param_fragments": None,
                 "lr_scheduler": {"last_batch_iteration": 11}, "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": set(),
                 "skipped_steps": 2, "global_steps": 14, "global_samples": 112, "dp_world_size": self.world, "mp_world_size": 1,
                 "ds_config": {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "ds_version": "0.14.5",
                 "epoch": 4, "rng": torch.arange(3)}
        if stage >= 2:
            state["frozen_param_shapes"] = OrderedDict((name, one.shape) for name, one in self.frozen.items())
            state["frozen_param_fragments"] = OrderedDict(self.frozen)
        state.update(more)
        return {key: value for key, value in state.items() if value != "absent"}

    def flat(self, key, group, alignment=1, behind=None):
        """A group's vector, with its padding at the end and, of 0.19, behind parameters."""
        parts = []
        for index, name in enumerate(group):
            parts.append(self.values[key][name].reshape(-1))
            if behind:
                parts.append(torch.full((behind[index],), -7.0))
        whole = torch.cat(parts)
        return torch.cat([whole, torch.zeros(-whole.numel() % alignment)])

    def partitions(self, key, group, behind=None):
        return self.flat(key, group, 2 * self.world, behind).chunk(self.world)

    def torch_state(self, flats, options=OPTIONS, step=None):
        """torch.optim's state_dict() of flat parameters: [[{state: tensor}] of a group]."""
        numbers = iter(range(1000))
        groups, state = [], {}
        for group, own in zip(flats, options, strict=True):
            members = []
            for one in group:
                members.append(next(numbers))
                state[members[-1]] = {"step": torch.tensor(float(self.steps)) if step is None else step, **one}
            groups.append({**own, "params": members})
        return {"state": state, "param_groups": groups}

    def slices(self, group, part, rank):
        """The elements of a rank's part that are a parameter's, as get_hp_fragment_mapping counts them: without padding behind parameters."""
        found, offset = OrderedDict(), 0
        for name in group:
            numel = self.values["fp32"][name].numel()
            begin, end = max(offset, rank * part), min(offset + numel, (rank + 1) * part)
            if begin < end:
                found[name] = made(fragment_address, start=begin - rank * part, numel=end - begin)
            offset += numel
        return found

    def zero12(self, rank, kind="plain", behind=None):
        """The optimizer's file of a rank at stages 1 and 2."""
        masters = [self.partitions("fp32", group, pad) for group, pad in zip(GROUPS, behind or [None, None], strict=True)]
        lengths = [self.flat("fp32", group, 1, pad).numel() for group, pad in zip(GROUPS, behind or [None, None], strict=True)]
        paddings = [max(0, min(part[0].numel(), (rank + 1) * part[0].numel() - length)) for part, length in zip(masters, lengths, strict=True)]
        states = [{key: self.partitions(key, group, pad)[rank] for key in STATES} for group, pad in zip(GROUPS, behind or [None, None], strict=True)]

        def lean(tensor, padding):
            return tensor[:tensor.numel() - padding]
        own = {"loss_scaler": made(DynamicLossScaler, cur_scale=256.0, cur_iter=14, last_overflow_iter=3, scale_factor=2.0, scale_window=1000,
                                   min_scale=1, delayed_shift=2, cur_hysteresis=1, consecutive_hysteresis=False, dynamic=True, dtype=torch.float16),
               "dynamic_loss_scale": True, "overflow": False, "clip_grad": 0.0, "base_optimizer_state": self.torch_state([[one] for one in states]),
               "single_partition_of_fp32_groups": [lean(part[rank], padding) for part, padding in zip(masters, paddings, strict=True)],
               "zero_stage": 2, "group_paddings": paddings, "partition_count": [self.world, self.world], "ds_version": "0.14.5",
               "param_slice_mappings": [self.slices(group, part[0].numel(), rank) for group, part in zip(GROUPS, masters, strict=True)]}
        if behind:
            own["param_alignment_paddings"] = behind
        if kind == "elastic":
            own["base_optimizer_state"] = [{key: lean(one, padding) for key, one in state.items()} for state, padding in zip(states, paddings, strict=True)]
            own["base_optimizer_state_step"] = self.steps
        if kind == "bf16_optimizer":
            own["single_partition_of_fp32_groups"] = [part[rank] for part in masters]
            for key in ("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow"):
                del own[key]
        if kind == "group_step":  # FusedAdam of older releases counts in the group
            for group in own["base_optimizer_state"]["param_groups"]:
                group["step"] = self.steps
            for state in own["base_optimizer_state"]["state"].values():
                del state["step"]
        return {"optimizer_state_dict": own, "ds_config": {}, "ds_version": "0.14.5"}

    def divided(self, tensor, rank):
        part = math.ceil(tensor.numel() / self.world)
        padded = torch.cat([tensor.reshape(-1), torch.full((part * self.world - tensor.numel(),), 5, dtype=tensor.dtype)])
        return padded[part * rank:part * (rank + 1)]

    def zero3(self, rank, sub_groups):
        def flat(key, names):
            return torch.cat([self.divided(self.values[key][name], rank) for name in names])
        states = [[{key: flat(key, names) for key in STATES} for names in group] for group in sub_groups]
        own = {"zero_stage": 3, "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "partition_count": self.world,
               "optimizer_state_dict": self.torch_state(states), "fp32_flat_groups": [flat("fp32", names) for group in sub_groups for names in group]}
        return {"optimizer_state_dict": own, "ds_config": {}, "ds_version": "0.14.5"}


class DeepSpeed(TrainersTest):
    def folder_of(self, files, tag="global_step14"):
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        (self.folder / "run" / tag).mkdir(parents=True)
        (self.folder / "run" / "latest").write_text(tag)
        for name, content in files.items():
            (self.folder / "run" / tag / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, self.folder / "run" / tag / name)
        return self.folder / "run"

    def zero12_files(self, run, kind="plain", behind=None, prefix="", stage=2, **more):
        return {"mp_rank_00_model_states.pt": run.model(stage, **more),
                **{f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": run.zero12(rank, kind, behind) for rank in range(run.world)}}

    SUB_GROUPS = ([GROUPS[0][:2], GROUPS[0][2:]], [GROUPS[1]])

    def zero3_files(self, run):
        names = [one for group in self.SUB_GROUPS for one in group]
        files = {}
        for rank in range(run.world):
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = run.model(
                3, names, frozen_param_fragments=OrderedDict((name, run.divided(one, rank)) for name, one in run.frozen.items()))
            files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = run.zero3(rank, self.SUB_GROUPS)
        return files

    def assert_is(self, found, run, masters=True, states=True, groups=True, options=True, steps=None, frozen=True):
        self.assertEqual(found.names, [*SHAPES, *(run.frozen if frozen else [])])
        self.assertEqual(found.frozen, set(run.frozen if frozen else []))
        for name in SHAPES:
            master = run.values["fp32"][name]
            self.assertEqual(bits(found.parameters[name]), bits(master if masters else master.to(run.dtype)), name)
            self.assertEqual(found.parameters[name].shape, SHAPES[name])
            for key in STATES if states else ():
                self.assertEqual(bits(found.states[name][key]), bits(run.values[key][name]), (name, key))
            if groups:
                self.assertEqual(found.groups[name], 0 if name in GROUPS[0] else 1)
        for name, one in (run.frozen if frozen else {}).items():
            self.assertEqual((bits(found.parameters[name]), found.parameters[name].shape), (bits(one), one.shape), name)
        self.assertEqual({name: bits(one) for name, one in found.buffers.items()}, {name: bits(one) for name, one in run.buffers.items()})
        self.assertEqual(found.aliases, {"head.weight": "embed.weight"})
        self.assertEqual(set(found.steps.values()), ({run.steps} if steps is None else steps) if states else set())
        self.assertEqual((found["global_steps"], found["skipped_steps"], found["global_samples"]), (14, 2, 112))
        self.assertEqual(found["lr_scheduler"], {"last_batch_iteration": 11})
        self.assertEqual(found["client_state"], {"epoch": 4})
        self.assertIn("client_state.rng: a tensor of int64 [3]", found["not_read"])
        self.assertEqual(found["world_size"], run.world)
        self.assertEqual(found["optimizer"], "AdamW")
        for one in found["parameters"]:
            self.assertEqual(one["dtype"], {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[run.dtype])
        if options:
            self.assertEqual(found["groups"], [{**one, "betas": list(one["betas"])} for one in OPTIONS])

    def test_stages_1_and_2(self):
        for world in (1, 2, 3, 7):
            run = Run(world)
            with self.subTest(world=world):
                found = self.read("deepspeed", self.folder_of(self.zero12_files(run)))
                self.assert_is(found, run)
                self.assertEqual((found["stage"], found["format"], found["version"]), (2, "DeepSpeed ZeRO", "0.14.5"))
                self.assertEqual(found["loss_scaler"]["cur_scale"], 256.0)
                self.assertEqual((found["loss_scaler"]["cur_hysteresis"], found["loss_scaler"]["last_overflow_iter"]), (1, 3))
            with self.subTest(world=world, kind="0.8: no lists of tied and frozen parameters"):
                files = self.zero12_files(run, stage=1, shared_params="absent", frozen_param_shapes="absent", frozen_param_fragments="absent")
                self.assert_is(self.read("deepspeed", self.folder_of(files)), run)
            with self.subTest(world=world, kind="0.19: padding behind parameters"):
                behind = [[1, 5, 0], [3, 3, 7, 0]]
                self.assert_is(self.read("deepspeed", self.folder_of(self.zero12_files(run, behind=behind))), run)
            with self.subTest(world=world, kind="elastic"):
                found = self.read("deepspeed", self.folder_of(self.zero12_files(run, "elastic")))
                self.assert_is(found, run, options=False)
                self.assertIn("the param groups' options: an elastic checkpoint does not have them", found["not_read"])
            with self.subTest(world=world, kind="BF16_Optimizer"):
                found = self.read("deepspeed", self.folder_of(self.zero12_files(run, "bf16_optimizer", prefix="bf16_")))
                self.assert_is(found, run)
                self.assertEqual((found["stage"], found["loss_scaler"]), (0, None))
            with self.subTest(world=world, kind="group_step"):
                found = self.read("deepspeed", self.folder_of(self.zero12_files(run, "group_step")))
                self.assert_is(found, run, options=False)

    def test_stage_3(self):
        for world in (1, 2, 3, 7):
            with self.subTest(world=world):
                run = Run(world)
                found = self.read("deepspeed", self.folder_of(self.zero3_files(run)))
                self.assert_is(found, run)
                self.assertEqual((found["stage"], found["loss_scaler"]), (3, None))

    def test_names_without_wrappers(self):
        run = Run(2)
        files = self.zero12_files(run)
        model = files["mp_rank_00_model_states.pt"]
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            model[key] = OrderedDict((f"_orig_mod.{name}", one) for name, one in model[key].items())
        model["param_shapes"] = [OrderedDict((f"_orig_mod.{name}", one) for name, one in group.items()) for group in model["param_shapes"]]
        model["buffer_names"] = [f"_orig_mod.{name}" for name in model["buffer_names"]]
        model["shared_params"] = {"_orig_mod.head.weight": "_orig_mod.embed.weight"}
        self.assert_is(self.read("deepspeed", self.folder_of(files)), run)

    def stage_0(self, run, optimizer):
        return self.folder_of({"mp_rank_00_model_states.pt": run.model(
            0, optimizer=optimizer, param_shapes=None, shared_params=None, ds_config={"optimizer": {"type": "AdamW"}})})

    def test_stage_0_in_half_precision(self):
        """Its masters have no names: the module's weights are taken, and what is lost is said."""
        for groups in (GROUPS, [[name for group in GROUPS for name in group]]):
            run = Run(1, torch.float16)
            flat = [[{key: run.flat(key, group) for key in STATES}] for group in groups]
            apart = [[{key: run.values[key][name] for key in STATES} for name in group] for group in groups]
            for states, masters in ((flat, {"fp32_groups_flat": [run.flat("fp32", group) for group in groups]}),
                                    (apart, {"fp32_groups": [[run.values["fp32"][name] for name in group] for group in groups]})):
                found = self.read("deepspeed", self.stage_0(run, {
                    "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 14, "last_overflow_iter": 3, "scale_factor": 2.0, "scale_window": 100,
                    "optimizer_state_dict": run.torch_state(states, OPTIONS[:len(groups)]), **masters, "clip_grad": 0.0}))
                module = run.module()
                for name, one in found.parameters.items():
                    self.assertEqual(bits(one), bits(module[name]), name)
                self.assertEqual(found.states, {})
                self.assertEqual((found["stage"], found["format"], found["loss_scaler"]["cur_scale"]), (0, "DeepSpeed", 512.0))
                self.assertIn({"kind": "state", "name": ""}, found["lost"])
                self.assertEqual({"kind": "option", "name": ""} in found["lost"], len(groups) > 1)
                self.assertEqual(len(found["groups"]), 1 if len(groups) == 1 else 0)
                self.assertTrue(any("saves without names" in line for line in found["not_read"]), found["not_read"])

    def test_stage_0_in_fp32(self):
        run = Run(1, torch.float32)
        apart = [[{key: run.values[key][name] for key in STATES} for name in group] for group in GROUPS]
        self.assert_is(self.read("deepspeed", self.stage_0(run, run.torch_state(apart))), run)

    def test_values_that_cannot_be_read_leave_the_others(self):
        """Of a schedule, of the optimizer's states and options, of the client state; numpy's numbers are read."""
        numpy_values = {"base_lrs": [np.float64(0.5), np.float32(0.25)], "last_epoch": np.int64(11), "done": np.bool_(True), "half": np.float16(1.5),
                        "big": np.frombuffer(np.array([2.5], ">f8").tobytes(), ">f8")[0], "many": np.uint64(7), "zero": np.array(3.5), "name": np.str_("é")}
        schedule = {**numpy_values, "table": np.arange(6, dtype=">i4").reshape(2, 3).T, "code": types.SimpleNamespace(a=1), "inner": {"code": [1, 2j], "gamma": 0.5},
                    "sparse": torch.eye(2).to_sparse()}
        run = Run(2)
        files = self.zero12_files(run, lr_scheduler=schedule, extra=np.float64(1.25))
        for rank in range(2):
            state = files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]["base_optimizer_state"]
            state["param_groups"][0].update(lr=np.float64(0.1), why=types.SimpleNamespace(a=1), decay=np.array([0.5, 0.25]))
            state["state"][0].update(step=np.int64(run.steps), sparse=torch.eye(2).to_sparse(), code=2j)
        for protocol in (2, 5):
            with self.subTest(protocol=protocol):
                root = self.folder_of(files)
                for name, content in files.items():
                    torch.save(content, root / "global_step14" / name, pickle_protocol=protocol)
                answer = self.read("deepspeed", root)
                found = decoded(answer["lr_scheduler"])
                table = found.pop("table")
                self.assertEqual(table.tolist(), schedule["table"].tolist())
                self.assertEqual(found, {key: value.item() if hasattr(value, "item") else value for key, value in numpy_values.items()} | {"inner": {"gamma": 0.5}})
                self.assertEqual((answer["groups"][0]["lr"], answer["groups"][0]["decay"], answer["client_state"]["extra"]), (0.1, [0.5, 0.25], 1.25))
                self.assertEqual(set(answer.steps.values()), {run.steps})
                self.assertEqual(bits(answer.states["gain"]["exp_avg"]), bits(run.values["exp_avg"]["gain"]))
                self.assertEqual({(one["kind"], one["name"]) for one in answer["lost"]},
                                 {("schedule", "lr_scheduler"), ("option", "why"), ("state", "sparse"), ("state", "code")})
                for word in ("lr_scheduler.code: types.SimpleNamespace", "lr_scheduler.inner.code[1]: builtins.complex", "lr_scheduler.sparse: a sparse tensor",
                             "option why: types.SimpleNamespace", "'sparse': a sparse tensor"):
                    self.assertTrue(any(word in line for line in answer["not_read"]), (word, answer["not_read"]))

    def test_loss_scales_and_counts_that_cannot_be_read(self):
        """What decides the scale, and when it changes, is lost; what the configuration has, too, is not."""
        unread, run = types.SimpleNamespace(a=1), Run(2)
        scaler = {"cur_scale": unread, "cur_iter": unread, "last_overflow_iter": np.array([1, 2]), "scale_factor": unread, "dtype": unread}
        for key, value in [*scaler.items(), ("cur_scale", 0.0), ("cur_scale", math.nan), ("cur_scale", "1"), (None, unread)]:
            files = self.zero12_files(run)
            for rank in range(2):
                own = files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
                if key:
                    setattr(own["loss_scaler"], key, value)
                else:
                    own["loss_scaler"] = value
            lost = key is None or key.startswith(("cur", "last"))
            found = self.read("deepspeed", self.folder_of(files))
            self.assertEqual([(one["kind"], one["name"]) for one in found["lost"]], [("scale", key or "cur_scale")] if lost else [], (key, value))
            self.assertEqual(found["loss_scaler"] is None, lost)
        flat = {"optimizer_state_dict": run.torch_state([], []), "fp32_groups_flat": [], "dynamic_loss_scale": True, "cur_scale": unread, "cur_iter": 3}
        self.assertIn({"kind": "scale", "name": "cur_scale"}, self.read("deepspeed", self.stage_0(run, flat))["lost"])
        for key in ("global_steps", "skipped_steps"):
            found = self.read("deepspeed", self.folder_of(self.zero12_files(run, **{key: unread})))
            self.assertEqual([(one["kind"], one["name"]) for one in found["lost"]], [("count", key)])

    def universal(self, run, stage):
        """As ds_to_universal.py writes it: stage 3 has flat tensors and no steps beside them."""
        files = {}
        for name in SHAPES:
            for key in ("fp32", *STATES):
                one = run.values[key][name]
                files[f"zero/{name}/{key}.pt"] = one.reshape(-1) if stage == 3 else {"param": one, "cat_dim": 0}
            if stage < 3:
                files[f"zero/{name}/step.pt"] = torch.tensor(float(run.steps))
        for name in [*run.frozen, *run.buffers, "head.weight"] if stage < 3 else []:  # since 0.19
            files[f"zero/{name}/fp32.pt"] = {"param": run.module()[name].float()}
        native = self.zero3_files(run) if stage == 3 else self.zero12_files(run)
        optimizer = next(content for name, content in native.items() if "optim_states" in name)["optimizer_state_dict"]
        inner = optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        sharded = () if stage == 3 else ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
        files["zero/optimizer_state.pt"] = {**{key: one for key, one in optimizer.items() if key not in sharded}, "param_groups": inner["param_groups"]}
        files.update((name, content) for name, content in native.items() if "model_states" in name)
        root = self.folder_of(files, "global_step14_universal")
        (root / "latest").rename(root / "latest_universal")
        return root

    def test_universal(self):
        for stage in (2, 3):
            for world in (1, 3):
                with self.subTest(stage=stage, world=world):
                    run = Run(world)
                    root = self.universal(run, stage)
                    for path in (root, root / "global_step14_universal"):
                        found = self.read("universal", path)
                        self.assert_is(found, run)
                        self.assertEqual((found["stage"], found["format"]), (stage, "DeepSpeed universal"))
                    self.assertIsNone(self.ask("deepspeed", root))
                    self.assert_is(self.read("foreign", root), run)
        (root / "global_step14_universal" / "zero" / "gain" / "exp_avg.pt").write_bytes(b"no file of torch.save")
        self.assert_refused("universal", root, "exp_avg.pt")
        shutil.rmtree(root / "global_step14_universal" / "zero" / "gain")
        self.assert_refused("universal", root, "has no folder 'gain'")

    def test_paths(self):
        run = Run(2)
        root = self.folder_of(self.zero12_files(run))
        for path in (root, root / "latest", root / "global_step14", root / "global_step14" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
            self.assert_is(self.read("deepspeed", path), run)
        self.assert_is(self.read("foreign", root), run)
        self.assertIsNone(self.ask("universal", root))
        self.assertIsNone(self.ask("deepspeed", self.folder))
        (root / "latest").write_text("global_step99\n")
        self.assert_refused("deepspeed", root, "latest", "'global_step99', which is no folder")
        for text in ("/etc", "../run", ""):
            (root / "latest").write_text(text)
            self.assert_refused("deepspeed", root, "expected the name of a checkpoint's folder")

    def test_incomplete(self):
        root = self.folder_of(self.zero12_files(Run(3)))
        one = root / "global_step14"

        def without(change, *words):
            shutil.rmtree(self.folder / "copy", ignore_errors=True)
            shutil.copytree(one, self.folder / "copy")
            change(self.folder / "copy")
            self.assert_refused("deepspeed", self.folder / "copy", *words)

        name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        without(lambda at: (at / name.format(1)).unlink(), "file of rank 1 is missing")
        without(lambda at: (at / name.format(2)).unlink(), "2 ranks; expected 3", "rank 2 is missing")
        without(lambda at: shutil.copy(at / name.format(2), at / name.format(3)), "4 ranks; expected 3", "of another run")
        without(lambda at: shutil.copy(at / name.format(2), at / ("bf16_" + name.format(2))), "rank 2 has two files")
        without(lambda at: (at / "mp_rank_00_model_states.pt").unlink(), "has no model's file")
        without(lambda at: shutil.copy(at / "mp_rank_00_model_states.pt", at / "mp_rank_01_model_states.pt"), "tensor parallelism (mp_rank 1)")
        without(lambda at: (at / "layer_01-model_00-model_states.pt").touch(), "pipeline parallelism")
        without(lambda at: (at / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), "mixture of experts")
        without(lambda at: (at / "expp_rank_0_mp_rank_00_optim_states.pt").touch(), "mixture of experts")
        without(lambda at: [(at / name.format(rank)).unlink() for rank in range(3)], "has no optimizer's files")
        without(lambda at: (at / name.format(1)).write_bytes((at / name.format(1)).read_bytes()[:-500]), name.format(1))

    def test_a_file_copied_over_another(self):
        """The parts of all ranks are as long as each other: what is in the files tells. Of one parameter alone the mappings are equal, too."""
        one = {"embed.weight": (12, 4)}
        for stage, shapes in ((2, None), (2, one), (3, None)):
            with self.subTest(stage=stage, shapes=shapes):
                run = Run(2)
                files = self.zero3_files(run) if stage == 3 else self.zero12_files(run)
                if shapes:
                    for rank in range(2):
                        own = files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
                        own["single_partition_of_fp32_groups"] = [torch.randn(24)]
                        own["base_optimizer_state"] = run.torch_state([[{key: torch.randn(24) for key in STATES}]], OPTIONS[:1])
                        own["param_slice_mappings"] = [{"embed.weight": made(fragment_address, start=0, numel=24)}]
                        own["group_paddings"], own["partition_count"] = [0], [2]
                    files["mp_rank_00_model_states.pt"]["param_shapes"] = [OrderedDict(shapes)]
                    files["mp_rank_00_model_states.pt"]["module"] = {"embed.weight": torch.randn(12, 4).bfloat16()}
                    files["mp_rank_00_model_states.pt"].update(buffer_names=[], shared_params={}, frozen_param_shapes=None, frozen_param_fragments=None)
                first, second = sorted(name for name in files if "optim_states" in name)
                self.read("deepspeed", self.folder_of(files))
                why = "it is the file of rank 0" if stage == 2 and not shapes else "has the same fp32 masters as"
                self.assert_refused("deepspeed", self.folder_of({**files, second: files[first]}), second, why, "copy the checkpoint again")
        files = self.zero12_files(Run(2))
        own = Run(2).zero12(0)  # of another run
        own["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [part + 1 for part in own["optimizer_state_dict"]["single_partition_of_fp32_groups"]]
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        self.assert_refused("deepspeed", self.folder_of({**files, name: own}), name, "param_slice_mappings", "it is the file of rank 0")

    def test_masters_that_are_alike_before_the_first_update(self):
        """Of norms and biases alone each rank has the same part: of each one number, and padding."""
        for world in (2, 5):
            with self.subTest(world=world):
                run = Run(world)
                run.values["fp32"] = {name: torch.full(shape, float(i % 2)) for i, (name, shape) in enumerate(SHAPES.items())}
                run.values.update((key, {name: torch.zeros(shape) for name, shape in SHAPES.items()}) for key in STATES)
                self.assert_is(self.read("deepspeed", self.folder_of(self.zero3_files(run))), run)

    def test_files_of_two_checkpoints(self):
        run, later = Run(2), Run(2)
        later.steps = 13
        files = self.zero12_files(run)
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        self.assert_refused("deepspeed", self.folder_of({**files, name: later.zero12(1)}), name, "counts 13 updates, rank 0's 12")
        short = run.zero12(1)
        masters = short["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0] = masters[0][:9].clone()
        self.assert_refused("deepspeed", self.folder_of({**files, name: short}), "is not there from element")
        shapes = [OrderedDict(group) for group in files["mp_rank_00_model_states.pt"]["param_shapes"]]
        shapes[1]["gain"] = torch.Size((2000,))
        model = {**files["mp_rank_00_model_states.pt"], "param_shapes": shapes}
        self.assert_refused("deepspeed", self.folder_of({**files, "mp_rank_00_model_states.pt": model}), "expected files of one checkpoint")
        model = {**files["mp_rank_00_model_states.pt"], "param_shapes": shapes[:1]}
        self.assert_refused("deepspeed", self.folder_of({**files, "mp_rank_00_model_states.pt": model}), "param_shapes has 1 groups")
        state = run.zero12(1)
        del state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        self.assert_refused("deepspeed", self.folder_of({**files, name: state}), "has no 'exp_avg' of flat group 0")

    def test_what_is_refused_by_name(self):
        run = Run(2)
        for change, words in (({"num_experts": [4]}, "mixture of experts"), ({"ds_autoep_layers": [{}]}, "AutoEP"),
                              ({"mp_world_size": 2}, "tensor parallelism"), ({"module": None}, "pipeline parallelism")):
            self.assert_refused("deepspeed", self.folder_of(self.zero12_files(run, **change)), words)
        files = self.zero3_files(run)
        for rank in range(2):
            own = files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
            own["fp32_flat_groups"] = [one[:0] for one in own["fp32_flat_groups"]]
        root = self.folder_of(files)
        (root / "global_step14" / "offloaded_tensors").mkdir()
        self.assert_refused("deepspeed", root, "NVMe", "offloaded_tensors")
        for rank in range(2):
            own = files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
            own["fp32_groups"] = own.pop("fp32_flat_groups")
        self.assert_refused("deepspeed", self.folder_of(files), "elastic checkpoint of stage 3")
        files = self.zero3_files(run)
        for state in files.values():
            if "optimizer_state_dict" in state:
                state["optimizer_state_dict"].update(fp32_flat_groups=[], optimizer_state_dict={"state": {}, "param_groups": []})
            else:
                state["param_shapes"] = [{"w": torch.Size([0])}]
        self.assert_refused("deepspeed", self.folder_of(files), "fp32_flat_groups has no groups; expected one that has w")

    def test_states_that_are_not_of_the_parameters(self):
        run = Run(2)
        files = self.zero12_files(run)
        for rank in range(2):
            state = files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[0]["worker_error"] = torch.zeros(3)
            state[1]["scale"] = torch.tensor(2.0)
        found = self.read("deepspeed", self.folder_of(files))
        self.assert_is(found, run)
        text = json.dumps(found["not_read"])
        self.assertIn("worker_error", text)
        self.assertIn("scale", text)


if __name__ == "__main__":
    unittest.main()
