"""Buffers and extra state: what is saved, loaded, made equal on all ranks and refused is what the module holds at that moment.
Beside what torch's own state_dict() and load_state_dict() do with the same module."""
import contextlib
import json
import os
import resource
import subprocess
from pathlib import Path

import safetensors.torch
import tessera
import torch
from checks import STAGES, check, config, main, raises
from torch import nn

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()


def folder(name):
    """One that all ranks share."""
    path = Path(tessera.comm.all_gather(os.getcwd())[0]) / name
    path.mkdir(exist_ok=True)
    return path


def make(model, stage=0, **changes):
    engine, *_ = tessera.initialize(model=model, config=config(stage, **changes))
    return engine


def step(engine, width=8, seed=0):
    torch.manual_seed(100 * seed + rank)
    engine.backward(engine(torch.randn(4, width)).float().square().mean())
    engine.step()


def states(model):
    """All buffers by name, as torch's state_dict has them, on this rank."""
    return {name: value.clone() for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and bits(a[k]) == bits(b[k]) for k in a)


class Running(nn.Module):
    """Does to its buffers, in forward, all that Python lets it do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.inner = nn.Module()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("grows", torch.zeros(0))
        self.register_buffer("widens", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("none_later", torch.ones(3))
        self.register_buffer("gone_later", torch.ones(3))
        self.register_buffer("filled_later", None)

    def forward(self, x):
        y = self.fc(x)
        if self.training:
            self.count = self.count + 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            self.grows = torch.cat([self.grows, self.mean[:1] + rank])
            self.widens = self.widens.double() + 0.25
            self.none_later = None
            self.filled_later = torch.full((2, 2), float(self.count))
            if hasattr(self, "gone_later"):
                del self.gone_later
            if not hasattr(self.inner, "cache"):
                self.inner.register_buffer("cache", torch.zeros(4, dtype=torch.complex64))
            self.inner.cache[0] += 1j
        return y - self.mean


# ------------------------------------------------------------------------------------------------------------- buffers


@check
def buffers_are_saved_and_resumed_as_the_module_has_them():
    for stage in (0, 3):
        model = Running()
        engine = make(model, stage)
        for number in range(3):
            step(engine, seed=number)
        path = folder(f"running{stage}")
        engine.save_checkpoint(path)  # which makes ranks equal
        saved = states(model)
        assert model.count.item() == 3 and saved["grows"].shape == (3,) and saved["widens"].dtype == torch.float64
        assert "gone_later" not in saved and saved["inner.cache"][0] == 3j and model.none_later is None

        resumed = Running()
        other = make(resumed, stage)
        other.load_checkpoint(path)
        assert same(states(resumed), saved), (states(resumed), saved)
        assert resumed.none_later is None and not hasattr(resumed, "gone_later")
        for number in range(3, 5):  # what follows is the same as without the interruption
            step(engine, seed=number)
            step(other, seed=number)
        engine.eval()
        other.eval()
        assert same(states(resumed), states(model)) and resumed.count.item() == 5

        other.train()
        other.load_checkpoint(path)  # into the module as it is now
        assert same(states(resumed), saved)


@check
def ranks_do_not_differ_after_eval():
    model = Running()
    engine = make(model)
    for number in range(2 + rank):  # the module alone, on each rank its own way
        with torch.no_grad():
            model(torch.full((2, 8), float(rank + number)))
    engine.eval()
    mine = json.dumps({name: (list(value.shape), str(value.dtype), bits(value)) for name, value in states(model).items()})
    assert tessera.comm.all_gather(mine) == [mine] * world
    assert model.count.item() == 2  # rank 0's
    if world > 1:
        if rank == 1:
            model.register_buffer("alone", torch.ones(1))
        raises(tessera.CommError, engine.eval, "rank 1's module has the buffer alone, rank 0's has none")


class Rope(nn.Module):
    def __init__(self, theta, length=8):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("inv_freq", theta ** (-torch.arange(8) / 8.0), persistent=False)
        self.register_buffer("mask", torch.ones(length, length).tril(), persistent=False)

    def forward(self, x):
        return self.fc(x) * self.inv_freq * self.scale


@check
def buffers_that_are_not_persistent_stay_the_models_own():
    path = folder("rope")
    model = Rope(1e4)
    engine = make(model, 1)
    engine.save_checkpoint(path / "ck")
    engine.save_model(path / "m.safetensors")
    model.scale.fill_(7)
    for change in (lambda e: e.load_checkpoint(path / "ck"), lambda e: e.load_checkpoint(path / "ck", load_module_only=True),
                   lambda e: e.load_weights(path / "m.safetensors")):
        other = Rope(5e5, 16)
        kept = other.inv_freq.clone()
        other.scale.fill_(3)
        engine = make(other, 1)
        change(engine)
        assert torch.equal(other.inv_freq, kept) and other.mask.shape == (16, 16) and other.scale.item() == 1
        assert list(engine.state_dict()) == list(other.state_dict(keep_vars=True))
    if rank == 0:
        subprocess.run([os.environ["TESSERA"], "consolidate", path / "ck", path / "c.safetensors"], check=True, capture_output=True)
        Rope(1).load_state_dict(safetensors.torch.load_file(path / "c.safetensors"))  # strict
        full = {**safetensors.torch.load_file(path / "m.safetensors"), "inv_freq": torch.zeros(8), "mask": torch.zeros(2, 2)}
        safetensors.torch.save_file(full, path / "older.safetensors")  # as they were written once
    tessera.comm.barrier("written")
    other = Rope(5e5)
    make(other).load_weights(path / "older.safetensors")
    assert torch.equal(other.inv_freq, Rope(5e5).inv_freq)


@check
def a_shared_buffer_has_all_its_names():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.a, self.b = nn.Linear(8, 8), nn.Module(), nn.Module()
            self.a.register_buffer("x", torch.ones(2))
            self.b.register_buffer("x", self.a.x)

        def forward(self, x):
            return self.fc(x)

    path = folder("shared")
    model = Shared()
    engine = make(model)
    model.a.x.fill_(4)
    engine.save_checkpoint(path)
    engine.save_model(path / "m.safetensors")
    for load in (lambda e: e.load_checkpoint(path), lambda e: e.load_weights(path / "m.safetensors")):
        other = Shared()
        load(make(other))
        assert other.a.x is other.b.x and other.a.x.tolist() == [4, 4]


def all_dtypes():
    """Without those of quantized tensors, of which there are none in files, and bcomplex32 of torch 2.15, which is refused by name."""
    dtypes = {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    return sorted((d for d in dtypes if not str(d).startswith(("torch.q", "torch.bits", "torch.bcomplex"))), key=str)


SUB_BYTE = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # of which torch.save knows nothing
SAFETENSORS = {"torch." + name for name in ("uint16", "uint32", "uint64", "complex64", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
                                            "float8_e4m3fnuz", "float8_e8m0fnu", "bfloat16", "float32", "int8", "bool")}


class Dtypes(nn.Module):
    def __init__(self, seed, dtypes=None):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(seed)
        for dtype in dtypes or all_dtypes():
            raw = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 2 * dtype.itemsize), generator=generator).to(torch.uint8)
            self.register_buffer("of_" + str(dtype).split(".")[1], raw.view(dtype))
        self.register_buffer("scalar_uint16", torch.tensor(7 + seed, dtype=torch.uint16))
        self.register_buffer("conjugated", torch.conj(torch.full((2,), 1 + seed * 1j)))

    def forward(self, x):
        return self.fc(x)


@check
def every_dtype_of_torch_is_saved_and_loaded_as_it_is():
    assert len(all_dtypes()) >= 30
    path = folder("dtypes")
    model = Dtypes(rank)
    engine = make(model)
    engine.eval()
    engine.train()
    first = {name: bits(value) for name, value in ((n, b.resolve_conj()) for n, b in Dtypes(0).named_buffers())}
    assert {name: bits(value.resolve_conj()) for name, value in model.named_buffers()} == first  # rank 0's
    engine.save_checkpoint(path)
    other = Dtypes(5)
    make(other).load_checkpoint(path)
    assert {name: bits(value.resolve_conj()) for name, value in other.named_buffers()} == first
    assert [b.dtype for b in other.buffers()] == [b.dtype for b in Dtypes(0).buffers()]
    raises(tessera.CheckpointError, lambda: engine.save_model(path / "m.pt"), "which pt files do not have; no format has it")


@check
def types_are_exported_to_the_formats_that_have_them():
    path = folder("export")
    wide = [d for d in all_dtypes() if str(d) not in SUB_BYTE]
    for name, dtypes in (("pt", wide), ("safetensors", [d for d in wide if str(d) in SAFETENSORS])):
        model = Dtypes(0, dtypes)
        engine = make(model)
        engine.save_checkpoint(path / name)
        engine.save_model(path / f"m.{name}")
        if rank == 0:
            subprocess.run([os.environ["TESSERA"], "consolidate", path / name, path / f"c.{name}"], check=True, capture_output=True)
            for file in (path / f"m.{name}", path / f"c.{name}"):
                loaded = torch.load(file, weights_only=True) if name == "pt" else safetensors.torch.load_file(file)
                for key, buffer in model.named_buffers():
                    if file.name.startswith("c.") and buffer.dtype in (torch.float64, torch.float16, torch.bfloat16):
                        assert torch.equal(loaded[key], buffer.float()), key  # --dtype is fp32
                    else:
                        assert loaded[key].dtype == buffer.dtype and bits(loaded[key]) == bits(buffer.resolve_conj()), key
        if name == "pt":
            raises(tessera.CheckpointError, lambda e=engine: e.save_model(path / "no.safetensors"), "is of type",
                   "which safetensors files do not have; expected a .pt file")
            raises(tessera.CheckpointError, lambda e=engine: e.save_model(path / "no.h5"), "which h5 files do not have")
            if rank == 0:
                refused = subprocess.run([os.environ["TESSERA"], "consolidate", path / name, path / "no.safetensors"], capture_output=True, text=True)
                assert refused.returncode != 0 and "which safetensors files do not have" in refused.stderr, refused.stderr
        else:
            other = Dtypes(3, dtypes)
            make(other).load_weights(path / "m.safetensors")
            assert all(bits(a.resolve_conj()) == bits(b.resolve_conj()) for a, b in zip(other.buffers(), Dtypes(0, dtypes).buffers()))


@check
def memory_that_runs_out_on_rank_0_ends_the_export_on_all_ranks():
    """In the conversion of a weight of 64 MiB in fp32 to bf16, which only rank 0 makes, and for the whole weight."""
    if world == 1:  # which has the whole weight already
        return
    engine, path = make(nn.Linear(4096, 4096, bias=False), 1, bf16={"enabled": True}), folder("short")
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    for free in (76, 40):
        spare, held = torch.empty(free << 20, dtype=torch.uint8), []
        if rank == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), unlimited[1]))
            for size in (16, 4, 1):  # MiB: no larger piece is left
                with contextlib.suppress(RuntimeError):
                    while True:
                        held.append(torch.empty(size << 20, dtype=torch.uint8))
        del spare
        try:
            raises(tessera.CheckpointError, lambda: engine.save_model(path / "short.safetensors"), "rank 0: ", "can't allocate memory")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
            held.clear()
    engine.save_model(path / "m.safetensors")
    assert safetensors.torch.load_file(path / "m.safetensors")["weight"].equal(engine.full_parameter("weight").bfloat16())
    assert [one.name for one in path.iterdir()] == ["m.safetensors"]


@check
def what_files_do_not_hold_is_refused_by_name():
    if world > 1:  # refused by initialize(), which ends the group
        return
    for name, tensor in (("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)), ("few", torch.eye(3).to_sparse())):
        model = nn.Linear(8, 8)
        model.register_buffer(name, tensor)
        engine = make(model)
        step(engine)
        raises(tessera.CheckpointError, lambda e=engine: e.save_checkpoint(folder("refused")), f"buffer {name} is", "files do not hold")


# ----------------------------------------------------------------------------------------------------------- precision


@check
def floating_buffers_keep_their_dtype_in_16_bits():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
            self.register_buffer("inv_freq", 1e4 ** (-torch.arange(8) / 8.0))

        def forward(self, x):
            return self.head(self.norm(self.conv(x)).relu().mean((2, 3)) * self.inv_freq.to(x.dtype))

    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        torch.manual_seed(0)
        model = Net()
        kept = model.inv_freq.clone()
        engine = make(model, 2, **{precision: {"enabled": True, "auto_cast": True}})
        x = torch.randn(4, 1, 6, 6)
        tracked = nn.BatchNorm2d(8)
        for _ in range(3):
            with torch.no_grad():
                tracked(model.conv(x.to(dtype)).float())
            engine.backward(engine(x).float().square().mean())
            assert model.norm.weight.dtype == dtype
            engine.step()
        assert torch.equal(model.inv_freq, kept)
        assert model.norm.running_mean.dtype == model.norm.running_var.dtype == torch.float32
        if world == 1:  # torch's own averages of the same values
            assert (model.norm.running_mean - tracked.running_mean).abs().max() < 1e-3, (model.norm.running_mean, tracked.running_mean)
        engine.eval()
        assert engine(x).dtype == dtype and torch.isfinite(engine(x).float()).all()
        cast = make(Net(), 0, **{precision: {"enabled": True}}, data_types={"buffer_dtype": precision}).module
        assert cast.inv_freq.dtype == cast.norm.running_var.dtype == dtype and cast.norm.num_batches_tracked.dtype == torch.long


# --------------------------------------------------------------------------------------------------------- extra state


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.state = {"scale": 1.0}

    def forward(self, x):
        if self.training:
            self.state["scale"] *= 0.5
        return self.fc(x) * self.state["scale"]

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Unscaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)


@check
def extra_state_is_saved_and_given_back():
    path = folder("extra")
    model = nn.Sequential(Scaled(), nn.Linear(8, 8), Scaled())
    engine = make(model, 2)
    for number in range(3):
        step(engine, seed=number)
    model[0].state = {"scale": 0.25, "names": ("a", None), 3: {"nested": [1, {2}]}, "rank": rank}  # other values: arguments_rank.py
    assert engine.state_dict()["2._extra_state"] == {"scale": 0.125}
    engine.save_checkpoint(path)
    other = nn.Sequential(Scaled(), nn.Linear(8, 8), Scaled())
    again = make(other, 2)
    again.load_checkpoint(path)
    assert other[0].state == model[0].state, other[0].state  # each rank's own
    assert other[2].state == {"scale": 0.125}
    manifest = json.loads((path / (path / "latest").read_text().strip() / "manifest.json").read_text())
    assert manifest["state"]["module"]["extra_state"] == ["0._extra_state", "2._extra_state"]

    model[0].state = {"a": [object()]}
    raises(tessera.CheckpointError, lambda: engine.save_checkpoint(path, "bad"), "0._extra_state['a'][0]", "builtins.object", "expected what JSON has")
    assert not (path / "bad").exists()
    plain = make(nn.Sequential(Unscaled(), nn.Linear(8, 8), Unscaled()))
    raises(tessera.CheckpointError, lambda: plain.load_checkpoint(path), "0._extra_state: not in the model")


@check
def extra_state_that_is_refused_is_named():
    class Renamed(nn.Linear):
        key = "n"

        def get_extra_state(self):
            return {self.key: 1}

        def set_extra_state(self, state):
            state[self.key]

    path = folder("renamed")
    make(nn.Sequential(Renamed(8, 8))).save_checkpoint(path, "tag")
    model = nn.Sequential(Renamed(8, 8))
    model[0].key = "n2"
    raises(tessera.CheckpointError, lambda: make(model).load_checkpoint(path), f"{path.name}/tag: 0.set_extra_state(): KeyError: 'n2' at module_state_rank.py:")


@check
def extra_state_of_one_tensor_is_in_files_of_weights_too():
    class Amax(nn.Linear):
        amax = torch.zeros(3)

        def get_extra_state(self):
            return self.amax

        def set_extra_state(self, state):
            self.amax = state

    path = folder("amax")
    model = Amax(8, 8)
    model.amax = torch.tensor([1.0, 2, 3])
    make(model).save_model(path / "m.safetensors")
    other = Amax(8, 8)
    make(other).load_weights(path / "m.safetensors")
    assert other.amax.tolist() == [1, 2, 3]
    make(Scaled()).save_model(path / "s.safetensors")  # says that the extra state is not in it
    make(Scaled()).load_weights(path / "s.safetensors")


class OwnEntries(nn.Linear):
    """Keeps a tensor in its state dict that is no buffer, and computes another one after loading."""

    def __init__(self):
        super().__init__(8, 8)
        self.scale = torch.ones(1)
        self.register_buffer("norm", torch.zeros(()), persistent=False)
        self.register_load_state_dict_post_hook(OwnEntries.loaded)

    def forward(self, x):
        if self.training:
            self.scale = self.scale * 0.5
        return super().forward(x) * self.scale

    def loaded(self, _):
        self.norm.copy_(self.weight.detach().norm())

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "scale" in state_dict:
            self.scale = state_dict.pop(prefix + "scale").clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


@check
def what_modules_add_to_a_state_dict_is_saved_and_loaded():
    path = folder("own_entries")
    for stage in STAGES:
        engine = make(nn.Sequential(OwnEntries(), nn.Linear(8, 8)), stage)
        step(engine)
        tag = f"stage{stage}"
        engine.save_checkpoint(path, tag)
        engine.save_model(path / f"{tag}.safetensors")
        wanted = engine.full_parameter("0.weight").norm()
        for load in (lambda other, tag=tag: other.load_checkpoint(path, tag), lambda other, tag=tag: other.load_weights(path / f"{tag}.safetensors")):
            other = nn.Sequential(OwnEntries(), nn.Linear(8, 8))
            load(make(other, stage))
            assert other[0].scale.tolist() == [0.5], (stage, other[0].scale)
            torch.testing.assert_close(other[0].norm, wanted)


@check
def files_have_the_names_of_the_state_dict():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def model():
        return nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), nn.Linear(8, 8))

    path = folder("wrapped")
    wanted = model()
    if rank == 0:
        safetensors.torch.save_file(wanted.state_dict(), path / "plain.safetensors")
    tessera.comm.barrier()
    for stage in (0, 3):
        engine = make(model(), stage)
        engine.load_weights(path / "plain.safetensors")
        engine.save_model(path / f"{stage}.safetensors")
        assert same(safetensors.torch.load_file(path / f"{stage}.safetensors"), safetensors.torch.load_file(path / "plain.safetensors")), stage


@check
def hooks_that_change_what_is_loaded_are_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    path = folder("changed") / "m.safetensors"
    engine = make(model)
    engine.save_model(path)
    model.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.update({prefix + "0.weight": state[prefix + "0.weight"].t()}))
    raises(tessera.Error, lambda: engine.load_weights(path), "the module has a hook", "GatheredParameters")


@check
def slices_of_one_tensor_are_parameters_of_their_own():
    """A fused matrix that was split: its parts shared memory, and a counter of writes, until initialize()."""
    def model():
        torch.manual_seed(0)
        fused = torch.randn(24, 8) * 0.3
        parts = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        parts.load_state_dict({f"{i}.weight": part for i, part in enumerate(fused.chunk(3))}, assign=True)
        return parts

    plain, losses = model(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = plain(torch.ones(2, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for stage in STAGES:
        engine, *_ = tessera.initialize(model=model(), config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
                                                               "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
        for wanted in losses:
            loss = engine(torch.ones(2, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            torch.testing.assert_close(loss.item(), wanted, rtol=1e-5, atol=1e-6)


@check
def a_buffer_may_require_a_gradient():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("scale", torch.full((8,), 1.0 + rank, requires_grad=True))

        def forward(self, x):
            return self.fc(x) * self.scale.detach()

    path = folder("requires_grad")
    engine = make(Net())
    step(engine)
    assert engine.module.scale.requires_grad and engine.module.scale.tolist() == [1.0] * 8
    engine.save_checkpoint(path)
    engine.load_checkpoint(path)


@check
def submodules_of_torchscript_train():
    for submodule in (torch.jit.script(nn.Linear(8, 8)), torch.jit.trace(nn.Linear(8, 8), torch.ones(1, 8))):
        for stage in STAGES:
            engine = make(nn.Sequential(nn.Linear(8, 8), submodule), stage)
            step(engine)
            engine.destroy()


if __name__ == "__main__":
    main()
