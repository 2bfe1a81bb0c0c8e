"""Safetensors files written by Tessera, read by the safetensors library, and the other way round. All comparisons are of bits."""
import json
import random
import struct
import subprocess
import sys
import unittest

import numpy as np
import safetensors
import safetensors.torch
import torch
from formats_testing import TOOL, TYPES, WORDS, FormatsTest, all_names, bits, every_kind, random_tensor


class Safetensors(FormatsTest):
    def test_every_kind(self):
        for piece_bytes in (1, 4096, 10_000_000):
            path = self.write("safetensors", every_kind(), piece_bytes=piece_bytes)
            self.assert_same(safetensors.torch.load_file(path), all_names(every_kind()))
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        self.assertEqual(metadata.pop("format"), "pt")
        self.assertEqual(sorted(metadata), ["tessera_blocks", "tessera_digest"])

    def parts(self, path):
        """The header without its metadata, and the data."""
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:8 + length])
        header.pop("__metadata__")
        return list(header.items()), content[8 + length:]

    def test_is_what_the_library_writes(self):
        ours = self.write("safetensors", every_kind())
        theirs = self.folder / "theirs.safetensors"
        safetensors.torch.save_file({name: tensor.clone() for name, tensor in all_names(every_kind()).items()}, theirs,
                                    metadata={"format": "pt"})
        self.assertEqual(self.parts(ours), self.parts(theirs))

    def test_without_tensors(self):
        self.assertEqual(safetensors.torch.load_file(self.write("safetensors", [])), {})

    def test_ours_reads_what_the_library_writes(self):
        path = self.folder / "theirs.safetensors"
        expected = all_names(every_kind())
        safetensors.torch.save_file({name: tensor.clone() for name, tensor in expected.items()}, path)
        read = json.loads(subprocess.run([TOOL, "read", path], capture_output=True, text=True, check=True).stdout)
        self.assert_same({name: torch.frombuffer(bytearray(bytes.fromhex(entry["hex"])) or bytearray(8), dtype=TYPES[entry["type"]])
                          [:int(np.prod(entry["shape"], dtype=np.int64))].reshape(entry["shape"])
                          for name, entry in read.items()}, expected)

    def test_a_name_the_format_keeps_for_itself(self):
        message = self.write("safetensors", [("__metadata__", torch.zeros(2), [])], expect=1)
        self.assertIn("cannot hold a tensor named __metadata__", message)
        self.assertEqual(list(self.folder.glob("model*")), [])


def shards_of(tensors, limit):
    """What huggingface_hub's split_torch_state_dict_into_shards documents: in order, a new shard when the next tensor would
    not fit, a shard of its own for one that never would. Names of one tensor stay together, and each counts."""
    shards, current, size = [], [], 0
    for name, tensor, aliases in tensors:
        count = len(bits(tensor)) * (1 + len(aliases))
        if count > limit:
            shards.append([name, *aliases])
            continue
        if size + count > limit:
            shards.append(current)
            current, size = [], 0
        current += [name, *aliases]
        size += count
    return shards + ([current] if current else [])


