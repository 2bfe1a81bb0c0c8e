"""What `tessera completion` prints, beside --help: bash's own completion, zsh's and man's own readers."""
import re
import shutil
import subprocess
import unittest

from tool import ToolTest

COMPLETE = """
complete_words() {
  COMP_WORDS=("$@")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _tessera
  echo "${COMPREPLY[@]}"
}
"""


class CompletionTest(ToolTest):
    known = {}  # what was printed: the same each time

    def printed(self, *arguments):
        if arguments not in self.known:
            outcome = self.run_tool(*arguments)
            self.assert_succeeded(outcome)
            self.known[arguments] = outcome.out
        return self.known[arguments]

    def bash(self, *words):
        """What bash offers for the last of the words."""
        done = subprocess.run(["bash", "--norc", "-c", f"{self.printed('completion', 'bash')}{COMPLETE}complete_words \"$@\"", "bash", "tessera", *words],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.split()

    def options_by_help(self, *command):
        """The options that --help shows, and the commands."""
        text = self.printed(*command, "--help")
        names = re.findall(r"^  (-[\w-]+(?:, -[\w-]+)*)", text, re.MULTILINE)
        return ", ".join(names).split(", "), re.findall(r"^  ([a-z]+)  ", text.partition("Subcommands:")[2], re.MULTILINE)

    def test_bash_offers_what_help_shows(self):
        options, commands = self.options_by_help()
        self.assertGreater(len(commands), 8)
        self.assertEqual(self.bash(""), [*commands, *options])
        self.assertEqual(self.bash("insp"), ["inspect"])
        for command in commands:
            with self.subTest(command=command):
                self.assertEqual(sorted(set(self.bash(command, "-"))), sorted(set(self.options_by_help(command)[0])))
        self.assertEqual(self.bash("inspect", "--v"), ["--verify"])
        self.assertEqual(self.bash("inspect", "runs"), [], "files are bash's")
        self.assertEqual(self.bash("completion", ""), ["bash", "zsh", "man"])

    def test_bash_leaves_the_program_behind_two_dashes_alone(self):
        self.assertEqual(self.bash("launch", "--nn"), ["--nnodes"])
        self.assertEqual(self.bash("launch", "--", "program", "--nn"), [])

    def test_zsh_names_what_help_shows(self):
        text = self.printed("completion", "zsh")
        for command in self.options_by_help()[1]:
            (case,) = re.findall(rf"^    {command}\)\n(.*?);;$", text, re.MULTILINE | re.DOTALL)
            self.assertEqual(sorted(set(re.findall(r"^ +'\*?(-[\w-]+)[=+]?\[", case, re.MULTILINE))), sorted(set(self.options_by_help(command)[0])))
        self.assertEqual(text.count("'*--env-file=["), text.count("--env-file=["), "may be given several times")
        if shutil.which("zsh"):
            done = subprocess.run(["zsh", "-fn", "/dev/stdin"], input=text, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipUnless(shutil.which("man"), "man is not installed")
    def test_man_reads_its_page_without_a_warning(self):
        page = self.folder / "tessera.1"
        page.write_text(self.printed("completion", "man"), encoding="utf-8")
        done = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True, check=False,
                              env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "MANWIDTH": "100", "MAN_KEEP_FORMATTING": "", "PAGER": "cat"})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for command in self.options_by_help()[1]:
            section = re.split(r"\n   tessera [a-z]+\n", done.stdout.partition(f"\n   tessera {command}\n")[2])[0]
            self.assertTrue(section, command)
            for option in self.options_by_help(command)[0]:
                self.assertIn(option, section)

    def test_another_program_is_refused(self):
        outcome = self.run_tool("completion", "fish")
        self.assertEqual((outcome.code, outcome.err.splitlines()[-1].rpartition("error: ")[2]), (1, "completion fish: expected bash, zsh or man"))


if __name__ == "__main__":
    unittest.main()
