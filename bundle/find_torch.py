"""Prints the folders of libtorch's libraries in this Python, joined by ":", or one line of what is wrong (exit code 1).

    python3 find_torch.py 2.11

torch is looked for and not imported, which would take seconds.
"""
import importlib.util
import re
import sys
from pathlib import Path


def fail(message):
    sys.exit(f"error: {message}")


def torch_folder():
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    return Path(found.origin).parent if found is not None and found.origin else None


def nvidia_folders(site):
    """Those of the nvidia-* packages beside torch, and of those elsewhere in this Python's path."""
    places = [site, *map(Path, sys.path)]
    return list(dict.fromkeys(str(folder) for place in places for folder in sorted(place.glob("nvidia/*/lib")) if folder.is_dir()))


def main():
    expected = sys.argv[1]
    todo = f"pip install 'torch=={expected}.*', or set PYTHON to a Python that has it"
    folder = torch_folder()
    if folder is None:
        fail(f"{sys.executable} has no torch: expected torch {expected}; {todo}")
    text = (folder / "version.py").read_text(encoding="utf-8") if (folder / "version.py").exists() else ""
    found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    version = found.group(1) if found else "of no known version"
    if not version.startswith(f"{expected}."):
        fail(f"{sys.executable} has torch {version} ({folder}): expected torch {expected}; {todo}")
    if not (folder / "lib" / "libtorch_cpu.so").exists():
        fail(f"{folder}/lib/libtorch_cpu.so is not there, though torch {version} is: expected PyPI's torch {expected}; {todo}")
    print(":".join([str(folder / "lib"), *nvidia_folders(folder.parent)]))


if __name__ == "__main__":
    main()
