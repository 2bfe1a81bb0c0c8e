"""Folders of torch.distributed.checkpoint, written by torch's FSDP and DTensor, compared with what torch loads from them."""
import os
import pickle
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from trainers_testing import TrainersTest

warnings.filterwarnings("ignore")

# FSDP1 of torch 2.12 and 2.13 ends in a segmentation fault on a CPU, in the state dict's clone().
NOT_WRITTEN = {(1, "FULL_STATE_DICT")} if torch.__version__.startswith(("2.12.", "2.13.")) else set()


class Model(nn.Module):
    """Odd sizes, tied embeddings, and a batch norm with its buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.fc = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.fc2 = nn.Linear(7, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.fc2(self.norm(self.fc(self.embed(x)))))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randint(0, 11, (5,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class TrainState:
    def state_dict(self):
        return {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(4096), "losses": [0.5, 0.25]}

    def load_state_dict(self, state):
        pass


def save_fsdp2(folder, world_size):
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.fc, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
    train(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
              "step": 3, "extra": {"list": [1, 2], "number": torch.tensor(2.5)}}, checkpoint_id=folder / "fsdp2")
    dcp.save({**get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
              "train_state": TrainState(), "lr_scheduler": scheduler, "dataloader": {"dp_rank_0": pickle.dumps({"at": 7})}},
             checkpoint_id=folder / "titan" / "step-3")
    dcp.save({"app": {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}},
             checkpoint_id=folder / "app", storage_writer=dcp.FileSystemWriter(folder / "app", thread_count=2))
    untied = {name: value for name, value in get_model_state_dict(model).items() if name != "out.weight"}
    dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(folder / "hub"), save_distributed=True))


def save_with_accelerate(folder, rank, world_size):
    """As Accelerator.save_state and the Hugging Face Trainer save a model in FSDP, which they have on GPUs only."""
    PartialState(cpu=True)  # without which Accelerate's log is not to be used
    device = torch.device("cpu")
    for version in (1, 2):
        torch.manual_seed(0)
        model = Model()
        if version == 1:
            model.fc = FullyShardedDataParallel(model.fc, use_orig_params=True, device_id=device)
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
        else:
            fully_shard(model.fc, mesh=init_device_mesh("cpu", (world_size,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer)
        accelerator = SimpleNamespace(num_processes=world_size, process_index=rank, is_fsdp2=version == 2)
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            if (version, kind) in NOT_WRITTEN:
                continue
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
            save_fsdp_model(plugin, accelerator, model, folder / f"fsdp{version}_{kind}")
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder / f"fsdp{version}_{kind}")


def save_mesh(folder):
    """Tensors that are split in every way on a 2 x 2 mesh, some into parts that are empty."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    ways = {"rows": [Shard(0), Replicate()], "columns": [Shard(1), Replicate()], "both": [Shard(0), Shard(1)],
            "twice": [Shard(0), Shard(0)], "inner": [Replicate(), Shard(2)], "whole": [Replicate(), Replicate()]}
    state = {}
    for name, way in ways.items():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((5, 7, 3), (1, 3, 5)):
                tensor = torch.randn(shape).to(dtype)
                state[f"{name}.{dtype}.{shape[0]}".replace("torch.", "")] = DTensor.from_local(
                    tensor, mesh, [Replicate(), Replicate()]).redistribute(placements=way)
    dcp.save({"model": state}, checkpoint_id=folder / "mesh")


