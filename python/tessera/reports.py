"""What a training loop in Python reports as it goes: progress lines, times, memory, and the values of the monitors.

The keys of the configuration are steps_per_print, wall_clock_breakdown, memory_breakdown, tensorboard, csv_monitor, jsonl_monitor and
mlflow. The lines and the names of the values are DeepSpeed's. `Engine`'s forward, backward and step are decorated here.
"""
import functools
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tessera import _engine
from tessera.launch import name_python

_TIMERS = {"forward": "fwd", "backward": "bwd", "step": "step"}  # by phase, DeepSpeed's names
_MONITORS = ("tensorboard", "csv_monitor", "jsonl_monitor", "mlflow")
_meters = []  # one of the process, since allocators report to one; made for the first engine with memory_breakdown
_places = weakref.WeakKeyDictionary()  # where the monitors of each Reports and MonitorMaster write


def meter_of_process() -> "_engine.MemoryMeter | None":
    """The one that `memory_breakdown` has made."""
    return _meters[0] if _meters else None


def meter_memory(parsed: _engine.Config, device: torch.device) -> None:
    """Begin to count this process's memory, before an engine is made, if the configuration has `memory_breakdown`."""
    if json.loads(parsed.resolved)["memory_breakdown"] and not _meters:
        _meters.append(_engine.MemoryMeter(device))


def reports_of(engine: Any, parsed: _engine.Config) -> "Reports | None":
    """What the configuration asks for; None: nothing. Its monitors are closed when the engine, or the process, ends."""
    reports = Reports(engine, parsed)
    if not reports.enabled:
        return None
    weakref.finalize(engine, reports.close)
    return reports


def has_monitors(config: dict[str, Any]) -> bool:
    """Whether a configuration with all defaults has a monitor that is enabled."""
    return any(config[name]["enabled"] for name in _MONITORS)


def take_place(owner: Any, parsed: _engine.Config) -> int:
    """The number that `_engine.Monitors` gets for a configuration. It is the owner's until `free_place`, or the owner's end. Where monitors of
    this process write to the same folder, those of the next owner write to another, job_name_2, since two cannot write one file."""
    config = json.loads(parsed.resolved)
    taken = set().union(*_places.values())
    number = next(number for number in itertools.count(1) if not taken & _places_of(config, number))
    _places[owner] = _places_of(config, number)
    return number


def free_place(owner: Any) -> None:
    """Let monitors of others replace the owner's records."""
    _places.pop(owner, None)


def open_monitors(parsed: _engine.Config, number: int, resumed_after: int | None = None) -> "_engine.Monitors":
    """The monitors of a configuration. `resumed_after`: the records of later steps are removed; None: earlier files are replaced."""
    name_python()
    return _engine.Monitors(parsed, number, resumed_after)


def _places_of(config, number):
    """Where the monitors of a configuration write if `_engine.Monitors` gets this number, which has the same defaults."""
    suffix = f"_{number}" if number > 1 else ""

    def place(section):
        if "output_path" not in section:  # mlflow's names a run
            return suffix
        return os.path.realpath(os.path.join(section["output_path"] or ".", (section["job_name"] or "DeepSpeedJobName") + suffix))

    return {(name, place(config[name])) for name in _MONITORS if config[name]["enabled"]}


