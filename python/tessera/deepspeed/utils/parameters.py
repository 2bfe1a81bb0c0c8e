"""`deepspeed.utils.tensor_fragment`: fp32 values, gradients and optimizer states of single parameters, whatever the stage and tier.

All of these calls are collective: all ranks make them, in the same order, those of a "local" part too. The part of rank r is what
DeepSpeed's stage 3 gives it: elements r * n to (r + 1) * n of the parameter in one dimension, with n = ceil(numel / world), and zeros
behind its end. Tessera's own shards are of units of several parameters.
"""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera import arguments, comm, zero
from tessera.errors import Error
from tessera.zero import GatheredParameters

_GRADIENTS = ("gradients are in the engine, and cannot be set there; expected a hook of the parameter (register_hook), which changes the "
              "gradient of one micro-batch as it is made")


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """An fp32 copy of a whole parameter, its master weights, in its shape. Collective. Raises Error for a parameter of no engine."""
    engine, name = _engine_and_name(param, "safe_get_full_fp32_param")
    return engine.full_parameter(name)


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weights of a whole parameter, and the values that the model computes with. Collective; rank 0's value counts.

    `value` is a tensor of the parameter's shape, of any floating dtype. Raises Error for another one, and for a parameter of no engine.
    """
    engine, name = _engine_and_name(param, "safe_set_full_fp32_param")
    value = _checked(value, param.shape, "safe_set_full_fp32_param")
    if param.dtype == torch.float32:  # its values are the masters
        with GatheredParameters(param, modifier_rank=0), torch.no_grad():
            if engine.global_rank == 0:
                param.copy_(value)
        return
    value = _broadcast(engine, value)
    with tempfile.TemporaryDirectory(prefix="tessera_param_") as folder:
        path = Path(folder) / "value.safetensors"
        _write_safetensors(path, name, value)
        try:
            engine._engine.load_weights(str(path), ["*"], [], [])
        except Error as error:
            raise Error(str(error).replace("load_weights()", "safe_set_full_fp32_param() of a 16-bit model")) from None


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """An fp32 copy of a state of a whole parameter, such as "exp_avg", in its shape; zeros before the first step. Collective.

    Raises Error for a state that the optimizer has not, and for a parameter that it does not train.
    """
    engine, name = _engine_and_name(param, "safe_get_full_optimizer_state")
    index = _index_of(engine, param, optim_state_key, "safe_get_full_optimizer_state")
    return _states(engine, name)[1][index].to(engine.device)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a state of a whole parameter. Collective; rank 0's value counts. Raises as `safe_get_full_optimizer_state`, and Error for a value
    of another shape. The number of updates, by which Adam corrects its moments, stays."""
    engine, name = _engine_and_name(param, "safe_set_full_optimizer_state")
    index = _index_of(engine, param, optim_state_key, "safe_set_full_optimizer_state")
    value = _broadcast(engine, _checked(value, param.shape, "safe_set_full_optimizer_state"))
    num_updates, states = _states(engine, name)
    states[index] = value.to("cpu", torch.float32)
    engine._engine.set_optimizer_states(name, states, num_updates)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The fp32 mean gradient of a whole parameter over the global batch, unscaled, in its shape. Collective.

    None where there is none: before the backward() at the accumulation boundary, and for a parameter that no loss depends on.
    """
    engine, name = _engine_and_name(param, "safe_get_full_grad")
    try:
        return engine.full_gradient(name)
    except Error:
        engine._engine.check_usable()
        return None


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Raises Error: gradients are changed in hooks."""
    raise Error(f"safe_set_full_grad(): {_GRADIENTS}")


