"""The project's files, and C++ sources without their comments and strings."""
import os
import re
import subprocess
import tempfile
from pathlib import Path

# Written by tools, not by us. (.gitignore says the same; this is for a tree that is no git checkout.)
GENERATED = re.compile(r"^(\.git|\.deps|\.cache|build[^/]*|runs)/|(^|/)__pycache__/")

CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}


def project_files(root):
    """Paths of the tree's files, relative to `root`: what git tracks or would track, else all but what is generated."""
    root = Path(root)
    files = []
    if (root / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                 cwd=root, capture_output=True, check=False)
        files = [Path(os.fsdecode(name)) for name in listing.stdout.split(b"\0") if name]
    if not files:
        files = [path.relative_to(root) for path in root.rglob("*")
                 if not GENERATED.search(path.relative_to(root).as_posix())]
    return sorted(path for path in set(files) if (root / path).is_file())


def in_a_tree(rule, files):
    """The complaints of a rule about a tree of these files, name -> text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return rule(folder)


_RAW_STRING = r'R"(?P<tag>[^()\\\s]{0,16})\((?:.|\n)*?\)(?P=tag)"'
_NOT_CODE = re.compile(
    rf"{_RAW_STRING}|//[^\n]*|/\*(?:.|\n)*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'")  # 1'000 is a number


def code_of(text):
    """`text` with comments and the contents of strings blanked, line for line. Include directives are kept."""
    def blank(match):
        line_start = text.rfind("\n", 0, match.start()) + 1
        if match.group().startswith('"') and text[line_start:match.start()].strip().startswith("#"):
            return match.group()
        return re.sub(r"[^\n]", " ", match.group())
    return _NOT_CODE.sub(blank, text)
