"""The documents keep the rules of documents.py, and each rule catches a document that breaks it."""
import sys
import tempfile
import unittest
from pathlib import Path

import documents

ROOT = Path(__file__).resolve().parents[2]


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


class EachRule(unittest.TestCase):
    """`check` writes a small tree and gives it to one rule."""

    def check(self, rule, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return rule(folder)

    def assert_caught(self, rule, files, *where):
        complaints = self.check(rule, files)
        self.assertEqual([complaint.split(": ")[0] for complaint in complaints], list(where), complaints)

    def assert_accepted(self, rule, files):
        self.assertEqual(self.check(rule, files), [])

    def test_broken_links(self):
        page = {"docs/b.md": "# A title, here\n"}
        for link in ["[x](c.md)", "[x](b.md#no-title)", "[x](#none)", "[x](../../out.md)", "[x](/docs/b.md)", "![x](b.svg)",
                     '<img src="b.png">', "[x]: none.md"]:
            with self.subTest(link=link):
                self.assert_caught(documents.links, {**page, "docs/a.md": f"\n{link}\n"}, "docs/a.md:2")

    def test_links_that_hold(self):
        files = {"docs/b.md": "# A title, here\n## Twice\n## Twice\n```\n# not a title\n```\n", "docs/c.svg": "", "top.md": ""}
        for link in ["[x](b.md)", "[x](b.md#a-title-here)", "[x](b.md#twice-1)", "[x](../top.md)", "![x](c.svg)", "[x](https://x.org/y)",
                     "[x](mailto:a@b)", "`[x](none.md)`", "```\n[x](none.md)\n```", "## A `title`\n[x](#a-title)"]:
            with self.subTest(link=link):
                self.assert_accepted(documents.links, {**files, "docs/a.md": link + "\n"})
        self.assert_caught(documents.links, {**files, "docs/a.md": "[x](b.md#not-a-title)\n"}, "docs/a.md:1")

    def test_files_that_are_named(self):
        files = {"core/a.h": "", "docs/b.md": ""}
        self.assert_caught(documents.files_named, {**files, "x.md": "`core/a.h` and\n`core/none.h`\n```\ncat core/shm/\n```\n"}, "x.md:2",
                           "x.md:4")
        for text in ["core/a.h.", "`core/`", "runs/none.json", "include/core/none.h", "core/loss", "../core/none.h", "https://core/none.h",
                     "docs/b.md#x"]:
            with self.subTest(text=text):
                self.assert_accepted(documents.files_named, {**files, "x.md": text + "\n"})

    def test_pages_that_sources_name(self):
        self.assert_caught(documents.pages_named, {"core/a.h": "// docs/a.md\n// docs/none.md\n", "docs/a.md": ""}, "core/a.h:2")
        self.assert_accepted(documents.pages_named, {"core/a.h": "// mlflow.org/docs/latest.html\n"})

    def test_notes(self):
        source = {"zero/a.h": "// [Note: one order of\n// things] says it.\n"}
        self.assert_accepted(documents.notes_named, {**source, "a.md": "see [Note: one order\nof things]\n"})
        self.assert_caught(documents.notes_named, {**source, "a.md": "see [Note: another]\n"}, "a.md:1")

    def test_notes_in_their_files(self):
        source = {"zero/a.h": "// [Note: order]\n// One.\n", "zero/b.h": "// see [Note: order] in a.h.\n// [Note: order] in\n// zero/a.h\n"}
        self.assert_accepted(documents.notes_in_their_files, source)
        for text in ["// See [Note: order] in b.h.\n", "// See [Note: none] in a.h.\n", "// See [Note:\n// order] in\n// c.h\n"]:
            with self.subTest(text=text):
                self.assertEqual(len(self.check(documents.notes_in_their_files, {**source, "zero/c.cc": text})), 1)

    def test_members_named(self):
        source = {"zero/a.h": "class A {\n  void b();\n};\n"}
        self.assert_accepted(documents.members_named, {**source, "docs/architecture.md": "`A::b`, `A::b()`, `A`\n"})
        self.assert_caught(documents.members_named, {**source, "docs/architecture.md": "`A::b`\n`A::c`\n`B::b`\n"},
                           "docs/architecture.md:2", "docs/architecture.md:3")

    def test_make(self):
        files = {"Makefile": "demo:\nbench-peers: x\n"}
        for text in ["`make demo`", "    make bench-peers ARGS=x", "```\nmake demo\n```", "These\nmake it fast.", "`make`"]:
            with self.subTest(text=text):
                self.assert_accepted(documents.make_commands, {**files, "a.md": text + "\n"})
        for text in ["`make none`", "```\nmake none\n```", "    make none"]:
            with self.subTest(text=text):
                self.assertEqual(len(self.check(documents.make_commands, {**files, "a.md": text + "\n"})), 1)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