class Reports:
    """What one engine reports. Rank 0 writes; other ranks count only."""

    def __init__(self, engine: Any, parsed: _engine.Config) -> None:
        config = engine.config
        self._engine = weakref.ref(engine)
        self._parsed = parsed
        self._is_first = engine.global_rank == 0
        self._steps_per_print = config["steps_per_print"]
        self._times = {} if config["wall_clock_breakdown"] else None
        self._meter = _meters[0] if config["memory_breakdown"] and _meters else None
        self._scales_loss = config["fp16"]["enabled"] or (config["torch_autocast"]["enabled"] and config["torch_autocast"]["dtype"] == "fp16")
        self._monitored = self._is_first and has_monitors(config)
        self._number = take_place(self, parsed) if self._monitored else 0
        self._monitors = None
        self._losses = []
        self._resumed_after = None

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._steps_per_print or self._times is not None or self._meter or self._monitored)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """`call()`; the time that it takes is counted under `name`."""
        if self._times is None:
            return self._watched(call)
        self._synchronize()
        start = time.perf_counter()
        result = self._watched(call)
        self._synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        for timer in (name + "_microstep", name):
            self._times[timer] = self._times.get(timer, 0) + elapsed
        return result

    def add_loss(self, loss: torch.Tensor, is_first: bool) -> None:
        """The loss of a micro-step, as it counts for the mean of the step. `is_first`: those before it were of gradients that are gone."""
        if self._monitored:
            if is_first:
                self._losses.clear()
            self._losses.append(loss.detach().reshape(()).float())

    def forget_losses(self) -> None:
        """The gradients of the losses since the last step are gone."""
        self._losses.clear()

    def stepped(self, at_boundary: bool) -> None:
        """`step()` has ended; at a boundary an optimizer step was taken or skipped."""
        if self._times is not None and self._is_first:
            self._log_times("_microstep")
        if at_boundary:
            engine = self._engine()
            due = self._steps_per_print and engine.global_steps % self._steps_per_print == 0
            if due and self._is_first:
                _engine.log_info(f"[Rank 0] step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={momentum_of(engine)}")
            if self._meter and (due or not self._steps_per_print):
                if self._monitored:
                    self.write(engine.global_samples, [(f"Train/Samples/memory_peak_bytes/{use}", size) for use, size in self._meter.peak()])
                peak = self._meter.take_peak()
                if self._is_first:
                    _engine.log_info(f"[Rank 0] memory at the peak (MB) | {peak}")
            if self._monitored:
                self._write(engine)
            if self._times is not None and self._is_first:
                self._log_times("")
        self._forget(at_boundary)

    def resumed(self, samples: int) -> None:
        """A checkpoint was loaded: what the monitors have of later steps is removed."""
        self._end()
        self._resumed_after = samples
        self._losses.clear()

    def close(self) -> None:
        """End the monitors' records, which monitors of others may replace from now on."""
        self._end()
        free_place(self)

    def _end(self):
        if self._monitors is not None:
            self._monitors.close(getattr(sys, "last_value", None) is not None)
            self._monitors = None

    def _watched(self, call):
        if self._meter is None:
            return call()
        try:
            return call()
        except RuntimeError:
            at_failure = self._meter.at_failure()
            if at_failure:
                _engine.log_warning(f"out of memory; what it was used for (MB) | {at_failure}")
            raise

    def _synchronize(self):
        if self._engine().device.type == "cuda":
            torch.cuda.synchronize(self._engine().device)

    def _log_times(self, ending):
        shown = [(name + ending, self._times.get(name + ending)) for name in _TIMERS.values()]
        _engine.log_info("[Rank 0] time (ms)" + "".join(f" | {name}: {value:.2f}" for name, value in shown if value is not None))

    def _forget(self, at_boundary):
        if self._times is not None:
            self._times = {} if at_boundary else {name: value for name, value in self._times.items() if not name.endswith("_microstep")}

    def write(self, samples: int, scalars: list[tuple[str, float]]) -> None:
        """Write values into the records of the monitors; without monitors, and on other ranks than 0, nothing."""
        if self._monitored:
            if self._monitors is None:
                self._monitors = open_monitors(self._parsed, self._number, self._resumed_after)
            self._monitors.scalars(samples, scalars)

    def _write(self, engine):
        scalars = [("Train/Samples/lr", engine.get_lr()[0])]
        if self._losses:
            scalars.insert(0, ("Train/Samples/train_loss", torch.stack(self._losses).sum().item()))
        if self._scales_loss:
            scalars.append(("Train/Samples/loss_scale", engine.loss_scale))
        if self._times is not None:
            scalars += [(f"Train/Samples/elapsed_time_ms_{phase}", self._times[timer]) for phase, timer in _TIMERS.items() if timer in self._times]
        self._losses.clear()
        self.write(engine.global_samples, scalars)


def momentum_of(engine: Any) -> list[Any]:
    """DeepSpeed's get_mom(): SGD's momentum, or the betas, by param group."""
    return [group.get("momentum", group.get("betas", 0.0)) for group in engine.optimizer.param_groups]


def timed(phase: str) -> Callable[..., Any]:
    """Decorates Engine's "forward", "backward", which returns the loss as it counts for the step, and "step"."""
    def decorate(method):
        @functools.wraps(method)
        def call(engine, *args, **kwargs):
            if engine.memory_record is not None:
                engine.memory_record.append((phase, time.perf_counter()))
            reports = engine._reports
            if reports is None or (phase == "forward" and not engine.module.training):
                return method(engine, *args, **kwargs)
            before, is_first = engine.global_steps, not engine._engine.has_gradients
            result = reports.time(_TIMERS[phase], lambda: method(engine, *args, **kwargs))
            if phase == "backward":
                reports.add_loss(result, is_first)
            elif phase == "step":
                reports.stepped(engine.global_steps > before)
            return result
        return call
    return decorate
