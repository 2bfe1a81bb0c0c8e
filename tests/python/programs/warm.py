"""A process that has imported torch and Tessera, and forks programs: each starts in milliseconds.

    warm.py SOCKET               the server
    warm.py SOCKET SCRIPT ARGS   runs the script as `python SCRIPT ARGS` would, with this process's environment, files and exit code
"""
import json
import os
import select
import signal
import socket
import sys

SOCKET = sys.argv[1]


def serve():
    """Returns, in a fork, the words of a client."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen(64)
    running = {}  # {a process's file: (its number, the client)}
    while True:
        for ready in select.select([listener, *running, *(client for _, client in running.values())], [], [])[0]:
            if ready is listener:
                client, _ = listener.accept()
                text, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
                while not text.endswith(b"\0"):
                    text += client.recv(1 << 20)
                pid = os.fork()
                if pid == 0:
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                    os.closerange(3, 256)
                    given = json.loads(text[:-1])
                    os.chdir(given["folder"])
                    os.environ.clear()
                    os.environ.update(given["environment"])
                    return given["words"]
                for file in files:
                    os.close(file)
                client.send(pid.to_bytes(4, "little"))
                running[os.pidfd_open(pid)] = (pid, client)
            elif ready in running:
                pid, client = running.pop(ready)
                os.close(ready)
                try:
                    client.send(os.waitpid(pid, 0)[1].to_bytes(4, "little"))
                except BrokenPipeError:
                    pass
                client.close()
            else:  # a client that is gone takes its process along
                for pid, client in running.values():
                    if client is ready and not ready.recv(1):
                        os.kill(pid, signal.SIGKILL)
                break


def ask(words):
    server = socket.socket(socket.AF_UNIX)
    server.connect(SOCKET)
    text = json.dumps({"folder": os.getcwd(), "environment": dict(os.environ), "words": words}).encode() + b"\0"
    socket.send_fds(server, [text], [0, 1, 2])
    pid = int.from_bytes(server.recv(4), "little")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int.from_bytes(server.recv(4), "little")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if len(sys.argv) > 2:
    ask(sys.argv[2:])
import runpy  # noqa: E402

import tessera  # noqa: E402

print("ready", flush=True)
sys.argv = serve()
tessera.failures.this_process_is_the_rank()
runpy.run_path(sys.argv[0], run_name="__main__")
