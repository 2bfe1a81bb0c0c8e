"""Ctrl-C ends a rank that waits for another within a second, wherever it waits, with KeyboardInterrupt."""
import signal
import sys
import time
import unittest

from ranks import PROGRAMS, RanksTest, free_port


class Interrupt(RanksTest):
    def interrupt(self, ranks, sent=signal.SIGINT):
        """Sends a signal to rank 0, which says that it waits; returns (seconds to the KeyboardInterrupt, output)."""
        waiting = ranks[0].stdout.readline()
        while waiting and "waiting" not in waiting:
            waiting = ranks[0].stdout.readline()
        time.sleep(1)
        start = time.monotonic()
        ranks[0].send_signal(sent)
        lines = []
        for line in ranks[0].stdout:
            lines.append(line)
            if line.startswith("KeyboardInterrupt"):
                break
        seconds = time.monotonic() - start
        text = "".join(lines)
        self.assertIn("KeyboardInterrupt", text)
        self.assertNotIn("terminate called", text)
        self.assertLess(seconds, 1, text)
        ranks[0].wait(timeout=10)
        return text

    def test_in_collectives(self):
        for backend in ("shm", "gloo"):
            for what in ("barrier", "exchange", "large all_reduce"):
                with self.subTest(backend=backend, what=what):
                    self.interrupt(self.start_ranks(2, "train_script.py", "wait_for_others", backend, what))

    def test_while_initialize_waits(self):
        self.interrupt(self.start_ranks(2, "train_script.py", "wait_for_others", "shm", "initialize"))

    def test_in_forward_and_backward(self):
        self.interrupt(self.start_ranks(2, "train_script.py", "wait_in_backward"))

    def test_at_the_rendezvous(self):
        lonely = self.start(sys.executable, PROGRAMS / "train_script.py", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2,
                            MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
        time.sleep(8)
        start = time.monotonic()
        lonely.send_signal(signal.SIGINT)
        text, _ = lonely.communicate(timeout=10)
        self.assertIn("KeyboardInterrupt", text)
        self.assertLess(time.monotonic() - start, 2, text)


if __name__ == "__main__":
    unittest.main()
