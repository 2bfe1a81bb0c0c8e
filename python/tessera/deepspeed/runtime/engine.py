"""`deepspeed.runtime.engine`: an engine with DeepSpeed's further methods."""
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tessera import _engine, arguments, checkpoints, reports, whole_model, zero
from tessera import comm as _comm
from tessera.data import DataLoader
from tessera.deepspeed.monitor.monitor import MonitorMaster
from tessera.deepspeed.runtime.config import ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER  # noqa: F401  DeepSpeed's
from tessera.deepspeed.runtime.optimizer import DeepSpeedOptimizer, DeepSpeedScheduler
from tessera.deepspeed.utils.logging import warning_once
from tessera.engine import Engine
from tessera.errors import Error
from tessera.zero import GatheredParameters

DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = Any


class Refused(Error, AssertionError):
    """An Error, which DeepSpeed's users may catch as the AssertionError that it is there."""


# Methods that say what the configuration has at a place.
_OF_CONFIGURATION = {
    "fp16_enabled": "fp16.enabled", "bfloat16_enabled": "bf16.enabled", "torch_autocast_enabled": "torch_autocast.enabled",
    "optimizer_params": "optimizer.params", "steps_per_print": "steps_per_print", "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown", "dump_state": "dump_state", "tensorboard_enabled": "tensorboard.enabled",
    "gradient_predivide_factor": "gradient_predivide_factor", "managed_gradient_accumulation": "managed_gradient_accumulation",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size", "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
}
# Methods whose answer is always the same, with why.
_ALWAYS = {
    "amp_enabled": (False, "Apex is not used"), "sparse_gradients_enabled": (False, "gradients are dense"),
    "checkpoint_tag_validation_enabled": (True, "a tag that differs between ranks is an error"),
    "checkpoint_tag_validation_fail": (True, "a tag that differs between ranks is an error"),
    "load_universal_checkpoint": (False, "a checkpoint loads on any number of ranks as it is"),
    "zero_gather_16bit_weights_on_model_save": (True, "whole models are written from the shards"),
    **dict.fromkeys(("get_model_parallel_rank", "get_sequence_parallel_rank", "get_tensor_parallel_rank"), (0, "each rank has all of the model")),
    **dict.fromkeys(("get_model_parallel_world_size", "get_sequence_parallel_world_size", "get_tensor_parallel_world_size"),
                    (1, "each rank has all of the model")),
    "clip_fp32_gradients": (None, "step() clips, by gradient_clipping"),
    # DeepSpeed's guide to training several models calls it after the loss.backward() of a loss that they share.
    "_backward_epilogue": (None, "loss.backward() has reduced the gradients"),
}
# Methods that compute their answer, with what it is.
_COMPUTED = {
    "get_batch_info": (lambda self: (self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()),
                       "(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)"),
    "get_mom": (lambda self: reports.momentum_of(self), "Adam's betas, or SGD's momentum, by param group"),
    "get_type": (lambda self: [group.get("type", 0.0) for group in self.optimizer.param_groups], "The key \"type\" of the param groups, or 0.0"),
    "get_data_parallel_rank": (lambda self: self.global_rank, "This rank"),
    "get_data_parallel_world_size": (lambda self: self.world_size, "The number of ranks"),
    "zero_optimization": (lambda self: self.zero_optimization_stage() > 0, "Whether the stage is above 0"),
    "zero_optimization_partition_gradients": (lambda self: self.zero_optimization_stage() >= 2, "Whether the stage is 2 or 3"),
    "zero_optimization_partition_weights": (lambda self: self.zero_optimization_stage() >= 3, "Whether the stage is 3"),
    "zero_offload_optimizer": (lambda self: self._offload("offload_optimizer"), "The section offload_optimizer, None where nothing is offloaded"),
    "zero_offload_param": (lambda self: self._offload("offload_param"), "The section offload_param, None where nothing is offloaded"),
    "zero_cpu_offload": (lambda self: self.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu",
                         "Whether optimizer states are in the host's memory by offload_optimizer"),
    "zero_use_cpu_optimizer": (lambda self: self.zero_offload_optimizer() is not None,
                               "Whether optimizer states are offloaded, to the host's memory or to disk: its CPU updates them then"),
    "torch_autocast_dtype": (lambda self: whole_model.DTYPES[self.config["torch_autocast"]["dtype"]] if self.torch_autocast_enabled() else None,
                             "In which operators run; None without autocast"),
    "scheduler_name": (lambda self: self.config.get("scheduler", {}).get("type"), "`scheduler.type` of the configuration"),
    "scheduler_params": (lambda self: self.config.get("scheduler", {}).get("params"), "`scheduler.params` of the configuration"),
    "dynamic_loss_scale": (lambda self: self.optimizer.dynamic_loss_scale, "Whether the loss scale changes with overflows"),
    "initial_dynamic_scale": (lambda self: 2.0 ** self.config["fp16"]["initial_scale_power"], "2 to the power of fp16.initial_scale_power"),
}


