"""The wheel's metadata that depend on the torch it is built for: its dependency, and the local part of its version.

A plugin of scikit-build-core (https://scikit-build-core.readthedocs.io, [[tool.dynamic-metadata]] in pyproject.toml). torch is looked for
in the Python that builds, and not imported.
"""
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Provider:
    """`version` is that of CMakeLists.txt, in a wheel with "+torch2.11" after it; `dependencies` is "torch==2.11.*" in a wheel."""

    def build_state(self, build_state: str) -> None:
        self._is_wheel = build_state != "sdist"

    def dynamic_metadata(self, _settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, Any]:
        version = re.search(r"project\(tessera VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
        if not self._is_wheel:
            return {"version": version, "dependencies": ["torch"]}
        minor = _torch_minor()
        return {"version": f"{version}+torch{minor}", "dependencies": [f"torch=={minor}.*"]}

    def dynamic_wheel(self, _settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}


def _torch_minor():
    supported = re.search(r"set\(TESSERA_TORCH_MINORS ([0-9. ]+)\)", (ROOT / "cmake" / "Torch.cmake").read_text(encoding="utf-8"))[1].split()
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"error: torch was not found in the Python that builds tessera: expected torch {' or '.join(supported)}, installed before, "
                         "and pip's --no-build-isolation") from None
    minor = ".".join(version.split(".")[:2])
    if minor not in supported:
        raise SystemExit(f"error: found torch {version}: expected torch {' or '.join(supported)}")
    return minor
