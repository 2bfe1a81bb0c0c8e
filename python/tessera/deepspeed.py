"""`deepspeed`, for scripts and libraries that were written for it. One line, before Accelerate or transformers are imported:

    import tessera.deepspeed

From then on `import deepspeed` gives this module in this process, whether DeepSpeed is installed or not, so that the Hugging Face
Trainer (`deepspeed="ds_config.json"`) and Accelerate's DeepSpeedPlugin train with Tessera. It has the names that those two use, and
those of a training script; what else DeepSpeed has is an AttributeError.
"""
import atexit
import enum
import functools
import importlib
import importlib.machinery
import importlib.metadata
import logging
import math
import os
import sys
import types
from contextlib import contextmanager
from datetime import timedelta

import torch

from tessera import _engine, arguments, checkpoints, whole_model, zero
from tessera import comm as _comm
from tessera import initialize as _initialize
from tessera.engine import Engine
from tessera.errors import Error

__version__ = "0.19.8"  # whose interface this is
logger = logging.getLogger("DeepSpeed")


class DeepSpeedEngine(Engine):
    """An Engine with DeepSpeed's further methods."""

    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """Compile the module in place, as `module.compile`. `schedule` and `compiled_autograd_enabled` are DeepCompile's, and refused."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError("compile(): schedule and compiled_autograd_enabled are of DeepSpeed's compiler; expected None and False")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None):
        """As `tessera.Engine.load_checkpoint`; without a tag, where LOAD_DIR/latest is missing, a warning and (None, None)."""
        if tag is None and isinstance(load_dir, (str, os.PathLike)) and load_dir:
            found = _comm.all_gather(os.path.isfile(os.path.join(load_dir, "latest")), "checkpoint to load")
            if not found[0]:
                if self.global_rank == 0:
                    _engine.log_warning(f"load_checkpoint(): {os.path.join(load_dir, 'latest')} is not there, and no tag was given: nothing is loaded")
                return None, None
        return super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
                                       custom_load_fn)

    def zero_gather_16bit_weights_on_model_save(self):
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """The whole model on rank 0, None elsewhere. Collective."""
        state = whole_model.gathered_state_dict(self, only_rank=0)
        if exclude_frozen_parameters:
            frozen = {name for name, parameter in self.named_tensors if not parameter.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state if self.global_rank == 0 else None

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Write the model to one file, in the format of its ending (.bin, .safetensors, .h5). Collective. Returns True."""
        def make_folder():
            folder = checkpoints.folder_of(save_dir, "save_dir")
            if self.global_rank == 0:
                os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, arguments.path(save_filename, "save_filename"))
            return path, {"save_filename": save_filename, "exclude_frozen_parameters": exclude_frozen_parameters}

        path = _comm.agreed("save_16bit_model()", make_folder)
        whole_model.save(self, path, exclude_frozen=exclude_frozen_parameters)
        return True


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, distributed_port=None,
               mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None, config_params=None):
    """As `tessera.initialize`; the engine is a `DeepSpeedEngine`."""
    return _initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu, dist_init_required,
                       collate_fn, _without_infinity(config), mesh_param, _without_infinity(config_params), engine_class=DeepSpeedEngine)


