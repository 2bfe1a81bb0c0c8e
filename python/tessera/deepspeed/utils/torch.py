"""`deepspeed.utils.torch`: the version of torch."""
import torch


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version is between these, which belong to it."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version(): expected min_version or max_version")
    found = _numbers(torch.__version__)
    least, most = (None if version is None else _numbers(str(version)) for version in (min_version, max_version))
    return (least is None or found >= least) and (most is None or found <= most)


def _numbers(version):
    parts = (version.split("+")[0].split(".") + ["0", "0"])[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
