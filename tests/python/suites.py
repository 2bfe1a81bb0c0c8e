"""Which rank programs ctest runs, and how: a row is a run. ctest's test python_NAME_test has the rows of a name in `make test`, and
python_NAME_full_test those that only `make test-full` has, which are of all stages (checks.STAGES).

    suites.py --list             NAME;SUITE;the most ranks, a line each
    suites.py NAME [SUITE]       runs them

The words of a row: name, suite, numbers of ranks (several run one after another in one folder), the program of programs/ and its
arguments, of which the first is the backend; after a colon the checks, if not all, or with a minus before each those that are left out.
"and" in place of a name: in the folder of the row before, after it. A program that has no checks is marked with an exclamation mark.
"""
import ast
import os
import sys
import unittest

from ranks import PROGRAMS, RanksTest

ROWS = """
activations            test  2      activations_rank.py shm
activations            full  1      activations_rank.py auto
activations            full  2      activations_rank.py gloo
arguments_ranks        full  1      arguments_rank.py auto
arguments_ranks        test  2      arguments_rank.py auto
compile_inductor       test  2      compile_rank.py shm inductor 3
compile_inductor       full  2      compile_rank.py gloo inductor 0123
compile_aot_eager      full  2      compile_rank.py gloo aot_eager 13
compile_eager          full  1      compile_rank.py auto eager 3
deepspeed_names_ranks  test  2      deepspeed_names_rank.py shm
deepspeed_names_ranks  full  1      deepspeed_names_rank.py auto
deepspeed_names_ranks  full  2      deepspeed_names_rank.py gloo
engine                 test  2      engine_rank.py shm
engine                 full  1      engine_rank.py auto
engine                 full  1      flops_rank.py auto
engine                 full  2      engine_rank.py gloo
failed_steps           test  2      failed_steps_rank.py gloo
failed_steps           test  1      failed_steps_rank.py auto
failed_steps           test  2      different_engines_rank.py! gloo 3 gather
failed_steps           test  2      different_engines_rank.py! shm 0 state_dict
failed_steps           full  2      different_engines_rank.py! gloo 3 eval
failed_steps           full  2      different_engines_rank.py! shm 3 gather
failed_steps           full  2      failed_steps_rank.py shm
foreign                test  2      foreign_rank.py auto
foreign                full  1      foreign_rank.py auto
frozen_dtypes          test  2      frozen_dtypes_rank.py auto
frozen_dtypes          full  1      frozen_dtypes_rank.py auto
frozen_dtypes          full  2      frozen_dtypes_rank.py gloo
loops                  test  2      loops_rank.py auto
loops                  full  1      loops_rank.py auto
loops                  full  2      loops_rank.py gloo
loss_backward          test  2      loss_backward_rank.py auto
loss_backward          full  1      loss_backward_rank.py auto
loss_backward          full  2      loss_backward_rank.py gloo
making                 test  2      making_rank.py shm
making                 full  1      making_rank.py auto
making                 full  3      making_rank.py gloo
module_state           test  2      module_state_rank.py shm
module_state           test  2      module_members_rank.py shm
module_state           test  1      batch_norm.py!
module_state           full  1      module_state_rank.py auto
module_state           full  1      module_members_rank.py auto
muon                   test  2      muon_rank.py auto
muon                   full  2      muon_rank.py gloo : stages_have_the_bits_of_torch half_precision_updates_masters
muon                   full  3,1    muon_rank.py auto : stages_have_the_bits_of_torch
optim                  test  2      optim_rank.py auto
optimizer              test  2      optimizer_rank.py auto
optimizer              test  2      optimizer_state_rank.py auto
optimizer              full  1      optimizer_rank.py auto
optimizer              full  1      optimizer_state_rank.py auto
parity_torch           test  2      parity_rank.py shm torch
parity_torch           full  1      parity_rank.py auto torch
parity_torch           full  2      parity_rank.py gloo torch
parity_torch           full  3      parity_rank.py gloo torch
parity_transformers    test  2      parity_rank.py shm transformers
parity_transformers    full  1      parity_rank.py auto transformers
parity_transformers    full  2      parity_rank.py gloo transformers
parity_torchvision     test  2      parity_rank.py shm torchvision
parity_torchvision     full  1      parity_rank.py auto torchvision
parity_torchvision     full  2      parity_rank.py gloo torchvision
parity_patterns        test  2      parity_rank.py shm patterns
parity_patterns        full  3      parity_rank.py gloo patterns
parity_peft            test  2      parity_rank.py shm peft
parity_peft            full  1      parity_rank.py auto peft
parity_peft            full  2      parity_rank.py gloo peft
patterns               test  2      patterns_rank.py shm
patterns               test  1      patterns_rank.py auto : modes_of_the_caller_do_not_hear_the_engine
patterns               test  2      uneven_rank.py! held
patterns               test  2      uneven_rank.py! leaf
patterns               full  1      patterns_rank.py auto
patterns               full  3      patterns_rank.py gloo
random_calls           test  1      random_calls.py! auto --sequences 15 --stages 03
random_calls           test  2      random_calls.py! auto --sequences 20 --first 1000 --stages 03
random_calls           test  1      random_calls.py! auto --lone 2 --sequences 6 --calls 10
random_calls           test  2      random_calls.py! gloo --first 50045 --sequences 1 --stages 3
random_calls_lone      full  1      random_calls.py! auto --lone 2 --sequences 60 --first 100
random_calls_lone      full  1      random_calls.py! gloo --lone 2 --sequences 60 --first 100
random_calls           full  1      random_calls.py! auto --sequences 300 --first 10000
random_calls           full  2      random_calls.py! auto --sequences 130 --first 20000
random_calls           full  2      random_calls.py! gloo --sequences 70 --first 30000
random_programs_1      full  1      random_programs.py! --first 100000 --programs 1250
random_programs_2      full  1      random_programs.py! --first 120000 --programs 1250
random_programs_3      full  1      random_programs.py! --first 200000 --programs 1250
random_programs_4      full  1      random_programs.py! --first 220000 --programs 1250
raw_reads              test  2      raw_reads_rank.py shm
raw_reads              full  1      raw_reads_rank.py auto
raw_reads              full  2      raw_reads_rank.py gloo
recomputation          test  1      recomputation_rank.py auto : -collectives_in_the_forward -compiled_functions_with_fallback_kernels
recomputation          test  2      recomputation_rank.py gloo : collectives_in_the_forward
recomputation          test  1      random_programs.py! --programs 60 --policies-each 2
recomputation          full  1      recomputation_rank.py auto : compiled_functions_with_fallback_kernels
reports                test  2      reports_rank.py auto
reports                full  1      reports_rank.py auto
same_program           test  2      same_program_rank.py auto
whole_optimizer        test  2      whole_optimizer_rank.py auto : -checkpoints_of_another_world
and                    test  3      whole_optimizer_rank.py auto : checkpoints_of_another_world
whole_optimizer        full  1      whole_optimizer_rank.py auto
whole_optimizer        full  2      whole_optimizer_rank.py gloo : every_optimizer_of_torch_has_its_own_bits accumulation_clipping_and_bf16 state_on_disk_and_in_groups
whole_optimizer        full  3,1,2  whole_optimizer_rank.py auto : checkpoints_resume
and                    full  2,3,1  whole_optimizer_rank.py auto : checkpoints_of_another_world
zero_init              test  2      zero_init_rank.py shm
zero_init              full  1      zero_init_rank.py auto
zero_init              full  3      zero_init_rank.py gloo : values_of_rank_0 gathered_before_initialize from_pretrained
"""


PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # inductor starts ninja, which lies beside python


class Row:
    """A line of ROWS, and those that follow it in its folder."""

    def __init__(self, line):
        words, _, checks = line.partition(" : ")
        self.name, self.suite, worlds, program, *self.arguments = words.split()
        self.worlds, self.checks, self.next = [int(world) for world in worlds.split(",")], checks.split(), []
        self.program, self.has_checks = program.rstrip("!"), not program.endswith("!")

    def run(self, test):
        variables = {"SAVED": test.folder, "PATH": PATH, **({"TESSERA_TEST_STAGES": "0123"} if self.suite == "full" else {})}
        for world in self.worlds:
            if self.has_checks:
                test.run_checks(world, self.program, *self.arguments, checks=self.checks, **variables)
            else:
                print(*test.run_ranks(world, self.program, *self.arguments, timeout_s=5400, **variables))
        for row in self.next:
            row.run(test)


def rows(text=ROWS):
    found = []
    for row in map(Row, text.strip().splitlines()):
        (found[-1].next if row.name == "and" else found).append(row)
    return found


def checks_of(source):
    """(names of a program's checks; whether it has any, of which some may get their names when it runs; the lines after main() that have some)."""
    names, late, ended = [], [], False
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any(getattr(one, "id", "") in ("check", "each_stage") for one in node.decorator_list):
            names.append(node.name)
            late += [node.lineno] if ended else []
        ended |= isinstance(node, ast.Expr) and getattr(getattr(node.value, "func", None), "id", "") == "main"
    return names, bool(names) or "_check(" in source, late


