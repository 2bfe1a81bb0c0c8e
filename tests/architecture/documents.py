"""Rules for the documents: what they link to and name is there. Each returns complaints: "file:line: what is wrong"."""
import os
import re
from pathlib import Path
from urllib.parse import unquote

from source_tree import CPP_SUFFIXES, project_files

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|\b(?:src|href)=\"([^\"]+)\"|^ {0,3}\[[^\]]+\]: +(\S+)", re.MULTILINE)
_TEXT_BLOCK = re.compile(r"^ *```text\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_NOTE = re.compile(r"\[Note: ([^\]]+)\]")
_NOTE_DEFINED = re.compile(r"^\s*(?://|#)\s*\[Note: ([^\]]+)\](?!\s+(?://+\s*)?in\s)", re.MULTILINE)
_NOTE_IN_FILE = re.compile(r"\[Note:\s*(?://+\s*)?([^\]]+)\]\s+(?://+\s*)?in\s+(?://+\s*)?`?([\w./-]+\.(?:h|cc|cu|py))\b")
_MAKE = re.compile(r"(?:^|`|&& |; )[ \t]*make ((?:[a-z][a-z-]*[ \t]*)+)", re.MULTILINE)
_PAGE = re.compile(r"(?<![\w./-])docs/[\w-]+\.\w+\b")
_NAMED = re.compile(r"(?<![\w./:{}<>*$-])([A-Za-z.][\w.-]*/)[\w./-]*")
# With an underscore or a folder, which keeps a.cc and hdf5.h out; neither libtorch's nor the installed headers'.
_IN_COMMENT = re.compile(r"(?<![\w./*<-])(?!torch/|tessera/|record_function\.h)((?:\w+/)+\w+\.(?:h|cc|cu)|\w+_\w*\.(?:h|cc|cu))\b")
# Suffixes of the project's own files. A name without one of them may be a metric, a folder of a run or the like.
_SUFFIXES = {".h", ".cc", ".cu", ".py", ".sh", ".md", ".json", ".toml", ".cmake", ".txt", ".svg", ".png"}
_SOURCES = {".h", ".cc", ".cu", ".py", ".sh", ".json", ".toml", ".cmake", ".txt", ""}


def _blank(pattern, text):
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def _line(text, position):
    return text.count("\n", 0, position) + 1


def documents(root):
    """(path from the root, text) of every Markdown file."""
    return [(path, (Path(root) / path).read_text(encoding="utf-8")) for path in project_files(root) if path.suffix == ".md"]


