"""Recomputation repeats only what is known to be pure: models that do more, and random programs, beside plain PyTorch."""
import os
import sys
import unittest

from ranks import RanksTest

ALONE = ("two_in_place_operators_on_a_tensor_from_before_the_block noise_of_rrelu running_statistics_read_and_written lists_that_are_written strides "
         "memory_that_no_operator_writes what_belongs_to_a_call_besides_its_values torch_func_grad_names_activation_checkpointing "
         "written_between_forward_and_backward operators_of_others recurrent_cells forward_mode "
         "a_difference_is_an_error_that_names_the_operator what_is_kept_is_not_made_again names_to_keep_are_checked "
         "the_first_forwards_are_verified_and_one_of_256_later").split()


class Recomputation(RanksTest):
    def test_alone(self):
        self.run_ranks(1, "recomputation_rank.py", "auto", *ALONE)

    def test_two_ranks(self):
        self.run_ranks(2, "recomputation_rank.py", "gloo", "collectives_in_the_forward", "a_rank_without_a_forward")

    def test_compiled(self):
        """Inductor needs a C++ compiler, and time."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        self.run_ranks(1, "recomputation_rank.py", "auto", "compiled_functions_with_fallback_kernels", PATH=path)

    def test_random_programs(self):
        print(*self.run_ranks(1, "random_programs.py", "--programs", 200, "--policies-each", 2))

    def test_5000_random_programs(self):
        """In two processes, which share nothing."""
        processes = [self.start_ranks(1, "random_programs.py", "--first", first, "--programs", 2500)[0] for first in (100_000, 200_000)]
        print(*self.finish(processes, timeout_s=1400))


if __name__ == "__main__":
    unittest.main()
