"""A measured table inside a Markdown document: it stands between two comments, and a command replaces what is there."""


def markers(command):
    """The comments around the table of `command`, such as "make methods"."""
    return f"<!-- table of {command}: begin -->", f"<!-- table of {command}: end -->"


def surroundings(path, command):
    """What stands before and after a document's table. Throws OSError; ValueError for a document without the markers."""
    first, last = markers(command)
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path}: has no table to replace; expected the lines {first} and {last}")
    return before, after


def replace_table(path, command, markdown):
    """Throws as surroundings does."""
    first, last = markers(command)
    before, after = surroundings(path, command)
    path.write_text(f"{before}{first}\n{markdown}{last}{after}", encoding="utf-8")
