"""The public names have docstrings that read well."""
import inspect
import os
import re
import subprocess
import sys
import tempfile
import typing
import unittest
from pathlib import Path

import tessera

STUB = Path(__file__).resolve().parents[2] / "python" / "tessera" / "_engine.pyi"


def public_names():
    """(name, function, class or property) of all that `import tessera` offers, methods included."""
    for module in (tessera, tessera.comm, tessera.errors, tessera.zero):
        yield module.__name__, module
        for name, value in vars(module).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("tessera"):
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                members = [pair for base in value.__mro__ if base.__module__.startswith("tessera") for pair in vars(base).items()]
                for member, attribute in members:
                    if not member.startswith("_") and (inspect.isfunction(attribute) or isinstance(attribute, property)):
                        yield f"{module.__name__}.{name}.{member}", attribute


class Interface(unittest.TestCase):
    def test_every_public_name_has_a_docstring(self):
        names = dict(public_names())
        self.assertGreater(len(names), 80)
        for name, value in names.items():
            self.assertTrue((inspect.getdoc(value) or "").strip(), name)

    def test_every_public_function_has_types(self):
        for name, value in public_names():
            function = value.fget if isinstance(value, property) else value
            if not inspect.isfunction(function):
                continue
            types = typing.get_type_hints(inspect.unwrap(function))
            arguments = [argument for argument in inspect.signature(function).parameters if argument != "self"]
            self.assertEqual(sorted(types), sorted([*arguments, "return"]), name)

    def test_sections_are_numpys(self):
        """Every argument that a section "Parameters" lists is one of the function, in its order."""
        with_sections = 0
        for name, value in public_names():
            function = value.__init__ if inspect.isclass(value) else value
            text = inspect.getdoc(value) or ""
            if not inspect.isfunction(function) or "Parameters\n----------" not in text:
                continue
            section = re.search(r"Parameters\n-+\n(.*?)(?=\n\w+\n---|\Z)", text, re.DOTALL)[1]
            listed = [one.strip().lstrip("*") for line in re.findall(r"^(\S.*)$", section, re.MULTILINE) for one in line.split(" : ")[0].split(",")]
            arguments = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "_")]
            self.assertEqual(sorted(set(listed) - set(arguments)), [], name)
            self.assertEqual(sorted(set(arguments) - set(listed)), [], name)
            with_sections += 1
        self.assertGreaterEqual(with_sections, 15)

    def test_initialize_has_all_sections(self):
        for section in ("Parameters", "Returns", "Raises", "Examples"):
            self.assertIn(f"{section}\n{'-' * len(section)}", inspect.getdoc(tessera.initialize))

    def test_initialize_has_deepspeeds_signature(self):
        self.assertEqual(list(inspect.signature(tessera.initialize).parameters)[:11],
                         ["args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
                          "dist_init_required", "collate_fn", "config"])

    def test_the_stub_says_what_is_in_the_module(self):
        """python/tessera/_engine.pyi is what pybind11-stubgen writes of the module that was built; BLESS=1 writes it anew. It is a file of the tree
        because importing the module to make it needs all of torch's libraries, which compiling does not."""
        with tempfile.TemporaryDirectory(prefix="tessera_stub_") as folder:
            subprocess.run([sys.executable, "-B", "-m", "pybind11_stubgen", "--exit-code", "-o", folder, "tessera._engine"], check=True, capture_output=True)
            made = (Path(folder) / "tessera" / "_engine.pyi").read_text(encoding="utf-8")
        made = re.sub(r"^(__version__: str) = .*$", r"\1", made, flags=re.MULTILINE)  # stands in CMakeLists.txt alone
        if os.environ.get("BLESS"):
            STUB.write_text(made, encoding="utf-8")
        self.assertTrue(STUB.read_text(encoding="utf-8") == made, f"{STUB} differs: BLESS=1 ctest --test-dir build -R python_interface writes it anew")


if __name__ == "__main__":
    unittest.main()
