"""A GAN of scikit-learn's digits: two models, each with an engine and an optimizer of its own, at ZeRO-2. The generator's loss goes through the
discriminator, whose gradients of that loss are dropped.

    tessera launch -n 2 -- python examples/gallery/gan.py
    after 600 steps: pixels of made digits have mean -0.37 and deviation 0.72, those of real ones -0.39 and 0.75
"""
import tessera
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

BATCH, NOISE, STEPS = 64, 16, 600


def start(*layers):
    """An engine of one of the two, which knows the digit beside its other input."""
    engine, *_ = tessera.initialize(model=nn.Sequential(*layers), config={
        "train_batch_size": BATCH, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.999]}}})
    return engine


def loss_of(scores, real):
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 8 - 1, one_hot(torch.tensor(labels), 10).float()
    generator = start(nn.Linear(NOISE + 10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    critic = start(nn.Linear(64 + 10, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    source = torch.Generator().manual_seed(1 + generator.global_rank)  # each rank has noise and samples of its own
    size = BATCH // generator.world_size

    def made(digits):
        noise = torch.randn(len(digits), NOISE, generator=source)
        return generator(torch.cat([noise, digits], 1))

    for step in range(1, STEPS + 1):
        some = torch.randint(len(images), (size,), generator=source)
        digits = labels[some]
        with torch.no_grad():
            fakes = made(digits)
        scores = critic(torch.cat([torch.cat([images[some], digits], 1), torch.cat([fakes, digits], 1)]))
        critic_loss = loss_of(scores[:size], True) + loss_of(scores[size:], False)
        critic.backward(critic_loss)
        critic.step()

        generator_loss = loss_of(critic(torch.cat([made(digits), digits], 1)), True)
        generator_loss.backward()
        generator.step()
        critic.zero_grad()  # what the generator's loss has left there
        if step % 100 == 0 and generator.global_rank == 0:
            print(f"step {step}  critic {critic_loss.item():.3f}  generator {generator_loss.item():.3f}", flush=True)

    with torch.no_grad():
        fakes = made(labels)
    if generator.global_rank == 0:
        print(f"after {STEPS} steps: pixels of made digits have mean {fakes.mean():.2f} and deviation {fakes.std():.2f}, "
              f"those of real ones {images.mean():.2f} and {images.std():.2f}", flush=True)


if __name__ == "__main__":
    main()
