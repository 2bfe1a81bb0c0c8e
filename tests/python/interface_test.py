"""The stub says what the module has; the public names have docstrings that read well."""
import ast
import inspect
import unittest
from pathlib import Path

import tessera
from tessera import _engine

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "tessera"


def names_of(body):
    return {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))} | \
        {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


class Interface(unittest.TestCase):
    def test_the_stub_has_what_the_module_has(self):
        stub = ast.parse((PACKAGE / "_engine.pyi").read_text())
        self.assertEqual(names_of(stub.body), {name for name in dir(_engine) if not name.startswith("_")} | {"__version__"})
        for node in stub.body:
            if isinstance(node, ast.ClassDef):
                real = {name for name in vars(getattr(_engine, node.name)) if not name.startswith("_")}
                self.assertEqual(names_of(node.body) - {"__init__"}, real, node.name)

    def test_every_public_function_says_what_it_does(self):
        for module in (tessera, tessera.comm, tessera.zero):
            for name, value in vars(module).items():
                if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
                    self.assertTrue(inspect.getdoc(value), f"{module.__name__}.{name}")
        for section in ("Parameters", "Returns", "Raises", "Examples"):
            self.assertIn(f"{section}\n{'-' * len(section)}", inspect.getdoc(tessera.initialize))

    def test_initialize_has_deepspeeds_signature(self):
        self.assertEqual(list(inspect.signature(tessera.initialize).parameters)[:11],
                         ["args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
                          "dist_init_required", "collate_fn", "config"])

    def test_files_are_short(self):
        for path in PACKAGE.glob("*.py"):
            self.assertLess(path.read_text().count("\n"), 400, path.name)


if __name__ == "__main__":
    unittest.main()
