"""`deepspeed.runtime.zero.partition_parameters`: parameters at stage 3, and what they have as attributes there.

A parameter of an engine at stage 3, or of a model that was made inside of `zero.Init`, has `ds_id`, `ds_shape`, `ds_numel` and
`ds_status`, by which libraries tell ZeRO-3. Others have not: `hasattr` is False. `ds_tensor`, DeepSpeed's shard of one parameter, has its
shape and no memory (a tensor on "meta"), because Tessera's shards are of units of several parameters: `safe_get_local_fp32_param` reads it.
"""
import enum
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tessera import zero
from tessera.deepspeed.comm import init_distributed
from tessera.deepspeed.utils.parameters import part_size
from tessera.errors import Error
from tessera.zero import GatheredParameters  # noqa: F401  DeepSpeed's name

ZeRORuntimeException = Error
_orig_torch_arange = torch.arange
_made_inside = WeakIdKeyDictionary()  # parameters of zero.Init that no engine has: their numbers
_numbers = itertools.count(-1, -1)
_opened = WeakIdKeyDictionary()  # parameters that all_gather() has gathered: their GatheredParameters


class ZeroParamStatus(enum.Enum):
    """`ds_status` of a parameter at stage 3: AVAILABLE inside of `GatheredParameters`, else NOT_AVAILABLE. INFLIGHT is never found."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """`ds_param_type`: each parameter is sharded over all ranks, PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Init(zero.Init):
    """`zero.Init`: see `tessera.zero.Init`. Joins the group as `init_distributed` does, and gives the parameters `ds_` attributes."""

    def _join(self):
        init_distributed()

    def _share(self, modules):
        modules = list(modules)
        super()._share(modules)
        if self._enabled:
            mark_parameters(parameter for module in modules for parameter in module.parameters(recurse=False))


class MiCS_Init(Init):  # noqa: N801  DeepSpeed's name
    """As `zero.Init`. Which ranks share a copy is said by `zero_optimization.mics_shard_size` of the configuration that `initialize` gets."""


def mark_parameters(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters that no engine has yet `ds_` attributes, until an engine at another stage takes them."""
    for parameter in parameters:
        if parameter not in _made_inside:
            _made_inside[parameter] = next(_numbers)


def is_zero_param(parameter: Any) -> bool:
    """Whether it is a parameter at stage 3."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Checks its arguments only: operators gather the parameters that they read, wherever those are registered."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter({type(module).__name__}, {type(parameter).__name__}): expected a Module and a Parameter")


unregister_external_parameter = register_external_parameter


def zero_wrapper_for_fp_tensor_constructor(fn: Any, target_fp_dtype: Any = None) -> Any:
    """The function itself: `zero.Init` leaves torch's constructors as they are."""
    return fn


def _number(parameter):
    """The `ds_id`; None for a parameter that is not at stage 3."""
    owner = zero.owner_of(parameter)
    if owner is not None:
        return owner[1] if owner[0].zero_optimization_stage() == 3 else None
    return _made_inside.get(parameter)


def _status(parameter):
    return ZeroParamStatus.AVAILABLE if zero.is_held(parameter) else ZeroParamStatus.NOT_AVAILABLE


def _listed(parameter, param_list):
    return [parameter] if param_list is None else list(param_list)


def _all_gather(parameter, param_list=None, async_op=False, hierarchy=0):
    """Hold parameters whole until `partition()`. Collective. `async_op` is refused: the call returns when they are there."""
    if async_op:
        raise Error("all_gather(async_op=True): the parameters are there when the call returns; expected False")
    wanted = [one for one in _listed(parameter, param_list) if one not in _opened]
    for one in wanted:
        gathered = GatheredParameters(one)
        gathered.__enter__()
        _opened[one] = gathered


class _Gathered:
    """What `all_gather_coalesced()` returns: the parameters are there already."""

    def wait(self, handle_dependency=True):
        """Returns at once."""


def _all_gather_coalesced(parameter, params, safe_mode=False, quantize=False):
    """Hold parameters whole until `partition()`. Collective. `quantize` is refused."""
    if quantize:
        raise Error("all_gather_coalesced(quantize=True): parameters are sent as they are; expected False")
    _all_gather(parameter, params)
    return _Gathered()


def _partition(parameter, param_list=None, hierarchy=0, has_been_updated=False):
    """Give up what `all_gather()` holds. Collective."""
    if has_been_updated:
        raise Error("partition(has_been_updated=True): what was written inside of all_gather() does not count; expected "
                    "tessera.GatheredParameters(parameter, modifier_rank=0) around what writes")
    for one in _listed(parameter, param_list):
        gathered = _opened.pop(one, None)
        if gathered is not None:
            gathered.__exit__(None, None, None)


# By name: what a parameter at stage 3 has.
_ATTRIBUTES = {
    "ds_id": _number, "ds_shape": lambda parameter: parameter.shape, "ds_numel": lambda parameter: parameter.numel(), "ds_status": _status,
    "ds_tensor": lambda parameter: torch.empty(part_size(parameter), dtype=parameter.dtype, device="meta"),
    "partition_numel": lambda parameter: lambda: part_size(parameter),
    "ds_persist": lambda _: False, "ds_param_type": lambda _: ZeroParamType.PARTITIONED, "ds_active_sub_modules": lambda _: set(),
    "all_gather": lambda parameter: lambda *args, **kwargs: _all_gather(parameter, *args, **kwargs),
    "all_gather_coalesced": lambda parameter: lambda *args, **kwargs: _all_gather_coalesced(parameter, *args, **kwargs),
    "partition": lambda parameter: lambda *args, **kwargs: _partition(parameter, *args, **kwargs)}


def _property(name, function):
    def get(parameter):
        if _number(parameter) is None:
            raise AttributeError(f"'{type(parameter).__name__}' object has no attribute '{name}': it is not a parameter at stage 3")
        return function(parameter)

    return property(get, doc=f"Of a parameter at stage 3: see tessera.deepspeed.runtime.zero.partition_parameters. {name}")


def add_attributes() -> None:
    """Let parameters answer for their `ds_` attributes. Nothing is stored in them, so copies and pickles of them stay plain."""
    for name, function in _ATTRIBUTES.items():
        setattr(torch.nn.Parameter, name, _property(name, function))
    torch.nn.Module.ds_external_parameters = lambda _: ()  # [(name, Parameter)] of what was registered as external


add_attributes()
