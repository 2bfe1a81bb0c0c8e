"""The folders in which the commands of tests/messages run, by the name of the file of cases."""
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("tools", "examples")]
from tool import TESSERA, ToolTest  # noqa: E402

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def merged(value, changes):
    """RFC 7396: null removes a key."""
    if not isinstance(changes, dict):
        return changes
    value = dict(value) if isinstance(value, dict) else {}
    for key, change in changes.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = merged(value.get(key), change)
    return value


class Fixtures(ToolTest):
    def make(self, name):
        self.folder = self.folder / name
        self.tmp, self.bin = self.folder / "tmp", self.folder / "bin"
        for folder in (self.folder, self.tmp, self.bin):
            folder.mkdir()
        (self.bin / "tessera").symlink_to(TESSERA)
        self.write("config.json", self.config(data={"type": "fashion_mnist", "path": "data"}))
        shutil.copytree(self.data, self.folder / "data")
        self.write("taken", "")
        getattr(self, f"make_{name}", lambda: None)()

    def left(self):
        """Yields what is in the folder of a run, and removes it after that."""
        if (run := self.folder / "run").exists():
            yield from [path for path in (run, *sorted(run.rglob("*"))) if path.is_file() or not any(path.iterdir())]
            shutil.rmtree(run)

    def make_train(self):
        for name in ("cut", "foreign", "folder"):
            shutil.copytree(self.data, self.folder / name)
        (self.folder / "cut" / IMAGES).write_bytes((self.data / IMAGES).read_bytes()[:5000])
        (self.folder / "foreign" / LABELS).write_bytes(b"<!DOCTYPE html>\n" * 20)
        (self.folder / "folder" / IMAGES).unlink()
        (self.folder / "folder" / IMAGES).mkdir()
        (self.folder / "empty").mkdir()
        self.write("env", "A=1\nRANK=3\n")

    def make_torchscript(self):
        """Models from Python and their data: m.pt and train.safetensors, and what differs from them as the name says."""
        import h5py
        import python_models as models
        import torch
        from safetensors.torch import save_file
        from torchscript_test import TorchScriptTest

        class Moody(torch.nn.Linear):
            """Its output has another shape in training than in evaluation."""

            def forward(self, x):
                scores = torch.nn.functional.linear(x, self.weight, self.bias)
                return scores if self.training else scores.squeeze(1)

        torch.set_num_threads(1)
        self.write("config.json", TorchScriptTest.run_config(self))
        model, data = TorchScriptTest.export(self, models.classification())
        x, y = data["x"], data["y"]
        wrong = [y.clone(), y.clone()]
        wrong[0][31], wrong[1][31] = 5, -1
        for name, changes in {
                "few": {"y": y[:39]}, "none": {"x": x[:0]}, "one": {"y": torch.tensor(3)}, "float": {"y": y.float()}, "narrow": {"x": x[..., :5]},
                "long": {"x": x.long()}, "rows": {"y": y.unsqueeze(1)}, "x": {"y": None}, "label": {"y": wrong[0]}, "negative": {"y": wrong[1]},
                "wide": {"x": x.repeat(1, 2, 1, 1)}, "two": {"y": y.unsqueeze(1).repeat(1, 2)},
                "part-0": {"x": x[:8], "y": y[:8]}, "part-1": {"x": x[8:], "y": wrong[0][8:]}}.items():
            save_file({key: value.contiguous() for key, value in {**data, **changes}.items() if value is not None}, self.folder / f"{name}.safetensors")
        with h5py.File(self.folder / "some.h5", "w") as file:
            file["x"], file["t"] = x.numpy(), ["a", "b"]
        (self.folder / "cut.pt").write_bytes((self.folder / "m.pt").read_bytes()[:2000])
        torch.save(model.state_dict(), self.folder / "state.pt")
        own, tokens = models.own_loss()
        assert own.embed.num_embeddings == 17
        save_file(tokens, self.folder / "tokens.safetensors")
        for name, places in (("bad", {(31, 4): 17}), ("worse", {(31, 4): 17, (3, 0): -1})):
            changed = {key: value.clone() for key, value in tokens.items()}
            for place, value in places.items():
                changed["x"][place] = value
            for part, rows in (("", slice(None)), ("-0", slice(20)), ("-1", slice(20, None))):
                save_file({key: value[rows].clone() for key, value in changed.items()}, self.folder / f"{name}{part}.safetensors")
        save_file({"x": models.random(models.NUM_SAMPLES, 6, seed=2), "y": models.random(models.NUM_SAMPLES, seed=3)}, self.folder / "six.safetensors")
        still = models.classification()[0].requires_grad_(False)
        for name, one in (("frozen", torch.jit.freeze(torch.jit.script(model.eval()))), ("still", torch.jit.script(still)),
                          ("own", torch.jit.script(own)), ("moody", torch.jit.script(Moody(6, 1)))):
            one.save(str(self.folder / f"{name}.pt"))
