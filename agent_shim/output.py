"""Lines on standard error, the only log that the shim has."""

from __future__ import annotations

import posix


def plain(text: str) -> str:
    """Return `text` on one line, control characters as blanks: a server may have written it."""
    return "".join(char if char.isprintable() else " " for char in text)


def say(text: str) -> None:
    """Write one line to standard error; a closed or full standard error is nobody's failure."""
    line = f"agent-shim: {plain(text)}\n".encode("utf-8", "backslashreplace")
    try:  # noqa: SIM105 - contextlib is slow to load
        posix.write(2, line)
    except OSError:
        pass