class Shards(FormatsTest):
    def model(self, seed=1):
        source = random.Random(seed)
        return [(f"layers.{i}.weight", random_tensor((source.randrange(0, 40), 4), torch.float32, i), [f"tied.{i}"] * (i % 7 == 3)) for i in range(30)]

    def load(self, folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        loaded = {}
        for name in sorted(set(index["weight_map"].values())):
            part = safetensors.torch.load_file(folder / name)
            self.assertEqual(dict.fromkeys(part, name), {key: value for key, value in index["weight_map"].items() if value == name})
            loaded.update(part)
        return index, loaded

    def test_are_cut_as_documented(self):
        for seed in range(5):
            for limit in (100, 640, 2000, 5000):
                tensors = self.model(seed)
                folder = self.write("safetensors", tensors, self.folder / f"out-{seed}-{limit}", max_shard_bytes=limit)
                index, loaded = self.load(folder)
                self.assert_same(loaded, all_names(tensors))
                expected = shards_of(tensors, limit)
                self.assertEqual(index["weight_map"], {name: f"model-{i + 1:05d}-of-{len(expected):05d}.safetensors"
                                                       for i, names in enumerate(expected) for name in names})
                self.assertEqual(index["metadata"], {"total_size": sum(len(bits(tensor)) for tensor in all_names(tensors).values())})
                self.assertEqual(sorted(path.name for path in folder.iterdir()),
                                 sorted({*index["weight_map"].values(), "model.safetensors.index.json"}))

    def test_the_index_is_written_as_transformers_does(self):
        folder = self.write("safetensors", every_kind(), self.folder / "out", max_shard_bytes=1000)
        text = (folder / "model.safetensors.index.json").read_text()
        self.assertEqual(text, json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n")

    def test_tied_names_stay_together_and_count(self):
        folder = self.write("safetensors", every_kind(), self.folder / "out", max_shard_bytes=1000)
        index, loaded = self.load(folder)
        self.assert_same(loaded, all_names(every_kind()))
        tied = {index["weight_map"][name] for name in ("embedding.weight", "lm_head.weight", "decoder.weight")}
        self.assertEqual(len(tied), 1)
        self.assertEqual(index["metadata"]["total_size"], sum(len(bits(tensor)) for tensor in all_names(every_kind()).values()))

    def test_one_shard_needs_no_index(self):
        folder = self.write("safetensors", self.model(), self.folder / "out", max_shard_bytes=10**9)
        self.assertEqual([path.name for path in folder.iterdir()], ["model.safetensors"])
        self.assert_same(safetensors.torch.load_file(folder / "model.safetensors"), all_names(self.model()))

    def test_shards_of_empty_tensors(self):
        tensors = [("a", torch.zeros(0), []), ("big", torch.ones(100), []), ("b", torch.zeros(0), [])]
        folder = self.write("safetensors", tensors, self.folder / "out", max_shard_bytes=40)
        self.assert_same(self.load(folder)[1], all_names(tensors))

    def test_a_folder_keeps_its_other_files(self):
        out = self.folder / "out"
        self.write("safetensors", self.model(), out, max_shard_bytes=640)
        (out / "config.json").write_text("{}")
        (out / "link").symlink_to("config.json")
        for limit in (2000, 10**9):
            self.write("safetensors", self.model(2), out, max_shard_bytes=limit)
            weights = {path.name for path in out.iterdir()} - {"config.json", "link"}
            self.assertEqual((out / "link").read_text(), "{}")
            if limit == 2000:
                self.assertEqual({name[-17:] for name in weights if name.startswith("model-")},
                                 {f"{len(weights) - 1:05d}.safetensors"})
        self.assertEqual(weights, {"model.safetensors"})
        self.assertEqual([path.name for path in self.folder.iterdir()], ["out"])

    def test_a_folder_with_folders_is_refused(self):
        (self.folder / "out" / "runs").mkdir(parents=True)
        message = self.write("safetensors", self.model(), self.folder / "out", max_shard_bytes=640, expect=1)
        self.assertIn("holds a folder, runs; expected a new folder", message)
        self.assertEqual([path.name for path in (self.folder / "out").iterdir()], ["runs"])

    def test_ours_reads_shards(self):
        folder = self.write("safetensors", every_kind(), self.folder / "out", max_shard_bytes=1000)
        for path in (folder, folder / "model.safetensors.index.json"):
            read = json.loads(subprocess.run([TOOL, "read", path], capture_output=True, text=True, check=True).stdout)
            self.assertEqual({name: entry["hex"] for name, entry in read.items()},
                             {name: bits(tensor).hex() for name, tensor in all_names(every_kind()).items()})

    def test_other_formats_have_no_shards(self):
        for format_name in ("pt", "h5"):
            message = self.write(format_name, self.model(), self.folder / "out", max_shard_bytes=640, expect=1)
            self.assertIn("only safetensors can be cut into shards", message)


class Mutations(FormatsTest):
    def test_what_ours_accepts_the_library_reads_alike(self):
        """Ours is the stricter of the two."""
        theirs = self.folder / "theirs.safetensors"  # without our hashes, which no change of the header would pass
        safetensors.torch.save_file({name: tensor.clone() for name, tensor in all_names(every_kind()).items()}, theirs)
        original = theirs.read_bytes()
        header_bytes = struct.unpack("<Q", original[:8])[0]
        source = random.Random(5)
        paths = []
        for i in range(600):
            content = bytearray(original)
            for _ in range(source.choice((1, 1, 2, 5))):
                at = source.randrange(8 + header_bytes)
                content[at] = source.choice(b'0123456789,:[]{}" ') if source.random() < 0.7 else source.randrange(256)
            path = self.folder / f"{i}.safetensors"
            path.write_bytes(content)
            paths.append(path)
        verdicts = subprocess.run([TOOL, "check", *paths], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual(len(verdicts), len(paths))
        accepted = 0
        for path, verdict in zip(paths, verdicts):
            try:
                theirs = safetensors.torch.load_file(path)
            except Exception:  # its error types differ from version to version
                theirs = None
            if verdict == "ok":
                accepted += 1
                self.assertIsNotNone(theirs, path.read_bytes()[:header_bytes])
                read = json.loads(subprocess.run([TOOL, "read", path], capture_output=True, text=True, check=True).stdout)
                self.assertEqual({name: (entry["type"], entry["shape"], entry["hex"]) for name, entry in read.items()},
                                 {name: (WORDS[t.dtype], list(t.shape), bits(t).hex()) for name, t in theirs.items()})
            else:
                self.assertIn(str(path), verdict)
        self.assertGreater(accepted, 10)
        self.assertLess(accepted, 500)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
