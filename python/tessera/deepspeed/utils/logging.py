"""`deepspeed.utils.logging`: the logger "DeepSpeed", which writes to stdout from WARNING on, as in DeepSpeed."""
import functools
import logging
import sys
from collections.abc import Iterable

from tessera import comm
from tessera.deepspeed import stand_in

__getattr__ = stand_in.getattr_of("deepspeed.utils.logging")
log_levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}


def _make_logger():
    found = logging.getLogger("DeepSpeed")
    if not found.handlers:
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.WARNING)
        found.propagate = False
    return found


logger = _make_logger()


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set a level by its name: debug, info, warning, error or critical. Raises ValueError for another."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"log level {log_level_str!r}; expected one of {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(level)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, [-1] for all, and on any rank before the group is joined. Without ranks nothing is logged then."""
    wanted = list(ranks or [])
    if not comm.is_initialized() or wanted[:1] == [-1] or comm.get_rank() in wanted:
        logger.log(level, f"[Rank {comm.get_rank() if comm.is_initialized() else -1}] {message}")


@functools.cache
def warning_once(message: str) -> None:
    """Log a warning, the same once in a process."""
    logger.warning(message)
