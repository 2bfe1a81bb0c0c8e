"""Accelerate trains a vision model of timm with ZeRO-3 on scikit-learn's digits. Accelerate's script is what it would be for DeepSpeed, but for
the first import line. It saves its state in the middle and goes on from it.

    tessera launch -n 2 -- python examples/gallery/accelerate_vision.py
    accuracy 0.95 on 400 digits; runs/accelerate_vision has the state
"""
import tessera.deepspeed  # noqa: F401  isort: skip  the one line
import accelerate
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def digits():
    """(training, test), of images of 8x8 pixels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (TensorDataset(images[some], labels[some]) for some in (order[400:], order[:400]))


def main():
    accelerate.utils.set_seed(0)
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0))
    train, test = digits()
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10, stem_width=16, channels=(16, 32, 64, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=EPOCHS * len(loader))
    model, optimizer, loader, tests, schedule = accelerator.prepare(model, optimizer, loader, DataLoader(test, batch_size=100), schedule)
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}")
        if epoch == EPOCHS // 2:
            accelerator.save_state("runs/accelerate_vision")
            accelerator.load_state("runs/accelerate_vision")

    model.eval()
    right = 0
    for images, labels in tests:
        with torch.no_grad():
            found = model(images).argmax(-1)
        right += accelerator.gather_for_metrics(found == labels).sum().item()
    accelerator.print(f"accuracy {right / len(test):.2f} on {len(test)} digits; runs/accelerate_vision has the state", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