def _without_infinity(config):
    if not isinstance(config, dict):
        return config
    return {key: value for key, value in config.items() if not (isinstance(value, float) and math.isinf(value))}  # Accelerate's way to say never


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=None, verbose=True, timeout=None, init_method=None,
                     dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Join Tessera's group, and make torch.distributed's over the same store, for the libraries that use that. Collective.

    `dist_backend` is torch.distributed's. `rank` and `world_size` have to be those of the environment, or -1; `init_method` "env://", or
    None; `config` None.
    """
    _check_place(auto_mpi_discovery, init_method, dist_init_required, config, rank, world_size)
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    os.environ.update(_engine.environment())  # for those that read torchrun's names, whatever launcher it is
    if _comm.is_initialized():  # DeepSpeed says so, and goes on
        if verbose and timeout is not None and _comm.get_rank() == 0:
            _engine.log_info(f"init_distributed(timeout={timeout}): the group has been joined before, and keeps its timeout")
        group = _comm.group()
    else:
        group = _comm._join("auto", "auto", timeout.total_seconds() if timeout else 1800.0, 300.0, log=verbose)
    timeout = timeout or timedelta(minutes=30)
    if torch.distributed.is_initialized():
        return
    if group.size == 1:
        store = torch.distributed.HashStore()
    else:
        store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    backend = dist_backend or ("nccl" if group.device.type == "cuda" else "gloo")
    torch.distributed.init_process_group(backend, store=torch.distributed.PrefixStore("torch", store), rank=group.rank,
                                         world_size=group.size, timeout=timeout)
    if backend == "gloo":
        atexit.register(_destroy_torch_group)


def _check_place(auto_mpi_discovery, init_method, dist_init_required, config, rank, world_size):
    place = _engine.environment()
    for name, given, variable in (("rank", rank, "RANK"), ("world_size", world_size, "WORLD_SIZE")):
        if given not in (-1, int(place[variable])):
            raise ValueError(f"init_distributed({name}={given}): the environment says {variable}={place[variable]}; expected that, or -1")
    if init_method not in (None, "env://"):
        raise ValueError(f"init_distributed(init_method={init_method!r}): the place in the group comes from the environment; expected 'env://' or None")
    if config is not None:
        raise NotImplementedError("init_distributed(config=): it would configure DeepSpeed's log of collectives, which is not here; expected None")
    if dist_init_required is False and not _comm.is_initialized() and not torch.distributed.is_initialized():
        raise Error("init_distributed(dist_init_required=False), and this process has joined no group; expected True or None")
    if not auto_mpi_discovery and int(place["WORLD_SIZE"]) > 1 and "RANK" not in os.environ:
        raise Error("init_distributed(auto_mpi_discovery=False), and RANK is not set: the place in the group would come from the launcher's own "
                    "variables; expected True, or a launcher that sets torchrun's variables")


def _destroy_torch_group():
    """Before the interpreter is gone: Gloo's threads let go of tensors, which takes the GIL, and a thread that asks for it too late ends the
    process (SIGABRT, "terminate called without an active exception")."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def add_config_arguments(parser):
    """Add --deepspeed and --deepspeed_config to an argparse parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Enable DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    return parser


class Init(zero.Init):
    """`zero.Init`: see `tessera.zero.Init`. Joins the group as `init_distributed` does."""

    def _join(self):
        init_distributed()


class ZeroParamStatus(enum.Enum):
    """What DeepSpeed's parameters have as `ds_status`. Tessera's have no such attribute: operators gather what they read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Accelerator:
    """`get_accelerator()`: the device type of this process."""

    def device_name(self, index=None):
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return kind if index is None or kind == "cpu" else f"{kind}:{index}"

    def current_device_name(self):
        return self.device_name(_comm.get_local_rank())

    def communication_backend_name(self):
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_available(self):
        return torch.cuda.is_available()

    def empty_cache(self):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _engine_and_name(parameter):
    for engine in list(zero.engines()):
        for name, other in engine.named_tensors:
            if other is parameter:
                return engine, name
    raise Error("the parameter belongs to no engine")


def safe_get_full_fp32_param(param):
    """An fp32 copy of a whole parameter. Collective."""
    engine, name = _engine_and_name(param)
    return engine.full_parameter(name)


def safe_get_full_grad(param):
    """The fp32 gradient of a whole parameter; None if there is none. Collective."""
    engine, name = _engine_and_name(param)
    try:
        return engine.full_gradient(name)
    except Error:
        return None


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """The modules of `model` of these classes, or classes' names. Nothing is marked: parameters are gathered by units, not by modules."""
    if isinstance(leaf_module_classes, str):
        raise TypeError(f"set_z3_leaf_modules(): leaf_module_classes is {leaf_module_classes!r}; expected a list of classes or their names")
    names = {one if isinstance(one, str) else f"{one.__module__}.{one.__qualname__}" for one in leaf_module_classes}
    found = [module for module in model.modules()
             if {type(module).__name__, type(module).__qualname__, f"{type(module).__module__}.{type(module).__qualname__}"} & names]
    if not found and raise_if_not_found:
        raise ValueError(f"set_z3_leaf_modules(): no module of the model is one of {', '.join(sorted(names))}")
    return found


