"""Where the memory of a step goes: a record of one step of one's own loop, as data and as a page."""
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera import _engine, arguments, comm, reports, zero
from tessera.engine import Engine
from tessera.errors import Error


@contextmanager
def memory_report(engine: Engine, path: str | Path | None = None) -> Iterator[None]:
    """Record the memory of what runs inside: a context manager around a step, or a micro-step, of one's own loop.

        with tessera.memory_report(engine, "memory.html"):
            engine.backward(loss_of(engine(x), y))
            engine.step()

    Parameters
    ----------
    engine : Engine
    path : str or Path, optional
        Of the page, one HTML file; rank 0 writes it, and only there the folder has to exist. With it, the call is collective. A name that
        ends in ".json" gives a trace for Perfetto instead.
        `engine.memory_timeline()` has the data, on each rank.

    Raises
    ------
    Error
        Another record is being made, of this or another engine.
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine is {arguments.shown(engine)}; expected what tessera.initialize returns")
    file = None if path is None else Path(arguments.path(path, "path"))
    if file is not None:
        comm.agreed("memory_report()", lambda: (_check_path(file, engine.global_rank), {}))
    if any(one.memory_record is not None for one in (engine, *zero.engines())):  # allocators report to one meter of the process
        raise Error("memory_report: a record of this or another engine is being made; expected one at a time")
    kept = reports.meter_of_process()
    meter = kept or _engine.MemoryMeter(engine.device)
    meter.record(engine._engine)
    start, record = time.perf_counter(), []
    engine.memory_record = record
    try:
        yield
    finally:
        engine.memory_record = None
        text = meter.take_timeline(engine._engine, [(phase, moment - start) for phase, moment in record], kept is None)
        del meter  # a traceback keeps this frame, and a meter listens as long as it lives
    engine.recorded_timeline = json.loads(text)
    if file is not None and engine.global_rank == 0:
        page = _engine.memory_trace(text) if file.suffix == ".json" else _engine.memory_page(engine._engine, text)
        file.write_text(page, encoding="utf-8")


def _check_path(file, rank):
    if rank != 0:
        return
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"path is {str(file)!r}, whose folder does not exist; expected a file in a folder that does")
    if file.is_dir():
        raise IsADirectoryError(f"path is {str(file)!r}, a folder; expected a file")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise PermissionError(f"path is {str(file)!r}, which this process may not write; expected a file that it may")
