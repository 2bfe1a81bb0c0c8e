"""Ranks on this host: for notebooks, and the command."""
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_GRACE_S = 2  # from SIGTERM to SIGKILL, as of `tessera launch`
_ERROR_FILES = ("TESSERA_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")
_LIBRARIES = ctypes.CDLL(None)  # of this process: libc, and torch's OpenMP
_prctl = _LIBRARIES.prctl  # looked up before a fork: a lock of the loader may be held in the child
_PR_SET_PDEATHSIG = 1  # the signal that a process gets when its parent ends


def command_path() -> Path:
    """The program `tessera` of this package."""
    return Path(__file__).parent / "bin" / "tessera"


def main() -> None:
    """The command `tessera`, in the place of this process: `python -m tessera`, and the console script."""
    name_python()
    os.execve(command_path(), ["tessera", *sys.argv[1:]], with_torch_found(dict(os.environ)))


def name_python() -> None:
    """Set TESSERA_PYTHON, which runs MLflow's library, to this interpreter, unless it is set. Empty is unset."""
    if not os.environ.get("TESSERA_PYTHON"):
        os.environ["TESSERA_PYTHON"] = sys.executable


def run_command(*arguments: str | os.PathLike) -> None:
    """Run the command `tessera` as this rank of the group, in a process of its own, and wait for its end. Collective.

    For workers of an engine that tells each Python process its place, as Ray Train does. torch.distributed's group may have been
    made in this process; Tessera's own not yet, because the command's processes join it.

    Parameters
    ----------
    arguments : str or Path
        What stands behind `tessera` on a command line: `"train", "config.json"`.

    Raises
    ------
    Error
        The command's exit code is not 0; what it said is above. Or this process has joined the group.
    """
    from tessera import _engine, comm
    from tessera.errors import Error

    if comm.is_initialized():
        raise Error("run_command() after this process has joined the group; call it in a process that does not use tessera.initialize")
    words = ["tessera", *map(os.fspath, arguments)]
    with comm._port_beside_torch():
        environment = environment_of_child(_engine.environment())
    with subprocess.Popen(words, executable=command_path(), env=environment, stdin=subprocess.DEVNULL,
                          preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)) as process:  # a worker that is killed takes it along
        try:
            code = process.wait()
        except BaseException:  # an engine cancels its workers by exceptions
            process.terminate()
            raise
    if code != 0:
        raise Error(f"{' '.join(words)}: {f'exit code {code}' if code > 0 else f'ended by {signal.Signals(-code).name}'}; what it said is above")


def environment_of_child(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Of a command that this process starts. It says its error itself: the file that a launcher has given is for this process's own."""
    environment = with_torch_found({**os.environ, **(changes or {})})
    return {name: value for name, value in environment.items() if name not in _ERROR_FILES}


def with_torch_found(environment: dict[str, str]) -> dict[str, str]:
    """The command looks for torch's libraries beside the package; an environment that builds upon another has them elsewhere."""
    package, beside = Path(__file__).parent, Path(torch.__file__).parents[1]
    if not command_path().is_symlink() and beside != package.parent:  # a link: of a build tree, which knows where torch is
        folders = [beside / "torch" / "lib", *sorted(beside.glob("nvidia/*/lib"))]
        given = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = ":".join([*map(str, folders), *([given] if given else [])])
    return environment


def launch(function: Callable[..., Any], args: tuple = (), nproc: int = 2) -> Any:
    """Run a function on several ranks of this host, such as a notebook's. Returns when all have ended.

    Each rank is a fork of this process, so the function may be one that was typed into a cell; nothing may have used CUDA, or
    joined a group, in this process before. The function may make torch.distributed's group too, by `init_process_group(backend)`.
    Unless OMP_NUM_THREADS is set, each rank computes on its share of torch's threads. `sys.exit()` in it is no failure.

    Parameters
    ----------
    function : callable
        Called with `args` on each rank; trains with `tessera.initialize`.
    args : tuple
    nproc : int
        Ranks.

    Returns
    -------
    object
        What rank 0's function returned, which has to be picklable.

    Raises
    ------
    Error
        A rank has failed: with the first one's traceback. The others are ended.
    ValueError
        `nproc` is below 1.
    """
    from tessera import arguments, comm
    from tessera.errors import Error

    nproc = arguments.integer(nproc, "launch(): nproc", 1, 2**15)
    if not callable(function):
        raise TypeError(f"launch(): function is a {type(function).__name__}; expected a callable")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"launch(): args is a {type(args).__name__}; expected a tuple")
    if comm.is_initialized():
        raise Error("launch() after this process has joined a group; call it in a fresh process, or restart the notebook's kernel")
    context = multiprocessing.get_context("fork")
    _end_threads_of_openmp()
    ranks, receivers = [], []
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(nproc):  # no daemons: those may have no children, such as a DataLoader's workers
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank, args=(function, args, rank, nproc, listener, sender, os.getpid()))
                ranks.append(process)
                process.start()
                sender.close()  # before the next fork: the rank's end ends the pipe
                receivers.append(receiver)
            # This process serves the store, as torchrun's agent does: for Tessera's group and for torch.distributed's. The server has a
            # thread, so it starts after the forks; ranks that connect earlier wait in the listener's queue.
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
    except BaseException:
        _end(ranks, at_once=True)
        raise
    try:
        return _await_results(ranks, receivers, Error)
    finally:
        del store


