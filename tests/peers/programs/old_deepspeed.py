"""What old releases of DeepSpeed ask of torch and Python, which newer ones do not have any more."""
import importlib.machinery
import importlib.util
import sys
import types

CPU_PACKAGES = ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch")  # before 0.14 its CPU accelerator asks for them


def prepare():
    import torch.distributed.elastic.agent.server.api as agent
    for name in ("log", "_get_socket_with_port"):  # of its elastic agent, which is not used here
        if not hasattr(agent, name):
            setattr(agent, name, None)
    import numpy
    if not hasattr(numpy, "BUFSIZE"):  # gone since numpy 2
        numpy.BUFSIZE = 8192
    if "torch._six" not in sys.modules:  # gone since torch 2.0
        sys.modules["torch._six"] = types.SimpleNamespace(inf=float("inf"), string_classes=(str, bytes), int_classes=int)
    for name in CPU_PACKAGES:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)


class Nothing:
    """A stream or event of a device without any."""

    def __init__(self, **_):
        pass

    def __getattr__(self, name):
        return lambda *_: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def complete():
    """The same, of what DeepSpeed itself has once it is imported: its CPU accelerator before 0.14 was for a few models only."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import engine
    accelerator = get_accelerator()
    accelerator._communication_backend_name = "gloo"  # oneCCL, of old releases
    if tuple(map(int, deepspeed.__version__.strip().split("+")[0].split(".")[:2])) >= (0, 14):
        return
    import torch
    from deepspeed.comm.torch import TorchBackend

    def by_type(tensors):
        return [(kind, [one for one in tensors if one.type() == kind]) for kind in dict.fromkeys(one.type() for one in tensors)]

    def detached(value):
        return value.detach() if torch.is_tensor(value) else value

    def all_gather(self, *values, **named):
        return gathers(self, *map(detached, values), **{key: detached(value) for key, value in named.items()})
    engine.split_half_float_double_sparse = by_type
    gathers = TorchBackend.all_gather_into_tensor if hasattr(TorchBackend, "all_gather_into_tensor") else TorchBackend.all_gather_base
    setattr(TorchBackend, gathers.__name__, all_gather)
    type(accelerator).device_count = lambda self: 1  # which asks the program numactl
    for kind in ("Event", "Stream"):
        if getattr(accelerator, kind) is None:
            setattr(type(accelerator), kind, property(lambda self: Nothing))
            type(accelerator).stream = lambda self, _: Nothing()
    if accelerator.default_stream() is None:
        type(accelerator).default_stream = type(accelerator).current_stream = lambda self, device_index=None: Nothing()
    torch.Tensor.record_stream = lambda self, stream: None
