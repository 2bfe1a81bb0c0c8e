"""The documents keep the rules of documents.py, and the rows of Python's tests those of suites.py; each rule catches what breaks it. The edits of
mutants.toml fit the code."""
import sys
import unittest
from pathlib import Path

import documents
from source_tree import in_a_tree

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "mutants")]
import mutants  # noqa: E402
import suites  # noqa: E402


class TheDocuments(unittest.TestCase):
    def test_keep_every_rule(self):
        for rule in documents.ALL_RULES:
            with self.subTest(rule=rule.__name__):
                complaints = rule(ROOT)
                self.assertEqual(complaints, [], "\n" + "\n".join(complaints))

    def test_are_looked_at(self):
        names = {path.as_posix() for path, _ in documents.documents(ROOT)}
        self.assertLessEqual({"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/README.md", "docs/configuration.md"}, names)

    def test_index_has_every_page(self):
        index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
        pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
        linked = set(documents.re.findall(r"\]\(([\w-]+\.md)\)", index))
        self.assertEqual(pages - linked, set(), "docs/README.md does not list these pages")

    def test_site_has_every_page_and_public_header(self):
        """`make docs` says so, too, and is not a part of the suite."""
        listed = set(documents.re.findall(r"(\S+)\.md$", (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8"), documents.re.MULTILINE))
        headers = documents.re.findall(r'^#include "(.*)"', (ROOT / "tessera.h").read_text(encoding="utf-8"), documents.re.MULTILINE)
        pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} | {f"reference/cpp/{header}" for header in headers}
        self.assertEqual(pages - listed, set(), "nav of docs/site/mkdocs.yml does not list these pages")


TARGETS = {"docs/b.md": "# A title, here\n## Twice\n## Twice\n```\n# not a title\n```\n", "docs/c.svg": "", "top.md": ""}
NAMED = {"core/a.h": "", "docs/b.md": ""}
NOTES = {"zero/a.h": "// [Note: one order of\n// things] says it.\n"}
DEFINED = {"zero/a.h": "// [Note: order]\n// One.\n", "zero/b.h": "// see [Note: order] in a.h.\n// [Note: order] in\n// zero/a.h\n"}
MEMBERS = {"zero/a.h": "class A {\n  void b();\n};\n"}
OWNED = {"tests/a_test.cc": "TEST_P(A, B) {}\n"}
PRINTED = {"core/a.cc": 'throw Error("no ", bytes, " MiB of \\"shm\\" "\n            "are left");\n'}
MAKEFILE = {"Makefile": "demo:\nbench-peers: x\n"}
# A rule, a tree that breaks it, and where: one sample for each complaint, or for each form in which the rule finds it.
BROKEN = [
    *((documents.links, {**TARGETS, "docs/a.md": f"\n{link}\n"}, "docs/a.md:2")
      for link in ("[x](c.md)", "[x](b.md#not-a-title)", "[x](#none)", "[x](../../out.md)", "[x](/docs/b.md)", '<img src="b.png">', "[x]: none.md")),
    (documents.files_named, {**NAMED, "x.md": "`core/a.h` and\n`core/none.h`\n"}, "x.md:2"),
    (documents.files_named, {**NAMED, "x.md": "```\ncat core/shm/\n```\n"}, "x.md:2"),
    *((documents.files_in_comments, {"core/a_b.h": f"// core/a_b.h, a_b.h\n// {name}\n"}, "core/a_b.h:2") for name in ("core/none.h", "none_b.cc")),
    (documents.pages_named, {"core/a.h": "// docs/a.md\n// docs/none.md\n", "docs/a.md": ""}, "core/a.h:2"),
    (documents.notes_named, {**NOTES, "a.md": "see [Note: another]\n"}, "a.md:1"),
    *((documents.notes_in_their_files, {**DEFINED, "zero/c.cc": text}, "zero/c.cc:1")
      for text in ("// See [Note: order] in b.h.\n", "// See [Note:\n// none] in\n// a.h\n")),
    (documents.members_named, {**MEMBERS, "docs/architecture.md": "`A::b`\n`A::c`\n"}, "docs/architecture.md:2"),
    (documents.owners_have_their_tests, {**OWNED, "tests/README.md": "\n| a | `tests/a_test.cc` | `A`, `C` |\n"}, "tests/README.md:2"),
    (documents.messages_quoted, {**PRINTED, "a.md": "```text\nno … MiB\nno … MB of\n```\n"}, "a.md:3"),
    (documents.messages_quoted, {"a.cc": '"; the kernel killed it because memory ran out" "; the launcher ended it" " (killed)"',
                                 "a.md": "```text\n(killed); the launcher killed it because memory ran out\n```\n"}, "a.md:2"),
    (documents.messages_quoted, {"tests/a.cc": '"no room"', "a.md": "1. One:\n\n   ```text\n   error: no room\n   ```\n"}, "a.md:4"),
    *((documents.make_commands, {**MAKEFILE, "a.md": text + "\n"}, f"a.md:{line}") for text, line in (("`make none`", 1), ("```\nmake none\n```", 2), ("    make none", 1))),
]
# What looks like it, and is none.
ACCEPTED = [
    *((documents.links, {**TARGETS, "docs/a.md": link + "\n"})
      for link in ("[x](b.md)", "[x](b.md#a-title-here)", "[x](b.md#twice-1)", "[x](../top.md)", "![x](c.svg)", "[x](https://x.org/y)",
                   "[x](mailto:a@b)", "`[x](none.md)`", "```\n[x](none.md)\n```", "## A `title`\n[x](#a-title)")),
    (documents.files_named, {**NAMED, "x.md": "core/a.h. `core/` runs/none.json include/core/none.h core/loss ../core/none.h https://core/none.h docs/b.md#x\n"}),
    (documents.files_in_comments, {"core/a.h": "#include <none/b_c.h>\n// a.cc, *_internal.h, torch/script.h\n"}),
    (documents.pages_named, {"core/a.h": "// mlflow.org/docs/latest.html\n"}),
    (documents.notes_named, {**NOTES, "a.md": "see [Note: one order\nof things]\n"}),
    (documents.notes_in_their_files, DEFINED),
    (documents.members_named, {**MEMBERS, "docs/architecture.md": "`A::b`, `A::b()`, `A`\n"}),
    (documents.owners_have_their_tests, {**OWNED, "tests/README.md": "| a | `tests/a_test.cc` | `A`, `B` |\n"}),
    (documents.messages_quoted, {**PRINTED, "a.md": "```text\nCommError: no … MiB of \"shm\" are left\n```\n```\nnot ours\n```\n"}),
    (documents.make_commands, {**MAKEFILE, "a.md": "`make demo`\n    make bench-peers ARGS=x\n```\nmake demo\n```\nThese\nmake it fast. `make`\n"}),
]


class EachRule(unittest.TestCase):
    def test_catches_what_breaks_it(self):
        for rule, files, where in BROKEN:
            with self.subTest(rule.__name__, where=where, files=files):
                complaints = in_a_tree(rule, files)
                self.assertEqual([complaint.split(": ")[0] for complaint in complaints], [where], complaints)
        self.assertEqual({rule for rule, _, _ in BROKEN}, set(documents.ALL_RULES))

    def test_accepts_what_does_not(self):
        for rule, files in ACCEPTED:
            with self.subTest(rule.__name__, files=files):
                self.assertEqual(in_a_tree(rule, files), [])


CHECKED = "@check\ndef a():\n    pass\n\n@each_stage\ndef b(stage):\n    pass\n\nmain()\n"
ROWS = "name test 2 p.py auto"


class TheMutants(unittest.TestCase):
    """`make mutants` puts them in, which takes minutes."""

    def test_fit_the_code(self):
        self.assertEqual([stale for mutant in mutants.read_list(mutants.LIST) if (stale := mutants.stale(ROOT, mutant))], [])


class RowsOfPythonsTests(unittest.TestCase):
    def test_run_every_check(self):
        self.assertEqual(suites.complaints(suites.rows(), *suites.programs_and_others()), [])

    def test_what_is_wrong_is_said(self):
        for rows, program, said in (
                (f"{ROWS} : a", CHECKED, "p.py: no row runs b"), (f"{ROWS} : -a", CHECKED, "p.py: no row runs a"),
                (f"{ROWS} : -c", CHECKED, "p.py: no check is named c"), ("name test 2 p.py! auto", CHECKED, "p.py: a row leaves out its checks, and it has some"),
                (ROWS, "main()\n", "p.py: a row runs its checks, and it has none"), (ROWS, CHECKED + CHECKED.replace("main()", ""), "two checks are named a"),
                (ROWS, "main()\n" + CHECKED, "p.py:3: a check after main() does not run"), ("name test 2 q.py auto", CHECKED, "q.py: there is no such program")):
            with self.subTest(said):
                self.assertIn(said, "\n".join(suites.complaints(suites.rows(rows), {"p.py": program})))
        self.assertEqual(suites.complaints(suites.rows(ROWS), {"p.py": CHECKED, "q.py": ""}), ["q.py: nothing runs it"])
        self.assertEqual(suites.complaints(suites.rows(f"{ROWS} : a\nand full 1 p.py gloo : b"), {"p.py": CHECKED, "q.py": ""}, "q.py"), [])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
