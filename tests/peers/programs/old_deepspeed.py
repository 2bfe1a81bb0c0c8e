"""What old releases of DeepSpeed ask of torch and Python, which newer ones do not have any more."""
import importlib.machinery
import importlib.util
import sys
import types


def prepare():
    if "torch._six" not in sys.modules:  # gone since torch 2.0
        sys.modules["torch._six"] = types.SimpleNamespace(inf=float("inf"), string_classes=(str, bytes), int_classes=int)
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:  # before 0.14 the CPU's accelerator asks for it
        sys.modules["intel_extension_for_pytorch"] = types.ModuleType("intel_extension_for_pytorch")
        sys.modules["intel_extension_for_pytorch"].__spec__ = importlib.machinery.ModuleSpec("intel_extension_for_pytorch", None)
