"""Each program of examples/gallery runs on two ranks, and its last line is the one in its docstring; the notebook runs, and shows pictures."""
import ast
import importlib.util
import json
import re
import sys
import unittest

from ranks import ROOT, TESSERA, RanksTest, python

GALLERY = ROOT / "examples" / "gallery"
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
PROGRAMS = sorted(GALLERY.glob("*.py"))
NOTEBOOK = GALLERY / "memory_and_losses.ipynb"


def packages_of(source):
    return {name.partition(".")[0] for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])}


def words_of(program):
    """(what is installed for it; the command that starts it; its last line), as its docstring says them."""
    indented = re.findall(r"(?m)^ {4}(\S.*)$", ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))))
    return [line for line in indented if line.startswith("pip install ")], *indented[-2:]


class Gallery(RanksTest):
    def needs(self, packages, how):
        if missing := sorted(name for name in packages if importlib.util.find_spec(name) is None):
            self.skipTest(f"{', '.join(missing)} not installed in {sys.prefix}; expected {how}")

    def run_program(self, program):
        source = program.read_text(encoding="utf-8")
        installed, _, last = words_of(program)
        self.needs(packages_of(source), f"what requirements.txt lists, and: {'; '.join(installed) or 'nothing more'}")
        (text,) = self.finish([self.start(TESSERA, "launch", "-n", 2, "--", *python(), program, PYTHONWARNINGS="ignore")], timeout_s=1200)
        self.assertEqual(text.splitlines()[-1], last, text)
        if program.stem == "trainer":  # a model for transformers
            import transformers
            classify = transformers.pipeline("text-classification", str(self.folder / "runs" / "trainer"))
            (answer,) = classify(["The cutoff frequency of the lowpass filter, in Hz, relative to the sampling frequency."])
            self.assertEqual(answer["label"], "scipy.signal")

    def test_notebook(self):
        self.needs(["nbclient", "ipykernel", "matplotlib"], "pip install nbclient ipykernel matplotlib")
        import nbclient
        import nbformat
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(self.folder)}}).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        self.assertEqual(sum("image/png" in output.get("data", {}) for output in outputs), 2, outputs)
        printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
        self.assertEqual(printed, "equal: True\nless at stage 3: True\n")


class Files(unittest.TestCase):
    def test_each_is_short_and_says_how_it_is_run(self):
        self.assertGreater(len(PROGRAMS), 7)
        for program in PROGRAMS:
            with self.subTest(program.name):
                _, command, last = words_of(program)
                self.assertEqual(command, f"tessera launch -n 2 -- python examples/gallery/{program.name}")
                self.assertIn(last, PAGE)
                self.assertIn(f"(../examples/gallery/{program.name})", PAGE)
                self.assertLessEqual(len(program.read_text(encoding="utf-8").splitlines()), 80)

    def test_the_notebook_has_no_outputs(self):
        code = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        self.assertGreater(len(code), 1)
        self.assertEqual([(cell["outputs"], cell["execution_count"]) for cell in code], [([], None)] * len(code))


for _program in PROGRAMS:
    setattr(Gallery, f"test_{_program.stem}", lambda test, program=_program: test.run_program(program))

if __name__ == "__main__":
    unittest.main(verbosity=2)