def anchors(text):
    """The names GitHub gives to the headings."""
    names = set()
    for title in _HEADING.findall(_blank(_FENCE, text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = 0
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.add(name)
    return names


def links(root):
    complaints = []
    for path, text in documents(root):
        for match in _LINK.finditer(_blank(_CODE_SPAN, _blank(_FENCE, text))):
            target = next(group for group in match.groups() if group)
            if _SCHEME.match(target):
                continue
            name, _, anchor = target.partition("#")
            linked = Path(os.path.normpath(path.parent / unquote(name))) if name else path
            where = f"{path.as_posix()}:{_line(text, match.start())}"
            if linked.parts[:1] == ("..",) or name.startswith("/") or not (Path(root) / linked).exists():
                complaints.append(f"{where}: links to {target}; there is no such file in the tree")
            elif anchor and linked.suffix == ".md" and anchor not in anchors((Path(root) / linked).read_text(encoding="utf-8")):
                complaints.append(f"{where}: links to {target}; {linked.as_posix()} has no such heading")
    return complaints


def files_named(root):
    """Paths of our own folders, as words of a document. The changelog may name what is gone."""
    folders = {path.parts[0] + "/" for path in project_files(root) if len(path.parts) > 1}
    complaints = []
    for path, text in documents(root):
        if path.name == "CHANGELOG.md":
            continue
        for match in _NAMED.finditer(text):
            name = match.group().rstrip(".")
            if match[1] in folders and (Path(name).suffix in _SUFFIXES or name.endswith("/")) and not (Path(root) / name).exists():
                complaints.append(f"{path.as_posix()}:{_line(text, match.start())}: names {name}, which is not there")
    return complaints


def files_in_comments(root):
    """Files of ours that comments of C++ name, by their path or the end of it."""
    files = [f"/{path.as_posix()}" for path in project_files(root)]
    complaints = []
    for path in project_files(root):
        if path.suffix not in CPP_SUFFIXES or path.parts[:2] == ("tests", "architecture"):
            continue
        for number, line in enumerate((Path(root) / path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            complaints += [f"{path.as_posix()}:{number}: names {name}, which is not there" for name in _IN_COMMENT.findall(line.partition("//")[2])
                           if not any(file.endswith(f"/{name}") for file in files)]
    return complaints


def pages_named(root):
    """Pages of docs/ that messages, help and comments send a reader to."""
    complaints = []
    for path in project_files(root):
        if path.suffix not in _SOURCES or path.parts[:2] == ("tests", "architecture"):
            continue
        text = (Path(root) / path).read_text(encoding="utf-8", errors="replace")
        complaints += [f"{path.as_posix()}:{_line(text, match.start())}: names {match.group()}, which is not there"
                       for match in _PAGE.finditer(text) if not (Path(root) / match.group()).exists()]
    return complaints


def notes_named(root):
    """[Note: title] of a document stands in a source file."""
    notes = set()
    for path in project_files(root):
        if path.suffix in {".h", ".cc", ".cu", ".py"}:
            text = re.sub(r"\n\s*(?://+|#) ?", " ", (Path(root) / path).read_text(encoding="utf-8", errors="replace"))
            notes.update(re.sub(r"\s+", " ", title) for title in _NOTE.findall(text))
    return [f"{path.as_posix()}:{_line(text, match.start())}: names [Note: {title}], which no source file has"
            for path, text in documents(root) for match in _NOTE.finditer(text)
            if (title := re.sub(r"\s+", " ", match[1])) not in notes]


def notes_in_their_files(root):
    """"[Note: title] in FILE" of a comment or a document: FILE defines the note. FILE may be given by its last parts."""
    defined = {}
    texts = []
    for path in project_files(root):
        if path.suffix not in {".h", ".cc", ".cu", ".py", ".md"} or path.parts[:2] == ("tests", "architecture"):
            continue
        text = (Path(root) / path).read_text(encoding="utf-8", errors="replace")
        texts.append((path, text))
        if path.suffix != ".md":
            for title in _NOTE_DEFINED.findall(text):
                defined.setdefault(title, []).append(path.as_posix())
    complaints = []
    for path, text in texts:
        for match in _NOTE_IN_FILE.finditer(text):
            title, name = (re.sub(r"\s*\n\s*(?://+|#)?\s*", " ", part) for part in match.groups())
            if not any(("/" + place).endswith("/" + name) for place in defined.get(title, [])):
                complaints.append(f"{path.as_posix()}:{_line(text, match.start())}: says that [Note: {title}] is in {name}, "
                                  f"but it is in {', '.join(defined.get(title, ['no file']))}")
    return complaints


def members_named(root):
    """`Class::member` of docs/architecture.md: a header or source file has a member or function of that name."""
    words = set()
    for path in project_files(root):
        if path.suffix in {".h", ".cc"} and path.parts[0] not in {"tests", "benchmarks"}:
            text = (Path(root) / path).read_text(encoding="utf-8", errors="replace")
            classes = set(re.findall(r"\b(?:class|struct|enum|namespace) (\w+)", text))
            members = set(re.findall(r"\b(\w+)\b", text))
            words.update((name, member) for name in classes for member in members)
            words.update(re.findall(r"\b(\w+)::(\w+)\b", text))
    complaints = []
    for path, text in documents(root):
        if path.as_posix() == "docs/architecture.md":
            for match in re.finditer(r"`(\w+)::(\w+)(?:\(\))?`", text):
                if match.groups() not in words:
                    complaints.append(f"{path.as_posix()}:{_line(text, match.start())}: names {match[1]}::{match[2]}, which is nowhere")
    return complaints


def owners_have_their_tests(root):
    """Rows of tests/README.md: | promise | `file` | `test`, ... |. A test is a suite or a case of GoogleTest, or a function of Python."""
    complaints = []
    for path, text in documents(root):
        if path.as_posix() != "tests/README.md":
            continue
        for number, line in enumerate(text.splitlines(), 1):
            row = re.fullmatch(r"\|[^|]*\| `([^`]+)` \| (.*) \|", line)
            source = Path(root) / row[1] if row else None
            if source is None or not source.exists():  # files_named complains
                continue
            for test in re.findall(r"`(\w+)`", row[2]):
                if not re.search(rf"\b(TEST(_[FP])?\((\w+,\s*)?|def ){test}\b", source.read_text(encoding="utf-8")):
                    complaints.append(f"{path}:{number}: {row[1]} has no test {test}")
    return complaints


def make_commands(root):
    """The changelog may name what is gone."""
    makefile = Path(root) / "Makefile"
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile.read_text(encoding="utf-8"), re.MULTILINE)) if makefile.exists() else set()
    complaints = []
    for path, text in documents(root):
        for match in _MAKE.finditer(text) if path.name != "CHANGELOG.md" else ():
            # In a sentence "make" is a verb; as a command it stands in a code block or span.
            word = match[1].split()[0]
            if (match.group().startswith("`") or _in_fence(text, match.start())) and word not in targets:
                complaints.append(f"{path.as_posix()}:{_line(text, match.start())}: names make {word}; the Makefile has no such command")
    return complaints


def _literals(source):
    """The texts of a program's string literals, a line each; those that the compiler joins are one, and a value in an f-string ends one."""
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)
    found = (text for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined))
    return [piece.strip() for text in found for piece in re.split(r"\{[^{}]*\}|\\n", text.replace('\\"', '"')) if piece.strip()]


