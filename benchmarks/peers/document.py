"""Measured tables: as text, as Markdown, and inside a Markdown document, where a table stands between two comments and a command replaces it.

A column is (title, the key in a row, the format of its values); a value may be None.
"""


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


def cells(row, columns):
    return ["" if row[key] is None else f"{row[key]:{form}}" for _, key, form in columns]


def text_table(title, rows, columns):
    lines = [f"\n{title:40}" + "".join(f"{column:>13}" for column, _, _ in columns)]
    lines += [f"{name:40}" + "".join(f"{cell:>13}" for cell in cells(row, columns)) for name, row in rows.items()]
    return "\n".join(lines)


def markdown_table(title, rows, columns):
    first = f"| {title} |" if title else "| |"
    lines = [f"{first} {' | '.join(column for column, _, _ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells(row, columns))} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"