def register_external_parameter(module, parameter):
    """Checks its arguments only: operators gather the parameters that they read, wherever those are registered."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter({type(module).__name__}, {type(parameter).__name__}): expected a Module and a Parameter")


def _cloned(state_dict):
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in state_dict.items()}


def _not_here(name):
    def refuse(*args, **kwargs):
        raise Error(f"deepspeed.{name}: Tessera translates torch's optimizers; expected one of torch.optim, or the configuration's")
    return refuse


def _module_tree():
    """What each module of the package has."""
    return {
        "deepspeed": {name: globals()[name] for name in ("__version__", "DeepSpeedEngine", "initialize", "init_distributed",
                                                         "add_config_arguments")},
        "deepspeed.accelerator": {"get_accelerator": _Accelerator},
        "deepspeed.checkpoint": {},
        "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": _cloned},
        "deepspeed.comm": {
            "init_distributed": init_distributed, "is_initialized": torch.distributed.is_initialized, "get_rank": _comm.get_rank,
            "get_world_size": _comm.get_world_size, "get_local_rank": _comm.get_local_rank,
            **{name: getattr(torch.distributed, name) for name in ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "ReduceOp",
                                                                   "all_gather_object", "broadcast_object_list", "new_group")}},
        "deepspeed.ops": {},
        "deepspeed.ops.adam": {"DeepSpeedCPUAdam": _not_here("ops.adam.DeepSpeedCPUAdam"), "FusedAdam": _not_here("ops.adam.FusedAdam")},
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
        "deepspeed.runtime.lr_schedules": {
            "VALID_LR_SCHEDULES": ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]},
        "deepspeed.runtime.zero": {},
        "deepspeed.runtime.zero.partition_parameters": {
            "zero_wrapper_for_fp_tensor_constructor": lambda function, *args, **kwargs: function, "_orig_torch_arange": torch.arange,
            "get_accelerator": _Accelerator, "GatheredParameters": zero.GatheredParameters, "Init": Init,
            "ZeroParamStatus": ZeroParamStatus},
        "deepspeed.utils": {"logger": logger, "safe_get_full_fp32_param": safe_get_full_fp32_param, "safe_get_full_grad": safe_get_full_grad,
                            "set_z3_leaf_modules": set_z3_leaf_modules},
        "deepspeed.zero": {"Init": Init, "GatheredParameters": zero.GatheredParameters, "register_external_parameter": register_external_parameter},
    }


class _Metadata(importlib.metadata.DistributionFinder):
    """Says that the distribution deepspeed is installed, where it is not: libraries look for it before they import it."""

    class _Distribution(importlib.metadata.Distribution):
        def read_text(self, filename):
            return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {__version__}\n" if filename == "METADATA" else None

        def locate_file(self, path):
            return path

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None

    @classmethod
    def find_distributions(cls, context=None):
        return [cls._Distribution()] if context is not None and context.name == "deepspeed" else []


def _teach_accelerate_ranks_on_cpus():
    """Accelerate has DeepSpeed on devices only: without one it takes each process for a group of its own."""
    try:
        from accelerate.state import DistributedType, PartialState
    except ImportError:
        return
    prepare = PartialState._prepare_backend

    def prepare_with_cpus(self, *args, **kwargs):
        backend, kind = prepare(self, *args, **kwargs)
        is_rank = "LOCAL_RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        return ("gloo", DistributedType.MULTI_CPU) if backend is None and is_rank else (backend, kind)

    PartialState._prepare_backend = prepare_with_cpus


def _teach_transformers_to_load_on_every_rank():
    """Under a stage 3 configuration transformers reads weights, and draws initial ones, on rank 0 alone, and in another order of draws.
    Here every rank does what it does under the other stages: so the weights have the same bits at every stage, and every rank has them,
    with an engine or without. What ranks have drawn differently becomes rank 0's. transformers is taught when its configuration object
    is made, because importing this module does not import it."""
    try:
        from accelerate.utils.deepspeed import HfDeepSpeedConfig
    except ImportError:
        return
    make = HfDeepSpeedConfig.__init__

    @functools.wraps(make)
    def make_and_teach(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if any(base.__module__.startswith("transformers.") for base in type(self).__mro__):
            _load_on_every_rank(importlib.import_module("transformers.modeling_utils").PreTrainedModel,
                                importlib.import_module("transformers.integrations.deepspeed"))

    HfDeepSpeedConfig.__init__ = make_and_teach


def _load_on_every_rank(model_class, integration):
    if hasattr(model_class, "__tessera__"):
        return
    model_class.__tessera__ = True

    @contextmanager
    def without_configuration():
        kept, integration._hf_deepspeed_config_weak_ref = integration._hf_deepspeed_config_weak_ref, None
        try:
            yield
        finally:
            integration._hf_deepspeed_config_weak_ref = kept

    def taught(function, modules_of):
        @functools.wraps(function)
        def call(self_or_class, *args, **kwargs):
            if not integration.is_deepspeed_zero3_enabled():
                return function(self_or_class, *args, **kwargs)
            if modules_of is not None:
                init_distributed()
            with without_configuration():
                result = function(self_or_class, *args, **kwargs)
            for module in modules_of(self_or_class, result) if modules_of is not None else ():
                zero.share_values((*module.named_parameters(), *module.named_buffers()), what=f"a {type(module).__name__}")
            return result
        return call

    def embeddings(model):
        return [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]

    for name in ("from_pretrained", "_from_config"):
        setattr(model_class, name, classmethod(taught(getattr(model_class, name).__func__,
                                                      lambda _, result: [result[0] if isinstance(result, tuple) else result])))
    model_class.resize_token_embeddings = taught(model_class.resize_token_embeddings, lambda model, _: embeddings(model))
    model_class.init_weights = taught(model_class.init_weights, None)  # of a constructor that is called directly


def install():
    """Make `import deepspeed` give this module. Importing `tessera.deepspeed` has done it."""
    already = sys.modules.get("deepspeed")
    if already is not None and not hasattr(already, "__tessera__"):
        raise Error("deepspeed is imported already: import tessera.deepspeed first, before accelerate and transformers")
    for name, names in _module_tree().items():
        module = types.ModuleType(name, __doc__)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        module.__tessera__ = True
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    if _Metadata not in sys.meta_path:
        sys.meta_path.append(_Metadata)
        _teach_accelerate_ranks_on_cpus()
        _teach_transformers_to_load_on_every_rank()


install()
