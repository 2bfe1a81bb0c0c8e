"""A rank that fails is the one that is named, by the launcher and by the other ranks, whatever the others notice first.

    raising_rank_test.py [RUNS]     4 runs, or more
"""
import itertools
import subprocess
import sys
import unittest

from ranks import PROGRAMS, TESSERA, RanksTest, free_port, python

RUNS = int(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 4
LIMIT_S = 120  # for a machine that does much else
BUG = "a bug of mine: rank 1 is gone (to lunch)"  # words do not decide who is to blame
# What the launcher shows, where the victim's own exception is not all of it.
REASONS = {"sys.exit": f"SystemExit: {BUG} at raising_rank.py:", "collective": "TypeError: all_reduce", "SystemExit": "exit code 3",
           "os._exit(3)": "exit code 3", "os._exit(0)": "rank {} ended with exit code 0 while others still waited for it",
           "before, 0": "rank {} of {} has ended with exit code 0 before it joined the others", "thread": f"KeyError: '{BUG}' at raising_rank.py:",
           "worker": f"KeyError: Caught KeyError in DataLoader worker process 0: KeyError: '{BUG}'",
           "atexit": f"KeyError: '{BUG}' at raising_rank.py:"}
WHERES = ["loop", "backward", "sys.exit", "before, 0", "finally", "before", "worker", "collective", "SystemExit", "os._exit(3)", "os._exit(0)", "hook",
          "caught", "thread", "atexit", "excepthook"]
WITH_0 = ("os._exit(0)", "before, 0", "thread", "atexit")  # the victim's exit code


def cases():
    """(way, where, number of ranks, victim, stage, backend): each rank in turn. torchrun's own imports take seconds: seldom."""
    for number in itertools.count():
        where, world = WHERES[number % len(WHERES)], (2, 2, 4)[number % 3]
        way = "hand" if number % 5 == 1 else "torchrun" if number % 10 == 8 else "launch"
        if way != "launch" and where in (*WITH_0, "before"):
            way = "launch"  # without it the others wait at the rendezvous; torchrun shows no reason of an exit with 0
        yield way, where, world, (number // 2 + number) % world, 2 + number % 2, ("auto", "gloo")[number // 3 % 2]


class RaisingRank(RanksTest):
    def run_case(self, way, where, world, victim, stage, backend):
        program = [*python(), PROGRAMS / "raising_rank.py", where, victim, stage, backend]
        reason = REASONS.get(where, f"KeyError: '{BUG}' at raising_rank.py:").format(victim, world)
        if way == "hand":
            place = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            ended = self.outcome([self.start(*program, RANK=rank, **place) for rank in range(world)], LIMIT_S)
            for rank, (code, text) in enumerate(ended):
                self.assertNotEqual(code, 0, text)
                if rank != victim:
                    self.assertRegex(text, rf"CommError: .*rank {victim} (left the group: it (raised .*a bug of mine|raised TypeError|has ended)|is gone)")
            return
        if way == "launch":
            command = [TESSERA, "launch", "-n", world, "--", *program]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", world, "--master-port", free_port(), "--no-python", *program]
        ((code, text),) = self.outcome([self.start(*command)], LIMIT_S)
        self.assertNotEqual(code, 0, text)
        if way == "torchrun":
            self.assertRegex(text, rf"(?s)Root Cause .*\n  rank      : {victim} \(local_rank: {victim}\)", text)
            return
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")] or [text]
        self.assertIn(reason, line, text)
        if where not in WITH_0:
            self.assertIn(f"rank {victim} of {world} failed first: exit code ", line, text)

    def test_the_rank_that_fails_is_named(self):
        wrong = []
        for case in itertools.islice(cases(), RUNS):
            try:
                self.run_case(*case)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{case}: {error}")
                if RUNS > 4:
                    print(wrong[-1], flush=True)
        print(f"{RUNS - len(wrong)} of {RUNS} runs name the rank that failed")
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
