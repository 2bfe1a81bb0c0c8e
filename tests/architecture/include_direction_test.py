"""The tree keeps the rules of rules.py, and each rule catches a tree that breaks it."""
import re
import sys
import tempfile
import unittest
from pathlib import Path

import rules
from source_tree import code_of, project_files

ROOT = Path(__file__).resolve().parents[2]


class TheTree(unittest.TestCase):
    def test_keeps_every_rule(self):
        for rule in rules.ALL_RULES:
            with self.subTest(rule=rule.__name__):
                complaints = rule(ROOT)
                self.assertEqual(complaints, [], "\n" + "\n".join(complaints))

    def test_is_looked_at(self):
        self.assertTrue((ROOT / rules.STAGE_POLICY).is_file())
        seen = {source.folder for source in rules.sources(ROOT)}
        self.assertLessEqual({"core", "comm", "zero", "engine", "train", "examples", "launcher", "monitor"}, seen)


class EachRule(unittest.TestCase):
    """`check` writes a small tree and gives it to one rule."""

    def check(self, rule, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return rule(folder)

    def assert_caught(self, rule, files, where):
        complaints = self.check(rule, files)
        self.assertEqual([complaint.split(": ")[0] for complaint in complaints], [where], complaints)

    def assert_accepted(self, rule, files):
        self.assertEqual(self.check(rule, files), [])

    def include(self, source, target, text=None):
        return {source: text or f'#pragma once\n#include "{target}"\n', target: ""}

    def test_lower_folders_may_not_include_higher_ones(self):
        for source, target in [("core/a.h", "comm/b.h"), ("comm/a.cc", "zero/b.h"), ("zero/k/a.cc", "engine/b.h"),
                               ("zero/a.h", "checkpoint/b.h"), ("engine/a.h", "train/b.h"),
                               ("train/a.cc", "examples/t/b.h"), ("launcher/a.cc", "comm/b.h"),
                               ("engine/a.h", "launcher/b.h"), ("engine/a.h", "tools/b.h"), ("core/a.h", "tests/b.h"),
                               ("checkpoint/a.cc", "comm/b.h"), ("checkpoint/a.cc", "zero/gather/residency.h"),
                               ("engine/a.cc", "monitor/b.h"), ("monitor/a.h", "engine/config/b.h"),
                               ("examples/t/model.h", "core/b.h"), ("examples/t/model.h", "examples/t/b.h")]:
            with self.subTest(source=source, target=target):
                self.assert_caught(rules.include_direction, self.include(source, target), f"{source}:2")

    def test_sets_are_iterated_in_an_order_that_ranks_have_in_common(self):
        made = "import weakref\n_engines = weakref.WeakSet()\nclass A:\n    def __init__(self, n):\n        self._held: set[int] = set(n)\n"
        for broken in ("for e in list(_engines):\n    e.gather()", "[e for e in _engines]", "print(*_engines)", "dict.fromkeys(_engines | {1})",
                       "def f(a):\n    names = {x.name for x in a}\n    more = names - {1}\n    for n in more: pass", "for x in self._held: pass",
                       "def f(a: set[str]):\n    for x in a: pass", "for x in set(a).union(b): pass", "','.join(frozenset(a))"):
            with self.subTest(broken=broken):
                line = made.count("\n") + 1 + broken.count("\n", 0, max(broken.find("for x"), broken.find("for n in"), 0))
                self.assert_caught(rules.order_of_sets, {"python/tessera/a.py": f"{made}{broken}\n"}, f"python/tessera/a.py:{line}")
        self.assert_accepted(rules.order_of_sets, {"python/tessera/a.py": made + "for e in sorted(_engines): pass\nany(x for x in self._held)\n"
                                                   "{id(e) for e in _engines}\nsorted(x for x in {1})\nfor x in {1: 2}: pass\n"})

    def test_angle_brackets_hide_nothing(self):
        self.assert_caught(rules.include_direction, self.include("core/a.h", "comm/b.h", "#  include <comm/b.h>\n"),
                           "core/a.h:1")

    def test_higher_folders_may_include_lower_ones(self):
        for source, target in [("comm/a.h", "core/b.h"), ("zero/a.h", "zero/k/b.h"), ("engine/a.h", "checkpoint/b.h"),
                               ("checkpoint/a.h", "zero/plan/layout.h"), ("examples/t/data.h", "train/b.h"),
                               ("launcher/a.h", "core/b.h"), ("monitor/a.h", "core/b.h"), ("train/a.cc", "monitor/b.h"),
                               ("tools/a.cc", "launcher/b.h"), ("tests/core/a.cc", "tools/b.h")]:
            with self.subTest(source=source, target=target):
                self.assert_accepted(rules.include_direction, self.include(source, target))

    def test_includes_are_paths_from_the_root(self):
        self.assert_caught(rules.include_direction, {"core/a.h": '#include "b.h"\n', "core/b.h": ""}, "core/a.h:1")

    def test_a_commented_include_is_none(self):
        self.assert_accepted(rules.include_direction,
                             {"core/a.h": '// #include "comm/b.h"\n/*\n#include "comm/b.h"\n*/\n', "comm/b.h": ""})

    def test_a_new_folder_needs_a_place(self):
        self.assert_caught(rules.include_direction, {"misc/a.cc": "int a;\n"}, "misc/a.cc:1")

    def test_sub_folders_have_one_direction(self):
        for source, target in [("zero/plan/a.h", "zero/unit/b.h"), ("zero/gather/a.cc", "zero/sharded_model.h"),
                               ("comm/gloo/a.h", "comm/init/b.h"), ("comm/control/a.cc", "comm/transport.h"),
                               ("core/error.h", "core/files/b.h"), ("engine/config/document/a.h", "engine/config/key.h"), ("tools/doctor/a.cc", "tools/main.h")]:
            with self.subTest(source=source, target=target):
                self.assert_caught(rules.sub_folder_direction, self.include(source, target), f"{source}:2")
                self.assert_accepted(rules.sub_folder_direction, self.include(target, source))
        self.assert_caught(rules.sub_folder_direction, {"zero/misc/a.cc": "int a;\n"}, "zero/misc/a.cc:1")
        self.assert_accepted(rules.sub_folder_direction, self.include("activations/x/a.h", "activations/y/b.h"))

    def test_torch_stays_out_of_torch_free_files(self):
        for source in ["core/a.h", "launcher/a.cc", "zero/plan/layout.h", "zero/plan/layout.cc"]:
            with self.subTest(source=source):
                self.assert_caught(rules.torch_headers, {source: "#include <ATen/ATen.h>\n"}, f"{source}:1")
        self.assert_accepted(rules.torch_headers, {"zero/unit.h": "#include <ATen/ATen.h>\n"})

    def test_slow_and_clashing_headers(self):
        self.assert_caught(rules.torch_headers, {"engine/a.cc": "#include <torch/torch.h>\n"}, "engine/a.cc:1")
        self.assert_caught(rules.torch_headers, {"engine/a.cc": "#include <spdlog/spdlog.h>\n"}, "engine/a.cc:1")
        self.assert_accepted(rules.torch_headers, {"core/log.cc": "#include <spdlog/spdlog.h>\n"})

    def test_stages_are_compared_in_one_file(self):
        for line in ["if (stage == 3) {", "if (config.zero.stage >= 2)", "return stage_ != 0;", "x = 2 <= stage;",
                     "switch (stage) {", "switch (config->stage) {", "stage() < 1 ? a : b", "if (stage>1)",
                     "if (zero_stage > 1)"]:
            with self.subTest(line=line):
                self.assert_caught(rules.stage_comparisons, {"zero/a.cc": f"// x\n{line}\n"}, "zero/a.cc:2")
                self.assert_accepted(rules.stage_comparisons, {rules.STAGE_POLICY: line + "\n"})
                self.assert_accepted(rules.stage_comparisons, {"tests/zero/a.cc": line + "\n"})

    def test_other_uses_of_stages_are_accepted(self):
        for line in ["int stage = 3;", "// if (stage == 3)", 'fail("stage == 3 needs");', "out << stage << 1;",
                     "sharding_of(config.stage)", "keys.stage3_max_live_parameters >= 2", "std::optional<int> stage;",
                     "s << stage;", "const int n = 1'000; // 'stage == 1'", "for (int stage : kStages)"]:
            with self.subTest(line=line):
                self.assert_accepted(rules.stage_comparisons, {"zero/a.cc": line + "\n"})

    def test_nothing_is_named_after_a_stage(self):
        self.assert_caught(rules.stage_comparisons, {"zero/stage3.cc": "\n"}, "zero/stage3.cc:1")
        self.assert_caught(rules.stage_comparisons, {"zero/a.h": "class Stage3Engine {};\n"}, "zero/a.h:1")

    def test_json_is_read_in_one_place(self):
        for line in ["x = nlohmann::json::parse(text);", "json::parse(text)", "ordered_json::parse(text)", "nlohmann::json::sax_parse(a, b)"]:
            with self.subTest(line=line):
                self.assert_caught(rules.json_readers, {"train/a.cc": f"// x\n{line}\n"}, "train/a.cc:2")
        self.assert_accepted(rules.json_readers, {"core/json/a.cc": "json::parse(text)\n", "tests/a.cc": "json::parse(text)\n",
                                                  "train/a.cc": "parse_json(text)\n"})

    def test_long_files(self):
        self.assert_caught(rules.file_lengths, {"core/a.cc": "\n" * 901}, "core/a.cc:901")
        self.assert_accepted(rules.file_lengths, {"core/a.cc": "\n" * 900, "docs/a.md": "\n" * 2000})

    def test_generated_files_are_not_ours(self):
        self.assert_accepted(rules.file_lengths, {".deps/a.py": "\n" * 901, "build-asan/a.cc": "\n" * 701})


class CodeOf(unittest.TestCase):
    def test_blanks_comments_and_strings_and_keeps_lines(self):
        text = 'a("x // y"); // c\n/* d\n e */ f(R"(g "\n)" , \'"\'); h\n'
        self.assertEqual(code_of(text).split("\n")[0].rstrip(), "a(" + " " * 8 + ");")
        self.assertEqual(code_of(text).count("\n"), text.count("\n"))
        self.assertEqual("".join(code_of(text).split()), "a();f(,);h")

    def test_keeps_includes(self):
        self.assertEqual(code_of('#include "a.h"  // "b.h"\n').rstrip(), '#include "a.h"')


class ArchitecturePage(unittest.TestCase):
    def test_its_table_has_the_sub_folders_of_each_room_in_their_order(self):
        text = (Path(__file__).resolve().parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
        table, room = {}, ""
        for row in re.findall(r"^\|(.*)\|$", text.split("### Inside of a room")[1].split("###")[0], re.MULTILINE)[2:]:
            cells = [cell.strip() for cell in row.split("|")]
            room = cells[0].strip("`/") or room
            table.setdefault(room, []).extend(name.rstrip("/") for name in re.findall(r"`([^`]+)`", cells[1]))
        self.assertEqual(table, rules.SUB_FOLDERS)


class ProjectFiles(unittest.TestCase):
    def test_without_git(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ["core/a.h", "build/b.h", "tests/build/c.h", "runs/d", "tests/__pycache__/e"]:
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, name).write_text("")
            self.assertEqual([path.as_posix() for path in project_files(folder)], ["core/a.h", "tests/build/c.h"])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
