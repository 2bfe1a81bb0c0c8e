"""PyTorch Lightning: `Trainer(strategy=TesseraStrategy(stage=3))`.

Lightning's own `strategy="deepspeed_stage_3"` does the same after `import tessera.deepspeed`, on CUDA devices. Importing this module imports
both, and needs the package lightning.
"""
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

import tessera.deepspeed  # noqa: F401  from here on `import deepspeed`, which the strategy does, gives it


class TesseraStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, with its arguments, also on CPU ranks: `Trainer(accelerator="cpu", devices=2, strategy=TesseraStrategy())`.

    `config` is a configuration of Tessera's, a dict or a file; without it `stage` and the other arguments make one. Checkpoints of the Trainer
    are folders, which load on any number of ranks.
    """

    strategy_name = "tessera"

    def setup_environment(self) -> None:
        """As DeepSpeedStrategy's, which refuses CPU ranks."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """As DeepSpeedStrategy's, which asks for the indices of CUDA devices."""
        if all(isinstance(device, torch.device) and device.type == "cpu" for device in self.parallel_devices):
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()
