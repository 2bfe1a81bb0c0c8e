"""What old releases of DeepSpeed ask of torch and Python, which newer ones do not have any more."""
import importlib.machinery
import importlib.util
import sys
import types

CPU_PACKAGES = ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch")  # before 0.14 its CPU accelerator asks for them


def prepare():
    if "torch._six" not in sys.modules:  # gone since torch 2.0
        sys.modules["torch._six"] = types.SimpleNamespace(inf=float("inf"), string_classes=(str, bytes), int_classes=int)
    for name in CPU_PACKAGES:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
