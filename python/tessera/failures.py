"""Says why this rank ends, before anything of it is destroyed: to the launcher, and to the ranks that wait for it."""
import atexit
import builtins
import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch

from tessera import _engine

_LIBRARIES = tuple(f"{Path(path).resolve().parent}/" for path in (__file__, torch.__file__, os.__file__))
_MAX_TEXT = 400  # characters
_TIME_TO_BE_SECOND_S = 3.0

# is_rank: not a process that the rank has forked or spawned. reason: what ends the rank. of_peer: another rank's end is why. is_told: the
# other ranks know. aside: what a thread or an atexit function has raised, which ends nothing. before: the hooks that were there.
_state = SimpleNamespace(is_rank=multiprocessing.parent_process() is None, reason=None, of_peer=False, is_told=False, aside=None,
                         before=SimpleNamespace())


def install() -> None:
    """Watch how this process ends. Called once, by `import tessera`."""
    _state.before = SimpleNamespace(exception=sys.excepthook, thread=threading.excepthook, unraisable=sys.unraisablehook, exit=sys.exit)
    sys.excepthook, threading.excepthook, sys.unraisablehook, sys.exit = _on_exception, _on_thread, _on_unraisable, _on_exit
    os.register_at_fork(after_in_child=lambda: setattr(_state, "is_rank", False))
    atexit.register(at_exit)


def this_process_is_the_rank() -> None:
    """It joins the group, also where it is a fork."""
    _state.is_rank, _state.reason, _state.of_peer, _state.is_told = True, None, False, False


def describe(error: BaseException) -> str:
    """"KeyError: 'x' at train.py:6", in one line: the last line of the traceback that is neither Python's, torch's nor Tessera's."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # its own __str__
        lines = [""]
    if len(lines) > 1 and lines[0].startswith("Caught "):  # a DataLoader's worker: its traceback follows
        lines[0] = f"{lines[0].rstrip('.')}: {lines[-1]}"
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(_LIBRARIES) and not frame.filename.startswith("<frozen ")]
    return _placed(text, (own or frames)[-1:])


def _placed(text, frames):
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    placed = "".join([text, *(f" at {os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)])
    return placed.encode("utf-8", "backslashreplace").decode()  # a file's name that is no UTF-8 is half a surrogate pair


def tell_launcher(reason: str) -> None:
    """It names the rank that reported first, and shows its reason. The first one counts."""
    if _state.is_rank:
        _state.reason = _state.reason or reason
        _engine.report_error(reason, note_of_peer())


def note_of_peer(error: BaseException | None = None) -> bool:
    """Keeps, and returns, whether this rank fails because another one has ended or left. An error that libtorch passes on has lost its type; the group knows."""
    from tessera import comm

    _state.of_peer = (_state.of_peer or getattr(error, "of_peer", False) or (comm.is_initialized() and _engine.has_failed_by_peer(comm.group())))
    return _state.of_peer


def tell_ranks(reason: str) -> None:
    """Leave the group. Ranks that wait for this one raise CommError with the reason at once."""
    from tessera import comm

    if _state.is_rank and not _state.is_told and comm.is_initialized():
        _state.is_told = True
        note_of_peer()  # the group may be gone when the launcher is told
        _engine.leave(comm.group(), reason)


def at_exit() -> None:
    """The end of a program, before its group is left. Where another excepthook has taken the place of ours, Python keeps the exception."""
    error = getattr(sys, "last_value", None)
    if error is not None and not _state.reason and not isinstance(error, KeyboardInterrupt) and not _is_interactive():
        note_of_peer(error)
        tell_launcher(describe(error))
    if _state.reason:
        tell_ranks(f"it raised {_state.reason}")
    elif _state.aside and _state.is_rank:  # the exit code is 0, and the launcher shows it if others fail because this rank is gone
        _engine.report_error(_state.aside, note_of_peer())
    if _state.is_rank and _is_under_torchrun():
        _engine.report_exit_code()


def _is_interactive():
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _is_under_torchrun():
    return bool(os.environ.get("TORCHELASTIC_ERROR_FILE")) and not os.environ.get("TESSERA_ERROR_FILE")  # empty: unset


def _on_exception(kind, error, trace):
    if _is_interactive() or not _state.is_rank:
        _state.before.exception(kind, error, trace)
        return
    reason, of_peer = describe(error.with_traceback(trace)), note_of_peer(error)
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted:
        tell_launcher(reason)
    _state.before.exception(kind, error, trace)
    tell_ranks("it was interrupted" if interrupted else f"it raised {reason}")
    # torchrun names the first process that it finds ended, and then ends the others.
    if of_peer and _is_under_torchrun():
        sys.stderr.flush()
        time.sleep(_TIME_TO_BE_SECOND_S)


def _on_thread(args):
    if args.exc_value is not None and not isinstance(args.exc_value, builtins.SystemExit):
        _state.aside = _state.aside or f"{describe(args.exc_value)} in {ascii(args.thread.name)[1:-1] if args.thread else 'a thread'}"
    _state.before.thread(args)


def _on_unraisable(args):
    _state.before.unraisable(args)
    if args.exc_value is not None and "atexit" in (args.err_msg or ""):
        _state.aside = _state.aside or f"{describe(args.exc_value)} at exit"


class _Exit(builtins.SystemExit):
    """What sys.exit raises: it knows whether it ends the program. Python has no hook for that."""

    reason = None

    def __reduce__(self):
        return builtins.SystemExit, self.args

    def __del__(self, sys=sys):
        if self.reason and not sys.is_finalizing() and sys._getframe().f_back is None:  # nobody has caught it, but the interpreter
            tell_launcher(self.reason)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def _on_exit(status=None, /):
    if not _state.is_rank or status is None or (isinstance(status, int) and status == 0) or threading.current_thread() is not threading.main_thread():
        return _state.before.exit(status)
    raised, leaving = sys.exc_info()[1], _Exit(status)
    if raised is not None and not isinstance(raised, builtins.SystemExit):
        note_of_peer(raised)
        leaving.reason = describe(raised)
    else:
        text, frame = (str(status).strip() or repr(status)).splitlines()[0], sys._getframe(1)
        leaving.reason = _placed(f"SystemExit: {text}", [SimpleNamespace(filename=frame.f_code.co_filename, lineno=frame.f_lineno)])
    try:
        raise leaving
    finally:
        del raised, leaving  # in this frame they would keep themselves alive, and it is when they go that the program is known to end
