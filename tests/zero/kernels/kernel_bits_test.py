"""The CPU loops give the same bits at every x86-64 level."""
import subprocess
import sys
import unittest

PRODUCT, PORTABLE, *LEVELS = sys.argv[1:]
UNSUPPORTED = 77


def digests(program):
    """{pass: digest}, or None where this CPU does not have the program's level."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    if done.returncode == UNSUPPORTED:
        return None
    assert done.returncode == 0, f"{program}: exit {done.returncode}: {done.stderr}"
    return dict(line.split() for line in done.stdout.splitlines())


class KernelBits(unittest.TestCase):
    def test_what_users_run_equals_the_portable_loops(self):
        portable = digests(PORTABLE)
        self.assertEqual(len(portable), 3 * (12 + 6))
        self.assertEqual(len(set(portable.values())), len(portable))
        self.assertEqual(digests(PRODUCT), portable)

    def test_every_level_equals_the_portable_loops(self):
        portable = digests(PORTABLE)
        for program in LEVELS:
            with self.subTest(program):
                found = digests(program)
                if found is None:
                    self.skipTest("this CPU does not have it")
                self.assertEqual(found, portable)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
