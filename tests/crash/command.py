"""The real command in a process of its own, in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import COMMAND, Run

IMPATIENT = """
import sys
from reconciler import cli, database
database.Settle.__init__.__defaults__ = (int(sys.argv.pop(1)), int(sys.argv.pop(1)))
sys.exit(cli.main())
"""


def start(*arguments: str, home: Path, **environment: str) -> subprocess.Popen[bytes]:
    return _start([COMMAND, *arguments], home, environment)


def start_impatient(
    statement_timeout: int, lock_timeout: int, *arguments: str, home: Path
) -> subprocess.Popen[bytes]:
    """The same command with other time limits, in milliseconds (it has no option for them)."""
    limits = [str(statement_timeout), str(lock_timeout)]
    return _start([sys.executable, "-c", IMPATIENT, *limits, *arguments], home, {})


def _start(command: list[str], home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PODSETTLE_", "PG", "KUBE"))}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean | {"HOME": str(home), "COLUMNS": "200", **environment},
    )


def finish(process: subprocess.Popen[bytes]) -> Run:
    """Wait for its end; a traceback is a failure."""
    with process:
        out, err = process.communicate(timeout=120)
    return Run(
        subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())
    )


def run(*arguments: str, home: Path, **environment: str) -> Run:
    return finish(start(*arguments, home=home, **environment))


def refused_in_one_sentence(done: Run) -> str:
    """The sentence of a run that ended with exit code 4; beside it there are log events alone."""
    assert done.code == 4, (done.code, done.err)
    *events, last = [line for line in done.err.splitlines() if line.strip()]
    assert len(events) == len(done.events), done.err
    assert last.startswith("Error: "), done.err
    return last
