"""Whether the torch that is imported is the one that the package was built for: its C++ interface is that of a minor version.

Importing this raises ImportError where it is not, before a library is loaded that this torch lacks symbols for.
"""
import torch

from tessera._built_for import TORCH


def _minor(version):
    return ".".join(version.split("+")[0].split(".")[:2])


if _minor(torch.__version__) != _minor(TORCH):
    raise ImportError(f"this tessera was built for torch {_minor(TORCH)}, and found torch {torch.__version__} ({torch.__file__}): "
                      f"pip install 'torch=={_minor(TORCH)}.*', or the wheel tessera-*+torch{_minor(torch.__version__)}-*.whl, which "
                      f"`make wheel TESSERA_TORCH={_minor(torch.__version__)}` makes (docs/install.md)")