def complaints(rows, programs, others=""):
    """What is wrong with rows of these programs, {name: source}: a check that none of them runs is one. `others`: sources of other tests."""
    found, run = [], {}
    every = [row for first in rows for row in (first, *first.next)]
    for row in every:
        if row.program not in programs:
            found.append(f"{row.program}: there is no such program")
            continue
        names, has_checks, _ = checks_of(programs[row.program])
        named = {name.lstrip("-") for name in row.checks}
        if has_checks != row.has_checks:
            found.append(f"{row.program}: a row {'runs' if row.has_checks else 'leaves out'} its checks, and it has {'some' if has_checks else 'none'}")
        found += [f"{row.program}: no check is named {name}" for name in sorted(named - set(names)) if names]
        all_but = not row.checks or row.checks[0].startswith("-")
        run.setdefault(row.program, set()).update(set(names) - named if all_but else named)
    for program, source in programs.items():
        names, has_checks, late = checks_of(source)
        found += [f"{program}:{line}: a check after main() does not run" for line in late]
        found += [f"{program}: two checks are named {name}" for name in sorted({name for name in names if names.count(name) > 1})]
        if program in run or has_checks and program not in others:
            found += [f"{program}: no row runs {name}" for name in names if name not in run.get(program, ())]
        module = program.removesuffix(".py")
        if program not in run and program not in others and not any(f"import {module}" in text or f"from {module} " in text for text in programs.values()):
            found.append(f"{program}: nothing runs it")
    return found


def programs_and_others():
    tests = list(PROGRAMS.parent.glob("*_test.py"))
    return {path.name: path.read_text() for path in sorted(PROGRAMS.glob("*.py"))}, "".join(path.read_text() for path in tests)


class Suite(RanksTest):
    """Gets a test for each row."""


def main(name, suite="test"):
    for number, row in enumerate(row for row in rows() if (row.name, row.suite) == (name, suite)):
        setattr(Suite, f"test_{number}_{row.program}_{'_'.join(row.arguments)}_on_{'_'.join(map(str, row.worlds))}", lambda test, row=row: row.run(test))
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(Suite))
    sys.exit(0 if result.wasSuccessful() and result.testsRun else 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        if wrong := complaints(rows(), *programs_and_others()):
            sys.exit("\n".join(wrong))
        ranks = {}
        for row in rows():
            ranks[row.name, row.suite] = max([ranks.get((row.name, row.suite), 0), *(world for one in (row, *row.next) for world in one.worlds)])
        print(*(f"{name};{suite};{most}" for (name, suite), most in ranks.items()), sep="\n")
    else:
        main(*sys.argv[1:])
