"""Sessions that wait for each other: what one waits for is read from the server, never guessed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import pytest

from reconciler import database as db
from reconciler.database import Connection, Row

PATIENCE = 60.0
"""Seconds until a test that waits in vain fails; nothing is asserted about less."""


def tries(what: str) -> Iterator[None]:
    """Turns of a loop that asks until it has its answer, and fails if that never comes."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield
        time.sleep(0.005)
    pytest.fail(f"in vain: {what}")


class Watch:
    """A session of its own that looks at the others."""

    def __init__(self, dsn: str) -> None:
        self.connection = db.connect(dsn, application="watch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def until(self, query: str, arguments: tuple[Any, ...] = (), *, what: str) -> list[Row]:
        """Ask until there are rows."""
        for _ in tries(what):
            rows = self.connection.execute(query, arguments).fetchall()  # type: ignore[arg-type]
            if rows:
                return rows
        raise AssertionError(what)

    def until_blocked(self, pid: int, by: int | None = None) -> None:
        """Wait until a backend waits for a lock (that another one holds)."""
        self.until(
            "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            " and case when %s::int is null then cardinality(pg_blocking_pids(pid)) > 0"
            " else %s = any(pg_blocking_pids(pid)) end",
            (pid, by, by),
            what=f"backend {pid} does not wait for a lock of {by}",
        )

    def until_blocked_or_done(self, pid: int, *, by: int, future: Future[Any]) -> bool:
        """Wait until a backend waits for another one, or is done; whether it waits."""
        for _ in tries(f"backend {pid} neither ends nor waits for {by}"):
            if future.done():
                return False
            row = self.connection.execute(
                "select %s = any(pg_blocking_pids(%s)) as blocked", (by, pid)
            ).fetchone()
            if row and row["blocked"]:
                return True
        raise AssertionError

    def until_a_pass_waits(self) -> int:
        """Wait until the session of a real command waits for a lock; its backend's pid."""
        (row,) = self.until(
            "select pid from pg_stat_activity where application_name = 'podsettle'"
            " and datname = current_database() and wait_event_type = 'Lock'",
            what="no pass waits for a lock",
        )
        return int(row["pid"])

    def deadlocks(self) -> int:
        row = self.connection.execute(
            "select deadlocks from pg_stat_database where datname = current_database()"
        ).fetchone()
        assert row
        return int(row["deadlocks"])


class Session:
    """A connection with a thread, so that it can wait while the test goes on."""

    def __init__(self, dsn: str, name: str) -> None:
        self.connection: Connection = db.connect(dsn, application=name)
        self.pid = self.connection.info.backend_pid
        self.connection.execute("set statement_timeout = '60s'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def begin(self) -> None:
        self.connection.execute("begin")

    def commit(self) -> None:
        self.connection.execute("commit")

    def rollback(self) -> None:
        self.connection.execute("rollback")

    def start(self, call: Callable[[Connection], Any]) -> Future[Any]:
        """Run a call in a thread; its result, or its error, is the future's."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(self.connection))
            except BaseException as failed:
                future.set_exception(failed)

        threading.Thread(target=run, daemon=True).start()
        return future


@contextmanager
def sessions(dsn: str, *names: str) -> Iterator[tuple[Watch, list[Session]]]:
    """A watch, and a session for each name."""
    with Watch(dsn) as watch, ExitStack() as open_:
        yield watch, [open_.enter_context(Session(dsn, name)) for name in names]


def errors_of(*futures: Future[Any]) -> list[BaseException]:
    """Wait for all, and give what they raised."""
    return [e for e in (future.exception(timeout=PATIENCE) for future in futures) if e is not None]
