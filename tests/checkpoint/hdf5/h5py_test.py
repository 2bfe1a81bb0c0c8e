"""h5py opens a checkpoint's files and finds the same bits; so does a reader written from docs/checkpoint_format.md alone."""
import json
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np

TOOL = os.environ["CONSOLIDATE_TOOL"]
ROOT = Path(__file__).resolve().parents[3]
NUMPY = {"fp64": "<f8", "fp32": "<f4", "bf16": "<u2", "fp16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
         "int8": "i1", "uint8": "u1", "bool": "?", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "complex64": "<c8"}
READ_AS = {"fp64": np.float64, "fp32": np.float32, "bf16": np.float32, "fp16": np.float16, "int64": np.int64,
           "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.bool_, "uint16": np.uint16,
           "uint32": np.uint32, "uint64": np.uint64, "complex64": np.complex64}


def decode(text, type_name, shape):
    """The tensor that `text`, in hexadecimal digits, holds; bf16 as float32."""
    values = np.frombuffer(bytes.fromhex(text), NUMPY[type_name])
    if type_name == "bf16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values.reshape(shape)


class Checkpoint:
    """The format's description in code: no HDF5."""

    def __init__(self, directory):
        self.folder = Path(directory, Path(directory, "latest").read_text().removesuffix("\n"))
        self.manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for file in self.manifest["files"]:
            if isinstance(file["datasets"], int):  # those of an earlier file
                file["datasets"] = self.manifest["files"][file["datasets"]]["datasets"]

    def dataset(self, rank, name):
        file = self.manifest["files"][rank]
        record = next(one for one in file["datasets"] if one["name"] == name)
        with open(self.folder / file["name"], "rb") as data:
            data.seek(record["offset"])
            return record, data.read(record["bytes"])

    def parameter(self, name):
        found = next(one for one in self.manifest["parameters"] if name in [one["name"], *one["aliases"]])
        unit = self.manifest["units"][found["unit"]]
        group = "master" if unit["trainable"] else "parameter"
        parts = [self.dataset(rank, f"/{group}/unit_{found['unit']:05d}") for rank in range(self.manifest["world_size"])]
        type_name = parts[0][0]["type"]
        size = np.dtype(NUMPY[type_name]).itemsize
        whole = b"".join(data for _, data in parts)
        numel = int(np.prod(found["shape"], dtype=np.int64))
        return type_name, found["shape"], whole[found["offset"] * size:(found["offset"] + numel) * size]


