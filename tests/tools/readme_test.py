"""README.md is true: its code is the example's, its commands exist and print what it shows. The flags that any page shows exist.

Links and names of files: tests/architecture/documents.py.
"""
import json
import re
import shlex
import sys
import textwrap
import unittest

from tool import EXAMPLE_MINIMAL, ROOT, ToolTest

README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """(subcommand, the rest of the line) of every `tessera` command in code blocks and spans."""
    blocks = re.findall(r"^ *```([a-z]*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    code = [block.replace("\\\n", " ") for language, block in blocks if language != "text"]
    code += re.findall(r"`([^`\n]+)`", text)
    for line in "\n".join(code).splitlines():
        line = re.split(r" # | -- |[;|&>]", line)[0]
        yield from re.findall(r"(?<![\w/.-])(?:build/|/opt/tessera/bin/)?tessera ([a-z]+)((?: .*)?)$", line)


class ReadmeTest(ToolTest):
    def test_code_is_the_examples(self):
        example = (ROOT / "examples/minimal/main.cc").read_text(encoding="utf-8")
        shown = fenced(README, "cpp")
        self.assertEqual(len(shown), 1)
        self.assertIn("main(int argc, char** argv) try {\n" + textwrap.indent(shown[0], "  ") + "}", example, "all lines of its main()")

    def test_first_screen(self):
        """README.md begins with what Tessera is, the picture, what changes in a loop, pip, the numbers and the two commands, in this order; then C++."""
        parts = [README.index(part) for part in ("Tessera is ", "](docs/peers.svg)", "```diff", "pip install ", "<!-- table of make bench-peers: begin",
                                                 "make demo ", "make test ", "## ", "tessera::initialize")]
        self.assertEqual(parts, sorted(parts))
        self.assertLess(README[:parts[3]].count("\n"), 45)

    def test_facts_of_the_first_line(self):
        facts = README.splitlines()[2].split(" · ")
        python, minors, system, tests, license = facts
        torch = re.search(r"set\(TESSERA_TORCH_MINORS ([0-9. ]+)\)", (ROOT / "cmake/Torch.cmake").read_text(encoding="utf-8"))[1].split()
        self.assertEqual(minors, f"torch {torch[0]} to {torch[-1]}")
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        self.assertIn(f'license = "{license}"', project)
        oldest = tuple(map(int, re.fullmatch(r"Python (3)\.(\d+) or newer", python).groups()))
        self.assertLessEqual(oldest, sys.version_info[:2], "what runs the tests")
        self.assertGreaterEqual(oldest, tuple(map(int, re.search(r'requires-python = ">=(3)\.(\d+)"', project).groups())))
        self.assertEqual(system, "Linux x86-64")
        self.assertIn("manylinux_2_35_x86_64", (ROOT / "Makefile").read_text(encoding="utf-8"))
        num_tests = sum(len(re.findall(r"^TEST(?:_[FP])?\(|^    def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
                        for path in (ROOT / "tests").rglob("*_test.*") if path.suffix in {".cc", ".py"})
        self.assertGreater(num_tests, int(re.fullmatch(r"more than ([\d,]+) tests", tests)[1].replace(",", "")))

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

    def test_ten_keys_that_matter(self):
        """docs/configuration.md's file of ten keys trains, and has the keys of the list below it."""
        page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        section = re.search(r"^## Ten keys that matter\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)[1]
        (text,) = fenced(section, "json")
        keys = re.findall(r"^- `([\w.]+)`:", section, re.MULTILINE)
        self.assertEqual(len(set(keys)), 10)
        for key in keys:
            value = json.loads(text)
            for part in key.split("."):
                self.assertIn(part, value, key)
                value = value[part]
        outcome = self.run_tool("launch", "-n", 2, "--", EXAMPLE_MINIMAL, self.write("ten.json", text))
        self.assertEqual(outcome.code, 0, outcome)
        self.assertNotIn("warning", outcome.out + outcome.err)
        self.assertEqual(len(re.findall(r"^step \d+ loss", outcome.out, re.MULTILINE)), 5, outcome)

    def test_estimates_shown_are_printed(self):
        """docs/memory.md and docs/offload.md show what `memory --estimate` prints."""
        text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
        command = re.search(r"^build/tessera (memory --estimate configs/.*)$", text, re.MULTILINE)[1]
        shown = re.search(r"^The first prints\n\n```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
        outcome = self.run_tool(*[str(ROOT / word) if word.startswith("configs/") else word for word in command.split()])
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(shown.count("\nstage "), 4)
        for part in shown.split("\n...\n"):
            self.assertIn(part.strip(), outcome.out)

        text = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
        command = re.search(r"`tessera (memory --estimate --params [^`]*)`", text)[1]
        printed = self.run_tool(*command.split(), "--precision", "bf16").out.split("on GPUs")[1]
        stages = {line.split()[1]: line.split()[2:] for line in printed.splitlines() if line.startswith("stage ")}
        columns = [stages["1"][:2], stages["2"][:2], stages["3"][2:4]]  # the optimizer on the host, and the parameters too

        def shown_at(label):
            return re.findall(r"\d+\.\d+", re.search(rf"^\| {label} \|(.*)$", text, re.MULTILINE)[1])

        self.assertEqual([shown_at("on the device"), shown_at("on the host")], [list(row) for row in zip(*columns, strict=True)])

    def test_example_says_what_is_wrong(self):
        outcome = self.run_tool("no.json", program=EXAMPLE_MINIMAL)
        self.assert_one_error(outcome, "no.json: cannot be opened")

    def test_commands_shown_exist(self):
        helps, num_flags = {}, 0
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
            for name, rest in commands(page.read_text(encoding="utf-8")):
                if name not in helps:
                    helps[name] = self.run_tool(name, "--help")
                    self.assertEqual(helps[name].code, 0, f"{page.name}: tessera {name}")
                for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest):
                    num_flags += 1
                    with self.subTest(page=page.name, command=name, flag=flag):
                        self.assertRegex(helps[name].out, rf"(?<![\w-]){re.escape(flag)}(?![\w-])")
        self.assertLessEqual({"train", "eval", "predict", "launch", "inspect", "consolidate", "convert", "memory"}, set(helps))
        self.assertGreater(num_flags, 40)


if __name__ == "__main__":
    unittest.main()
