"""The learning-rate schedule of a configuration, with the interface of torch.optim.lr_scheduler."""
import weakref
from collections.abc import Mapping
from typing import Any


class LRScheduler:
    """The schedule of the configuration's section `scheduler`. `engine.step()` advances it at every step that updates."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def get_last_lr(self) -> list[float]:
        """The rates of the next step, by param group."""
        return self._engine().get_lr()

    get_lr = get_last_lr

    @property
    def last_epoch(self) -> int:
        """The number of steps that have updated."""
        return self._engine().global_steps - self._engine().skipped_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `engine.step()` has advanced the schedule."""

    def state_dict(self) -> dict[str, Any]:
        """For display: a checkpoint of the engine brings the schedule's place."""
        return {"last_epoch": self.last_epoch, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing, for the same reason."""
