"""What other programs have saved, loaded and continued: beside the same training that goes on in plain PyTorch."""
import json
import os
from pathlib import Path

import tessera
import torch
import torch.distributed.checkpoint as dcp
from checks import check, config, each_stage, largest_difference, main, raises, standard_error, train, train_plainly
from optimizers import batches, loss_of, rank, world
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

FOLDER = Path(os.environ["SAVED"])
STEPS = 5
OPTIMIZERS = {  # the configuration's, and torch's
    "AdamW": ({"lr": 0.01, "weight_decay": 0.1}, lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)),
    "SGD": ({"lr": 0.05, "momentum": 0.9}, lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
    "Adagrad": ({"lr": 0.05, "eps": 1e-10}, lambda groups: torch.optim.Adagrad(groups, lr=0.05)),
}


class Net(nn.Module):
    """A tied and a frozen parameter, a transposed one, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 33)
        self.norm = nn.BatchNorm1d(33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.again = nn.Linear(33, 33)
        self.tied = nn.Linear(33, 33)
        self.tied.weight = self.again.weight
        self.turned = nn.Parameter(torch.randn(7, 33).t() * 0.1)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        # In eval mode, because ranks have other statistics than one process.
        x = self.frozen(nn.functional.batch_norm(self.first(x), self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias))
        return self.head((self.tied(self.again(x).relu()) @ self.turned).tanh())


def groups_of(model):
    """Biases and vectors have no decay, as in the HF Trainer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]