def work(rank, world_size, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    if world_size == 2:
        save_fsdp2(folder, world_size)
        save_with_accelerate(folder, rank, world_size)
    else:
        save_mesh(folder)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    import socket
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Distributed(TrainersTest):
    @classmethod
    def setUpClass(cls):
        cls.saved = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_dcp_")))
        torch.set_num_threads(1)
        for world_size in (2, 4):
            mp.start_processes(work, args=(world_size, cls.saved, free_port()), nprocs=world_size, start_method="fork")

    def torchs(self, folder):
        """What torch makes of the folder, as one file."""
        dcp_to_torch_save(folder, self.folder / "whole.pt")
        return torch.load(self.folder / "whole.pt", weights_only=False)

    def copy(self, name):
        return Path(shutil.copytree(self.saved / name, self.folder / "copy", dirs_exist_ok=True))

    def test_fsdp2(self):
        found, expected = self.read("distributed", self.saved / "fsdp2"), self.torchs(self.saved / "fsdp2")
        self.assert_same(found.entries(), expected["model"])
        self.assertEqual(found.names, ["embed.weight", "fc.weight", "fc.bias", "norm.weight", "norm.bias", "fc2.weight",
                                       "fc2.bias"])
        self.assertEqual(found.aliases, {"out.weight": "embed.weight"})
        self.assertEqual(sorted(found.buffers), ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"])
        self.assert_states(found, expected["optimizer"]["state"])
        self.assertEqual([found.groups[name] for name in found.names], [0, 0, 1, 1, 1, 0, 1])
        self.assertEqual([(group["weight_decay"], group["betas"]) for group in found["groups"]],
                         [(0.1, [0.8, 0.9]), (0.0, [0.8, 0.9])])
        self.assertEqual((found["format"], found["optimizer"], found["world_size"], found["global_steps"]),
                         ("torch.distributed.checkpoint", "AdamW", 2, 3))
        self.assertEqual(found["client_state"], {"step": 3, "extra": {"list": [1, 2], "number": 2.5}})
        self.assert_all_read(found)

    def test_torchtitans_flat_names(self):
        found = self.read("distributed", self.saved / "titan")
        self.assertEqual(found["path"], str(self.saved / "titan" / "step-3"))
        expected = self.torchs(self.saved / "titan" / "step-3")
        self.assert_same(found.entries(), {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)})
        state = {}
        for key, value in expected["optimizer"].items():
            if key.startswith("state."):
                name, word = key[len("state."):].rsplit(".", 1)
                state.setdefault(name, {})[word] = value
        self.assert_states(found, state)
        self.assertEqual([found.groups[name] for name in found.names], [0, 0, 1, 1, 1, 0, 1])
        self.assertEqual((found["global_steps"], found["lr_scheduler"]["last_epoch"]), (3, 0))
        self.assertEqual(found["client_state"]["train_state"], {"step": 3, "ntokens_seen": 4096, "losses": [0.5, 0.25]})
        self.assertEqual(len(found["not_read"]), 1)
        self.assertIn("dataloader.dp_rank_0", found["not_read"][0])

    def test_states_in_states(self):
        found, expected = self.read("distributed", self.saved / "app"), self.torchs(self.saved / "app")
        self.assert_same(found.entries(), expected["app"]["model"])
        self.assert_states(found, expected["app"]["optim"]["state"])
        self.assert_all_read(found)

    def test_what_accelerate_saves(self):
        wholes = {}
        for version in (1, 2):
            path = self.saved / f"fsdp{version}_SHARDED_STATE_DICT"
            found = self.read("trainer", path)
            model = self.torchs(path / "pytorch_model_fsdp_0")["model"]
            optimizer = self.torchs(path / "optimizer_0")["optimizer"]
            self.assert_same(found.entries(), model)
            self.assert_states(found, optimizer["state"])
            self.assertEqual((found["groups"][0]["lr"], found.aliases), (0.01, {"out.weight": "embed.weight"}))
            self.assert_all_read(found)
            alone = self.read("distributed", path / "pytorch_model_fsdp_0")
            self.assert_same(alone.entries(), model)
            self.assert_refused("distributed", path / "optimizer_0", "no model's tensors")

            if (version, "FULL_STATE_DICT") in NOT_WRITTEN:
                continue
            path = self.saved / f"fsdp{version}_FULL_STATE_DICT"
            full = self.read("trainer", path)
            self.assert_same(full.entries(), model)
            self.assert_states(full, torch.load(path / "optimizer.bin")["state"])
            self.assertEqual((full["groups"], full.aliases), (found["groups"], found.aliases))
            self.assert_all_read(full)
            wholes[version] = full
        for whole in wholes.values():
            self.assertEqual(whole.names, wholes[2].names)

    def test_every_way_to_split(self):
        found = self.read("distributed", self.saved / "mesh")
        self.assert_same(found.parameters, self.torchs(self.saved / "mesh")["model"])
        self.assertEqual(len(found.parameters), 24)
        self.assertEqual(found["world_size"], 4)

    def test_hub_shards_are_refused(self):
        self.assert_refused("distributed", self.saved / "hub", "consolidate_safetensors_files")
        path = self.copy("hub")
        shutil.copy(min(path.iterdir()), path / "model.safetensors")  # what was made of them beside them is a model
        self.assertIsNone(self.ask("distributed", path))

    def save_alone(self, state, **options):
        path = self.folder / "alone"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
        return path

    def test_numbers_are_named_in_the_models_order(self):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer)
        path = self.save_alone({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2})
        found = self.read("distributed", path)
        names = [name for name, _ in model.named_parameters()]
        self.assertEqual(found.names, names)
        self.assertEqual(found.aliases, {"out.weight": "embed.weight"})
        self.assert_states(found, dict(zip(names, optimizer.state_dict()["state"].values(), strict=True)))
        self.assertEqual((found["optimizer"], found["client_state"]), ("SGD", {"epoch": 2}))
        self.assert_all_read(found)

    def test_numbers_that_have_no_name_are_said(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW([{"params": [model[1].weight, model[0].bias]}, {"params": [model[0].weight]}])
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        found = self.read("distributed", self.save_alone({"model": model.state_dict(), "optim": optimizer.state_dict()}))
        self.assert_same(found.parameters, model.state_dict())
        self.assertEqual((found.states, found["groups"]), ({}, []))
        self.assertEqual(len(found["not_read"]), 2)
        self.assertIn("the states of 3 parameters, which it has by number", found["not_read"][0])
        self.assertIn("param groups: 2, whose parameters cannot be told", found["not_read"][1])

    def test_a_state_dict_alone_has_all_of_its_tensors(self):
        """Also those whose names have no period, which a value beside the model's could have."""
        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.logit_scale, self.iteration = nn.Linear(3, 2), nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.tensor([7.]))
                self.cls_token = nn.Parameter(torch.randn(1, 1, 3))
                self.register_buffer("ids", torch.arange(3))

        state = Plain().state_dict()
        for more in ({}, {"step": torch.tensor(4)}):
            found = self.read("distributed", self.save_alone({**state, **more}))
            self.assert_same({**found.parameters, **found.buffers}, state)
            self.assertEqual(found["global_steps"], 4 if more else None)
            self.assertEqual(found["not_read"], [])
        found = self.read("distributed", self.save_alone({**state, "epoch": 3}))  # a number beside them may be either
        self.assert_same({**found.parameters, **found.buffers}, {name: one for name, one in state.items() if name != "logit_scale"})
        self.assertEqual((found["client_state"], len(found["not_read"])), ({"epoch": 3, "logit_scale": 2.5}, 1))
        self.assertIn("logit_scale: a number beside the model's tensors", found["not_read"][0])

    def test_lists_and_dicts_are_what_they_were(self):
        """Torch makes texts of a dict's keys, and numbers tell the places in a list."""
        values = {"list": ["a", {"x": [1]}], "dict": {"0": "x", "1": "y"}, "numbers": {0: "a", 1: {3: 4}}}
        found = self.read("distributed", self.save_alone({"model": Model().state_dict(), **values}))
        self.assertEqual(found["client_state"], {**values, "numbers": {"0": "a", "1": {"3": 4}}})

    def test_one_file_for_each_entry(self):
        model = Model()
        found = self.read("distributed", self.save_alone({"model": model.state_dict()}, single_file_per_rank=False))
        self.assert_same(found.entries(), model.state_dict())

    def test_counts_and_schedules_in_dicts(self):
        """Of an optimizer that does not count. A dict around all has its values beside the model, one of counts has an epoch; options have others."""
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        both = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        schedule = {"last_epoch": 9, "_step_count": 10}
        for name, state in {"app": {"app": {**both, "epoch": 4, "step": 9, "scheduler": schedule}},
                            "state": {"state": {**both, "epoch": 4, "global_step": 9, "scheduler": schedule}},
                            "counts": {**both, "progress": {"epoch": 4, "iteration": 9}, "args": {"steps": 100}, "scheduler": schedule},
                            "train_state": {**both, "train_state": {"epoch": 4, "step": 9}, "epoch": 4, "lr_scheduler": schedule}}.items():
            with self.subTest(name):
                found = self.read("distributed", self.save_alone(state))
                self.assertEqual((found["global_steps"], found["lr_scheduler"]), (9, schedule))
                self.assertEqual(sorted(found.states), ["bias", "weight"])
                self.assertNotIn("steps", [key for key in found["client_state"] if key != "args"])

    def test_a_count_of_all_updates_is_taken_before_one_of_an_epoch(self):
        """Wherever both are: at the top, beside the model, in dicts of counts; and before the best model's."""
        model = {"w": torch.ones(2, 2)}
        for all_updates in ("global_step", "num_updates"):
            for some in ("step", "iteration", "epoch"):
                one, other = {some: 4, "epoch": 4}, {all_updates: 9, "epoch": 4}
                for state in ({"model": model, **one, "trainer": other}, {"model": model, **other, "trainer": one}, {"app": {"model": model, **one, "trainer": other}},
                              {"app": {"model": model, "trainer": one}, "progress": other}, {"model": model, "train_state": one, "client": other},
                              {"model": model, **one, "app": {"client": other}}, {"app": {"model": model, **one}, "client": {"state": other}},
                              {"model": model, "step": 9, "epoch": 5, "best": one}, {"model": model, **other, "micro": {"iter": 36, "epoch": 4}}):
                    found = self.read("distributed", self.save_alone(state))
                    self.assertEqual(found["global_steps"], 9, state)

    def test_a_model_whose_module_is_called_state(self):
        model = nn.ModuleDict({"state": nn.Linear(2, 3), "optim": nn.Linear(3, 2)})
        found = self.read("distributed", self.save_alone({"model": model.state_dict()}))
        self.assert_same(found.entries(), model.state_dict())

    def test_strides_of_a_chunk(self):
        tensor = torch.arange(24.).reshape(2, 3, 4).permute(2, 0, 1)
        found = self.read("distributed", self.save_alone({"model": {"w": tensor, "none": torch.empty(0, 3)}}))
        self.assert_same(found.parameters, {"w": tensor, "none": torch.empty(0, 3)})

    def test_a_folder_that_is_not_complete(self):
        path = self.copy("fsdp2")
        (path / "__1_0.distcp").unlink()
        self.assert_refused("distributed", path, "__1_0.distcp is missing", "copy all files of the folder")
        path = self.copy("fsdp2")
        (path / ".metadata").unlink()
        self.assert_refused("distributed", path, ".metadata is missing", "the save was not completed")
        self.assertIsNone(self.ask("distributed", self.folder))
        self.assertIsNone(self.ask("distributed", self.saved / "fsdp1_SHARDED_STATE_DICT"))

    def test_files_that_were_cut_off(self):
        for name, keep in (("__0_0.distcp", 0.5), ("__0_0.distcp", 0), (".metadata", 0.7), (".metadata", 0)):
            path = self.copy("fsdp2")
            content = (path / name).read_bytes()
            (path / name).write_bytes(content[:int(len(content) * keep)])
            self.assert_refused("distributed", path, name)

    def change(self, path, edit):
        metadata = pickle.loads((path / ".metadata").read_bytes())
        edit(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path

    def test_metadata_that_does_not_fit_the_files(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
        name = "model.fc.weight"

        def places(metadata):
            return {index: info for index, info in metadata.storage_data.items() if index.fqn == name}

        def set_chunk(metadata, offsets, sizes):
            metadata.state_dict_metadata[name].chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

        def swap(metadata):
            (one, a), (two, b) = places(metadata).items()
            metadata.storage_data[one], metadata.storage_data[two] = b, a

        def drop_chunk(metadata):
            metadata.state_dict_metadata[name].chunks.pop()

        def other_type(metadata):
            metadata.state_dict_metadata[name].properties.dtype = torch.float16

        def outside(metadata):
            next(iter(places(metadata).values())).relative_path = "../../etc/passwd"

        def compressed(metadata):
            for info in places(metadata).values():
                info.transform_descriptors = ["stream.zstd/1.0"]

        def beyond(metadata):
            next(iter(places(metadata).values())).offset = 1 << 40

        for edit, words in ((lambda m: set_chunk(m, [4, 0], [4, 6]), ["a chunk from [4, 0] on of [4, 6]", "within [7, 6]"]),
                            (lambda m: set_chunk(m, [3, 0], [3, 6]), ["storage_data has no file"]),
                            (lambda m: m.storage_data.pop(MetadataIndex(name, [4, 0])), ["storage_data has no file"]),
                            (swap, ["found a tensor of [3, 6]; expected [4, 6]"]), (drop_chunk, ["fc.weight", "no file has"]),
                            (other_type, ["found a tensor of fp32; expected fp16"]), (outside, ["within the folder"]),
                            (compressed, ["stream.zstd/1.0"]), (beyond, ["cut off"])):
            self.assert_refused("distributed", self.change(self.copy("fsdp2"), edit), *words)

    def test_metadata_that_would_run_a_program(self):
        path = self.copy("fsdp2")
        (path / ".metadata").write_bytes(b"\x80\x02cos\nsystem\n(X\x0c\0\0\0touch /tmp/xtR.")
        self.assert_refused("distributed", path, "os.system")

    def test_several_models_are_refused(self):
        path = self.save_alone({"a": {"model": {"w": torch.ones(2)}}, "b": {"model": {"w": torch.ones(2)}}})
        self.assert_refused("distributed", path, "has several models: a.model, b.model")


if __name__ == "__main__":
    unittest.main()
