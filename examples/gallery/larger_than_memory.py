"""A model whose values, gradients and moments do not fit in the memory that its ranks may have: they lie on disk (ZeRO-3 with offload_param and
offload_optimizer), and the model is never whole in memory. A limit of what a process may allocate (RLIMIT_DATA) stands for the size of a
machine's memory. Under it plain torch fails, which is tried first. What ranks share is not in that limit: the end compares resident memory too.

    tessera launch -n 2 -- python examples/gallery/larger_than_memory.py
    loss 0.4055 after 4 steps of 1077 MB of state, with 400 MB more for each of 2 ranks; plain torch: not enough memory
"""
import resource

import tessera
import torch
from torch import nn

WIDTH, LAYERS, STEPS, MORE_MB = 1024, 64, 4, 400


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x))) / LAYERS


def model():
    return nn.Sequential(*[Block() for _ in range(LAYERS)], nn.Linear(WIDTH, 1))


def batch(rank, world):
    """Is the sum of a row's first half larger than that of its second half?"""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))[rank::world]
    return x, (x[:, :WIDTH // 2].sum(1) - x[:, WIDTH // 2:].sum(1)).sign().unsqueeze(1)


def memory_mb(*names):
    """Of this process, by the lines of /proc/self/status."""
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.split(":")[0] in names) * 1024 / 1e6


def fits_in_plain_torch():
    """Whether one process trains it for a step."""
    try:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        x, y = batch(0, 1)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error), error
        return False
    return True


def main():
    torch.set_num_threads(1)
    before = memory_mb("RssAnon", "RssShmem")
    resource.setrlimit(resource.RLIMIT_DATA, (int((memory_mb("VmData") + MORE_MB) * 1e6), resource.RLIM_INFINITY))
    alone = "enough memory" if fits_in_plain_torch() else "not enough memory"
    torch.manual_seed(0)
    disk = {"device": "nvme", "nvme_path": ".", "buffer_count": 2}
    engine, *_ = tessera.initialize(model=model, config={
        "train_batch_size": 64, "zero_optimization": {"stage": 3, "unit_numel": WIDTH**2, "offload_param": disk, "offload_optimizer": disk},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    x, y = batch(engine.global_rank, engine.world_size)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
    losses = tessera.comm.all_gather(loss.item())
    assert memory_mb("RssAnon", "RssShmem") - before < MORE_MB
    state = 16 * sum(parameter.numel() for parameter in engine.module.parameters()) / 1e6
    if engine.global_rank == 0:
        print(f"loss {sum(losses) / len(losses):.4f} after {STEPS} steps of {state:.0f} MB of state, with {MORE_MB} MB more for each of "
              f"{engine.world_size} ranks; plain torch: {alone}", flush=True)


if __name__ == "__main__":
    main()
