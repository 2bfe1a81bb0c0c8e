"""Models written by Tessera, opened by the libraries other people use: torch, h5py. All comparisons are of bits."""
import collections
import os
import struct
import subprocess
import sys
import unittest
import zipfile

import h5py
import numpy as np
import torch
from formats_testing import FORMATS, TOOL, FormatsTest, all_names, bits, every_kind


class Torch(FormatsTest):
    def test_every_kind(self):
        for piece_bytes in (1, 4096, 10_000_000):
            path = self.write("pt", every_kind(), piece_bytes=piece_bytes)
            for mmap in (False, True):
                loaded = torch.load(path, weights_only=True, mmap=mmap)
                self.assertIs(type(loaded), collections.OrderedDict)
                self.assertEqual(list(loaded), list(all_names(every_kind())))
                self.assert_same(loaded, all_names(every_kind()))
                for name, tensor in loaded.items():
                    self.assertFalse(tensor.requires_grad)
                    self.assertEqual(tensor.stride(), torch.empty(tensor.shape).stride(), name)

    def test_tied_names_share_their_storage(self):
        for mmap in (False, True):
            loaded = torch.load(self.write("pt", every_kind()), weights_only=True, mmap=mmap)
            pointers = {loaded[name].data_ptr() for name in ("embedding.weight", "lm_head.weight", "decoder.weight")}
            self.assertEqual(len(pointers), 1)
            loaded["lm_head.weight"].fill_(3)
            self.assertTrue((loaded["embedding.weight"] == 3).all())
            self.assertEqual(len({tensor.data_ptr() for tensor in loaded.values() if tensor.numel()}),
                             sum(tensor.numel() > 0 for _, tensor, _ in every_kind()))

    def test_offsets_can_be_computed(self):
        """torch asserts, for every storage, that the offset it computes is the one it reads."""
        path = self.write("pt", every_kind())
        script = ("import sys, torch; from torch.utils.serialization import config\n"
                  "torch.load(sys.argv[1], weights_only=True)\n"
                  "config.load.calculate_storage_offsets = True\n"
                  "print(len(torch.load(sys.argv[1], weights_only=True, mmap=True)))")
        result = subprocess.run([sys.executable, "-c", script, path], env={**os.environ, "TORCH_SERIALIZATION_DEBUG": "1"},
                                capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stdout.strip()), (0, str(len(all_names(every_kind())))), result.stderr)

    def test_large_and_far_entries_lie_where_torch_computes(self):
        reader = torch._C.PyTorchFileReader(str(self.write("pt", every_kind())))
        limit = 0xffffffff
        for offset in (0, 1, 63, 1000, limit - 1, limit, limit + 1, 10**12):
            for size in (1, 64, limit - 1, limit, 10**11):
                for name in ("data/0", "data/12345"):
                    ours = subprocess.run([TOOL, "zip", str(offset), name, str(size)], capture_output=True, text=True, check=True)
                    self.assertEqual(int(ours.stdout), reader.get_record_offset_no_read(offset, name, size, 64), (offset, size, name))

    def test_the_zip_is_sound(self):
        path = self.write("pt", every_kind())
        theirs = self.folder / "theirs.pt"
        torch.save(collections.OrderedDict(all_names(every_kind())), theirs)
        with zipfile.ZipFile(path) as ours, zipfile.ZipFile(theirs) as reference:
            self.assertIsNone(ours.testzip())  # every CRC-32
            content = path.read_bytes()
            for info in ours.infolist():
                self.assertEqual(info.compress_type, zipfile.ZIP_STORED)
                name_bytes, extra_bytes = struct.unpack("<HH", content[info.header_offset + 26:info.header_offset + 30])
                self.assertEqual((info.header_offset + 30 + name_bytes + extra_bytes) % 64, 0, info.filename)
            def small(archive):
                return {info.filename.split("/", 1)[1]: archive.read(info) for info in archive.infolist()
                        if not info.filename.endswith("/data.pkl") and "/data/" not in info.filename and "/.data/" not in info.filename}
            self.assertEqual(small(ours), small(reference))

    def test_without_tensors(self):
        self.assertEqual(torch.load(self.write("pt", []), weights_only=True), {})


class Hdf5(FormatsTest):
    def test_every_kind(self):
        for piece_bytes in (1, 10_000_000):
            path = self.write("h5", every_kind(), piece_bytes=piece_bytes)
            with h5py.File(path) as file:
                self.assertEqual(set(file), set(all_names(every_kind())))
                for name, tensor in all_names(every_kind()).items():
                    with self.subTest(name=name):
                        self.check(file[name], tensor)

    def check(self, dataset, tensor):
        value = dataset[()]
        self.assertEqual(dataset.shape, tuple(tensor.shape))
        if tensor.numel():
            self.assertIsNotNone(dataset.id.get_offset())  # contiguous
        if tensor.dtype == torch.bfloat16:  # numpy has none: h5py gives float32, of the same value
            self.assertEqual(dataset.dtype.itemsize, 4)
            expected = tensor.float()
            value = torch.from_numpy(np.array(value, dtype=np.float32).reshape(tensor.shape))
            self.assertTrue(torch.equal(value.isnan(), expected.isnan()))
            self.assertTrue(torch.equal(value.nan_to_num(), expected.nan_to_num()))
        else:
            self.assertEqual(dataset.dtype, tensor.numpy().dtype)
            self.assertEqual(np.ascontiguousarray(value).tobytes(), bits(tensor))

    def test_tied_names_are_one_dataset(self):
        with h5py.File(self.write("h5", every_kind())) as file:
            self.assertEqual(file["embedding.weight"], file["lm_head.weight"])
            self.assertNotEqual(file["embedding.weight"], file["last"])

    def test_without_tensors(self):
        with h5py.File(self.write("h5", [])) as file:
            self.assertEqual(list(file), [])


class AllFormats(FormatsTest):
    def test_a_folder_in_the_way(self):
        for format_name, name in FORMATS.items():
            (self.folder / name).mkdir()
            self.assertIn("is a folder; expected the name of a file", self.write(format_name, every_kind(), expect=1))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
