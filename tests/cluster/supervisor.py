"""The first process of the test cluster's own namespaces.

The harness starts it as process 1 of a new pid, mount and network namespace. It starts programs there, runs single
commands, reaps what is left over, and says what ended. When it is killed the kernel ends everything that it started,
and the mounts and the network go with it: that is how a cluster is stopped, whatever state it is in.

It speaks JSON lines over a Unix socket, one request a connection. It knows nothing of Kubernetes.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


class Children:
    """The processes that were started here, and how each one ended."""

    def __init__(self) -> None:
        """Start with no processes."""
        self._changed = threading.Condition()
        self._ended: dict[int, int] = {}
        self.named: dict[str, int] = {}

    def spawn(self, argv: list[str], env: dict[str, str], output: str) -> int:
        """Start a program in a session of its own; its output is appended to a file."""
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        return os.posix_spawnp(
            argv[0], argv, {**os.environ, **env}, file_actions=actions, setsid=True
        )

    def exit_code(self, pid: int) -> int | None:
        """Say how a process ended: None while it runs, minus the signal if one ended it."""
        with self._changed:
            return self._ended.get(pid)

    def wait(self, pid: int, timeout: float) -> int | None:
        """Wait until a process ended; None if it still runs after the time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._ended, timeout)
            return self._ended.get(pid)

    def reap(self) -> None:
        """Collect every process that ends, our own and the orphans that fall to process 1."""
        os.posix_spawnp("sleep", ["sleep", "infinity"], dict(os.environ))
        while True:
            pid, status = os.waitpid(-1, 0)
            with self._changed:
                self._ended[pid] = os.waitstatus_to_exitcode(status)
                self._changed.notify_all()


CHILDREN = Children()


class Handler(socketserver.StreamRequestHandler):
    """Answers one request."""

    def handle(self) -> None:
        """Read a request, act, and answer with a JSON object."""
        request = json.loads(self.rfile.readline())
        try:
            answer = getattr(self, "do_" + request.pop("do"))(**request)
        except (OSError, KeyError, AttributeError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def do_start(
        self, name: str, argv: list[str], env: dict[str, str], output: str
    ) -> dict[str, Any]:
        """Start a named program that goes on running."""
        pid = CHILDREN.named.get(name)
        if pid is not None and CHILDREN.exit_code(pid) is None:
            return {"error": f"{name} is running already as {pid}"}
        CHILDREN.named[name] = CHILDREN.spawn(argv, env, output)
        return {"pid": CHILDREN.named[name]}

    def do_stop(self, name: str, signal: int, timeout: float) -> dict[str, Any]:
        """Signal a named program and wait for its end."""
        pid = CHILDREN.named[name]
        if CHILDREN.exit_code(pid) is None:
            os.kill(pid, signal)
        return {"exit_code": CHILDREN.wait(pid, timeout)}

    def do_signal(self, name: str, signal: int) -> dict[str, Any]:
        """Signal a named program and do not wait."""
        os.kill(CHILDREN.named[name], signal)
        return {}

    def do_run(self, argv: list[str], env: dict[str, str], timeout: float) -> dict[str, Any]:
        """Run a command to its end and return its exit code and output."""
        with tempfile.NamedTemporaryFile(prefix="podsettle-run-") as output:
            pid = CHILDREN.spawn(argv, env, output.name)
            code = CHILDREN.wait(pid, timeout)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                code = CHILDREN.wait(pid, 10)
            return {
                "exit_code": code,
                "output": Path(output.name).read_text(errors="replace"),
            }

    def do_status(self) -> dict[str, Any]:
        """Say of every named program whether it runs."""
        return {
            "exit_codes": {name: CHILDREN.exit_code(pid) for name, pid in CHILDREN.named.items()}
        }


class Server(socketserver.ThreadingUnixStreamServer):
    """One thread a request: a command may take its time."""

    daemon_threads = True


def main(folder: str) -> None:
    """Serve requests until killed."""
    address = Path(folder) / "supervisor.sock"
    server = Server(str(address), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    CHILDREN.reap()


if __name__ == "__main__":
    main(sys.argv[1])
