"""The command line of agent-shim: run, install."""

from __future__ import annotations

import posix
import sys

from agent_shim import __version__
from agent_shim.output import say

HELP = """\
usage: agent-shim run [options] -- COMMAND ARG...    run a task, record and report its outcome
       agent-shim install DIR                        copy agent-shim into a folder
       agent-shim run --help | --version
"""


def main() -> None:
    """Run the command line and end the process with its exit code.

    Ends by `_exit`: the interpreter's own end costs time and has nothing left to do.
    """
    try:
        code = _main(sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - the shim's own failure has a code of its own
        from agent_shim.run import EXIT_INTERNAL

        say(f"failed, please report this: {type(error).__name__}: {error}")
        code = EXIT_INTERNAL
    posix._exit(code)  # noqa: SLF001


def _main(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command == "run":
        from agent_shim.run import run

        return run(words[1:])
    if command == "install":
        from agent_shim.install import install

        return install(words[1:])
    if command in ("--help", "-h"):
        posix.write(1, HELP.encode())
        return 0
    if command == "--version":
        posix.write(1, f"agent-shim {__version__}\n".encode())
        return 0
    say(f"unknown command {command[:80]!r}; see agent-shim --help")
    return 64


if __name__ == "__main__":
    main()
