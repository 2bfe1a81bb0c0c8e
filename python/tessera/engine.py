"""Engine: a model in training. The names follow DeepSpeed's `DeepSpeedEngine`.

    engine, optimizer, _, _ = tessera.initialize(model=model, config="ds_config.json")
    for x, y in loader:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
"""
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tessera import _engine, arguments, checkpoints, comm, leaf_modules, module_members, module_program, module_state, reports, whole_model
from tessera.containers import map_tensors, tensors_in
from tessera.data import DataLoader
from tessera.engine_properties import EngineProperties
from tessera.errors import CannotBeCopied, Error
from tessera.lr_scheduler import LRScheduler, StepsScheduler
from tessera.optimizer import Optimizer
from tessera.whole_optimizer import WholeOptimizer


class Engine(EngineProperties, StepsScheduler):
    """One rank's engine; `tessera.initialize` makes it. Used by one thread.

    It owns the memory of the model's parameters and updates them; the module itself stays as it is, in `engine.module`. Methods
    marked Collective are called by all ranks, in the same order. The errors that they raise are in `tessera.errors`.

    Attributes
    ----------
    module : torch.nn.Module
    optimizer : tessera.Optimizer
    lr_scheduler : object with step(), or None
    training_dataloader : iterable, or None
    global_steps, skipped_steps, micro_steps : int
        Optimizer steps taken or skipped; of these the skipped ones (gradients that are not finite); calls of `backward`.
    config : dict
        The configuration with all defaults.
    device : torch.device
        Where parameters and inputs are.
    global_rank, local_rank, world_size : int
        This rank, 0 to `world_size` - 1; this rank among those of its host; the number of ranks.
    """

    module: torch.nn.Module
    optimizer: Optimizer
    lr_scheduler: Any
    training_dataloader: DataLoader | None
    config: dict[str, Any]
    optimizer_class: type[Optimizer] = Optimizer  # what `initialize` makes
    scheduler_class: type[LRScheduler] = LRScheduler
    has_optimizer: bool = True  # False: its parameters have no gradients, masters and states, and keep their values

    def __init__(self, module: torch.nn.Module, config: _engine.Config, comm: _engine.Communicator, local_rank: int,
                 steps_per_epoch: int = 0, deferred: _engine.DeferredModel | None = None, untrained: Sequence[str] = (),
                 whole_optimizer: WholeOptimizer | None = None) -> None:
        parameters = module_state.named_parameters(module)
        module_program.check_same(module, comm)
        self.module = module
        self.device, self.global_rank, self.local_rank, self.world_size = comm.device, comm.rank, local_rank, comm.size
        self.dp_world_size = self.world_size
        self.named_tensors = parameters
        self._parameter_ids = module_state.parameter_ids(module)
        self._module_state = module_state.ModuleState(module)
        members = [(f"attribute {name}", tensor) for name, tensor in module_members.tensors(module)]
        viewed = module_members.viewed_outside(module, parameters) if deferred is None and comm.rank == 0 else None
        self._engine = _engine.Engine(parameters=parameters, state=self._module_state, members=members, config=config, comm=comm,
                                      local_rank=local_rank, steps_per_epoch=steps_per_epoch, deferred=deferred, untrained=list(untrained),
                                      whole_optimizer=whole_optimizer)
        self._whole_optimizer = whole_optimizer
        if viewed is not None:
            _engine.log_warning(f"the memory of parameter {viewed} is also held by a tensor outside of the module, such as a state dict, a view "
                                "or an array: it keeps the values of before initialize() and does not follow the training")
        self.config = json.loads(self._engine.config)
        self._casts = self.config["bf16"]["auto_cast"] or self.config["fp16"]["auto_cast"]
        self.optimizer = self.lr_scheduler = self.training_dataloader = None
        self._applied = self._was_skipped = self._keeps_zero_gradients = False
        self.memory_record = self.recorded_timeline = None  # of memory.memory_report(): phases, and when they began
        self._reports = reports.reports_of(self, config)
        if not module.training:
            module.train()

    # ------------------------------------------------------------------------------------------- the step

    @reports.timed("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Collective at stage 3, and in evaluation, where all ranks call it equally often.

        Tensors among the arguments, also inside of lists, tuples and dicts, are moved to the engine's device, in their own dtypes. With
        `auto_cast` in the section "bf16" or "fp16", floating ones among the positional arguments are cast to that type. A list or dict with
        a tensor in it that moves or is cast reaches the module as a copy: what the module writes into that one, its caller does not see.

        Returns
        -------
        Any
            What the module returns.

        Raises
        ------
        CommError
            At stage 3: the ranks run different forwards, or one is gone.
        Error
            The module's parameters were replaced or written to.
        """
        self._check_same_parameters()
        engine = self._engine
        if self.module.training and not engine.training:  # a framework has set the modules' modes one by one, as Lightning does
            engine.train()
        args = [map_tensors(value, engine.prepare if self._casts else self._moved, keeps=True) for value in args]
        kwargs = {key: map_tensors(value, self._moved, keeps=True) for key, value in kwargs.items()}
        is_inside = engine.in_forward
        try:
            engine.begin_forward()
            with self._saved_tensors_hooks():
                result = self.module(*args, **kwargs)
            engine.end_forward(list(tensors_in(result)) if torch.is_grad_enabled() else [])
        except BaseException as error:  # an interrupt too, which Python may raise when begin_forward() has returned
            if is_inside:  # and was refused
                raise
            engine.leave_forward()
            if isinstance(error, Exception):
                self._raise_cause_of(error)
            leaf_modules.abandon(self.module)
            raise
        return result

    __call__ = forward

    def _moved(self, tensor):
        return tensor.to(self.device)

    def _saved_tensors_hooks(self) -> AbstractContextManager:
        """While the module runs: what `activation_checkpointing` drops of what autograd saves."""
        if not self._engine.recomputes or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_engine.save_tensor, _engine.SavedTensor.unpack)

    @reports.timed("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Add the loss's gradients to those of this step. Collective where gradients are reduced.

        `loss.backward()` in its place does the same for `engine(...)` in training mode, also for a tensor of several elements with a
        gradient, and for one loss over several engines: gradients are divided by the number of accumulation steps as they come. Where the
        configuration scales the loss, it is `engine.scale(loss).backward()`.

        Parameters
        ----------
        loss : Tensor of one element
            The mean over this rank's micro-batch. It is divided by the number of accumulation steps, and multiplied by the loss
            scale.
        retain_graph : bool
            Not supported: add losses up and call it once.
        scale_wrt_gas : bool
            False: the loss is divided by the number of accumulation steps already.

        Returns
        -------
        Tensor
            The loss as it counts for the step: divided by the number of accumulation steps, unless `scale_wrt_gas` is False.

        Raises
        ------
        Error
            The loss is not one element, or was computed without autograd; `step()` is due; `retain_graph`.
        CommError
            Another rank is gone, or has called something else.
        """
        if retain_graph:
            raise Error("backward(retain_graph=True): a graph is used once here; add the losses and call backward() on the sum")
        if not isinstance(loss, torch.Tensor):
            raise Error(f"backward(): the loss is a {type(loss).__name__}; expected a tensor of one element, which the model's output gives")
        scale_wrt_gas = arguments.flag(scale_wrt_gas, "backward(): scale_wrt_gas")
        self._check_same_parameters()
        self._engine.backward(loss, scale_wrt_gas)
        accumulation = self.gradient_accumulation_steps()
        return loss.detach() / accumulation if scale_wrt_gas and accumulation > 1 else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a `loss.backward()`. Raises Error where it is not one element."""
        if not isinstance(loss, torch.Tensor):
            raise Error(f"scale(): the loss is a {type(loss).__name__}; expected a tensor of one element")
        return self._engine.scale(loss)

    @reports.timed("step")
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the parameters, if this micro-step is the last of its step; else do nothing. Collective.

        Clips, updates, frees the gradients and advances the schedule. A step with gradients that are not finite is skipped on all
        ranks alike; `was_step_applied` tells.

        Parameters
        ----------
        lr_kwargs : dict, optional
            Arguments for the step() of the engine's scheduler. One that needs some, as ReduceLROnPlateau does, is stepped here only if they are
            given.

        Raises
        ------
        Error
            Param groups, options of the optimizer or `grad` of a parameter were changed in a way that would have no effect; after
            `zero_grad(set_to_none=False)`, a parameter that torch would update with a gradient of zeros; `lr_kwargs` that no scheduler of the
            engine takes.
        """
        if lr_kwargs:
            self._check_arguments_of_scheduler(lr_kwargs)
        optimizer, updates, skipped, steps = self.optimizer, self._engine.update_is_due, self.skipped_steps, self.global_steps
        if self._engine.in_no_sync:
            self._engine.step()  # raises what is wrong with it
        elif updates:
            optimizer.call_hooks("pre")
            if self._keeps_zero_gradients:
                self._refuse_zero_gradients()
        self._applied = False
        optimizer.push()
        try:
            self._engine.step()
        except BaseException as error:
            # An interrupt, or the end of the program by a signal, is raised when the call has returned.
            if not isinstance(error, Exception) and self.global_steps > steps and not self._engine.has_failed:
                self._follow_update(skipped, lr_kwargs)
            raise
        if updates:
            self._follow_update(skipped, lr_kwargs)

    def _follow_update(self, skipped, lr_kwargs):
        """The engine has made or skipped one: what goes with it, so that a checkpoint has both."""
        optimizer = self.optimizer
        self._count_samples()
        self._was_skipped = self.skipped_steps > skipped
        self._applied = not self._was_skipped
        if self._applied:
            optimizer.stepped()
            optimizer.call_hooks("post")
            self._step_scheduler(lr_kwargs)
        optimizer.pull(skipped=not self._applied)

    def was_step_applied(self) -> bool:
        """Whether the last step() updated the parameters: it was at a boundary, and was not skipped."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last one before an update."""
        return self._engine.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backward() is the last before an update, in place of `gradient_accumulation_steps`. None: count again.

        What is said inside of `no_sync()` counts after it.
        """
        if is_boundary is not None:
            is_boundary = arguments.flag(is_boundary, "set_gradient_accumulation_boundary(): is_boundary")
        self._engine.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up; the first one after it is the last of its step, as in DistributedDataParallel.

        After that step they are counted again, or go on as `set_gradient_accumulation_boundary` has said.
        """
        self._engine.begin_no_sync()
        try:
            yield
        finally:
            self._engine.end_no_sync(next_is_last=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the parameters' `grad`, and between backward() and step() discard the gradients, as in PyTorch. All ranks alike.

        After a forward or backward() that failed on all ranks alike it drops the gradients of this step, of all its micro-steps, and
        training goes on. So it does after a step() in which an optimizer that runs as it is has raised: the parameters have the values of
        before, the optimizer's states what it has made of them. Collective then.

        Gradients of other losses that went through this model, such as a generator's through its discriminator, lie in `grad`. Calls
        in other places are not needed: step() frees what it has used, and keeps what is to be accumulated.

        With `set_to_none=False` the memory is freed as well. A parameter that the next step finds without a gradient is updated by torch
        with zeros then, if it had one before; here that step is an Error.
        """
        self._keeps_zero_gradients = not arguments.flag(set_to_none, "zero_grad(): set_to_none")
        was_refused = self._engine.step_was_refused
        self._engine.zero_grad()
        self._forget_micro_steps()
        if self._reports is not None and not self._engine.has_gradients:
            self._reports.forget_losses()
        if was_refused:
            self._whole_optimizer.drop_step()

    def _refuse_zero_gradients(self):
        """Raise Error where torch would go on with zeros in `grad`, which zero_grad(set_to_none=False) has left there."""
        unused = [name for name, parameter in self.named_tensors if parameter.grad is None and self._engine.num_updates(name) > 0]
        if self.world_size > 1:  # a gradient of another rank counts
            others = [set(names) for names in comm.all_gather(unused, "parameters without gradient")]
            unused = [name for name in unused if all(name in names for names in others)]
        if unused:
            raise Error(f"step(): parameter {unused[0]} has no gradient, and had one in an earlier step: after zero_grad(set_to_none=False) torch "
                        "would update it with zeros (weight decay and momentum go on), which is not built in; call zero_grad() without it, or "
                        "use the parameter in each loss")

    def memory_timeline(self) -> dict[str, Any]:
        """The memory of the step that `tessera.memory_report` has recorded last.

        Returns
        -------
        dict
            "blocks", each [begin, end, bytes, category, unit, module, operator], in nanoseconds from the beginning (0: it was there before;
            None: it was there afterwards) and places in "categories" and "names" (-1: none); "phases"; "peak", with "total", "by_category"
            and "alive", the blocks that were there.

        Raises
        ------
        Error
            Nothing was recorded.
        """
        if self.recorded_timeline is None:
            raise Error("memory_timeline: nothing was recorded; expected `with tessera.memory_report(engine):` around a step before")
        return self.recorded_timeline

    def destroy(self) -> None:
        """End the engine, and close its monitors: its module keeps whole parameters in memory of its own, as a plain module.

        Collective at stage 3.

        Afterwards the module can be given to `initialize` again, and so can the optimizer, whose methods are its own again; it has no
        moments then. A second call does nothing.
        """
        whole_model.give_back(self)
        if self._reports is not None:
            self._reports.close()
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.leave()

    # -------------------------------------------------------------------------------------------- modes

    def train(self, mode: bool = True) -> "Engine":
        """Set the mode of the module. Collective. Returns the engine.

        `module.train()` after `eval()` does the same, from the next forward on.
        """
        if not arguments.flag(mode, "train(): mode"):
            return self.eval()
        self.module.train()
        self._engine.train()
        return self

    def eval(self) -> "Engine":
        """Set the mode of the module to evaluation, and copy rank 0's buffers to all ranks. Collective. Returns the engine."""
        self.module.eval()
        self._engine.eval()
        return self

    # ---------------------------------------------------------------------------------- the whole model

    def full_parameter(self, name: str) -> torch.Tensor:
        """An fp32 copy of a whole parameter, its master weights, in its shape, on the engine's device. Collective.

        Raises Error for a name that the model has not.
        """
        return self._engine.full_parameter(arguments.text(name, "full_parameter(): name"))

    def full_gradient(self, name: str) -> torch.Tensor:
        """The fp32 mean gradient of a whole parameter over the global batch, in its shape, unscaled and before clipping. Collective.

        There is one from the backward() at the accumulation boundary until the next backward(), or until it is discarded, as a load does.
        Raises Error without one.
        """
        return self._engine.full_gradient(arguments.text(name, "full_gradient(): name"))

    def state_dict(self, destination: MutableMapping[str, Any] | None = None, prefix: str = "", keep_vars: bool = False,
                   only_rank: int | None = None) -> MutableMapping[str, Any]:
        """What `module.state_dict()` would be with whole parameters. Collective.

        Parameters
        ----------
        destination : dict, optional
            Is filled and returned; by default a new one.
        prefix : str
            Stands before each name.
        keep_vars : bool
            True is refused: the tensors are copies.
        only_rank : int, optional
            The rank that gets it, to save memory; others get an empty one.

        Returns
        -------
        OrderedDict of str to Tensor
            On the CPU, in the parameters' own types; names of a tied parameter share one tensor.
        """
        if keep_vars:
            raise ValueError("state_dict(keep_vars=True): whole parameters are copies; expected False, or engine.module.state_dict(keep_vars=True)")
        if only_rank is not None:
            only_rank = arguments.integer(only_rank, "state_dict(): only_rank", 0, self.world_size - 1)
        result = OrderedDict() if destination is None else destination
        result.update((prefix + name, value) for name, value in whole_model.gathered_state_dict(self, only_rank).items())
        return result

    def save_model(self, path: str | Path, dtype: str | None = None) -> None:
        """Write parameters and buffers to one file that other programs read, through one unit's memory. Collective.

        Parameters
        ----------
        path : str or Path
            NAME.safetensors, NAME.pt or NAME.h5; rank 0 writes it.
        dtype : {"fp32", "bf16", "fp16"}, optional
            Of floating tensors; by default their own. "fp32" gives the master weights of a 16-bit model.

        Raises
        ------
        CheckpointError
            The file cannot be written. The same on all ranks.
        """
        whole_model.save(self, path, dtype)

    def load_weights(self, path: str | Path, ignore_missing: Sequence[str] = (), ignore_unexpected: Sequence[str] = ()) -> None:
        """Load parameters and buffers from a .safetensors file, or a folder of them, in any precision. Collective.

        What another program has saved is read as well (docs/migrating.md): `pytorch_model.bin`, a file of `torch.save`, a checkpoint.
        `ignore_missing`: a list of globs of names that the file may lack; `ignore_unexpected`: of those that the model may lack. Raises
        CheckpointError, the same on all ranks, before anything has changed, and Error for a module with a hook of its own that changes
        a state dict before it is loaded.
        """
        path = arguments.path(path, "load_weights(): path")
        globs = [arguments.texts(values, f"load_weights(): {name}")
                 for name, values in (("ignore_missing", ignore_missing), ("ignore_unexpected", ignore_unexpected))]
        module_state.refuse_load_hooks(self.module, "load_weights()")
        self._engine.load_weights(path, *globs, module_state.names_in_files(self.module))
        self._forget_micro_steps()
        self._module_state.finish_load()

    # -------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, save_dir: str | Path, tag: str | int | Path | None = None, client_state: Any = None,
                        save_latest: bool = True, exclude_frozen_parameters: bool = False) -> str:
        """Save all that training needs to resume to SAVE_DIR/TAG, a folder that all ranks share. Collective.

        It is saved completely, or not at all, and SAVE_DIR/latest then names it. The values of the optimizer's param groups, the
        scheduler of `initialize(lr_scheduler=)` and the place of the data loader of `initialize(training_data=)` are saved too.

        Parameters
        ----------
        save_dir : str or Path
        tag : str, number or Path, optional
            A folder's name; 0 is "0". By default "global_step" and the number of steps.
        client_state : dict or another value, optional
            Comes back from `load_checkpoint`, equal and of the same types; rank 0's is kept. What JSON has, and tuples, sets, bytes,
            any keys of dicts, numpy's values and tensors on the CPU.
        save_latest : bool
            False: SAVE_DIR/latest stays as it is, and `checkpoint.keep_last` does not delete this checkpoint while the process runs.
        exclude_frozen_parameters : bool
            True: parameters that `initialize` found frozen are left out; load with `load_module_strict=False` then.

        Returns
        -------
        str
            SAVE_DIR/TAG.

        Raises
        ------
        CheckpointError
            It cannot be written. The same on all ranks, as all that follow.
        ValueError, TypeError
            A folder or tag that cannot be one; a client state that would not come back as it is (the message names the place in it).
        """
        return checkpoints.save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: str | Path, tag: str | int | Path | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                        custom_load_fn: Callable[..., Any] | None = None, *, allow_partial_load: bool = False) -> tuple[str, Any]:
        """Load LOAD_DIR/TAG, saved with any stage, number of ranks and precision. Collective.

        Parameters
        ----------
        load_dir : str or Path
        tag : str, number or Path, optional
            By default the one in LOAD_DIR/latest.
        load_module_strict : bool
            False: tensors of the same name and shape are loaded, the others keep their values; rank 0 logs which.
        load_optimizer_states : bool
            False: moments, and the hyper-parameters of the param groups, stay as they are.
        load_lr_scheduler_states : bool
            False: the schedule goes on where it is, and learning rates stay as they are. Without a schedule of the engine's, rates are
            the optimizer's, and are loaded with its states.
        load_module_only : bool
            Parameters and buffers alone; counters, optimizer, schedule and random numbers stay.
        custom_load_fn : None
            DeepSpeed's; a function is refused.
        allow_partial_load : bool
            For a checkpoint of which a schedule's state, options of param groups, rate, moments, loss scale or count of updates cannot be
            taken over. False: raises CheckpointError, which names them. True: warns, and the engine's own are used.

        Returns
        -------
        (str, object)
            The checkpoint's path, and the client state that was saved; {} where none was given.

        Raises
        ------
        CheckpointError
            There is none, it is damaged or does not fit. The same on all ranks, before anything has changed, as all that follow.
        ValueError, TypeError, NotImplementedError
            A folder or tag that cannot be one; `custom_load_fn`.
        Error
            Ranks gave different arguments.
        """
        return checkpoints.load(self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
                                custom_load_fn, allow_partial_load)

    def finish_checkpoint(self) -> None:
        """Wait for an asynchronous save. Raises the last save's CheckpointError, once and the same on all ranks."""
        self._engine.finish_checkpoint()

    # --------------------------------------------------------------------------------------- the module

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises CannotBeCopied: the engine's memory, shards and group of ranks are this process's."""
        raise CannotBeCopied("an engine cannot be pickled or copied; expected engine.save_checkpoint(folder) for all that training needs, "
                             "engine.save_model(path) or engine.state_dict() for the model, copy.deepcopy(engine.module) for a plain model")

    def __getattr__(self, name: str) -> Any:
        """What the engine has not, its module has: `engine.parameters()`, `engine.generate(...)`, `engine.training`."""
        if name in ("module", "_engine") or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            if error.name != name or error.obj is not self.module or hasattr(type(self.module), name):  # of a property of the module
                raise
            text = f"'{type(self).__name__}' object has no attribute '{name}', and neither has its module, a {type(self.module).__name__}"
            raise AttributeError(text, name=name, obj=self) from None

    def _check_same_parameters(self):
        ids = module_state.parameter_ids(self.module)
        if ids != self._parameter_ids:
            self._engine.check_same_parameters([(name, p) for name, p in module_state.named_parameters(self.module)])
            self._parameter_ids = ids

    def _raise_cause_of(self, error):
        """An operator that could not read its parameters raises torch's RuntimeError; the engine has kept the error that it is. One of other
        dtypes than the model's gets a note."""
        if isinstance(error, RuntimeError) and not self._casts and ("dtype" in str(error) or "should be the same" in str(error)):
            section = next((name for name in ("bf16", "fp16") if self.config[name]["enabled"]), None)
            if section is not None and hasattr(error, "add_note"):
                error.add_note(f'the model computes in {section}, and arguments of the engine keep their dtypes: give them as x.to(...), or set '
                               f'"{section}": {{"auto_cast": true}} in the configuration')
        try:
            self._engine.check_usable()
        except Error as cause:
            raise cause from error
        if self._engine.recomputes and "saved tensor hooks" in str(error):  # torch.func's own words
            raise Error("activation_checkpointing: torch.func.grad, vjp, jacrev and hessian refuse the saved-tensor hooks that it sets while "
                        'the model runs; use torch.autograd.grad(..., create_graph=True) in the model, or train with '
                        '"activation_checkpointing": {"policy": "none"}') from error