def _with_answers(kind):
    """A class decorator: adds the methods of the tables."""
    def add(name, answer, doc):
        answer.__name__, answer.__qualname__, answer.__doc__, answer.__module__ = name, f"{kind.__name__}.{name}", doc, kind.__module__
        answer.__annotations__ = {"return": Any}
        setattr(kind, name, answer)

    for name, place in _OF_CONFIGURATION.items():
        add(name, _reader(place.split(".")), f"`{place}` of the configuration.")
    for name, (answer, why) in _ALWAYS.items():
        add(name, _constant(answer), f"{answer}: {why}.")
    for name, (answer, doc) in _COMPUTED.items():
        add(name, answer, f"{doc}.")
    return kind


def _reader(keys):
    return lambda self: functools.reduce(lambda section, key: section[key], keys, self.config)


def _constant(answer):
    return lambda self: answer


@_with_answers
class DeepSpeedEngine(Engine):
    """An Engine with DeepSpeed's further methods. Its numbers are methods, as there: `engine.fp16_enabled()`, `get_batch_info()`, `get_mom()` …"""

    optimizer_class = DeepSpeedOptimizer
    scheduler_class = DeepSpeedScheduler
    mpu = None
    pipeline_parallelism = False
    enable_backward_allreduce = True
    sparse_tensor_module_names = frozenset()  # modules whose gradients are sent sparse: none
    _coalesces = False  # inside of coalesce_grad_reduction()

    # -------------------------------------------------------------------------------------------- numbers

    @property
    def monitor(self) -> MonitorMaster:
        """Writes values beside the engine's own: `engine.monitor.write_events([(name, value, samples)])`."""
        if "_monitor" not in self.__dict__:
            self._monitor = MonitorMaster(self)
        return self._monitor

    data_parallel_group = dp_process_group = seq_data_parallel_group = property(lambda self: torch.distributed.group.WORLD, doc="Of all ranks.")
    seq_dp_world_size = property(lambda self: self.world_size)
    mp_world_size = 1
    is_compiled = property(lambda self: self.module._compiled_call_impl is not None, doc="Whether the module was compiled.")
    communication_data_type = property(lambda self: whole_model.DTYPES[self.config["communication_data_type"] or self._accumulation_dtype()],
                                       doc="In which gradients are reduced.")
    tput_timer = None  # wall_clock_breakdown measures

    def set_lr(self, lr: float) -> None:
        """Write a rate into all param groups; a schedule of the configuration sets them anew after the next step."""
        lr = arguments.number(lr, "set_lr(): lr")
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    basic_optimizer = property(lambda self: self.optimizer.optimizer, doc="As `optimizer.optimizer`.")

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """In which the model computes, and in which gradients are accumulated."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return model, whole_model.DTYPES[self._accumulation_dtype()]

    def optimizer_name(self) -> str:
        """The name of the optimizer's class that `initialize` was given, or the configuration's `optimizer.type` in small letters."""
        client = self.optimizer.optimizer
        return self.config["optimizer"]["type"].lower() if client is self.optimizer else type(client).__name__

    def _offload(self, name):
        section = self.config["zero_optimization"][name]
        return None if section["device"] == "none" else section

    def _accumulation_dtype(self):
        return self.config["data_types"]["grad_accum_dtype"] or "fp32"

    # ------------------------------------------------------------------------------------------- training

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Does nothing: `backward()` has reduced them."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises Error: see `set_gradient_accumulation_steps`. The size that there is, is accepted."""
        self._refuse_change("set_train_batch_size", "train_batch_size", train_batch_size, self.train_batch_size())

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raises Error: see `set_gradient_accumulation_steps`. The size that there is, is accepted."""
        self._refuse_change("set_train_micro_batch_size", "micro_batch_size", micro_batch_size, self.train_micro_batch_size_per_gpu())

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Raises Error: the sizes of a step are fixed by `initialize`. The number that there is, is accepted."""
        self._refuse_change("set_gradient_accumulation_steps", "steps", steps, self.gradient_accumulation_steps())

    def _refuse_change(self, call, name, wanted, now):
        if arguments.integer(wanted, f"{call}(): {name}", 1) != now:
            raise Error(f"{call}({wanted}): the sizes of a step are fixed by initialize(), {now} here; expected that, or "
                        "engine.set_gradient_accumulation_boundary(True) before the last backward() of each step, with losses that are divided by "
                        "the number of micro-steps, and backward(loss, scale_wrt_gas=False)")

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backward passes inside are those of one step. What they have left to the last is reduced at the end of the `with`, where it is
        Collective; `step()` follows. What `set_gradient_accumulation_boundary` says inside counts from the next step on.

        Raises Refused inside of `no_sync()` or of itself, and where `managed_gradient_accumulation` is false.
        """
        if not self.managed_gradient_accumulation():
            raise Refused("coalesce_grad_reduction(): managed_gradient_accumulation is false, so each step() reduces what there is")
        if self._engine.in_no_sync:
            raise Refused("coalesce_grad_reduction() cannot be nested inside of no_sync(), or of itself")
        self._coalesces = True
        self._engine.begin_no_sync()
        try:
            yield
        finally:
            self._coalesces = False
            self._engine.end_no_sync(next_is_last=False)
        self._engine.reduce_accumulated()

    def no_sync(self) -> AbstractContextManager[None]:
        """As in `tessera.Engine`. Raises Refused inside of `coalesce_grad_reduction()`."""
        if self._coalesces:
            raise Refused("no_sync() cannot be nested inside of coalesce_grad_reduction()")
        return super().no_sync()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """As in `tessera.Engine`. Raises Refused where `managed_gradient_accumulation` is false."""
        if not self.managed_gradient_accumulation():
            raise Refused("set_gradient_accumulation_boundary(): managed_gradient_accumulation is false, so each step() is the boundary")
        super().set_gradient_accumulation_boundary(is_boundary)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """As in `tessera.Engine`. Raises Refused where the loss is not a scalar tensor that depends on something."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise Refused("scale(): loss must be a scalar tensor that depends on parameters; of other tensors call tensor.backward(gradient)")
        return super().scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """As in `tessera.Engine`. Raises Refused inside of `no_sync()` and `coalesce_grad_reduction()`."""
        if self._engine.in_no_sync:
            raise Refused("It is illegal to call Engine.step() inside no_sync context manager, or inside of coalesce_grad_reduction(): gradients "
                          "are not reduced there; expected it after the with")
        if lr_kwargs and self.lr_scheduler is None:
            warning_once("step(lr_kwargs=): the engine has no scheduler that would get them; they are left out, as by DeepSpeed")
            lr_kwargs = None
        super().step(lr_kwargs)

    def empty_partition_cache(self) -> None:
        """Give what PyTorch's allocator keeps back to the device. Units that are unsharded stay within `stage3_max_live_parameters`."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Raises Error: where states lie is decided by the configuration."""
        raise Error("offload_states(): where states lie is decided by initialize(); expected \"zero_optimization\": {\"offload_optimizer\": "
                    "{\"device\": \"cpu\"}} in the configuration, or save_checkpoint() and destroy()")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Does nothing: all states are where the configuration has put them."""

    def deepspeed_io(self, dataset: torch.utils.data.Dataset, batch_size: int | None = None, route: str = "train",
                     pin_memory: bool | None = None, data_sampler: Any = None, collate_fn: Callable[[list], Any] | None = None,
                     num_local_io_workers: int | None = None) -> Any:
        """A loader of this rank's part of a dataset. Collective without `data_sampler`.

        Parameters
        ----------
        dataset : Dataset
            Of the same length on all ranks.
        batch_size : int, optional
            Samples of a batch; by default those of a micro-batch.
        route : {"train", "eval", "predict"}
            "train": a `tessera.DataLoader`, in the training order. Else the samples in their order, by torch's DistributedSampler: all ranks
            have equally many, and where the number of ranks does not divide the length, the first samples come a second time at the end.
        pin_memory : bool, optional
            By default on CUDA.
        data_sampler : Sampler, optional
            Says which samples, and their order, on this rank.
        collate_fn : callable, optional
        num_local_io_workers : int, optional
            Processes that load.
        """
        def checked():
            if route not in ("train", "eval", "predict"):
                raise ValueError(f"route is {route!r}; expected 'train', 'eval' or 'predict'")
            return self.train_micro_batch_size_per_gpu() if batch_size is None else arguments.integer(batch_size, "batch_size", 1)

        options = {"collate_fn": collate_fn, "pin_memory": self.device.type == "cuda" if pin_memory is None else pin_memory,
                   "num_workers": num_local_io_workers or 0}
        if data_sampler is not None:
            return torch.utils.data.DataLoader(dataset, batch_size=checked(), sampler=data_sampler, **options)

        def make():
            size = checked()
            seed = self.config["seed"] if route == "train" else None
            if route == "train":
                loader = DataLoader(dataset, size, accumulation_steps=self.gradient_accumulation_steps(), seed=seed, **options)
            else:
                sampler = torch.utils.data.DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=False)
                loader = torch.utils.data.DataLoader(dataset, batch_size=size, sampler=sampler, **options)
            return loader, {"route": route, "len(dataset)": len(dataset), "batch_size": size, "seed": seed}

        return _comm.agreed("deepspeed_io()", make)

    # ------------------------------------------------------------------------------------------- weights

    def module_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
                          exclude_frozen_parameters: bool = False) -> Any:
        """As `state_dict`: whole parameters, on the CPU. Collective."""
        state = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            state = self._without_frozen(state, prefix)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True,
                               custom_load_fn: Callable[..., None] | None = None, fetch_z3_params: bool = False,
                               z3_params_to_fetch: Iterable[Any] | None = None) -> None:
        """Load `checkpoint["module"]`, a state dict of whole tensors, into the module. Collective; rank 0's values count.

        `custom_load_fn(src=state_dict, dst=module)` is called in place of `module.load_state_dict`. All parameters are gathered for it,
        whatever the last two arguments say. Raises KeyError without "module", and what `load_state_dict` raises; on ranks without that an
        Error. What was loaded until then counts, as in torch.
        """
        def load():
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                self.module.load_state_dict(checkpoint["module"], strict=strict)
            return None, {}

        failed = None
        with GatheredParameters(self.module, modifier_rank=0):
            try:
                _comm.agreed("load_module_state_dict()", load)
            except Exception as error:  # it must not leave the `with`: what was written there would be lost, and the engine unusable
                failed = error
        if failed is not None:
            raise failed

    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """Compile the module in place, as `module.compile`. `schedule` and `compiled_autograd_enabled` are DeepCompile's, and refused."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError("compile(): schedule and compiled_autograd_enabled are of DeepSpeed's compiler; expected None and False")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None, *, allow_partial_load=False):
        """As `tessera.Engine.load_checkpoint`; without a tag, where LOAD_DIR/latest is missing, a warning and (None, None)."""
        asks = tag is None and isinstance(load_dir, (str, os.PathLike)) and bool(load_dir)
        found = _comm.all_gather(os.path.isfile(os.path.join(load_dir, "latest")) if asks else None, "checkpoint to load")
        if None not in found and not found[0]:  # else all ranks find what is wrong, or load
            if self.global_rank == 0:
                _engine.log_warning(f"load_checkpoint(): {os.path.join(load_dir, 'latest')} is not there, and no tag was given: nothing is loaded")
            return None, None
        return super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
                                       custom_load_fn, allow_partial_load=allow_partial_load)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """The whole model on rank 0, None elsewhere. Collective."""
        state = whole_model.gathered_state_dict(self, only_rank=0)
        if exclude_frozen_parameters:
            state = self._without_frozen(state)
        return state if self.global_rank == 0 else None

    def _without_frozen(self, state, prefix=""):
        frozen = {prefix + name for name, parameter in self.named_tensors if not parameter.requires_grad}
        return OrderedDict((name, value) for name, value in state.items() if name not in frozen)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

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

    save_fp16_model = save_16bit_model


