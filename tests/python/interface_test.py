"""The stub says what the module has; the public names have docstrings that read well."""
import ast
import inspect
import re
import typing
import unittest
from pathlib import Path

import tessera
from tessera import _engine

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "tessera"


def is_property(node):
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)


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
                self.assertEqual({name for name in names_of(node.body) if not name.startswith("_")}, real, node.name)

    def test_the_stub_has_the_modules_arguments(self):
        """pybind11 writes each function's arguments into its docstring: name(self: ..., tensor: ...) -> ..."""
        stub = ast.parse((PACKAGE / "_engine.pyi").read_text())
        functions = [("", node, getattr(_engine, node.name)) for node in stub.body if isinstance(node, ast.FunctionDef)]
        for owner in stub.body:
            if isinstance(owner, ast.ClassDef):
                functions += [(owner.name, node, vars(getattr(_engine, owner.name))[node.name]) for node in owner.body
                              if isinstance(node, ast.FunctionDef) and not is_property(node)
                              and node.name in vars(getattr(_engine, owner.name)) and node.name != "__exit__"]
        self.assertGreater(len(functions), 40)
        for owner, node, real in functions:
            signature = real.__doc__.splitlines()[0]
            inside = re.search(r"\((.*)\) -> ", signature)[1]
            for _ in range(2):  # the insides of types: tuple[str, list[int]]
                inside = re.sub(r"\[[^\[\]]*\]", "", inside)
            names = re.findall(r"(?:^|, )(\w+):", inside)
            expected = [argument.arg for argument in node.args.args]
            self.assertEqual(names, expected, f"{owner}.{node.name}: {signature}")

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


if __name__ == "__main__":
    unittest.main()
