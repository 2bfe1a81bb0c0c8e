"""`deepspeed.utils.timer`: named timers that wait for the device."""
import time

from tessera import comm
from tessera.deepspeed.accelerator import get_accelerator


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`, `.stop()`, `timers.log(["forward"])`."""

    class Timer:
        """One of them. `stop` adds to what `elapsed` returns, in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self.reset()

        def start(self) -> None:
            """Raises AssertionError where it runs."""
            assert not self.started_, f"{self.name_} timer has already been started"
            get_accelerator().synchronize()
            self._begin, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Raises AssertionError where it does not run. `reset`: what was before is forgotten; `record` has no effect."""
            assert self.started_, "timer is not started"
            get_accelerator().synchronize()
            passed = 1e3 * (time.perf_counter() - self._begin)
            self._elapsed = passed if reset else self._elapsed + passed
            self._count += 1
            self.started_ = False

        def reset(self) -> None:
            """Forget what was measured."""
            self._elapsed, self._count = 0.0, 0

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds; a timer that runs goes on from now."""
            runs = self.started_
            if runs:
                self.stop()
            passed = self._elapsed
            if reset:
                self.reset()
            if runs:
                self.start()
            return passed

        def mean(self) -> float:
            """Milliseconds of one start and stop."""
            return self._elapsed / self._count if self._count else 0.0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> "SynchronizedWallClockTimer.Timer":
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, "SynchronizedWallClockTimer.Timer"]:
        """All, by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether there is one of this name."""
        return name in self.timers

    def log(self, names: list[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
            ranks: list[int] | None = None) -> None:
        """Print milliseconds divided by `normalizer`, on rank 0 or these ranks. `memory_breakdown` adds the device's memory."""
        if comm.get_rank() not in (ranks or [0]):
            return
        shown = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        if memory_breakdown:
            shown.append(f"memory: {get_accelerator().memory_allocated() / 2**30:.2f} GB")
        print("time (ms) | " + " | ".join(shown), flush=True)
