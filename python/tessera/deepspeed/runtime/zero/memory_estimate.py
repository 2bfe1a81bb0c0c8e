"""What `estimate_zero2_…` and `estimate_zero3_…` have in common: the bytes of model state by Tessera's formula, for bf16 and AdamW."""
import json
from typing import Any

import torch

from tessera import _engine, arguments
from tessera.errors import Error


def needs(stage: int, total_params: int, num_gpus_per_node: int, num_nodes: int, cpu_offload: bool, cpu_offload_params: bool,
          additional_buffer_factor: float) -> tuple[int, int]:
    """(bytes in the memory of one host, bytes on one device): what is offloaded lies in the host's, times `additional_buffer_factor`."""
    world = arguments.integer(num_gpus_per_node, "num_gpus_per_node", 1) * arguments.integer(num_nodes, "num_nodes", 1)
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
                       "optimizer": {"type": "AdamW"}})
    parsed = _engine.read_config(text, False, world, [])[0]
    total = arguments.integer(total_params, "total_params", 1)
    sizes = _engine.state_bytes(parsed, [("model", [total], torch.bfloat16, True)], world, stage)
    host = sum(sizes[kind] for kind in ("gradients", "master", "optimizer")) if cpu_offload else 0
    host += sizes["parameters"] if cpu_offload_params else 0
    return int(host * num_gpus_per_node * additional_buffer_factor), sum(sizes.values()) - host


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """(elements of all parameters, a shared one once; elements of the largest module's own parameters)."""
    if not isinstance(model, torch.nn.Module):
        raise Error(f"model is {arguments.shown(model)}; expected a torch.nn.Module")
    own = [sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules()]
    return sum(parameter.numel() for parameter in model.parameters()), max(own, default=0)


def show(title: str, num_gpus_per_node: int, num_nodes: int, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Print a table: "per CPU" is one host's memory, "per GPU" one device's."""
    print(f"Memory of parameters, optimizer states and gradients by Tessera's formula, in bf16 with AdamW, for {num_nodes} hosts with "
          f"{num_gpus_per_node} GPUs each.\n{title}\n  per CPU  |  per GPU |   Options")
    for options, (host, device, *_) in rows:
        print(f" {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {options}")
