"""Makes `import deepspeed` give `tessera.deepspeed`, and says what the stand-in does not have."""
import importlib
import importlib.abc
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tessera.errors import Error

_OWN = "tessera.deepspeed"
# Modules that DeepSpeed does not have, or has under the names in _ALIASES.
_INTERNAL = ("stand_in", "libraries", "ops.rules", "runtime.config_keys", "runtime.optimizer", "runtime.zero.memory_estimate", "utils.parameters")
_ALIASES = {"zero": "runtime.zero", "dist": "comm", "checkpointing": "runtime.activation_checkpointing.checkpointing",
            "runtime.zero.parameter_offload": "runtime.zero.partition_parameters", "runtime.base_optimizer": "runtime.optimizer",
            "utils.tensor_fragment": "utils.parameters", "comm.comm": "comm", "accelerator.real_accelerator": "accelerator",
            "ops.aio": "ops.op_builder", "runtime.zero.utils": "runtime.zero.partition_parameters",
            "runtime.zero.mics": "runtime.zero.partition_parameters", "runtime.fp16.loss_scaler": "runtime.optimizer"}
_DATA_PARALLEL = "Tessera has data parallelism alone"
# What Tessera does not do: modules, names of modules, and names at the top.
_REFUSED_MODULES = {
    "pipe": f"pipelines: {_DATA_PARALLEL}; \"zero_optimization\": {{\"stage\": 3}} shards a model that is too large for one rank",
    "moe": f"mixture of experts across ranks: {_DATA_PARALLEL}; a model's own experts train as they are, see docs/python.md, Branches",
    "inference": "inference engines: use the module itself",
    "module_inject": "inference engines and tensor parallelism: use the module itself",
    "model_implementations": "inference engines: use the module itself",
    "compression": "compression: compress the model before initialize()",
    "sequence": f"sequence parallelism: {_DATA_PARALLEL}",
    "linear": "OptimizedLinear: use peft's LoRA",
    "autotuning": "autotuning: `tessera memory --fit` finds a setting that fits",
    "elasticity": "elastic batch sizes: `tessera launch --nnodes MIN:MAX` restarts on the hosts that are left",
    "nvme": "DeepSpeed's I/O tuning: offload to NVMe needs none",
    "utils.timer": "timers: \"wall_clock_breakdown\" in the configuration prints the times of a step, and torch.utils.benchmark measures calls",
    "ops.transformer": "transformer kernels: use torch.nn.functional.scaled_dot_product_attention",
    "ops.sparse_attention": "sparse attention: use torch.nn.attention.flex_attention",
    "runtime.pipe": f"pipelines: {_DATA_PARALLEL}",
    "runtime.sequence_parallel": f"sequence parallelism: {_DATA_PARALLEL}",
    "runtime.tensor_parallel": f"tensor parallelism: {_DATA_PARALLEL}",
    "runtime.hybrid_engine": "the hybrid engine: generate with the module, inside of GatheredParameters at stage 3",
    "runtime.fp16.onebit": "1-bit optimizers: use AdamW or LAMB",
    "runtime.data_pipeline": "curriculum learning and data sampling: use a sampler of torch.utils.data",
    "runtime.rlhf": "DeepSpeed-Chat's engine: use TRL",
    "checkpoint.ds_to_universal": "universal checkpoints: a checkpoint of Tessera loads on any number of ranks as it is",
    **dict.fromkeys((f"runtime.activation_checkpointing.checkpointing.{name}" for name in (
        "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "CudaRNGStatesTracker")),
        f"random states of tensor parallelism: {_DATA_PARALLEL}; checkpoint() draws the same numbers again by itself"),
    **dict.fromkeys(("comm.log_summary", "comm.configure"), "log of collectives: \"profiler\" in the configuration gives a trace that has each"),
    **dict.fromkeys(("runtime.lr_schedules.add_tuning_arguments", "runtime.lr_schedules.get_lr_from_config"),
                    "options of schedules on a command line: name the schedule in the section \"scheduler\" of the configuration"),
    **dict.fromkeys((f"{module}.{name}" for module in ("utils", "utils.logging") for name in ("print_dist", "print_json_dist", "log_dist_once")),
                    "other call that logs than log_dist()"),
}
_REFUSED_NAMES = {
    "add_tuning_arguments": "runtime.lr_schedules.add_tuning_arguments",
    "PipelineModule": "pipe", "PipelineEngine": "pipe", "DualPipeVEngine": "pipe", "DualPipeVModule": "pipe", "InferenceEngine": "inference",
    "DeepSpeedInferenceConfig": "inference", "init_inference": "inference", "default_inference_config": "inference",
    "DeepSpeedHybridEngine": "runtime.hybrid_engine", "DeepSpeedTransformerLayer": "ops.transformer",
    "DeepSpeedTransformerConfig": "ops.transformer", "replace_transformer_layer": "module_inject", "revert_transformer_layer": "module_inject",
    "set_autotp_mode": "runtime.tensor_parallel", "tp_model_init": "runtime.tensor_parallel",
}


def refuse(name: str) -> None:
    """Raise ImportError for a name at the top of DeepSpeed, a module, or a name of one, that Tessera does not do."""
    module = _REFUSED_NAMES.get(name)
    if module is None:
        module = next((known for known in _REFUSED_MODULES if name == known or name.startswith(known + ".")), None)
    if module is not None:
        raise ImportError(f"deepspeed.{name} is not in tessera.deepspeed, Tessera's stand-in for DeepSpeed, which has no "
                          f"{_REFUSED_MODULES[module]}", name=f"deepspeed.{name}")


def getattr_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of "deepspeed", or "deepspeed.…": what the module has not is refused, or an AttributeError."""
    def missing(name):
        refuse(f"{module}.{name}".removeprefix("deepspeed."))
        raise AttributeError(f"module '{module}' has no attribute '{name}': it is tessera.{module}, Tessera's stand-in for DeepSpeed")

    return missing


class _Finder(importlib.abc.MetaPathFinder):
    """Of `deepspeed.…` that is not in sys.modules: nothing else is to be found, also where DeepSpeed is installed."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("deepspeed.") or sys.modules.get("deepspeed") is not sys.modules[_OWN]:
            return
        refuse(name.removeprefix("deepspeed."))
        raise ModuleNotFoundError(f"No module named '{name}' in tessera.deepspeed, Tessera's stand-in for DeepSpeed", name=name)


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        version = sys.modules[_OWN].__version__
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _DistributionFinder(importlib.metadata.DistributionFinder):
    """Gives the distribution deepspeed, whether another one is installed or not: libraries look for it before they import it."""

    def find_spec(self, name, path=None, target=None):
        """None: it finds no modules."""

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008  the base class's
        return [_Distribution()] if context.name is not None and context.name.lower() == "deepspeed" else []


def install() -> None:
    """Make `import deepspeed` give `tessera.deepspeed`. Raises Error where another deepspeed was imported before."""
    package = sys.modules[_OWN]
    already = sys.modules.get("deepspeed")
    if already is package:
        return
    if already is not None:
        raise Error("deepspeed is imported already: import tessera.deepspeed first, before accelerate and transformers")
    sys.modules["deepspeed"] = package
    for found in pkgutil.walk_packages(package.__path__, f"{_OWN}."):
        if found.name == f"{_OWN}.__main__":
            continue
        module = importlib.import_module(found.name)
        name = found.name.removeprefix(f"{_OWN}.")
        if name not in _INTERNAL:
            sys.modules[f"deepspeed.{name}"] = module
    for alias, name in _ALIASES.items():
        _add_alias(alias, sys.modules[f"{_OWN}.{name}"])
    sys.meta_path[:0] = [_Finder(), _DistributionFinder()]  # before those of a DeepSpeed that is installed
    libraries = sys.modules[f"{_OWN}.libraries"]
    libraries.teach_accelerate_ranks_on_cpus()
    libraries.teach_transformers_to_load_on_every_rank()


def _add_alias(alias: str, module: ModuleType) -> None:
    sys.modules[f"deepspeed.{alias}"] = module
    parent, _, child = alias.rpartition(".")
    owner = sys.modules[f"deepspeed.{parent}" if parent else "deepspeed"]
    if not hasattr(owner, child):
        setattr(owner, child, module)
