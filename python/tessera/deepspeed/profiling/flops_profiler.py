"""`deepspeed.profiling.flops_profiler`: FLOPs of a forward, counted by torch.utils.flop_counter.

Matrix products, convolutions and attention count, two FLOPs a multiplication and addition; DeepSpeed counts some elementwise operators
too. `flops_profiler` in the configuration counts those of a training step.
"""
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tessera.deepspeed.accelerator import get_accelerator
from tessera.errors import Error


class FlopsProfiler:
    """Counts what a module's forward computes between `start_profile` and `stop_profile`.

    Parameters
    ----------
    model : torch.nn.Module
    ds_engine : engine, optional
    recompute_fwd_factor : float
        How much of a forward is computed again in backward. Both are kept as attributes; what runs is counted.
    """

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._counter, self._duration = None, 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin to count. `ignore_list` is refused."""
        if ignore_list:
            raise Error("start_profile(ignore_list=): all modules are counted; expected None")
        from torch.utils.flop_counter import FlopCounterMode  # warns where Triton is not installed

        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        get_accelerator().synchronize()
        self._begin, self.started = time.perf_counter(), True

    def stop_profile(self) -> None:
        """Stop to count."""
        if self.started:
            get_accelerator().synchronize()
            self._duration = time.perf_counter() - self._begin
            self._counter.__exit__(None, None, None)
            self.started = False

    def end_profile(self) -> None:
        """Forget what was counted."""
        self.stop_profile()
        self._counter, self._duration = None, 0.0

    reset_profile = end_profile

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """FLOPs between start and stop."""
        return _shown(0 if self._counter is None else self._counter.get_total_flops(), as_string, "FLOPS")

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications and additions: half as many."""
        return _shown((0 if self._counter is None else self._counter.get_total_flops()) // 2, as_string, "MACs")

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of the module's parameters."""
        return _shown(sum(parameter.numel() for parameter in self.model.parameters()), as_string, "")

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds between start and stop."""
        return f"{1e3 * self._duration:.2f} ms" if as_string else self._duration

    def print_model_profile(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
                            output_file: str | Path | None = None) -> None:
        """Print the sums, and the FLOPs of modules down to `module_depth`, -1 for all: with `detailed` of each, else of the `top_modules`
        with most of them. To a file where one is named."""
        lines = [f"flops profiler, step {profile_step}: {self.get_total_params(True)} parameters, {self.get_total_flops(True)}, "
                 f"{self.get_total_macs(True)}, {self.get_total_duration(True)}"]
        found = {} if self._counter is None else self._counter.get_flop_counts()
        sums = {name: sum(counts.values()) for name, counts in found.items() if module_depth < 0 or name.count(".") <= module_depth}
        most = sorted(sums, key=sums.get, reverse=True)[:top_modules]
        lines += [f"  {name}: {_shown(number, True, 'FLOPS')}" for name, number in sums.items() if detailed or name in most]
        text = "\n".join(lines)
        if output_file is None:
            print(text, flush=True)
        else:
            Path(output_file).write_text(text + "\n")


def get_model_profile(model: torch.nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] = (),
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1,
                      top_modules: int = 1, warm_up: int = 1, as_string: bool = True, output_file: str | Path | None = None,
                      ignore_modules: Sequence[type] | None = None, mode: str = "forward") -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of `model(*args, **kwargs)`, or of an input of ones in `input_shape`; `mode` "generate": of
    `model.generate`. Numbers, or with `as_string` texts. `warm_up`: calls before the one that is counted."""
    if mode not in ("forward", "generate"):
        raise Error(f"get_model_profile(mode={mode!r}); expected 'forward' or 'generate'")
    if input_shape is not None:
        if args or kwargs:
            raise Error("get_model_profile(): input_shape is given beside args or kwargs; expected one of the two")
        first = next(model.parameters(), torch.empty((), device="cpu"))
        args = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    call = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with torch.no_grad() if mode == "generate" else nullcontext():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            call(*args, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


def _shown(number, as_string, unit):
    if not as_string:
        return number
    for name, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {name}{unit}".strip()
    return f"{number} {unit}".strip()