def _end_threads_of_openmp():
    """Those of GCC's library, which come again when they are needed. A fork does not have them, and would wait for them at its first computation."""
    pause = getattr(_LIBRARIES, "omp_pause_resource_all", None)
    if pause is not None:
        pause(1)  # omp_pause_soft


def _end(ranks, at_once):
    """Waits for processes. `at_once`: ends them, also those that handle SIGTERM. An interrupt while it waits kills them."""
    started = [process for process in ranks if process.pid is not None]
    try:
        for process in started if at_once else ():
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in started:
            process.join(max(0, deadline - time.monotonic()) if at_once else None)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()


def _run_rank(function, args, rank, nproc, listener, sender, parent):
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a notebook's kernel that is killed takes its ranks along
    if os.getppid() != parent:
        os._exit(1)
    # GROUP_RANK: these variables are those of the innermost launcher, where srun or mpirun has started the notebook.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(nproc), GROUP_RANK="0", GROUP_WORLD_SIZE="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]), TORCHELASTIC_USE_AGENT_STORE="True")
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() // nproc))
    for name in _ERROR_FILES:  # of a launcher that started this process
        os.environ.pop(name, None)
    listener.close()
    from tessera import comm, failures

    try:
        try:
            result = function(*args)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            result = None
        # Whole: the pickles of torch.multiprocessing name memory and files of this process, which ends.
        sender.send_bytes(_pickled(result if rank == 0 else None))
    except BaseException as error:
        # Before the others can fail because of it.
        sender.send_bytes(pickle.dumps((traceback.format_exc(), failures.note_of_peer(error), None)))
        failures.tell_ranks(f"it raised {failures.describe(error)}")
        raise SystemExit(1) from None
    finally:
        comm.destroy()


def _pickled(result):
    from tessera import arguments

    try:
        return pickle.dumps((None, False, result))
    except Exception as error:
        raise TypeError(f"launch(): rank 0's function returned {arguments.shown(result)}, which cannot be pickled ({error}); expected numbers, "
                        "texts, tensors and containers of them, or None") from error


def _await_results(ranks, receivers, error):
    waiting, outcome, failed = dict(enumerate(receivers)), None, []
    try:
        while waiting and all(by_peer for by_peer, _ in failed):
            ready = multiprocessing.connection.wait([*waiting.values(), *(ranks[rank].sentinel for rank in waiting)], timeout=1 if failed else None)
            if not ready:
                break  # no other rank has failed by itself
            for rank in [number for number, receiver in waiting.items() if receiver in ready or ranks[number].sentinel in ready]:
                receiver = waiting.pop(rank)
                try:
                    if not receiver.poll():
                        raise EOFError  # a process that the rank has left behind has the pipe, too
                    failure, of_peer, result = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    ranks[rank].join()
                    failure, of_peer, result = f"its process ended with exit code {ranks[rank].exitcode}", False, None
                if failure:
                    failed.append((of_peer, f"rank {rank} failed: {failure}"))
                outcome = result if rank == 0 else outcome
        if failed:
            raise error(min(failed, key=lambda one: one[0])[1])
    finally:
        _end(ranks, at_once=bool(waiting))
    return outcome
