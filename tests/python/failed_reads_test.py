"""Reads of parameters that fail, because the other rank is not there: an error where it is read, and never a value."""
import re
import unittest

from ranks import RanksTest


class FailedReads(RanksTest):
    def outcome_of(self, case):
        (code_0, said_0), (code_1, said_1) = self.outcome(self.start_ranks(2, "failed_reads_rank.py", case))
        self.assertEqual(code_0, 0, said_0)
        return code_1, said_1

    def expect_raised(self, *cases):
        for case in cases:
            with self.subTest(case):
                code, said = self.outcome_of(case)
                self.assertRegex(said, rf"RAISED {case} (RuntimeError|CommError) .*rank 0")
                self.assertNotIn("NOT RAISED", said)
                self.assertEqual(code, 0, said)  # the program has caught it

    def test_a_first_read_raises(self):
        self.expect_raised("module")

    def test_every_first_read_raises(self):
        self.expect_raised("engine", "generate", "norm", "backward", "autocast", "compiled", "deepcopy")

    def test_every_later_one_raises(self):
        ways = ["item", "print", "numpy", "deepcopy", "deepcopy_model", "state_dict", "save_state_dict", "engine_state_dict", "save",
                "tolist", "to", "compiled", "autocast", "thread", "backward", "gathered", "functional", "generate", "engine"]
        code, said = self.outcome_of(",".join(ways))
        self.assertEqual(re.findall(r"^RAISED (\w+)", said, re.MULTILINE), ways, said)
        self.assertEqual(code, 0, said)

    def test_that_nobody_catches_ends_the_program(self):
        code, said = self.outcome_of("backward_alone")
        self.assertNotIn("NOT RAISED", said)
        self.assertRegex(said, r"(RuntimeError|CommError): .*rank 0")
        self.assertEqual(code, 1, said)

    def expect_failed_at_the_end(self, case):
        code, said = self.outcome_of(case)
        self.assertIn("VIEWED", said)
        self.assertRegex(said, r"error: .*rank 0.*met where it could not be thrown")
        self.assertEqual(code, 1, said)

    def test_that_nothing_was_read_of_fails_the_program_at_its_end(self):
        self.expect_failed_at_the_end("view")

    def test_that_nothing_was_read_of_fails_the_program_without_an_engine(self):
        self.expect_failed_at_the_end("view_gone")

    def test_ranks_that_use_different_parameters_at_stage_3_are_told(self):
        for code, text in self.outcome(self.start_ranks(2, "uneven_rank.py", "plain")):
            self.assertNotEqual(code, 0, text)
            last = text.strip().splitlines()[-1]
            self.assertRegex(last, r"^tessera\.errors\.CommError: rank \d exchanges \"gather of unit \d+ \(branches\.\d.*rank \d exchanges")
            self.assertRegex(last, r"zero_optimization\.stage to 2, or .* in one GatheredParameters$")


if __name__ == "__main__":
    unittest.main()
