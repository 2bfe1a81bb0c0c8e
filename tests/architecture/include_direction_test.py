"""The tree keeps the rules of rules.py, and each rule catches a tree that breaks it."""
import re
import sys
import tempfile
import unittest
from pathlib import Path

import rules
from source_tree import code_of, in_a_tree, project_files

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


SETS = "import weakref\n_engines = weakref.WeakSet()\nclass A:\n    def __init__(self, n):\n        self._held: set[int] = set(n)\n"
# A rule, a tree that breaks it, and where: one sample for each complaint, or for each form in which the rule finds it.
BROKEN = [
    (rules.include_direction, {"core/a.h": '#pragma once\n#include "comm/b.h"\n', "comm/b.h": ""}, "core/a.h:2"),
    (rules.include_direction, {"core/a.h": "#  include <comm/b.h>\n", "comm/b.h": ""}, "core/a.h:1"),  # angle brackets hide nothing
    (rules.include_direction, {"engine/a.cc": '#include "monitor/b.h"\n', "monitor/b.h": ""}, "engine/a.cc:1"),  # beside the chain
    (rules.include_direction, {"checkpoint/a.cc": '#include "zero/gather/b.h"\n', "zero/gather/b.h": ""}, "checkpoint/a.cc:1"),
    (rules.include_direction, {"examples/t/model.h": '#include "core/b.h"\n', "core/b.h": ""}, "examples/t/model.h:1"),
    (rules.include_direction, {"core/a.h": '#include "b.h"\n', "core/b.h": ""}, "core/a.h:1"),  # paths are from the root
    (rules.include_direction, {"misc/a.cc": "int a;\n"}, "misc/a.cc:1"),
    (rules.sub_folder_direction, {"zero/plan/a.h": '#include "zero/unit/b.h"\n', "zero/unit/b.h": ""}, "zero/plan/a.h:1"),
    (rules.sub_folder_direction, {"engine/config/document/a.h": '#include "engine/config/b.h"\n', "engine/config/b.h": ""},
     "engine/config/document/a.h:1"),
    (rules.sub_folder_direction, {"core/error.h": '#include "core/files/b.h"\n', "core/files/b.h": ""}, "core/error.h:1"),
    (rules.sub_folder_direction, {"zero/misc/a.cc": "int a;\n"}, "zero/misc/a.cc:1"),
    (rules.torch_headers, {"zero/plan/layout.cc": "#include <ATen/ATen.h>\n"}, "zero/plan/layout.cc:1"),
    (rules.torch_headers, {"engine/a.cc": "#include <torch/torch.h>\n"}, "engine/a.cc:1"),
    (rules.torch_headers, {"engine/a.cc": "#include <spdlog/spdlog.h>\n"}, "engine/a.cc:1"),
    *((rules.stage_comparisons, {"zero/a.cc": f"// x\n{line}\n"}, "zero/a.cc:2")
      for line in ("if (config.zero.stage >= 2)", "x = 2 <= stage;", "switch (config->stage) {", "class Stage3Engine {};")),
    (rules.stage_comparisons, {"zero/stage3.cc": "\n"}, "zero/stage3.cc:1"),
    (rules.json_readers, {"train/a.cc": "// x\nnlohmann::json::sax_parse(a, b)\n"}, "train/a.cc:2"),
    *((rules.order_of_sets, {"python/tessera/a.py": f"{SETS}{code}\n"}, f"python/tessera/a.py:{line}") for code, line in (
        ("for e in list(_engines):\n    e.gather()", 6), ("[e for e in self._held]", 6), ("print(*_engines)", 6), ("','.join(_engines | {1})", 6),
        ("def f(a):\n    names = {x.name for x in a}\n    more = names - {1}\n    for n in more: pass", 9), ("for x in set(a).union(b): pass", 6))),
    (rules.file_lengths, {"core/a.cc": "\n" * 901}, "core/a.cc:901"),
]
# What looks like it, and is none.
ACCEPTED = [
    (rules.include_direction, {"comm/a.h": '#include "core/b.h"\n// #include "zero/c.h"\n/*\n#include "zero/c.h"\n*/\n', "core/b.h": "", "zero/c.h": ""}),
    (rules.include_direction, {"checkpoint/a.h": '#include "zero/plan/layout.h"\n', "zero/plan/layout.h": "", "tools/a.cc": '#include "checkpoint/a.h"\n'}),
    (rules.sub_folder_direction, {"zero/unit/a.h": '#include "zero/plan/b.h"\n', "zero/plan/b.h": "", "activations/x/a.h": '#include "activations/y/b.h"\n',
                                  "activations/y/b.h": ""}),
    (rules.torch_headers, {"zero/unit.h": "#include <ATen/ATen.h>\n", "core/log.cc": "#include <spdlog/spdlog.h>\n"}),
    (rules.stage_comparisons, {rules.STAGE_POLICY: "if (stage == 3) {\n", "tests/zero/a.cc": "if (stage == 3) {\n", "zero/a.cc": "\n".join((
        "int stage = 3;", "// if (stage == 3)", 'fail("stage == 3 needs");', "out << stage << 1;", "sharding_of(config.stage)", "s << stage;",
        "keys.stage3_max_live_parameters >= 2", "std::optional<int> stage;", "const int n = 1'000; // 'stage == 1'", "for (int stage : kStages)"))}),
    (rules.json_readers, {"core/json/a.cc": "json::parse(text)\n", "tests/a.cc": "json::parse(text)\n", "train/a.cc": "parse_json(text)\n"}),
    (rules.order_of_sets, {"python/tessera/a.py": SETS + "for e in sorted(_engines): pass\nany(x for x in self._held)\n{id(e) for e in _engines}\n"
                           "sorted(x for x in {1})\nfor x in {1: 2}: pass\n"}),
    (rules.file_lengths, {"core/a.cc": "\n" * 900, "docs/a.md": "\n" * 2000, ".deps/a.py": "\n" * 901, "build-asan/a.cc": "\n" * 901}),
]


class EachRule(unittest.TestCase):
    def test_catches_what_breaks_it(self):
        for rule, files, where in BROKEN:
            with self.subTest(rule.__name__, where=where):
                complaints = in_a_tree(rule, files)
                self.assertEqual([complaint.split(": ")[0] for complaint in complaints], [where], complaints)
        self.assertEqual({rule for rule, _, _ in BROKEN}, set(rules.ALL_RULES))

    def test_accepts_what_does_not(self):
        for rule, files in ACCEPTED:
            with self.subTest(rule.__name__):
                self.assertEqual(in_a_tree(rule, files), [])


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