def safe_update_full_grad_vectorized(param_list: list[torch.nn.Parameter], update_func: Callable[..., Any]) -> None:
    """Raises Error: gradients are changed in hooks."""
    raise Error(f"safe_update_full_grad_vectorized(): {_GRADIENTS}")


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of the master weights, in one dimension. Collective. Raises Error below stage 3, as DeepSpeed does."""
    return _local(_at_stage_3(param, "safe_get_local_fp32_param"), safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set it. Collective: each rank gives its part. Raises Error below stage 3, and for a value of another size."""
    engine = _at_stage_3(param, "safe_set_local_fp32_param")
    safe_set_full_fp32_param(param, _joined(engine, param, value, "safe_set_local_fp32_param"))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_grad`. Collective. Raises Error below stage 3."""
    engine, gradient = _at_stage_3(param, "safe_get_local_grad"), safe_get_full_grad(param)
    return None if gradient is None else _local(engine, gradient)


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Raises Error: gradients are changed in hooks."""
    raise Error(f"safe_set_local_grad(): {_GRADIENTS}")


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """This rank's part of `safe_get_full_optimizer_state`. Collective. Raises Error below stage 3."""
    return _local(_at_stage_3(param, "safe_get_local_optimizer_state"), safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set it. Collective: each rank gives its part. Raises Error below stage 3, and for a value of another size."""
    engine = _at_stage_3(param, "safe_set_local_optimizer_state")
    safe_set_full_optimizer_state(param, _joined(engine, param, value, "safe_set_local_optimizer_state"), optim_state_key)


def _engine_and_name(parameter, call):
    owner = zero.owner_of(parameter)
    if owner is None:
        raise Error(f"{call}(): the parameter belongs to no engine; expected one of a model that was given to initialize()")
    return owner[0], owner[2]


def _at_stage_3(parameter, call):
    engine, name = _engine_and_name(parameter, call)
    if engine.zero_optimization_stage() != 3:
        raise Error(f"{call}(): {name} is whole at stage {engine.zero_optimization_stage()}; expected stage 3, or the call of the full value")
    return engine


def _index_of(engine, parameter, key, call):
    names, name = engine._engine.state_names, _engine_and_name(parameter, call)[1]
    if key not in names:
        raise Error(f"{call}(): {engine.config['optimizer']['type']} has no state {key!r}; expected one of {', '.join(names) or 'none'}")
    if not engine.optimizer.state.is_trained(parameter):
        raise Error(f"{call}(): {name} has no state, because the optimizer does not train it; expected a parameter of its groups")
    return names.index(key)


def _states(engine, name):
    """(number of updates, states on the CPU)"""
    unit = next(i for i, names in enumerate(engine._engine.units()) if name in names)
    num_updates, states = engine._engine.optimizer_states(unit)[name]
    return num_updates, list(states)


def _checked(value, shape, call):
    arguments.tensor(value, f"{call}(): value")
    if value.shape != shape or not value.is_floating_point():
        raise Error(f"{call}(): value is {list(value.shape)}, {value.dtype}; expected a floating tensor of shape {list(shape)}")
    return value.detach()


def _broadcast(engine, value):
    """Rank 0's, in fp32 on the engine's device."""
    return comm.broadcast(value.to(engine.device, torch.float32, copy=True).contiguous(), 0, "value of a parameter")


def _part_size(engine, parameter):
    return -(-parameter.numel() // engine.world_size)


def _local(engine, whole):
    size = _part_size(engine, whole)
    part = whole.reshape(-1)[engine.global_rank * size:(engine.global_rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - part.numel())).clone()


def _joined(engine, parameter, value, call):
    size = _part_size(engine, parameter)
    value = _checked(value, torch.Size([size]), call)
    whole = torch.zeros(size * engine.world_size, dtype=torch.float32, device=engine.device)
    whole[engine.global_rank * size:(engine.global_rank + 1) * size] = value
    return comm.all_reduce(whole, "sum", "parts of a parameter")[:parameter.numel()].view(parameter.shape)


def _write_safetensors(path, name, value):
    """One fp32 tensor. The format: the header's length in 8 bytes, little-endian; the header, JSON; the elements."""
    header = json.dumps({name: {"dtype": "F32", "shape": list(value.shape), "data_offsets": [0, 4 * value.numel()]}}).encode()
    data = value.to("cpu").contiguous().view(-1).view(torch.uint8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data.untyped_storage()))
