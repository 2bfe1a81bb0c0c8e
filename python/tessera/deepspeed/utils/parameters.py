"""`deepspeed.utils.tensor_fragment`: fp32 values, gradients and optimizer states of single parameters, whatever the stage and tier.

All of these calls are collective: all ranks make them, in the same order, those of a "local" part too. The part of rank r is what
DeepSpeed's stage 3 gives it: elements r * n to (r + 1) * n of the parameter in one dimension, with n = ceil(numel / world), and zeros
behind its end. Tessera's own shards are of units of several parameters.
"""
from collections.abc import Callable
from typing import Any

import torch

from tessera import arguments, comm, zero
from tessera.errors import Error

__all__ = ["safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
           "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state",
           "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized"]


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """An fp32 copy of a whole parameter, its master weights, in its shape; None for one that is not trained. Collective.

    Raises Error for a parameter of no engine.
    """
    engine, name = _engine_and_name(param, "safe_get_full_fp32_param")
    return engine.full_parameter(name) if _is_trained(engine, param) else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weights of a whole parameter, and the values that the model computes with. Collective; rank 0's value counts.

    `value` is a tensor of the parameter's shape, of any floating dtype. Raises Error for another one, and for a parameter of no engine.
    """
    engine, name = _engine_and_name(param, "safe_set_full_fp32_param")
    value = _checked(value, param.shape, "safe_set_full_fp32_param")
    engine._engine.set_full_parameter(name, value)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """An fp32 copy of a state of a whole parameter, such as "exp_avg", in its shape; zeros before the first step. Collective.

    None for a parameter that is not trained. Raises Error for a state that the optimizer has not.
    """
    engine, name = _engine_and_name(param, "safe_get_full_optimizer_state")
    if not _is_trained(engine, param):
        return None
    if engine._whole_optimizer is not None:
        return _state_of_whole(engine, param, optim_state_key, "safe_get_full_optimizer_state")[optim_state_key].to(engine.device, torch.float32)
    index = _index_of(engine, param, optim_state_key, "safe_get_full_optimizer_state")
    return _states(engine, name)[1][index].to(engine.device)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a state of a whole parameter. Collective; rank 0's value counts. Raises as `safe_get_full_optimizer_state`, and Error for a value
    of another shape. The number of updates, by which Adam corrects its moments, stays."""
    engine, name = _engine_and_name(param, "safe_set_full_optimizer_state")
    if engine._whole_optimizer is not None:
        state = _state_of_whole(engine, param, optim_state_key, "safe_set_full_optimizer_state")
        value = _broadcast(engine, _checked(value, state[optim_state_key].shape, "safe_set_full_optimizer_state"))
        engine.optimizer.state[param] = {**state, optim_state_key: value.to("cpu", state[optim_state_key].dtype)}
        return
    index = _index_of(engine, param, optim_state_key, "safe_set_full_optimizer_state")
    value = _broadcast(engine, _checked(value, param.shape, "safe_set_full_optimizer_state"))
    num_updates, states = _states(engine, name)
    states[index] = value.to("cpu", torch.float32)
    engine._engine.set_optimizer_states(name, states, num_updates)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The fp32 mean gradient of a whole parameter over the ranks and the micro-batches so far, unscaled, in its shape. Collective.

    None where there is none: before a backward(), and for a parameter that is not trained.
    """
    engine, name = _engine_and_name(param, "safe_get_full_grad")
    try:
        return engine.full_gradient(name)
    except Error:
        comm.check_usable(engine._engine, "safe_get_full_grad()")  # else all ranks have none
        return None


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set it, between the backward() at the accumulation boundary and step(). Collective; rank 0's value counts.

    Raises Error for another shape, without a gradient, and for a parameter of no engine.
    """
    engine, name = _engine_and_name(param, "safe_set_full_grad")
    engine._engine.set_full_gradient(name, _checked(value, param.shape, "safe_set_full_grad"))


