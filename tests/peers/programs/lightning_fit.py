"""Two ranks of Lightning's Trainer on CPUs: `lightning_fit.py ddp|STAGE FOLDER`. Trains, saves, validates, and goes on from the checkpoint. Prints JSON."""
import json
import sys

import lightning
import torch

strategy, folder = sys.argv[1:]


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}}


def fit(epochs, data, checkpoint=None):
    if strategy == "ddp":
        way = "ddp"
    else:
        from tessera.lightning import TesseraStrategy
        way = TesseraStrategy(stage=int(strategy))
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=way, max_epochs=epochs, logger=False, enable_progress_bar=False,
                                gradient_clip_val=0.5, default_root_dir=folder)
    trainer.fit(Classifier(), data, data, ckpt_path=checkpoint)
    found = [float(trainer.callback_metrics[name]) for name in ("loss", "validation")]
    return trainer, [*found, *trainer.validate(trainer.lightning_module, data, verbose=False)[0].values()]


def main():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
    trainer, first = fit(2, data)
    trainer, second = fit(3, data, trainer.strategy.broadcast(trainer.checkpoint_callback.best_model_path))
    if trainer.is_global_zero:
        print("numbers", json.dumps([*first, *second, trainer.global_step]))


main()