def _printed(words, literals):
    """Whether `words` are of one literal: its beginning, its end, or 16 letters and more; or the end of one, whole ones, and the beginning of one.
    `literals`: a line each, and a line end before and behind them."""
    if (len(words) >= 16 and words in literals) or f"\n{words}" in literals or f"{words}\n" in literals:
        return True
    begin = ""
    while words:
        taken = next((length for length in range(len(words), 0, -1)
                      if f"{begin}{words[:length].strip()}" + ("" if length == len(words) and begin else "\n") in literals), 0)
        if taken == 0:
            return False
        words, begin = words[taken:].lstrip(), "\n"
    return True


def messages_quoted(root):
    """Lines of a block that begins with ```text are messages of the program, with "…" for what differs: the sources have what stands between."""
    blocks = [(path, text, block) for path, text in documents(root) for block in _TEXT_BLOCK.finditer(text)]
    if not blocks:
        return []
    source = "\n".join((Path(root) / path).read_text(encoding="utf-8", errors="replace") for path in project_files(root)
                       if path.suffix in {".h", ".cc", ".py"} and path.parts[0] != "tests")
    literals = "\n".join(["", *dict.fromkeys(_literals(source)), ""])
    complaints = []
    for path, text, block in blocks:
        for number, line in enumerate(block[1].splitlines(), _line(text, block.start(1))):
            parts = [part.strip() for part in re.sub(r"^ *(?:error|[A-Z]\w*Error): ", "", line).split("…")]
            complaints += [f"{path.as_posix()}:{number}: quotes \"{part}\", which no source file prints" for part in parts if not _printed(part, literals)]
    return complaints


def _in_fence(text, position):
    return any(match.start() <= position < match.end() for match in _FENCE.finditer(text)) or \
        text[text.rfind("\n", 0, position + 1) + 1:].startswith("    ")


ALL_RULES = [links, files_named, files_in_comments, pages_named, notes_named, notes_in_their_files, members_named, owners_have_their_tests, make_commands,
             messages_quoted]
