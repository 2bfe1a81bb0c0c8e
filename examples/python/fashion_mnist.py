"""A CNN on Fashion-MNIST in a plain loop: configs/fashion_mnist.json's training, written in Python.

    python fashion_mnist.py                                   # one rank
    tessera launch -n 2 -- python fashion_mnist.py --stage 3
    tessera launch -n 2 -- python fashion_mnist.py --resume   # goes on at the last checkpoint
"""
import argparse
import gzip
import os
from pathlib import Path

import tessera
import torch
from torch import nn
from torch.nn import functional


def read_idx(path, header_bytes):
    """(n, ...) uint8 of a gzipped IDX file."""
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header_bytes:]), dtype=torch.uint8)


def dataset(folder, prefix):
    images = read_idx(Path(folder, f"{prefix}-images-idx3-ubyte.gz"), 16).view(-1, 1, 28, 28).float() / 255
    labels = read_idx(Path(folder, f"{prefix}-labels-idx1-ubyte.gz"), 8).long()
    return torch.utils.data.TensorDataset((images - 0.286) / 0.353, labels)


def cnn():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def accuracy(engine, data):
    """Each rank looks at its part; in evaluation all ranks call the engine equally often."""
    images, labels = data.tensors
    engine.eval()
    share = len(labels) // engine.world_size
    mine = slice(engine.global_rank * share, (engine.global_rank + 1) * share)
    right = sum((engine(x).argmax(-1).cpu() == y).sum().item() for x, y in zip(images[mine].split(500), labels[mine].split(500)))
    engine.train()
    return sum(tessera.comm.all_gather(right)) / (share * engine.world_size)


def main():
    parser = argparse.ArgumentParser(description="Trains a CNN on Fashion-MNIST.")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=None)
    parser.add_argument("--out", default="runs/fashion_mnist_python")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(42)
    engine, _, loader, _ = tessera.initialize(model=cnn(), training_data=dataset(arguments.data, "train"), config={
        "train_batch_size": 128, "gradient_clipping": 1.0, "zero_optimization": {"stage": arguments.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0 and Path(arguments.out, "latest").exists()
    if arguments.resume or restarted:  # restarted: by --max-restarts, after a failure
        engine.load_checkpoint(arguments.out)
    test = dataset(arguments.data, "t10k")
    while loader.epoch < arguments.epochs:
        for x, y in loader:
            loss = functional.cross_entropy(engine(x), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0 and engine.global_steps % 100 == 0:
                print(f"step {engine.global_steps}  loss {loss.item():.4f}  norm {engine.get_global_grad_norm():.3f}", flush=True)
            if engine.global_steps == arguments.max_steps:
                break
        reached = accuracy(engine, test)
        if engine.global_rank == 0:
            print(f"after {engine.global_steps} steps: test accuracy {reached:.4f}", flush=True)
        engine.save_checkpoint(arguments.out)
        if engine.global_steps == arguments.max_steps:
            break
    engine.save_model(Path(arguments.out, "model.safetensors"))


if __name__ == "__main__":
    main()
