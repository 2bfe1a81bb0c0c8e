"""Ctrl-C ends a rank that waits for another soon, wherever it waits, with KeyboardInterrupt."""
import signal
import time
import unittest

from ranks import RanksTest

LIMIT_S = 30  # the others sleep for longer
WAITS = {"at the rendezvous": ("wait_for_others", "shm", "rendezvous"), "while initialize() waits": ("wait_for_others", "shm", "initialize"),
         "in forward and backward": ("wait_in_backward",),
         **{f"{what} over {backend}": ("wait_for_others", backend, what) for backend in ("shm", "gloo")
            for what in ("barrier", "exchange", "large all_reduce")}}


class Interrupt(RanksTest):
    def test_wherever_it_waits(self):
        for where, arguments in WAITS.items():
            with self.subTest(where):
                ranks = self.start_ranks(2, "train_script.py", *arguments)
                said = ranks[0].stdout.readline()
                while said and "waiting" not in said:
                    said = ranks[0].stdout.readline()
                time.sleep(0.5)  # it begins to wait
                ranks[0].send_signal(signal.SIGINT)
                text, _ = ranks[0].communicate(timeout=LIMIT_S)
                self.assertRegex(text, "(?m)^KeyboardInterrupt")
                self.assertNotIn("terminate called", text)
                self._kill()


if __name__ == "__main__":
    unittest.main()
