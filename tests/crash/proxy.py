"""A relay before Postgres that counts what the client sends and, at the N-th message, strikes."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

STARTUP = "startup"
ENDS_A_STATEMENT = frozenset({STARTUP, "Q", "S"})
"""After these the server answers: the startup packet, a simple query, a Sync."""


@dataclass
class Strike:
    """What is done to the client, and when.

    Attributes:
        at: The number of the frontend message, from 1.
        when: `before` it is forwarded; `after` it was forwarded and before the client hears of it;
            `mid-answer`: after half of the answer reached the client.
        blow: Kills the client; None: only its connection is cut.
        struck: Set once it was done.
    """

    at: int
    when: Literal["before", "after", "mid-answer"]
    blow: Callable[[], None] | None = None
    struck: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listens on 127.0.0.1 and relays to the server of a DSN, on whatever kind of socket that is.

    Attributes:
        dsn: The same database, through the proxy.
        messages: The kind of each frontend message so far, of all connections.
    """

    def __init__(self, dsn: str, strike: Strike | None = None) -> None:
        server = conninfo_to_dict(dsn)
        host, port = str(server.get("host") or "127.0.0.1"), int(server.get("port") or 5432)
        self._target: str | tuple[str, int] = (
            f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        )
        self._strike = strike
        self.messages: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.dsn = make_conninfo(
            dsn,
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            # Encryption is asked for with packets of another form.
            sslmode="disable",
            gssencmode="disable",
        )
        self._accepting = threading.Thread(target=self._accept)
        self._relays: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._closing = False

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._closing = True
        # Closing a socket does not wake who waits in accept(), shutting it down does.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for relay in self._relays:
            relay.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            relay = threading.Thread(target=self._relay, args=(client,))
            self._relays.append(relay)
            relay.start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, str):
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target)
            except OSError:
                server.close()
                raise
            return server
        return socket.create_connection(self._target)

    def _relay(self, client: socket.socket) -> None:
        with client, self._connect() as server:
            self._open |= {client, server}
            try:
                with suppress(ConnectionError):
                    self._pump(client, server)
                # All that was forwarded takes effect, and the backend is gone, before anybody goes on.
                with suppress(OSError):
                    server.shutdown(socket.SHUT_WR)
                with suppress(OSError):
                    while server.recv(65536):
                        pass
            finally:
                self._open -= {client, server}

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        frontend = Frontend()
        cut_in_answer = False
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is server:
                        if cut_in_answer:
                            client.sendall(data[: len(data) // 2])
                            self._hit(client)
                            return
                        client.sendall(data)
                        continue
                    forward = b""
                    for kind, message in frontend.feed(data):
                        self.messages.append(kind)
                        struck = self._strike
                        if struck is None or struck.at != len(self.messages):
                            forward += message
                            continue
                        if struck.when != "before":
                            forward += message
                        server.sendall(forward)
                        if struck.when == "mid-answer":
                            forward = b""
                            cut_in_answer = True
                            continue
                        self._hit(client)
                        return
                    server.sendall(forward)

    def _hit(self, client: socket.socket) -> None:
        assert self._strike
        if self._strike.blow:
            self._strike.blow()
        client.close()
        self._strike.struck.set()


class Frontend:
    """Cuts a client's stream into the messages of protocol 3."""

    def __init__(self) -> None:
        self._buffer = b""
        self._started = False

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        self._buffer += data
        found = []
        while True:
            head = 1 if self._started else 0  # The startup packet alone has no kind.
            if len(self._buffer) < head + 4:
                return found
            (length,) = struct.unpack_from(">i", self._buffer, head)
            if len(self._buffer) < head + length:
                return found
            message, self._buffer = self._buffer[: head + length], self._buffer[head + length :]
            found.append((message[:1].decode("ascii") if self._started else STARTUP, message))
            self._started = True