def begun(kind, grouped=False):
    """A training in plain PyTorch: model, optimizer, losses of the second half, and where it was in the middle."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    make = OPTIMIZERS[kind][1]
    optimizer = make(groups_of(model) if grouped else [p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2 * STEPS)
    all_batches = batches(2 * STEPS)
    for batch in all_batches[:STEPS]:
        train_plainly(model, optimizer, [batch], loss_of)
        scheduler.step()
    return model, optimizer, scheduler, all_batches[STEPS:]


def go_on(model, optimizer, scheduler, rest):
    losses = []
    for batch in rest:
        losses += train_plainly(model, optimizer, [batch], loss_of)
        scheduler.step()
    return losses


def continued(path, stage, kind, rest, grouped=False, tag=None, **changes):
    """The same in an engine that begins with other weights and loads what is in `path`."""
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    optimizer = OPTIMIZERS[kind][1](groups_of(model) if grouped else [p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2 * STEPS)
    engine, *_ = tessera.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(stage, 700, **changes))
    with standard_error() as said:
        engine.load_checkpoint(path, tag)
    losses = []
    for batch in rest:
        losses += train(engine, [batch], loss_of)
    return engine, losses, said[0]


def on_rank_0(write):
    """Calls it on rank 0, before others go on."""
    if rank == 0:
        write()
    tessera.comm.barrier()


def compare(path, kind, source, grouped=False, limit=1e-6, tag=None):
    model, optimizer, scheduler, rest = source
    expected = go_on(model, optimizer, scheduler, rest)
    for stage in range(4):
        engine, losses, said = continued(path, stage, kind, rest, grouped, tag)
        assert largest_difference(losses, expected) < limit, (path, stage, losses, expected, said)
        assert largest_difference(engine.state_dict(), model.state_dict()) < 20 * limit, (path, stage)
        assert engine.global_steps == 2 * STEPS, engine.global_steps
    return said


def scale(scheduler):
    return {key: value for key, value in scheduler.state_dict().items() if not callable(value)}


@check
def a_file_of_a_tutorial():
    for i, kind in enumerate(OPTIMIZERS):
        for grouped in (False, True):
            source = begun(kind, grouped)
            path = FOLDER / f"tutorial_{kind}_{grouped}_{world}.pt"
            model, optimizer, scheduler, _ = source
            values = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3, "step": STEPS,
                      "scheduler": scale(scheduler)}
            on_rank_0(lambda values=values, path=path, i=i: torch.save(values, path, _use_new_zipfile_serialization=i % 2 == 0))
            compare(path, kind, source, grouped)


@check
def a_folder_of_dcp():
    for kind in OPTIMIZERS:
        source = begun(kind)
        path = FOLDER / f"dcp_{kind}_{world}"
        model, optimizer, scheduler, _ = source

        state, of_optimizer = get_state_dict(model, optimizer)
        values = {"model": state, "optimizer": of_optimizer, "global_steps": STEPS, "lr_scheduler": scale(scheduler)}
        on_rank_0(lambda values=values, path=path: dcp.save(values, checkpoint_id=path, no_dist=True))
        compare(path, kind, source)


@each_stage
def weights_alone(stage):
    model, _, _, rest = begun("AdamW")
    file, folder = FOLDER / f"weights_{stage}_{world}.safetensors", FOLDER / f"hf_{stage}_{world}"
    both, sharded, apart = FOLDER / f"both_names_{stage}_{world}.safetensors", FOLDER / f"dcp_weights_{stage}_{world}", FOLDER / f"apart_{stage}_{world}.safetensors"

    def write():
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        copies = {name: value.clone() for name, value in state.items()}
        save_file(copies, both)
        dcp.save({"model": copies}, checkpoint_id=sharded, no_dist=True)
        save_file({**copies, "tied.weight": copies["tied.weight"] + 1}, apart)
        del state["tied.weight"]
        save_file(state, file)
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps({"model_type": "net"}))

    on_rank_0(write)
    for path in (file, folder, both, sharded):
        engine, losses, said = continued(path, stage, "AdamW", rest[:1])
        expected = train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.0), rest[:1], loss_of)
        assert largest_difference(losses, expected) < 1e-6
        assert rank > 0 or "states of the optimizer" in said, said
    raises(tessera.CheckpointError, lambda: continued(apart, stage, "AdamW", rest[:1]), "tied.weight")


@check
def load_weights_takes_them():
    """Of each format, with the names of another model, and with what may differ."""
    model, optimizer, *_ = begun("AdamW")
    dict_file, folder, renamed = FOLDER / f"dict_{world}.pt", FOLDER / f"both_{world}", FOLDER / f"renamed_{world}.bin"

    def write():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}, dict_file, _use_new_zipfile_serialization=False)
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder, no_dist=True)
        torch.save({**{name: value for name, value in model.state_dict().items() if name != "head.bias"}, "extra": torch.ones(2)}, renamed)

    on_rank_0(write)
    for stage in (0, 3):
        for path, options in ((dict_file, {}), (folder, {}), (renamed, {"ignore_missing": ["head.b*"], "ignore_unexpected": ["extra"]})):
            other = Net()
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(0.5)
                kept = other.head.bias.detach().clone()
            engine, *_ = tessera.initialize(model=other, config=config(stage, 700, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
            engine.load_weights(path, **options)
            expected = {**model.state_dict(), **({"head.bias": kept} if options else {})}
            found = engine.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (stage, path)
            if options:
                raises(tessera.CheckpointError, lambda engine=engine: engine.load_weights(renamed), "head.bias: not in the file", "extra: not in the model")


@check
def what_does_not_fit_is_named():
    model, optimizer, _, rest = begun("AdamW")
    other = FOLDER / f"other_{world}.pt"
    on_rank_0(lambda: torch.save({"model": {**model.state_dict(), "extra": torch.zeros(3)}, "optimizer": optimizer.state_dict()}, other))
    message = raises(tessera.CheckpointError, lambda: continued(other, 2, "AdamW", rest), "extra")
    assert "other" in message
    hostile = FOLDER / f"hostile_{world}.pt"
    on_rank_0(lambda: torch.save({"model": model.state_dict(), "x": Payload()}, hostile))
    raises(tessera.CheckpointError, lambda: continued(hostile, 2, "AdamW", rest), "system")
    assert not (FOLDER / "executed").exists()
    on_rank_0(lambda: (FOLDER / f"cut_{world}.pt").write_bytes(other.read_bytes()[:-500]))
    raises(tessera.CheckpointError, lambda: continued(FOLDER / f"cut_{world}.pt", 2, "AdamW", rest), "cut_")
    raises(tessera.CheckpointError, lambda: continued(FOLDER / "nowhere", 2, "AdamW", rest), "nowhere")


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {FOLDER / 'executed'}",)


if __name__ == "__main__":
    main()
