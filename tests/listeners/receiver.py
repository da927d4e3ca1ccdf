"""A real HTTP receiver for webhooks and Pushgateway requests, that behaves as it is told."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """What came, and how the next requests are answered: a status, `drop`, `slow`, `endless`."""

    url: str = ""
    answers: list[int | str] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            receiver.received.append(
                Received(
                    self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body
                )
            )
            answer = receiver.answers.pop(0) if receiver.answers else 204
            if answer == "drop":
                self.connection.close()
                return
            if answer == "slow":
                # Longer than anybody waits; ends with the test.
                receiver.stopping.wait()
                return
            status = 200 if answer == "endless" else int(answer)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            if answer != "endless":
                self.send_header("Content-Length", "0")
            self.end_headers()
            if answer == "endless":
                try:
                    while not receiver.stopping.wait(0.01):
                        self.wfile.write(b"x" * 1000)
                except OSError:
                    pass

        do_POST = do_PUT = _take  # noqa: N815 -- the names that http.server calls

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(receiver))
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


def verify(secret: str, received: Received) -> bool:
    """Check a signature as docs/listeners.md tells a receiver to."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join(
        (
            received.headers["webhook-id"].encode(),
            received.headers["webhook-timestamp"].encode(),
            received.body,
        )
    )
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return hmac.compare_digest(expected, received.headers["webhook-signature"])