def safe_update_full_grad_vectorized(param_list: list[torch.nn.Parameter],
                                     update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]) -> None:
    """Set the gradient of each parameter that is trained and has one to `update_func(gradient, parameter)`. Collective."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the master weights, in one dimension. Collective. Raises Error below stage 3, as DeepSpeed does."""
    return local_part(_at_stage_3(param, "safe_get_local_fp32_param"), safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set it. Collective: each rank gives its part. Raises Error below stage 3, and for a value of another size."""
    engine = _at_stage_3(param, "safe_set_local_fp32_param")
    safe_set_full_fp32_param(param, _joined(engine, param, value, "safe_set_local_fp32_param"))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_grad`. Collective. Raises Error below stage 3."""
    return local_part(_at_stage_3(param, "safe_get_local_grad"), safe_get_full_grad(param))


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set it. Collective: each rank gives its part. Raises Error below stage 3, and for a value of another size."""
    engine = _at_stage_3(param, "safe_set_local_grad")
    safe_set_full_grad(param, _joined(engine, param, value, "safe_set_local_grad"))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_optimizer_state`. Collective. Raises Error below stage 3."""
    return local_part(_at_stage_3(param, "safe_get_local_optimizer_state"), safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set it. Collective: each rank gives its part. Raises Error below stage 3, and for a value of another size."""
    engine = _at_stage_3(param, "safe_set_local_optimizer_state")
    safe_set_full_optimizer_state(param, _joined(engine, param, value, "safe_set_local_optimizer_state"), optim_state_key)


def _engine_and_name(parameter, call):
    owner = zero.owner_of(parameter)
    if owner is None:
        raise Error(f"{call}(): the parameter belongs to no engine; expected one of a model that was given to initialize()")
    return owner[0], owner[2]


def _state_of_whole(engine, parameter, key, call):
    """All states of a parameter whose optimizer keeps them itself."""
    state = dict(engine.optimizer.state[parameter])

    def checked():
        if not isinstance(state.get(key), torch.Tensor):
            tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
            raise Error(f"{engine._whole_optimizer.name} has no state {key!r} of this parameter; expected "
                        f"{', '.join(tensors) or 'a call after the first step'}")
        return state, {"optim_state_key": key}

    return comm.agreed(f"{call}()", checked)


def _is_trained(engine, parameter):
    return engine.has_optimizer and engine.optimizer.state.is_trained(parameter)


def _at_stage_3(parameter, call):
    engine, name = _engine_and_name(parameter, call)
    if engine.zero_optimization_stage() != 3:
        raise Error(f"{call}(): {name} is whole at stage {engine.zero_optimization_stage()}; expected stage 3, or the call of the full value")
    return engine


def _index_of(engine, parameter, key, call):
    """The place of a state. Collective: what one rank gives is an error of all."""
    return comm.agreed(f"{call}()", lambda: (_place_of(engine, parameter, key, call), {"optim_state_key": key}))


def _place_of(engine, parameter, key, call):
    names, name = engine._engine.state_names, _engine_and_name(parameter, call)[1]
    if key not in names:
        raise Error(f"{engine.config['optimizer']['type']} has no state {key!r}; expected one of {', '.join(names) or 'none'}")
    if not _is_trained(engine, parameter):
        raise Error(f"{name} has no state, because the optimizer does not train it; expected a parameter of its groups")
    own = engine.optimizer.state.names_of_states(parameter)
    if key not in own:
        raise Error(f"the group of {name} has no state {key!r}; expected one of {', '.join(own) or 'none'}")
    return names.index(key)


def _states(engine, name):
    """(number of updates, states on the CPU). Collective."""
    comm.check_usable(engine._engine, "states of the optimizer")
    unit = next(i for i, names in enumerate(engine._engine.units()) if name in names)
    num_updates, states = engine._engine.optimizer_states(unit)[name]
    return num_updates, list(states)


def _checked(value, shape, call):
    """Collective: what one rank gives is an error of all."""
    def prepare():
        arguments.tensor(value, "value")
        if value.shape != shape or not value.is_floating_point():
            raise Error(f"value is {list(value.shape)}, {value.dtype}; expected a floating tensor of shape {list(shape)}")
        return value.detach(), {}

    return comm.agreed(f"{call}()", prepare)


def _broadcast(engine, value):
    """Rank 0's, in fp32 on the engine's device."""
    return comm.broadcast(value.to(engine.device, torch.float32, copy=True).contiguous(), 0, "value of a parameter")


def part_size(tensor: torch.Tensor) -> int:
    """Elements of a rank's part of a whole tensor. Local."""
    return -(-tensor.numel() // comm.get_world_size())


def local_part(engine: Any, whole: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a whole tensor, in one dimension, filled up with zeros; None of None. Local."""
    if whole is None:
        return None
    size = part_size(whole)
    part = whole.reshape(-1)[engine.global_rank * size:(engine.global_rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - part.numel())).clone()


def _joined(engine, parameter, value, call):
    size = part_size(parameter)
    value = _checked(value, torch.Size([size]), call)
    whole = torch.zeros(size * engine.world_size, dtype=torch.float32, device=engine.device)
    whole[engine.global_rank * size:(engine.global_rank + 1) * size] = value
    return comm.all_reduce(whole, "sum", "parts of a parameter")[:parameter.numel()].view(parameter.shape)
