"""A minimal terminal: runs a command on a pseudo terminal and renders what it wrote as lines of a screen."""
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time


def run_on_terminal(start, columns, timeout_s):
    """`start(stdin=, stdout=, stderr=)` starts the process. Returns the ended process and the bytes it wrote."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        process = start(stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
    written = b""
    give_up = time.monotonic() + timeout_s
    try:
        while time.monotonic() < give_up:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                part = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not part:
                break
            written += part
        process.wait(timeout=max(1, give_up - time.monotonic()))
    finally:
        os.close(ours)
    return process, written


def render(written, columns):
    """The lines of the screen, without trailing blanks. Knows \\r, \\n, the break at the last column, and of the control sequences a line up,
    and the rest of the line or the screen erased; anything else is a ValueError, since it would not run everywhere."""
    lines, row, column = [[]], 0, 0
    for character in re.findall(r"\x1b\[\d*[A-Za-z]|.", written.decode(), re.DOTALL):
        if character == "\x1b[A":
            row = max(row - 1, 0)
        elif character in ("\x1b[K", "\x1b[J"):
            del lines[row][column:]
            if character == "\x1b[J":
                del lines[row + 1:]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif ord(character[0]) < 32:
            raise ValueError(f"control character {character!r}")
        else:
            if column == columns:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append([])
            lines[row] += [" "] * (column - len(lines[row]))
            lines[row][column:column + 1] = character
            column += 1
        while len(lines) <= row:
            lines.append([])
    return ["".join(line).rstrip() for line in lines]
