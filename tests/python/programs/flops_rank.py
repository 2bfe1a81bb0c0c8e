"""flops_profiler beside torch.utils.flop_counter, on one rank."""
import tessera
import torch
from checks import check, config, main
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


class Pictures(nn.Module):
    """Convolutions, a transposed one, attention, linear layers; the first ones may be checkpointed."""

    def __init__(self, again=False):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))
        self.back, self.mixed, self.head = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 5)
        self.again = again

    def forward(self, x):
        y = checkpoint(self.convolutions, x, use_reentrant=False) if self.again else self.convolutions(x)
        y = self.back(y).flatten(2).transpose(1, 2)
        return self.head(self.mixed(y, y, y)[0].mean(1))


@check
def model_flops_are_those_of_torch():
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    plain = Pictures()
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(plain(x), y).backward()
    for stage in (0, 3):
        for again in (False, True):
            engine, *_ = tessera.initialize(model=Pictures(again), config=config(
                stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, flops_profiler={"enabled": True}))
            assert engine.flops_per_step is None
            engine.backward(functional.cross_entropy(engine(x), y))
            engine.step()
            assert engine.flops_per_step == counter.get_total_flops(), (stage, again, engine.flops_per_step, counter.get_total_flops())


if __name__ == "__main__":
    main()
