"""A process that has imported what programs need, and forks them: each starts in milliseconds. ctest starts one for a run of the suite.

    warm.py FOLDER start MODULE…         starts it with these imports; returns when it is ready. Its socket and its log are in FOLDER
    warm.py FOLDER run SCRIPT ARGUMENT…  runs the script as `python SCRIPT ARGUMENT…` does, with this process's files, folder, environment
                                         and exit code
    warm.py FOLDER end
"""
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

IDLE_S = 1800  # it ends then: a run of ctest that was killed does not end it


def connect(folder):
    """None where nobody listens. A socket's path has 107 characters at most: it is named from its own folder."""
    here, server = os.getcwd(), socket.socket(socket.AF_UNIX)
    try:
        os.chdir(folder)
        server.connect("socket")
        return server
    except OSError:
        return None
    finally:
        os.chdir(here)


def start(folder, modules):
    end(folder)
    os.makedirs(folder, exist_ok=True)
    reader, writer = os.pipe()
    if os.fork() > 0:
        os.close(writer)
        if os.read(reader, 1) != b"r":
            with open(os.path.join(folder, "log")) as log:
                sys.exit("error: the warm process did not start:\n" + log.read())
        return
    os.setsid()
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from ranks import environment

    # libgomp reads its number of threads once; jemalloc, which MLflow's library brings, starts a thread as it is loaded.
    os.environ.update(environment(JE_ARROW_MALLOC_CONF="background_thread:false"))
    for module in modules:
        importlib.import_module(module)
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            sys.exit(f"error: {threads} threads after importing {module}; a process that forks must have 1")
    gc.freeze()  # a program's own gc.collect() looks at its own objects
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists("socket"):
        os.unlink("socket")
    os.umask(0o077)
    listener.bind("socket")
    listener.listen(64)
    os.write(writer, b"r")
    os.close(writer)
    serve(listener)


def serve(listener):
    running = {}  # {a process's file: (its number, the client)}
    while True:
        files = [listener, *running, *(client for _, client in running.values())]
        ready = select.select(files, [], [], None if running else IDLE_S)[0]
        if not ready:
            os._exit(0)
        for file in ready:
            if file is listener:
                client, _ = listener.accept()
                given, files = receive(client)
                if given is None:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    for other in (listener, client, *(other for _, other in running.values())):
                        other.close()
                    for number in running:
                        os.close(number)
                    become(given, files)  # does not return
                for number in files:
                    os.close(number)
                client.send(pid.to_bytes(4, "little"))
                running[os.pidfd_open(pid)] = (pid, client)
            elif file in running:
                pid, client = running.pop(file)
                os.close(file)
                try:
                    client.send(os.waitpid(pid, 0)[1].to_bytes(4, "little"))
                except BrokenPipeError:
                    pass
                client.close()
            else:  # a client that is gone takes its process along
                for pid, client in running.values():
                    if client is file and not file.recv(1):
                        os.killpg(pid, signal.SIGKILL)
                break


def receive(client):
    """What a client wants, and its files 0, 1 and 2; (None, []) where it wants the end."""
    text, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while text and not text.endswith(b"\0"):
        text += client.recv(1 << 20)
    return (json.loads(text[:-1]), files) if files else (None, [])


def become(given, files):
    import random
    import runpy
    import tempfile

    os.setsid()
    for number, file in zip((0, 1, 2), files):
        os.dup2(file, number)
        if file != number:
            os.close(file)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    random.seed()  # a fork has its parent's
    tempfile.tempdir = None  # the same: TMPDIR is another
    sys.argv = given["words"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    if "tessera" in sys.modules:
        sys.modules["tessera"].failures.this_process_is_the_rank()
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def run(folder, words):
    server = connect(folder)
    if server is None:
        os.execv(sys.executable, [sys.executable, "-B", *words])
    text = json.dumps({"folder": os.getcwd(), "environment": dict(os.environ), "words": words}).encode() + b"\0"
    socket.send_fds(server, [text], [0, 1, 2])
    pid = int.from_bytes(server.recv(4), "little")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # who reads what the program writes sees the program close it
        os.dup2(nothing, number)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int.from_bytes(server.recv(4), "little")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def end(folder, _=()):
    server = connect(folder)
    if server is not None:
        server.send(b"\0")
        server.recv(1)  # until it has ended


if __name__ == "__main__":
    _folder, _verb, *_words = sys.argv[1:]
    if _verb == "run":
        run(_folder, _words)
    else:
        {"start": start, "end": end}[_verb](_folder, _words)
