"""`deepspeed.accelerator`: the device type of this process, with torch's functions for it."""
import contextlib
import functools
import os
import resource
from typing import Any

import torch

from tessera.deepspeed.ops import op_builder
from tessera.errors import Error


class _Accelerator:
    """What a CPU and a CUDA device have in common."""

    _name = "cpu"
    _communication_backend_name = "gloo"
    FloatTensor, DoubleTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor
    ByteTensor, IntTensor, LongTensor = torch.ByteTensor, torch.IntTensor, torch.LongTensor

    def is_available(self):
        """Whether the device can be used."""
        return True

    def communication_backend_name(self):
        """torch.distributed's."""
        return self._communication_backend_name

    def supported_dtypes(self):
        """The floating types that models train in."""
        supported = {torch.float32: True, torch.bfloat16: self.is_bf16_supported(), torch.float16: self.is_fp16_supported()}
        return [dtype for dtype, holds in supported.items() if holds]

    def on_accelerator(self, tensor):
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name

    def is_triton_supported(self):
        """False: no kernel of the stand-in is Triton's."""
        return False

    def lazy_call(self, callback):
        """Calls it."""
        callback()

    def random(self):
        """The module torch.random."""
        return torch.random

    def initial_seed(self):
        """Of torch's generator."""
        return torch.initial_seed()

    def visible_devices_envs(self):
        """Variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self):
        """Prefixes of variables for ranks on other hosts."""
        return []

    def get_compile_backend(self):
        """Of `engine.compile()`."""
        return "inductor"

    def is_pinned(self, tensor):
        """Whether a tensor's memory is pinned."""
        return tensor.is_pinned()

    def get_op_builder(self, class_name):
        """A class of `deepspeed.ops.op_builder`; None for a name that it has not."""
        return getattr(op_builder, class_name, None)

    def create_op_builder(self, class_name):
        """One of it."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def op_builder_dir(self):
        """The module that has the builders."""
        return "deepspeed.ops.op_builder"


class _Cpu(_Accelerator):
    """Ranks on CPU cores."""

    Stream = None

    class Event:
        """Refused: a CPU has no events."""

        def __init__(self, **options):
            raise Error(f"get_accelerator().Event({', '.join(options)}): a CPU has no events; expected is_synchronized_device() to be asked before")

    def __init__(self):
        self._peak = 0

    def device_name(self, device_index=None):
        return "cpu"

    current_device_name = device_name

    def device(self, device_index=None):
        """A context that changes nothing."""
        return contextlib.nullcontext()

    def current_device(self):
        """"cpu": what torch takes as a device, where CUDA ranks have a number."""
        return "cpu"

    def set_device(self, device_index):
        """Does nothing: there is one device."""

    def device_count(self):
        """The ranks of this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")

    def is_synchronized_device(self):
        """True: an operator has ended when its call returns."""
        return True

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index=None):
        """Does nothing."""

    empty_cache = range_pop = synchronize

    def range_push(self, msg=None, domain=None, category=None):
        """Does nothing."""

    def stream(self, stream):
        """A context that changes nothing."""
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        """None: a CPU has no streams."""

    default_stream = current_stream

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
        """{"allocated_bytes.all.current", "allocated_bytes.all.peak"}"""
        return {"allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak": self.max_memory_allocated()}

    def total_memory(self, device_index=None):
        """Bytes of this host."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index=None):
        """Bytes of this host that no process has."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def manual_seed(self, seed):
        """Of torch's generator."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def default_generator(self, device_index=None):
        return torch.default_generator

    def is_bf16_supported(self):
        return True

    is_fp16_supported = is_bf16_supported

    def pin_memory(self, tensor, align_bytes=1):
        """The tensor itself: without a device nothing is pinned."""
        return tensor


class _Cuda(_Accelerator):
    """Ranks on CUDA devices; what is not here is torch.cuda's function of that name."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def device_name(self, device_index=None):
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self):
        return f"cuda:{torch.cuda.current_device()}"

    def device(self, device_index=None):
        return torch.cuda.device(device_index)

    def is_synchronized_device(self):
        """False: an operator may run on when its call has returned."""
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def total_memory(self, device_index=None):
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index=None):
        return torch.cuda.mem_get_info(device_index)[0]

    def get_rng_state(self, device_index=None):
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

    def set_rng_state(self, new_state, device_index=None):
        torch.cuda.set_rng_state(new_state) if device_index is None else torch.cuda.set_rng_state(new_state, device_index)

    def default_generator(self, device_index):
        return torch.cuda.default_generators[device_index]

    def is_fp16_supported(self):
        return True

    def range_push(self, msg, domain=None, category=None):
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain=None):
        return torch.cuda.nvtx.range_pop()

    def pin_memory(self, tensor, align_bytes=1):
        return tensor.pin_memory()

    def create_graph(self):
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph, pool=None, stream=None):
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph):
        graph.replay()

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
