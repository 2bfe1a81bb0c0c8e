"""What old releases of DeepSpeed ask of torch and Python, which newer ones do not have any more."""
import sys
import types


def prepare():
    if "torch._six" not in sys.modules:  # gone since torch 2.0
        sys.modules["torch._six"] = types.SimpleNamespace(inf=float("inf"), string_classes=(str, bytes), int_classes=int)
