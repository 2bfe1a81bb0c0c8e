"""Random orders of an engine's calls beside plain PyTorch: alone, on two ranks in shared memory, and over Gloo. A sequence is run at each stage."""
import unittest

from ranks import RanksTest


class RandomCalls(RanksTest):
    def test_alone(self):
        print(*self.run_ranks(1, "random_calls.py", "auto", "--sequences", 60))

    def test_shared_memory(self):
        print(self.run_ranks(2, "random_calls.py", "auto", "--sequences", 25, "--first", 1000)[0])

    def test_one_rank_fails_alone_in_shared_memory(self):
        print(self.run_ranks(1, "random_calls.py", "auto", "--lone", 2, "--sequences", 12, "--calls", 10)[0])

    def test_one_rank_alone_writes_what_all_hold(self):
        """What it has read meanwhile may not decide which units it releases next: the others would gather other ones."""
        self.run_ranks(2, "random_calls.py", "gloo", "--first", 50045, "--sequences", 1, "--stages", "3")

    def test_2000(self):
        """500 at four stages."""
        for world, backend, first, sequences in ((1, "auto", 10_000, 300), (2, "auto", 20_000, 130), (2, "gloo", 30_000, 70)):
            processes = self.start_ranks(world, "random_calls.py", backend, "--first", first, "--sequences", sequences)
            print(self.finish(processes, timeout_s=1400)[0])
        for backend in ("auto", "gloo"):
            print(self.finish(self.start_ranks(1, "random_calls.py", backend, "--lone", 2, "--sequences", 60, "--first", 100), timeout_s=1400)[0])


if __name__ == "__main__":
    unittest.main()
