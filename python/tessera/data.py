"""DataLoader: a dataset in the training order of `tessera train`, which resumes at the same sample."""
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tessera import _engine, arguments, comm
from tessera.errors import ConfigError

_OWN = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")  # options that are decided here


class DataLoader:
    """This rank's micro-batches of one epoch after another, in an order that depends on `seed` and epoch alone.

    A step takes the next samples of an epoch's order, whatever the number of ranks, and cuts them by micro-step and rank. Each
    iteration goes to the end of the epoch; the samples after its last whole step are left out. `state_dict` says where the
    training stands, `load_state_dict` makes the next iteration begin there, with another number of ranks too.

    Parameters
    ----------
    dataset : map-style Dataset
        `len(dataset)` and `dataset[i]`.
    micro_batch_size : int
        Samples of one batch of this rank.
    accumulation_steps : int
        Batches of one optimizer step.
    seed : int
    **options
        Of torch.utils.data.DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor ... Not those of the order.

    Raises
    ------
    ConfigError
        There are fewer samples than one step has, or the dataset has no length.
    TypeError
        torch's loader has no such option, or this one decides it.
    """

    def __init__(self, dataset: torch.utils.data.Dataset, micro_batch_size: int, accumulation_steps: int = 1, seed: int = 42,
                 **options: Any) -> None:
        known = inspect.signature(torch.utils.data.DataLoader).parameters
        for name in options:
            if name in _OWN:
                raise TypeError(f"DataLoader({name}=): the order and the size of batches come from micro_batch_size, accumulation_steps and seed")
            if name == "in_order" and not options[name]:
                raise TypeError("DataLoader(in_order=False): batches would come in the order in which workers finish them, others in a step than on "
                                "another number of ranks or after a resume; expected True, or no in_order")
            if name not in known:
                raise TypeError(f"DataLoader({name}=): torch.utils.data.DataLoader has no such option; expected one of "
                                f"{', '.join(name for name in known if name not in _OWN)}")
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"the training data is a {type(dataset).__name__} without len(), such as an IterableDataset; expected a dataset with "
                              "len() and [i]. Make a torch.utils.data.DataLoader over it, which gives each rank samples of its own, and iterate that")
        self.dataset = dataset
        self._accumulation_steps = arguments.integer(accumulation_steps, "DataLoader(): accumulation_steps", 1, 2**31 - 1)
        self._seed = arguments.integer(seed, "DataLoader(): seed", 0)
        self._options = options
        self._micro_batch_size = arguments.integer(micro_batch_size, "DataLoader(): micro_batch_size", 1, 2**31 - 1)
        self._step_size = self._micro_batch_size * self._accumulation_steps * comm.get_world_size()
        if len(dataset) < self._step_size:
            raise ConfigError(f"the training data has {len(dataset)} samples, and a step takes {self._step_size} over all ranks; expected as many at least, "
                              "or a smaller batch size or gradient_accumulation_steps")
        self._sampler = self._make_sampler()
        self.epoch = 0
        self._samples_into_epoch = 0

    def _make_sampler(self):
        return _engine.TrainSampler(len(self.dataset), self._micro_batch_size, self._accumulation_steps, comm.get_world_size(),
                                    comm.get_rank(), self._seed)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        return self._sampler.steps_per_epoch

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.steps_per_epoch * self._accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch from its beginning, unless it was resumed in the middle of it."""
        epoch = arguments.integer(epoch, "set_epoch(): epoch", 0)
        if epoch != self.epoch:
            self.epoch, self._samples_into_epoch = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch: batches as `collate_fn` makes them, tensors of shape (micro_batch_size, ...)."""
        epoch, begin = self.epoch, self._samples_into_epoch
        self._sampler.set_epoch(epoch)
        end = self.steps_per_epoch * self._step_size
        plan = [self._sampler.slice(first, micro_step)
                for first in range(begin, end - self._step_size + 1, self._step_size)
                for micro_step in range(self._accumulation_steps)]
        # A generator of its own: workers' seeds do not take from the one that dropout uses.
        generator = torch.Generator().manual_seed(hash((self._seed, epoch, begin)) & (2**63 - 1))
        batches = torch.utils.data.DataLoader(self.dataset, batch_sampler=plan, generator=generator, **self._options)
        with torch.device("cpu"):  # draws from the generator, whatever the user's default is
            iterator = iter(batches)
        for number, batch in enumerate(iterator, 1):
            # Where this iteration is, also after a checkpoint was loaded inside of its loop, which goes on.
            if number == len(plan):
                self.epoch, self._samples_into_epoch = epoch + 1, 0
            elif number % self._accumulation_steps == 0:
                self.epoch, self._samples_into_epoch = epoch, begin + number // self._accumulation_steps * self._step_size
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the next step's samples are: {"epoch", "samples_into_epoch", "seed"}."""
        return {"epoch": self.epoch, "samples_into_epoch": self._samples_into_epoch, "seed": self._seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """The next iteration begins where `state_dict()` was called, in the order of its seed.

        It is the next epoch, if fewer samples than one step has are left of that one.
        """
        arguments.check_state(state_dict, ("epoch", "samples_into_epoch"), "a tessera.DataLoader")
        seed, epoch, samples = (arguments.integer(value, f"load_state_dict(): {name}", 0) for name, value in (
            ("seed", state_dict.get("seed", self._seed)), ("epoch", state_dict["epoch"]), ("samples_into_epoch", state_dict["samples_into_epoch"])))
        if seed != self._seed:
            self._seed = seed
            self._sampler = self._make_sampler()
        if samples + self._step_size > self.steps_per_epoch * self._step_size:
            epoch, samples = epoch + 1, 0
        self.epoch, self._samples_into_epoch = epoch, samples
