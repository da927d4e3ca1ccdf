"""What the tests of the shim share: the shim as it is shipped, and real processes around it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

# For events that always come; long, since the machine may be busy with other things.
PATIENCE = 120.0
CHILD = Path(__file__).with_name("child.py")


@dataclasses.dataclass
class Ended:
    """A run of the shim that has ended."""

    code: int
    out: str
    err: str
    record_path: Path

    @property
    def message(self) -> str:
        """The termination message, as the kubelet would read it."""
        return self.record_path.read_text() if self.record_path.exists() else ""

    @property
    def record(self) -> dict[str, Any] | None:
        """The record as JSON; None where there is none."""
        return json.loads(self.message) if self.message else None


class Running:
    """A run of the shim that goes on; its standard output is read line by line."""

    def __init__(self, process: subprocess.Popen[str], record_path: Path) -> None:
        self.process = process
        self.record_path = record_path

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line that the task writes; an error when it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the task ended: {self.end().err}"
        return line.strip()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float = PATIENCE) -> Ended:
        """Wait for the shim's end and that of its output."""
        out, err = self.process.communicate(timeout=timeout)
        return Ended(shell_code(self.process.returncode), out, err, self.record_path)

    def end_when_killed(self) -> Ended:
        """Wait for the shim, end what it can no longer end, and take what they wrote."""
        self.process.wait(PATIENCE)
        while True:
            for pid in processes():
                if session_of(pid) == self.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            # One that was just being forked is missed; it holds the pipes open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.end(timeout=0.5)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def session_of(pid: int) -> int:
    """The session of a process; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])


def shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


class Shim:
    """Runs the shim with a record path of its own and no PODSETTLE_* variable around it."""

    def __init__(self, prefix: list[str], folder: Path) -> None:
        self.prefix = prefix
        self.folder = folder
        self.record_path = folder / "termination-log"
        self.started: list[subprocess.Popen[str]] = []
        # The kubelet makes the file before the container starts.
        self.record_path.touch()
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PODSETTLE_")
        }

    def start(
        self,
        *command: str,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        wrap: tuple[str, ...] = (),
        **popen: Any,
    ) -> Running:
        """Start `agent-shim run options -- command`, `wrap` before it."""
        record = (
            ()
            if any(o.startswith("--record") for o in options)
            else (
                "--record",
                str(self.record_path),
            )
        )
        words = [*wrap, *self.prefix, "run", *record, *options, "--", *command]
        return self.start_words(words, env=env, **popen)

    def start_words(
        self, words: list[str], *, env: dict[str, str] | None = None, **popen: Any
    ) -> Running:
        process = subprocess.Popen(
            words,
            stdin=popen.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | (env or {}),
            **popen,
        )
        self.started.append(process)
        return Running(process, self.record_path)

    def run(self, *command: str, **how: Any) -> Ended:
        """Run it to its end."""
        return self.start(*command, **how).end()

    def words(self, *words: str, **how: Any) -> Ended:
        """Run `agent-shim words` to its end."""
        return self.start_words([*self.prefix, *words], **how).end()

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def child(*words: str) -> tuple[str, ...]:
    """The command of a task that does what child.py describes."""
    return (sys.executable, "-I", "-S", str(CHILD), *words)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes whose parent it is, ended ones that it has not reaped included."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


FORWARDED = sorted(
    number for number in signal.valid_signals() if number not in (9, 19, signal.SIGCHLD)
)


class ControlPlane:
    """An HTTP server that notes what it is asked and answers as `answers` says, in order, then 200.

    An answer is a status, or: `drop`, take the request and close; `hang`, never answer; `drip`,
    one byte of the answer after another, for ever.
    """

    def __init__(self, *answers: int | str, context: ssl.SSLContext | None = None) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.arrived = threading.Semaphore(0)
        self.closing = threading.Event()
        self.before_answer: Callable[[str], None] = lambda path: None
        control = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                control.requests.append((self.path, json.loads(body), dict(self.headers)))
                answer = control.answers.pop(0) if control.answers else 200
                control.before_answer(self.path)
                control.arrived.release()
                if answer == "hang":
                    control.closing.wait()
                elif answer == "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    while not control.closing.wait(0.05):
                        self.wfile.write(b"x")
                elif isinstance(answer, int):
                    text = json.dumps({"message": f"answer\n{answer}"}).encode()
                    self.send_response(answer)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                self.close_connection = True

            def log_message(self, *words: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *words: Any) -> None:
                pass  # a client that was killed is what some tests are about

        self.server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def wait_for_request(self) -> None:
        assert self.arrived.acquire(timeout=PATIENCE), "no request came"

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Path and arguments of each request."""
        return [(path, body) for path, body, _ in self.requests]

    def options(self, *more: str) -> tuple[str, ...]:
        return ("--report-url", self.url, "--attempt-id", "attempt-1", *more)
