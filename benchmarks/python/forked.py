"""Ranks that are forked from a process which has imported everything: a row of a benchmark then takes a second, and not ten."""
import gc
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from ranks import RanksFailed  # noqa: E402


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(num_ranks, body, timeout_s=120):
    """What body(rank) returns, by rank, as JSON brings it. Raises RanksFailed where a rank has failed or the time is over. Ranks end
    without running destructors: after DeepSpeed's stage 3 one of them sometimes aborts."""
    gc.collect()
    gc.freeze()
    place = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    context = multiprocessing.get_context("fork")
    ranks, receivers = [], []
    for rank in range(num_ranks):  # a rank has no other rank's sender
        receiver, sender = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_report, args=(sender, body, rank, place)))
        ranks[-1].start()
        sender.close()
        receivers.append(receiver)
    give_up = time.monotonic() + timeout_s
    reports = [_read(receiver, give_up) for receiver in receivers]
    for rank in ranks:
        rank.kill()
        rank.join()
    if not all(reports):
        raise RanksFailed(f"no result of rank {reports.index(None)}")
    return reports


def _report(sender, body, rank, place):
    os.environ.update({name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()})
    try:
        sender.send_bytes(json.dumps(body(rank)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read(receiver, give_up):
    with receiver:
        try:
            return json.loads(receiver.recv_bytes()) if receiver.poll(max(0.0, give_up - time.monotonic())) else None
        except EOFError:
            return None
