"""Ranks that are forked from a process which has imported everything: a row of a benchmark then takes a second, and not ten."""
import gc
import json
import os
import select
import signal
import socket
import time
import traceback


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(num_ranks, body, timeout_s=120):
    """What body(rank) returns, by rank, as JSON brings it; None where a rank has failed or the time is over. Ranks end without running
    destructors: after DeepSpeed's stage 3 one of them sometimes aborts."""
    gc.collect()
    gc.freeze()
    place = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(num_ranks):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.environ.update({name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()})
            _report(writer, body, rank)
        os.close(writer)
        ranks.append((pid, reader))
    texts = _read({reader: b"" for _, reader in ranks}, time.monotonic() + timeout_s)
    for pid, reader in ranks:
        if texts[reader] is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
    return [json.loads(texts[reader]) if texts[reader] else None for _, reader in ranks]


def _report(writer, body, rank):
    try:
        text = json.dumps(body(rank)).encode()
        while text:
            text = text[os.write(writer, text):]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read(texts, give_up):
    """{pipe: all that was written; None when the time was over}."""
    waiting = set(texts)
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, give_up - time.monotonic()))
        if not ready:
            return {reader: None if reader in waiting else text for reader, text in texts.items()}
        for reader in ready:
            part = os.read(reader, 65536)
            texts[reader] += part
            if not part:
                waiting.remove(reader)
    return texts