def end_engines_of(model: Any, call: str) -> None:
    """End the engines that a module's parameters have, with a warning that names `call`: DeepSpeed takes such a module again, for instance where
    a cell of a notebook runs twice. The same on all ranks; Collective at stage 3."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    owners = {id(owner[0]): owner[0] for owner in map(zero.owner_of, parameters) if owner is not None}
    for engine in owners.values():
        if _comm.get_rank() == 0:
            _engine.log_warning(f"{call}: the model has an engine from an earlier call, which is ended; it trains nothing any more")
        engine.destroy()


_NO_OPTIMIZER = ("initialize() was given no optimizer, and without one nothing is trained, as in DeepSpeed; expected optimizer=, or the section "
                 "\"optimizer\" in the configuration")


class EngineWithoutOptimizer(DeepSpeedEngine):
    """The engine of a model that is evaluated only, such as a reference model: nobody has said how to train it. A rank has no more of it than
    the parameters, at stage 3 its shards of them."""

    has_optimizer = False

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Raises Refused: there is no optimizer. `loss.backward()` gives the gradients of what the module was called with."""
        raise Refused(f"backward({type(loss).__name__}, {retain_graph}, {scale_wrt_gas}): {_NO_OPTIMIZER}, or loss.backward(), for gradients of inputs")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises Error: there is no optimizer."""
        raise Error(f"{'step()' if lr_kwargs is None else 'step(lr_kwargs=)'}: {_NO_OPTIMIZER}")
