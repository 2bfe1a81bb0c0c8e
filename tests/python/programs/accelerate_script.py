"""A script for Accelerate. Argument: "plain" (DistributedDataParallel) or a ZeRO stage. Prints losses and the model's sums."""
import json
import os
import sys
import warnings

KIND = sys.argv[1]
if KIND != "plain":
    import tessera.deepspeed  # noqa: F401  the one line
import accelerate
import torch
from torch import nn

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def main():
    if KIND == "plain":
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=accelerate.DeepSpeedPlugin(
            zero_stage=int(KIND), gradient_clipping=0.1, gradient_accumulation_steps=2, zero3_save_16bit_model=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.TensorDataset(torch.randn(68, 8, generator=torch.Generator().manual_seed(1)), torch.arange(68) % 4)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert accelerator.num_processes == 2 and type(model).__module__ == ("torch.nn.parallel.distributed" if KIND == "plain" else "tessera.deepspeed.runtime.engine")
    losses, rates = [], []
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(schedule.get_last_lr()[0])
        if epoch == 1:  # there and back
            accelerator.save_state("state")
            accelerator.wait_for_everyone()
            accelerator.load_state("state")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "rates": rates, "weights": {name: value.double().sum().item() for name, value in state.items()},
                          "unwrapped": type(accelerator.unwrap_model(model)).__name__}))
    if KIND == "plain":  # the result is out: Gloo's threads abort the interpreter's end now and then
        sys.stdout.flush()
        accelerator.wait_for_everyone()
        os._exit(0)
    accelerator.end_training()


main()
