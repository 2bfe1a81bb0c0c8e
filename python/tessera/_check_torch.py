"""Whether the torch that is imported is the one that the package was built for: its C++ interface is that of a minor version.

Importing this raises ImportError where it is not, before a library is loaded that this torch lacks symbols for, and where the process lacks what
torch needs. Then it has torch tell of every operator that runs, as the engine needs it to.
"""
import os
import sys

from tessera._built_for import SUPPORTED, TORCH


def _check_process():
    """As tools/main.cc does it for the command."""
    for stream in range(3):  # a file that got the number of a closed stream would have in it what is printed
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free: this one
    try:
        os.getcwd()
    except FileNotFoundError:
        if "torch" not in sys.modules:  # MKL ends the process otherwise
            raise ImportError("the working folder has been removed; expected one that exists: cd elsewhere, and start again") from None
    if not os.access("/proc/self/status", os.R_OK):
        raise ImportError("/proc is not mounted, or cannot be read; expected the kernel's (mount -t proc proc /proc)")


_check_process()

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    minor = TORCH.rpartition(".")[0]
    raise ImportError(f"tessera needs torch {minor}, which is not installed here: pip install 'torch=={minor}.*'", name="torch") from None


def _minor(version):
    return ".".join(version.split("+")[0].split(".")[:2])


def _advice(found):
    this_one = f"pip install 'torch=={_minor(TORCH)}.*'"
    if found not in SUPPORTED:
        return f"{this_one}; tessera can be built for torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
    return f"{this_one}, or the wheel tessera-*+torch{found}-*.whl, which `make wheel TESSERA_TORCH={found}` makes (docs/install.md)"


if _minor(torch.__version__) != _minor(TORCH):
    raise ImportError(f"this tessera was built for torch {_minor(TORCH)}, and found torch {torch.__version__} ({torch.__file__}): "
                      + _advice(_minor(torch.__version__)))


def _tell_of_operators_in_python():
    """From torch 2.14 on, Python calls operators of torch.library.custom_op past the dispatcher and at::RecordFunction
    ("PyObject Dispatcher" in torch/_ops.py). What such an operator writes would be unknown then, so the way of the versions before is taken."""
    overload = torch._ops.OpOverload
    if not hasattr(overload, "_enable_pyobj_dispatch"):
        return
    overload._can_enable_pyobj_dispatch = lambda self: False
    for definition in list(torch._library.custom_ops.OPDEFS.values()):
        definition._opoverload._enable_pyobj_dispatch(False)


_tell_of_operators_in_python()
