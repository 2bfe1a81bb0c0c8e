"""README.md is true: its code is the example's, its commands exist and print what it shows, its links lead somewhere."""
import re
import shlex
import unittest

from tool import EXAMPLE_MINIMAL, ROOT, TESSERA, ToolTest

README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def anchors(text):
    """The names GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


class ReadmeTest(ToolTest):
    def test_code_is_the_examples(self):
        self.assertEqual(fenced(README, "cpp"), [(ROOT / "examples/minimal/main.cc").read_text(encoding="utf-8")])

    def test_links(self):
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
            text = page.read_text(encoding="utf-8")
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if re.match(r"https?:", target):
                    continue
                with self.subTest(page=page.name, target=target):
                    path, _, anchor = target.partition("#")
                    linked = (page.parent / path) if path else page
                    self.assertTrue(linked.exists())
                    if anchor:
                        self.assertIn(anchor, anchors(linked.read_text(encoding="utf-8")))

    def test_make_commands(self):
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
        self.assertLessEqual({"demo", "test"}, named)
        self.assertLessEqual(named, targets)

    def test_files_named_exist(self):
        for name in re.findall(r"\b(?:configs|docs|examples|scripts)/[\w./]+\w", README):
            with self.subTest(name=name):
                self.assertTrue((ROOT / name).exists())

    def test_nothing_is_left_open(self):
        self.assertNotRegex(README, r"@[A-Z]+@|TODO|FIXME")

    def test_error_is_what_the_command_says(self):
        blocks = re.findall(r"^\$ build/tessera (train .*)\n(error: .*)\n", README, re.MULTILINE)
        self.assertEqual(len(blocks), 1)
        command, error = blocks[0]
        args = [str(ROOT / word) if word.startswith("configs/") else word for word in shlex.split(command)]
        self.assert_one_error(self.run_tool(*args), error)

    def test_example_runs_on_two_ranks(self):
        command = re.search(r"^build/tessera launch (.*) -- build/example_minimal (\S+)$", README, re.MULTILINE)
        outcome = self.run_tool("launch", *command[1].split(), "--", EXAMPLE_MINIMAL, ROOT / command[2])
        self.assertEqual(outcome.code, 0, outcome)
        losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", outcome.out, re.MULTILINE)]
        self.assertEqual(len(losses), 5, outcome)
        self.assertLess(losses[-1], losses[0] / 2, outcome)
        self.assert_nothing_runs()

    def test_example_says_what_is_wrong(self):
        outcome = self.run_tool("no.json", program=EXAMPLE_MINIMAL)
        self.assert_one_error(outcome, "no.json: cannot be opened")

    def test_commands_shown_exist(self):
        helps = {name: self.run_tool(name, "--help").out for name in ("train", "eval", "predict", "launch", "inspect", "consolidate", "memory")}
        for name, rest in re.findall(r"build/tessera (\w+) (.*)$", README, re.MULTILINE):
            for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest.split(" -- ")[0]):
                with self.subTest(command=name, flag=flag):
                    self.assertRegex(helps[name], rf"(?<![\w-]){re.escape(flag)}(?![\w-])")


if __name__ == "__main__":
    unittest.main()
