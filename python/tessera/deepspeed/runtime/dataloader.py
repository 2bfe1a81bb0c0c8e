"""`deepspeed.runtime.dataloader`."""
from collections.abc import Iterable, Iterator
from typing import Any

from tessera.data import DataLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class RepeatingLoader:
    """Begins a loader anew where it ends. Iterating never ends.

    Parameters
    ----------
    loader : iterable
        One that can be iterated again, and is not empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
