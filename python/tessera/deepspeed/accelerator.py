"""`deepspeed.accelerator`: the device type of this process, with torch's functions for it."""
import contextlib
import functools
import os
import resource
from typing import Any

import torch

from tessera.deepspeed.ops import op_builder
from tessera.errors import Error


def _always(answer):
    """A method that answers so."""
    return lambda self: answer


def _of_any_device(answer):
    """The same of one that may be asked for a device."""
    return lambda self, device_index=None: answer


class _Accelerator:
    """What a CPU and a CUDA device have in common."""

    _name = "cpu"
    _communication_backend_name = "gloo"
    FloatTensor, DoubleTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor
    ByteTensor, IntTensor, LongTensor = torch.ByteTensor, torch.IntTensor, torch.LongTensor
    random = _always(torch.random)
    initial_seed = staticmethod(torch.initial_seed)
    is_triton_supported = _always(False)  # no kernel of the stand-in is Triton's
    get_compile_backend = _always("inductor")
    op_builder_dir = _always("deepspeed.ops.op_builder")
    visible_devices_envs = staticmethod(lambda: ["CUDA_VISIBLE_DEVICES"])  # variables that choose devices
    export_envs = staticmethod(lambda: [])  # prefixes of variables for ranks on other hosts
    lazy_call = staticmethod(lambda callback: callback())
    is_pinned = staticmethod(lambda tensor: tensor.is_pinned())

    def communication_backend_name(self):
        """torch.distributed's."""
        return self._communication_backend_name

    def supported_dtypes(self):
        """The floating types that models train in."""
        supported = {torch.float32: True, torch.bfloat16: self.is_bf16_supported(), torch.float16: self.is_fp16_supported()}
        return [dtype for dtype, holds in supported.items() if holds]

    def on_accelerator(self, tensor):
        return tensor.device.type == self._name

    def get_op_builder(self, class_name):
        """A class of `deepspeed.ops.op_builder`; None for a name that it has not."""
        return getattr(op_builder, class_name, None)

    def create_op_builder(self, class_name):
        """One of it."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()


class _Cpu(_Accelerator):
    """Ranks on CPU cores. `current_device` is what torch takes as a device, where CUDA ranks have a number."""

    Stream = None
    device_name = current_device_name = _of_any_device("cpu")
    current_device = _always("cpu")
    is_available = is_bf16_supported = is_fp16_supported = _always(True)
    # An operator has ended when its call returns.
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(True)
    set_device = synchronize = empty_cache = range_pop = current_stream = default_stream = _of_any_device(None)
    range_push = staticmethod(lambda msg=None, domain=None, category=None: None)
    device = _of_any_device(contextlib.nullcontext())
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda device_index=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda new_state, device_index=None: torch.set_rng_state(new_state))
    default_generator = _of_any_device(torch.default_generator)
    pin_memory = staticmethod(lambda tensor, align_bytes=1: tensor)  # without a device nothing is pinned
    total_memory = staticmethod(lambda device_index=None: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))  # of this host
    available_memory = staticmethod(lambda device_index=None: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))  # that no process has

    class Event:
        """Refused: a CPU has no events."""

        def __init__(self, **options):
            raise Error(f"get_accelerator().Event({', '.join(options)}): a CPU has no events; expected is_synchronized_device() to be asked before")

    def __init__(self):
        self._peak = 0

    def device_count(self):
        """The ranks of this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")

    def memory_allocated(self, device_index=None):
        """Bytes of memory that this process has (RSS)."""
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[1]) * resource.getpagesize()
        self._peak = max(self._peak, now)
        return now

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index=None):
        """The largest that `memory_allocated` has found since `reset_peak_memory_stats`."""
        self.memory_allocated()
        return self._peak

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index=None):
        """Of `max_memory_allocated`."""
        self._peak = 0

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index=None):
        return {"allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak": self.max_memory_allocated()}


class _Cuda(_Accelerator):
    """Ranks on CUDA devices; what is not here is torch.cuda's function of that name."""

    _name = "cuda"
    _communication_backend_name = "nccl"
    is_available = is_fp16_supported = _always(True)
    # An operator may run on when its call has returned.
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(False)
    range_push = staticmethod(lambda msg, domain=None, category=None: torch.cuda.nvtx.range_push(msg))
    range_pop = staticmethod(lambda domain=None: torch.cuda.nvtx.range_pop())
    pin_memory = staticmethod(lambda tensor, align_bytes=1: tensor.pin_memory())
    device_name = staticmethod(lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}")
    current_device_name = staticmethod(lambda: f"cuda:{torch.cuda.current_device()}")
    device = staticmethod(lambda device_index=None: torch.cuda.device(device_index))
    total_memory = staticmethod(lambda device_index=None: torch.cuda.get_device_properties(device_index).total_memory)
    available_memory = staticmethod(lambda device_index=None: torch.cuda.mem_get_info(device_index)[0])
    get_rng_state = staticmethod(lambda device_index=None: torch.cuda.get_rng_state("cuda" if device_index is None else device_index))
    set_rng_state = staticmethod(lambda new_state, device_index=None: torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index))
    default_generator = staticmethod(lambda device_index: torch.cuda.default_generators[device_index])
    create_graph = staticmethod(lambda: torch.cuda.CUDAGraph())
    capture_to_graph = staticmethod(lambda graph, pool=None, stream=None: torch.cuda.graph(graph, pool, stream))
    replay_graph = staticmethod(lambda graph: graph.replay())

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)


@functools.cache
def get_accelerator() -> Any:
    """What this process computes on: CUDA where torch finds a device, else the CPU. One object for the process."""
    return _Cuda() if torch.cuda.is_available() else _Cpu()


def set_accelerator(accel_obj: Any) -> None:
    """Raises Error for another than `get_accelerator()`: torch says what there is."""
    if accel_obj is not get_accelerator():
        raise Error("set_accelerator(): Tessera computes on what torch finds, a CUDA device or the CPU; expected get_accelerator()")


def is_current_accelerator_supported() -> bool:
    """True."""
    return True
