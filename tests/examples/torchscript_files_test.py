"""TorchScript files are read in place: what a rank holds meanwhile, archives of other programs, damaged ones; traced devices."""
import os
import time
import unittest
import zipfile

import python_models as models
import torch
from safetensors.torch import load_file, save_file
from torchscript_test import TorchScriptTest, train_in_parts

MIB = 1 << 20


class Frozen(torch.nn.Module):
    """Nearly all of it is frozen, so that there is little state beside the parameters."""

    def __init__(self, num_layers, size):
        super().__init__()
        self.first = torch.nn.Linear(6, size)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(num_layers))
        self.layers.requires_grad_(False)
        self.last = torch.nn.Linear(size, 5)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return self.last(x)


class Recurrent(torch.nn.Module):
    """Its trace has the device as a constant (the state of the LSTM, arange), and a tensor; a tied layer, and a buffer."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, batch_first=True)
        self.mix = torch.nn.Linear(8, 8, bias=False)
        self.again = torch.nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.head = torch.nn.Linear(8, 5)
        self.register_buffer("shift", models.random(8, seed=8))

    def forward(self, x):
        states, _ = self.lstm(x)
        place = torch.arange(8, device=x.device) * torch.tensor([0.1] * 8)
        return self.head(torch.tanh(self.again(self.mix(states[:, -1] + place) + self.shift)))


def rewrite(source, target, change):
    """The same archive as another program would write it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            change(new, entry.filename, old.read(entry))


class TorchScriptFilesTest(TorchScriptTest):
    def recurrent(self):
        torch.manual_seed(1)
        return Recurrent(), {"x": models.random(models.NUM_SAMPLES, 4, 6, seed=2), "y": models.numbers(5, models.NUM_SAMPLES, seed=3)}

    def test_a_trace_with_devices_and_constants(self):
        model, data = self.export(self.recurrent(), lambda model: torch.jit.trace(model, torch.ones(2, 4, 6)))
        expected = train_in_parts(model, data, ["x"], "cross_entropy", models.NUM_SAMPLES)
        found = [self.train("--set", f"zero_optimization.stage={stage}") for stage in (0, 3)]
        self.assert_close(found[0], expected)
        self.assertEqual(found[1], found[0])
        torch.testing.assert_close(load_file(self.folder / "run" / "model.safetensors")["shift"], model.shift, rtol=0, atol=0)

    def test_archives_of_other_programs_give_the_same_bits(self):
        self.export(self.recurrent(), lambda model: torch.jit.trace(model, torch.ones(2, 4, 6)))
        expected = self.train(ranks=1)

        def compressed(archive, name, content):
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)

        def not_aligned(archive, name, content):
            archive.writestr(name, content, zipfile.ZIP_STORED)
        for change in (compressed, not_aligned):
            with self.subTest(change.__name__):
                rewrite(self.folder / "m.pt", self.folder / "other.pt", change)
                self.assertEqual(self.train(model="other.pt", ranks=1), expected)

    def test_damaged_files(self):
        self.export(self.recurrent(), lambda model: torch.jit.trace(model, torch.ones(2, 4, 6)))

        def expect(name, *parts):
            outcome = self.run_tool("train", self.write("config.json", self.run_config(model=name)))
            self.assert_one_error(outcome, *parts)

        def lost(archive, name, content):
            if not name.endswith("data/0"):
                archive.writestr(name, content)
        # tests/examples/script_file_test.cc and script_nesting_test.cc have the others.
        rewrite(self.folder / "m.pt", self.folder / "lost.pt", lost)
        expect("lost.pt", "lost.pt: no TorchScript module: ")
        (self.folder / "empty.pt").write_bytes(b"")
        expect("empty.pt", "empty.pt: no TorchScript module: ", "expected a file that torch.jit.save wrote")

    def peaks(self, model, backend):
        """The most anonymous memory of each rank's process, in bytes, sampled until it ends."""
        config = self.run_config(model=model, zero_optimization={"stage": 3, "unit_numel": 1 << 20}, comm={"backend": backend})
        config["trainer"]["max_steps"] = 1
        process = self.start("train", self.write("config.json", config), "--nproc", 2)
        ranks = {}
        while process.poll() is None:
            if len(ranks) < 2:
                for pid, environment in self.marked().items():
                    if "RANK" in environment:
                        ranks.setdefault(pid, 0)
            for pid in ranks:
                try:
                    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
                        anonymous = [line for line in status if line.startswith("RssAnon:")]
                except OSError:
                    continue
                ranks[pid] = max([ranks[pid], *(int(line.split()[1]) << 10 for line in anonymous)])
            time.sleep(0.002)
        self.assert_succeeded(self.finish(process))
        self.assertEqual(len(ranks), 2)
        return ranks.values()

    @unittest.skipIf(os.environ.get("TESSERA_SANITIZE"), "a sanitizer has memory of its own")
    def test_memory_while_the_model_is_made(self):
        torch.manual_seed(1)
        save_file({"x": models.random(models.NUM_SAMPLES, 6, seed=2), "y": models.numbers(5, models.NUM_SAMPLES, seed=3)},
                  self.folder / "train.safetensors")
        for name, size in (("small.pt", 8), ("large.pt", 1024)):
            torch.jit.script(Frozen(24, size)).save(str(self.folder / name))
        whole, unit = os.path.getsize(self.folder / "large.pt"), 4 * MIB
        self.assertGreater(whole, 95 * MIB)
        # Over Gloo a rank has its half; in shared memory the parameters are not anonymous.
        for backend, shard in (("gloo", whole / 2), ("shm", 0)):
            with self.subTest(backend):
                most = max(self.peaks("large.pt", backend)) - max(self.peaks("small.pt", backend))
                self.assertLess(most, shard + 2 * unit + 24 * MIB)


if __name__ == "__main__":
    unittest.main()
