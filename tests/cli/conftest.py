from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).parent / "podsettle")


class Run:
    """What a real run of the command left."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.err, self.err

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]


@pytest.fixture
def podsettle(tmp_path: Path) -> Callable[..., Run]:
    """Run the command as a user would, in a clean environment."""

    def run(*arguments: str, stdin: str | bytes | None = None, **environment: str) -> Run:
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("PODSETTLE_", "PG", "KUBE"))
        }
        clean |= {"HOME": str(tmp_path), "COLUMNS": "200", **environment}
        if isinstance(stdin, str):
            stdin = stdin.encode()
        done = subprocess.run(
            [COMMAND, *arguments], input=stdin or b"", capture_output=True, env=clean, check=False
        )
        return Run(
            subprocess.CompletedProcess(
                done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
            )
        )

    return run
