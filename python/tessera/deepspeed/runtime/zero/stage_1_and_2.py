"""`deepspeed.runtime.zero.stage_1_and_2`: the memory that stage 2 takes."""
import torch

from tessera.deepspeed.runtime.optimizer import DeepSpeedOptimizer
from tessera.deepspeed.runtime.zero import memory_estimate

DeepSpeedZeroOptimizer = DeepSpeedOptimizer

def estimate_zero2_model_states_mem_needs(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int]:
    """(bytes in the memory of one host, bytes on one device) of parameters, gradients, fp32 masters and AdamW's states, in bf16 training."""
    return memory_estimate.needs(2, total_params, num_gpus_per_node, num_nodes, cpu_offload, False, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print it for a model, with and without `offload_optimizer`. `tessera.estimate` has all stages."""
    estimate_zero2_model_states_mem_needs_all_cold(memory_estimate.counts(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print it for a number of parameters."""
    rows = [(f"offload_optimizer={'cpu ' if offload else 'none'}", estimate_zero2_model_states_mem_needs(
        total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor)) for offload in (True, False)]
    memory_estimate.show(f"SW: Model with {int(total_params / 1e6)}M total params.", num_gpus_per_node, num_nodes, rows)
