"""What rank programs share: a list of checks that run one after another, and plain PyTorch's side of a comparison."""
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import tessera
import torch
from torch import nn
from torch.nn import functional

# Where the ranks' models and batches are: of TESSERA_TEST_DEVICE, as `tessera.comm` names it. Programs make tensors without a device, and
# some with a generator; on a GPU both are made there.
DEVICE = os.environ.get("TESSERA_TEST_DEVICE", "cpu")


class _GeneratorOfTheDevice:
    _of_torch = torch.Generator

    def __new__(cls, device=DEVICE):
        return cls._of_torch(device)


if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
    torch.Generator = _GeneratorOfTheDevice
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    _equal = torch.equal  # a state_dict of an engine is on the host
    torch.equal = torch.Tensor.equal = lambda a, b: _equal(a.cpu(), b.cpu())

# What Python adds does not depend on the stage: `make test` has the two that differ most, and `make test-full` all.
STAGES = tuple(map(int, os.environ.get("TESSERA_TEST_STAGES", "03")))
_checks = []


def check(function):
    """A function without arguments that all ranks call; its name is on the command line or all run."""
    _checks.append(function)
    return function


def each_stage(function):
    """A check of each of STAGES."""
    def all_stages():
        for stage in STAGES:
            function(stage)
    all_stages.__name__ = function.__name__
    return check(all_stages)


def _report(line):
    """For ranks.py: a line in the file TESSERA_TEST_REPORT.RANK."""
    if "TESSERA_TEST_REPORT" in os.environ:
        with open(f"{os.environ['TESSERA_TEST_REPORT']}.{tessera.comm.get_rank()}", "a") as file:
            print(line, file=file)


def main(backend=None):
    """Joins over the backend that is argument 1; runs the checks named by the others, or with a minus all but those. Reports their names, and after each its seconds."""
    torch.set_num_threads(1)
    tessera.comm.init_distributed(backend=backend or sys.argv[1], device=DEVICE, timeout_s=60, rendezvous_timeout_s=120)
    wanted, names = sys.argv[2:], [function.__name__ for function in _checks]
    unknown = {name.lstrip("-") for name in wanted} - set(names)
    if unknown:
        sys.exit(f"error: no check is named {' or '.join(sorted(unknown))}; expected some of {' '.join(names)}")
    all_but = not wanted or wanted[0].startswith("-")
    chosen = [function for function in _checks if ("-" + function.__name__ not in wanted if all_but else function.__name__ in wanted)]
    _report(" ".join(function.__name__ for function in chosen))
    for function in chosen:
        start = time.monotonic()
        print(function.__name__, end=" ", flush=True)
        function()
        tessera.comm.barrier(function.__name__)
        print(f"{time.monotonic() - start:.1f} s", flush=True)
        _report(f"{time.monotonic() - start:.1f}")


def config(stage, unit_numel=20_000, **changes):
    """Small units, so that even a tiny model has many."""
    return {"train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "unit_numel": unit_numel, "stage3_param_persistence_threshold": 0}, **changes}


def train(engine, batches, loss_of):
    """Steps over each rank's own micro-batch. Returns the mean losses over the ranks, each as its exact bits tell."""
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch[engine.global_rank])
        engine.backward(loss)
        engine.step()
        losses.append(tessera.comm.all_gather(loss.item()))
    return [sum(values) / len(values) for values in losses]


def train_plainly(model, optimizer, batches, loss_of):
    """The same in one process of plain PyTorch, as DistributedDataParallel does it: each rank's batch, gradients averaged."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        values = []
        for micro_batch in batch:
            loss = loss_of(model, micro_batch)
            loss.backward()
            values.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(batch)
        optimizer.step()
        losses.append(sum(values) / len(values))
    return losses


def folder():
    """A new one that all ranks share."""
    return Path(tessera.comm.all_gather(tempfile.mkdtemp(dir=os.getcwd()))[0])


def largest_difference(a, b):
    """Over two lists of numbers, or two state dicts."""
    if isinstance(a, list):
        assert len(a) == len(b)
        return max(abs(x - y) for x, y in zip(a, b))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[name].cpu().float() - b[name].cpu().float()).abs().max().item() for name in a if a[name].numel() > 0)


def raises(kind, function, *parts):
    """Asserts that a call raises, with these parts in the message. Returns the message."""
    try:
        function()
    except kind as error:
        text = str(error)
        for part in parts:
            assert part in text, f"{part!r} is not in {text!r}"
        assert "\n" not in text.strip() or kind is not tessera.Error, text
        return text
    raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def standard_error():
    """What is written to file descriptor 2 inside of it, as a list of one text afterwards."""
    said = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode())
            os.write(2, said[0].encode())


def mlp():
    """Of vectors of 16 numbers, into 5 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, samples):
    """Cross-entropy of (inputs, classes)."""
    return functional.cross_entropy(model(samples[0]).float(), samples[1])


def same(engine, other, limit=0.0):
    """Asserts that an engine's or a module's parameters and buffers are those of another, up to a difference."""
    apart = largest_difference(engine.state_dict(), other.state_dict())
    assert apart <= limit, apart
