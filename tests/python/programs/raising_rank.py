"""Trains until rank VICTIM fails at WHERE. Started by raising_rank_test.py: raising_rank.py WHERE VICTIM STAGE BACKEND."""
import atexit
import os
import sys
import threading

import tessera
import torch
from torch import nn

WHERE, VICTIM, STAGE, BACKEND = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
IS_VICTIM = int(os.environ["RANK"]) == VICTIM


def fail(*_):
    raise KeyError("a bug of mine: rank 1 is gone (to lunch)")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if WHERE == "worker" and IS_VICTIM and index > 20:
            fail()
        return torch.ones(8)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        if WHERE == "backward" and IS_VICTIM:
            fail()
        return 2 * grad


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    tessera.comm.init_distributed(backend=BACKEND)
    engine, *_ = tessera.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"},
                                                         "zero_optimization": {"stage": STAGE}})
    data = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1 if WHERE == "worker" else 0)
    for step, x in enumerate(data):
        if IS_VICTIM and step == 5:
            if WHERE == "loop":
                fail()
            if WHERE == "hook":
                model[0].register_forward_hook(fail)
            if WHERE == "sys.exit":
                sys.exit("a bug of mine: rank 1 is gone (to lunch)")
            if WHERE == "caught":
                try:
                    fail()
                except KeyError:
                    sys.exit(1)
            if WHERE == "SystemExit":
                raise SystemExit(3)
            if WHERE in ("os._exit(3)", "os._exit(0)"):
                os._exit(int(WHERE[-2]))
            if WHERE == "collective":
                tessera.comm.all_reduce(torch.ones(3, dtype=torch.int64))  # a mean of integers is refused
            if WHERE == "thread":
                thread = threading.Thread(target=fail, name="mine")
                thread.start()
                thread.join()
                sys.exit(0)
            if WHERE == "atexit":
                atexit.register(fail)
                sys.exit(0)
        loss = engine(Doubled.apply(x.requires_grad_()) if step == 5 else x).square().mean()
        engine.backward(loss)
        engine.step()


if WHERE == "before" and IS_VICTIM:
    fail()
if WHERE == "before, 0" and IS_VICTIM:
    sys.exit(0)
if WHERE == "excepthook":
    sys.excepthook = sys.__excepthook__  # another library's, which takes the place of Tessera's
if WHERE == "finally":
    WHERE = "loop"
    try:
        train()
    finally:
        tessera.comm.destroy()
WHERE = "loop" if WHERE == "excepthook" else WHERE
train()
