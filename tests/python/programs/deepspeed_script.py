"""A script that was written for DeepSpeed itself: but for its first line, nothing is Tessera's."""
import tessera.deepspeed  # noqa: F401  isort: skip
import argparse
import atexit
import json
import os
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn


def say_what_is_left():
    """At exit, after what was registered later: whether torch's group, with its threads, is gone."""
    Path(f"exit{os.environ['RANK']}").write_text(str(torch.distributed.is_initialized()))


def main():
    atexit.register(say_what_is_left)
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(deepspeed.comm.get_rank())
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
        nn.init.constant_(model[0].weight, 0.1)
    engine, optimizer, _, schedule = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    assert isinstance(engine, DeepSpeedEngine)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(engine.global_rank))
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(engine(x), x.argmax(-1) % 4)
        engine.backward(loss)
        gradient = safe_get_full_grad(model[2].weight)
        engine.step()
        losses.append(loss.item())
    assert gradient.shape == (4, 32) and safe_get_full_fp32_param(model[2].weight).shape == (4, 32)
    total = torch.tensor([losses[-1]])
    deepspeed.comm.all_reduce(total)
    engine.save_checkpoint("checkpoints", tag="a", client_state={"step": 4})
    path, client_state = engine.load_checkpoint("checkpoints")
    assert client_state == {"step": 4} and path.endswith("a")
    engine.save_16bit_model("model")
    if engine.global_rank == 0:
        print(json.dumps({"losses": losses, "total": total.item(), "lr": schedule.get_last_lr(), "groups": len(optimizer.param_groups)}))


main()