class H5py(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_h5py_"))
        cls.folders = {world: Path(folder, str(world)) for world in (1, 2, 3, 8)}
        for world, path in cls.folders.items():
            subprocess.run([TOOL, "sample", path, str(world)], check=True)

    def each_world(self):
        for world, folder in self.folders.items():
            yield world, folder, json.loads((folder / "expected.json").read_text(encoding="utf-8"))

    def assert_same(self, found, expected, type_name):
        found = np.asarray(found)
        self.assertEqual(found.dtype, READ_AS[type_name])
        self.assertEqual(found.shape, expected.shape)
        if found.dtype.kind == "f":  # HDF5 may change the bits of a NaN while it converts bf16
            self.assertTrue(np.array_equal(np.isnan(found), np.isnan(expected)))
            found, expected = found[~np.isnan(found)], expected[~np.isnan(expected)]
        self.assertEqual(found.tobytes(), expected.tobytes())

    def test_model_file_is_the_whole_model(self):
        for _, folder, expected in self.each_world():
            with h5py.File(folder / "step" / "model.h5", "r") as model:
                names = set(expected["buffers"])
                for name, one in expected["parameters"].items():
                    names |= {name, *one["aliases"]}
                    for alias in [name, *one["aliases"]]:
                        dataset = model[alias.replace("%", "%25").replace("/", "%2F")]
                        self.assert_same(dataset[()], decode(one["hex"], one["type"], one["shape"]), one["type"])
                for name, one in expected["buffers"].items():
                    self.assert_same(model[name][()], decode(one["hex"], one["type"], one["shape"]), one["type"])
                self.assertEqual({name.replace("%2F", "/") for name in model}, names)
                self.assertEqual(model.attrs["format"], "tessera-checkpoint")

    def test_slices_of_a_parameter_that_spans_ranks(self):
        for _, folder, expected in self.each_world():
            one = expected["parameters"]["fc.weight"]
            whole = decode(one["hex"], one["type"], one["shape"])
            with h5py.File(folder / "step" / "model.h5", "r") as model:
                self.assert_same(model["fc.weight"][1:4, 2], whole[1:4, 2], "fp32")
                self.assert_same(model["fc.weight"][:, :, ::2], whole[:, :, ::2], "fp32")

    def test_rank_files_hold_their_slices(self):
        for world, folder, expected in self.each_world():
            for rank in range(world):
                with h5py.File(folder / "step" / f"rank_{rank:05d}.h5", "r") as file:
                    attributes = dict(file.attrs)
                    self.assertEqual(attributes, {"format": "tessera-checkpoint", "format_version": 2, "tag": "step",
                                                  "rank": rank, "world_size": world})
                    for index, unit in enumerate(expected["units"]):
                        group = "master" if unit["trainable"] else "parameter"
                        datasets = {group: (unit["weights"], unit["type"])}
                        datasets |= {name: (data, "fp32") for name, data in unit.get("states", {}).items()}
                        for name, (data, type_name) in datasets.items():
                            whole = decode(data, type_name, [-1])
                            dataset = file[f"{name}/unit_{index:05d}"]
                            begin = dataset.attrs["first_element"]
                            self.assertEqual(begin, rank * whole.size // world)
                            self.assertEqual(dataset.attrs["unit_numel"], whole.size)
                            self.assert_same(dataset[:], whole[begin:begin + whole.size // world], type_name)
                    self.assertEqual(file["blobs/rng%2Fcpu"][:].tobytes().hex(), expected["blobs"][rank])

    def test_offsets_of_the_manifest_are_those_of_hdf5(self):
        for world, folder, _ in self.each_world():
            manifest = Checkpoint(folder).manifest
            for rank in range(world):
                with h5py.File(folder / "step" / f"rank_{rank:05d}.h5", "r") as file:
                    for one in manifest["files"][rank]["datasets"]:
                        dataset = file[one["name"]]
                        self.assertEqual(list(dataset.shape), one["shape"])
                        self.assertEqual(dataset.id.get_storage_size(), one["bytes"])
                        if one["bytes"]:
                            self.assertEqual(dataset.id.get_offset(), one["offset"])

    def test_the_description_is_enough(self):
        for _, folder, expected in self.each_world():
            checkpoint = Checkpoint(folder)
            for name, one in expected["parameters"].items():
                for alias in [name, *one["aliases"]]:
                    type_name, shape, data = checkpoint.parameter(alias)
                    self.assertEqual((type_name, shape, data.hex()), (one["type"], one["shape"], one["hex"]))
            for tensor in checkpoint.manifest["tensors"]:
                record, data = checkpoint.dataset(0, tensor["dataset"])
                one = expected["buffers"][tensor["name"]]
                self.assertEqual((record["type"], record["shape"], data.hex()), (one["type"], one["shape"], one["hex"]))

    def test_the_description_shows_real_keys(self):
        description = (ROOT / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")
        documented = set(re.findall(r"^\| `(\w+)` \|", description, re.MULTILINE))
        for _, folder, _ in self.each_world():
            manifest = Checkpoint(folder).manifest
            keys = set(manifest)
            for members in ("units", "parameters", "files", "tensors"):
                keys |= set(manifest[members][0])
            keys |= set(manifest["files"][0]["datasets"][0])
            self.assertEqual(keys, documented)


if __name__ == "__main__":
    unittest.main()
