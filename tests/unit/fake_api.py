"""A small API server: real HTTP, and of Kubernetes only what a list of pods needs."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

Pod = dict[str, Any]
Fault = Callable[["Handler"], None]
"""Answers one request in place of the server."""


class FakeApi:
    """Serves `count` pods that `make` builds by number, so that none of them is held.

    Attributes:
        faults: What happens to a request instead of an answer, by the number of the request.
        requests: Path and query of each list so far.
        write_faults: What happens to a patch or delete instead of an answer, by pod.
        writes: Method, path and body of each patch and delete so far.
        url: The address.
    """

    def __init__(
        self,
        make: Callable[[int], Pod],
        count: int,
        *,
        faults: Mapping[int, Fault] | None = None,
        date: str | None = None,
    ) -> None:
        self.make = make
        self.count = count
        self.faults = dict(faults or {})
        self.date = date
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.write_faults: dict[str, Fault] = {}
        self.writes: list[tuple[str, str, Any]] = []
        self.connections = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.api = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path, *, namespace: str | None = "tasks") -> Path:
        """Write a kubeconfig for this server (JSON, which is YAML too)."""
        context: dict[str, Any] = {"cluster": "fake", "user": "fake"}
        if namespace is not None:
            context["namespace"] = namespace
        file = folder / "kubeconfig"
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                    "users": [{"name": "fake", "user": {"token": "not-secret"}}],
                    "contexts": [{"name": "fake", "context": context}],
                }
            )
        )
        return file


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.api.connections += 1

    @property
    def api(self) -> FakeApi:
        return self.server.api  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.api.date or super().date_time_string(timestamp)

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(split.query).items()}
        number = len(self.api.requests)
        self.api.requests.append((unquote(split.path), query))
        try:
            fault = self.api.faults.get(number)
            if fault is not None:
                fault(self)
            else:
                self.answer(200, self.pod_list(unquote(split.path), query))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_PATCH(self) -> None:
        self.write()

    def do_DELETE(self) -> None:
        self.write()

    def write(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = unquote(urlsplit(self.path).path)
        self.api.writes.append((self.command, path, body))
        fault = self.api.write_faults.get(path.rpartition("/")[2])
        if fault is not None:
            fault(self)
        else:
            self.answer(200, {"kind": "Pod", "apiVersion": "v1"})

    def pod_list(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        parts = path.strip("/").split("/")
        assert parts[:2] == ["api", "v1"]
        assert parts[-1] == "pods"
        namespace = parts[3] if len(parts) == 5 else None
        limit = int(query.get("limit", "0")) or self.api.count
        start = int(base64.b64decode(query["continue"])) if "continue" in query else 0
        end = min(start + limit, self.api.count)
        # As in etcd, the limit counts what is read, and the selector drops from that.
        items = [
            pod
            for pod in map(self.api.make, range(start, end))
            if namespace in (None, pod["metadata"]["namespace"])
            and selected(pod["metadata"].get("labels") or {}, query.get("labelSelector", ""))
        ]
        metadata: dict[str, Any] = {"resourceVersion": "4711"}
        if end < self.api.count:
            metadata["continue"] = token(end)
        return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}

    def answer(self, status: int, document: object, **headers: str) -> None:
        self.raw(status, json.dumps(document).encode(), **headers)

    def raw(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


def selected(labels: Mapping[str, str], selector: str) -> bool:
    """Match the two forms that the profiles use: `key=value` and `key`."""
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def token(start: int) -> str:
    return base64.b64encode(str(start).encode()).decode()


# --- faults ------------------------------------------------------------------------------------


def status(code: int, message: str, *, metadata: object = None, **headers: str) -> Fault:
    """Answer with a Status object."""
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
        "metadata": metadata or {},
    }
    return lambda handler: handler.answer(code, document, **headers)


def expired(start: int | None) -> Fault:
    """Answer that the token is too old, with a fresh one or without."""
    metadata = {} if start is None else {"continue": token(start)}
    return status(410, "The provided continue parameter is too old", metadata=metadata)


def body(raw: bytes) -> Fault:
    """Answer 200 with this body."""
    return lambda handler: handler.raw(200, raw)


def silence(handler: Handler) -> None:
    """Take the request and say nothing until the client has gone."""
    handler.api.stopping.wait(20)
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """Answer rightly, in many small pieces."""
    split = urlsplit(handler.path)
    query = {key: values[-1] for key, values in parse_qs(split.query).items()}
    raw = json.dumps(handler.pod_list(split.path, query)).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    step = len(raw) // 10 + 1
    for start in range(0, len(raw), step):
        handler.wfile.write(raw[start : start + step])
        handler.wfile.flush()
        time.sleep(0.02)


def cut(handler: Handler) -> None:
    """Break off in the middle of a chunked body."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b'400\r\n{"kind":"PodList","items":[{"metadata":')
    handler.wfile.flush()
    handler.close_connection = True


def cut_length(handler: Handler) -> None:
    """Break off before the announced length."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b'{"kind":"PodList","items":[')
    handler.wfile.flush()
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    """Close the connection with no answer at all."""
    handler.close_connection = True
