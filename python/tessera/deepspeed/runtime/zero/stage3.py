"""`deepspeed.runtime.zero.stage3`: the memory that stage 3 takes, and a model that generates."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tessera.deepspeed.runtime.optimizer import DeepSpeedOptimizer
from tessera.deepspeed.runtime.zero import memory_estimate
from tessera.zero import GatheredParameters

DeepSpeedZeroOptimizer_Stage3 = DeepSpeedOptimizer


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside of the `with` all parameters of an engine's module are whole, so that generating gathers nothing. Collective."""
    with GatheredParameters(list(model.parameters())):
        yield model


def estimate_zero3_model_states_mem_needs(total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                          cpu_offload: bool = True, cpu_offload_params: bool = True, zero_init: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int, int]:
    """(bytes in the memory of one host, bytes on one device, bytes of the largest layer) of parameters, gradients, fp32 masters and AdamW's
    states, in bf16 training. The largest layer, which a device holds whole, is in the second.

    `zero_init` False: the whole model is on each rank before `initialize`, in fp32, which is the least that a host then needs.
    """
    host, device = memory_estimate.needs(3, total_params, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload and cpu_offload_params,
                                         additional_buffer_factor)
    whole = int(4 * total_params * num_gpus_per_node * additional_buffer_factor)
    return host if zero_init else max(host, whole), device + 2 * largest_layer_params, 2 * largest_layer_params


def estimate_zero3_model_states_mem_needs_all_live(model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print it for a model, for each way to offload. `tessera.estimate` has all stages."""
    estimate_zero3_model_states_mem_needs_all_cold(*memory_estimate.counts(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1,
                                                   num_nodes: int = 1, additional_buffer_factor: float = 1.5) -> None:
    """Print it for a number of parameters, and of those of the largest layer."""
    rows = [(f"offload_param={'cpu ' if params else 'none'}, offload_optimizer={'cpu ' if optimizer else 'none'}, zero_init={int(init)}",
             estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params, init,
                                                   additional_buffer_factor))
            for optimizer, params in ((True, True), (True, False), (False, False)) for init in (True, False)]
    memory_estimate.show(f"SW: Model with {int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params.",
                         num_gpus_per_node, num_nodes, rows)
