"""`agent-shim install DIR`: copy the shim for another container, with no shell and no cp."""

from __future__ import annotations

import posix
import sys

from agent_shim.output import say

ONE_FILE = "agent-shim.pyz"
COMPILED = "agent-shim.pyc"
LAUNCHER = "agent-shim"
RUNTIME = "runtime"


def install(arguments: list[str]) -> int:
    """Copy this shim into a folder: its one file and, where it runs from a bundle, the bundle.

    A file appears under its name only when it is whole, and an older one is replaced, so that it
    may be installed again into a folder that is in use.

    Args:
        arguments: the words after `install`: the folder, which is made when it is missing.

    Returns:
        0; 64 for a wrong call; 1 when something cannot be written, which is said.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        say("install takes one folder, as in: agent-shim install /podsettle")
        return 64
    target = arguments[0]
    folder, _, name = sys.argv[0].rpartition("/")
    folder = folder or "."
    try:
        _folder(target)
        if name == COMPILED:
            # In the bundle: this file is in its runtime folder.
            _tree(folder, f"{target}/{RUNTIME}")
            # The command last: whoever waits for it finds all that it needs.
            for file in (ONE_FILE, LAUNCHER):
                _copy(f"{folder}/../{file}", f"{target}/{file}", executable=True)
        elif name == ONE_FILE:
            _copy(sys.argv[0], f"{target}/{ONE_FILE}", executable=True)
        else:
            # From an installed package: put its modules into one file.
            from agent_shim.packing.onefile import one_file

            _write(f"{target}/{ONE_FILE}", one_file(), executable=True)
    except OSError as error:
        say(f"cannot install {error.filename or target}: {error.strerror}")
        return 1
    return 0


def _folder(path: str) -> None:
    try:  # noqa: SIM105 - contextlib is slow to load
        posix.mkdir(path, 0o755)
    except FileExistsError:
        pass


def _tree(source: str, target: str) -> None:
    _folder(target)
    with posix.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir():
                _tree(entry.path, f"{target}/{entry.name}")
            else:
                _copy(
                    entry.path,
                    f"{target}/{entry.name}",
                    executable=bool(entry.stat().st_mode & 0o100),
                )


def _copy(source: str, target: str, *, executable: bool) -> None:
    with open(source, "rb") as file:
        _write(target, file.read(), executable=executable)


def _write(target: str, content: bytes, *, executable: bool) -> None:
    draft = f"{target}.{posix.getpid()}.new"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC
    file = posix.open(draft, flags, 0o755 if executable else 0o644)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[posix.write(file, rest) :]
            # Whatever the umask is: the task may run as another user.
            posix.fchmod(file, 0o755 if executable else 0o644)
        finally:
            posix.close(file)
        posix.rename(draft, target)
    except OSError:
        posix.unlink(draft)
        raise
