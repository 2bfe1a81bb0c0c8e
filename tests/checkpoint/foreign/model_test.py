"""Models in the files of Hugging Face's programs and of torch.save, compared with what their libraries load."""
import json
import shutil
import unittest

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from trainers_testing import TrainersTest


def state_of(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Model(TrainersTest):
    def gpt2(self):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2))

    def test_save_pretrained(self):
        model = self.gpt2()
        for options in ({}, {"max_shard_size": "2KB"}):
            path = self.folder / f"model{len(options)}"
            model.save_pretrained(path, **options)
            found = self.read("model", path)
            expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}  # tied
            self.assert_same(found.parameters, expected)
            self.assertEqual((found["format"], found["optimizer"], found["groups"]), ("Hugging Face model", "", []))
            self.assertEqual(found["num_files"] > 1, bool(options))
            self.assert_all_read(found)
            index = path / ("model.safetensors.index.json" if options else "model.safetensors")
            self.assert_same(self.read("model", index).parameters, expected)

    def bin_shards(self, name):
        """As save_pretrained wrote before safetensors: files of torch.save, filled in the model's order."""
        path, state, weight_map = self.folder / "bin", self.gpt2().state_dict(), {}
        path.mkdir(exist_ok=True)
        names = list(state)
        for i in range(3):
            part = {key: state[key] for key in names[i::3]}
            file = f"{name}-{i + 1:05}-of-00003.bin"
            torch.save(part, path / file)
            weight_map.update(dict.fromkeys(part, file))
        (path / f"{name}.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return path, state

    def test_bin_shards(self):
        for name in ("pytorch_model", "diffusion_pytorch_model"):
            path, state = self.bin_shards(name)
            self.assert_same(self.read("model", path).entries(), state)
            shutil.rmtree(path)

    def test_other_names(self):
        state = state_of(a=(3, 4), b=(5,))
        for name in ("pytorch_model.bin", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin",
                     "adapter_model.safetensors", "adapter_model.bin"):
            path = self.folder / name.replace(".", "_")
            path.mkdir()
            (save_file if name.endswith("s") else torch.save)(state, path / name)
            self.assert_same(self.read("model", path).parameters, state)

    def test_tied_names(self):
        model = self.gpt2()
        path = self.folder / "pytorch_model.bin"
        for legacy in (False, True):
            torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
            for given in (path, self.folder):
                found = self.read("model", given)
                self.assert_same(found.entries(), model.state_dict())
                self.assertEqual(found.aliases, {"lm_head.weight": "transformer.wte.weight"})
                self.assertEqual(found.names, [name for name, _ in model.named_parameters()])

    def test_views_of_one_memory(self):
        memory = torch.arange(24.)
        state = {"all": memory.reshape(4, 6), "again": memory.reshape(4, 6), "turned": memory.reshape(4, 6).T, "half": memory[:12],
                 "step": memory[::2], "rows": memory.reshape(4, 6)[1:3, 2:5], "wide": torch.ones(3, 1).expand(3, 4)}
        torch.save(state, self.folder / "views.pt")
        found = self.read("model", self.folder / "views.pt")
        self.assert_same(found.entries(), state)
        self.assertEqual(found.aliases, {"again": "all"})

    def test_buffers(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        model.register_buffer("ids", torch.arange(4))
        model.register_buffer("table", torch.ones(2))  # nothing says that it is no parameter
        torch.save(model.state_dict(), self.folder / "model.pth")
        found = self.read("model", self.folder / "model.pth")
        self.assertEqual(sorted(found.buffers), ["0.num_batches_tracked", "0.running_mean", "0.running_var", "ids"])
        self.assertIn("table", found.parameters)

    def test_parameters_are_parameters_whatever_their_names(self):
        state = {"running_mean": nn.Parameter(torch.ones(3)), "ids": nn.Parameter(torch.arange(3), requires_grad=False),
                 "other": torch.arange(3)}
        torch.save(state, self.folder / "model.pt")
        found = self.read("model", self.folder / "model.pt")
        self.assertEqual((sorted(found.parameters), sorted(found.buffers)), (["ids", "running_mean"], ["other"]))

    def test_nested_dicts_and_extra_state(self):
        torch.save({"encoder": {"w": torch.ones(2)}, "decoder": {"w": torch.zeros(2)}, "_extra_state": {"calls": 3}},
                   self.folder / "model.pt")
        found = self.read("model", self.folder / "model.pt")
        self.assert_same(found.parameters, {"encoder.w": torch.ones(2), "decoder.w": torch.zeros(2)})

    def test_names_of_wrappers(self):
        state = state_of(a=(3, 4), b=(5,))
        torch.save({f"module.{name}": value for name, value in state.items()}, self.folder / "model.pt")
        self.assert_same(self.read("model", self.folder / "model.pt").parameters, state)
        mixed = {"module.a": state["a"], "b": state["b"]}
        torch.save(mixed, self.folder / "model.pt")
        self.assert_same(self.read("model", self.folder / "model.pt").parameters, mixed)

    def test_something_else(self):
        (self.folder / "config.json").write_text("{}")
        (self.folder / "notes.txt").write_text("text")
        self.assertIsNone(self.ask("model", self.folder))
        self.assertIsNone(self.ask("model", self.folder / "notes.txt"))
        torch.save([1, 2, 3], self.folder / "list.pt")
        self.assert_refused("model", self.folder / "list.pt", "found a list of 3; expected a state dict")
        torch.save({"w": torch.ones(2), "epoch": 3}, self.folder / "dict.pt")
        self.assert_refused("model", self.folder / "dict.pt", "found a dict of 2, in which the text 'epoch' is 3; expected a state dict")

    def test_shards_that_are_not_complete(self):
        path, _ = self.bin_shards("pytorch_model")
        shard = path / "pytorch_model-00002-of-00003.bin"
        content = shard.read_bytes()
        shard.unlink()
        self.assert_refused("model", path, "pytorch_model-00002-of-00003.bin is missing", "copy all files")
        shard.write_bytes(content[:len(content) // 2])
        self.assert_refused("model", path, "pytorch_model-00002-of-00003.bin")
        state = torch.load(path / "pytorch_model-00001-of-00003.bin")
        torch.save(state, shard)
        self.assert_refused("model", path, "the index has it in pytorch_model-00001")
        shard.write_bytes(content)
        index = path / "pytorch_model.bin.index.json"
        document = json.loads(index.read_text())
        document["weight_map"]["more"] = shard.name
        index.write_text(json.dumps(document))
        self.assert_refused("model", path, "'more' is not in pytorch_model-00002")
        document["weight_map"] = {name: file for name, file in document["weight_map"].items() if "wte" not in name}
        index.write_text(json.dumps(document))
        self.assert_refused("model", path, "is not in the index")
        index.write_text("{")
        self.assert_refused("model", path, "index.json")
        index.write_text(json.dumps({"weight_map": {"a": "../a.bin"}}))
        self.assert_refused("model", path, "index's own folder")


if __name__ == "__main__":
    unittest.main()
