"""Task instances of either host, and pods that speak about them, for the settle suite."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg.types.json import Jsonb

from reconciler.database import Connection, Row

FAR = "2031-02-03T04:05:06Z"


@dataclass(frozen=True)
class Attempt:
    """One dispatch of a task instance; attempt_id is None where the host has none."""

    id: str
    try_number: int
    attempt_id: str | None
    queued_at: datetime | None = None


class Standalone:
    """The host that podsettle brings."""

    name = "standalone"

    def __init__(self, connection: Connection) -> None:
        self.c = connection

    def create(self, *, dag: str = "d", task: str | None = None, retries: int = 0) -> str:
        row = self.c.execute(
            "select settle.create_task(%s, 'r', %s, -1, %s, interval '5 min')::text as id",
            (dag, task or uuid.uuid4().hex, retries),
        ).fetchone()
        assert row
        return row["id"]

    def dispatch(self, ti: str) -> Attempt:
        row = self.c.execute("select * from settle.dispatch(%s)", (ti,)).fetchone()
        assert row
        return Attempt(ti, row["try_number"], row["attempt_id"], self.row(ti)["queued_at"])

    def start(self, attempt: Attempt) -> None:
        self.c.execute("select settle.started(%s)", (attempt.attempt_id,))

    def row(self, ti: str) -> Row:
        row = self.c.execute("select * from settle.task_instance where id = %s", (ti,)).fetchone()
        assert row
        return row

    def raise_max_tries(self, ti: str, by: int) -> None:
        self.c.execute(
            "update settle.task_instance set max_tries = max_tries + %s where id = %s", (by, ti)
        )


class Jobs(Standalone):
    """app.jobs: see host_jobs_before.sql. Its orchestrator writes the table itself."""

    name = "jobs"

    def create(self, *, dag: str = "d", task: str | None = None, retries: int = 0) -> str:
        row = self.c.execute(
            "insert into app.jobs (pipeline, run, step, own_retries, last_retried_attempt)"
            " values (%s, 'r', %s, %s, %s) returning job_id::text as id",
            (dag, task or uuid.uuid4().hex, retries, retries),
        ).fetchone()
        assert row
        return row["id"]

    def dispatch(self, ti: str) -> Attempt:
        row = self.c.execute(
            "update app.jobs set attempt_no = attempt_no + (status <> 'later')::int,"
            " status = 'waiting', enqueued_at = clock_timestamp(), began_at = null,"
            " finished_at = null, not_before = null"
            " where job_id = %s and status in ('new', 'again', 'later')"
            " returning attempt_no, enqueued_at",
            (ti,),
        ).fetchone()
        assert row
        return Attempt(ti, row["attempt_no"], None, row["enqueued_at"])

    def start(self, attempt: Attempt) -> None:
        self.c.execute(
            "update app.jobs set status = 'working', began_at = now() where job_id = %s",
            (attempt.id,),
        )

    def raise_max_tries(self, ti: str, by: int) -> None:
        self.c.execute(
            "update app.jobs set last_retried_attempt = last_retried_attempt + %s"
            " where job_id = %s",
            (by, ti),
        )


Host = Standalone


def running(host: Host, **how: Any) -> Attempt:
    """Make a task instance and bring its first attempt to running."""
    attempt = host.dispatch(host.create(**how))
    host.start(attempt)
    return attempt


def again(host: Host, attempt: Attempt) -> Attempt:
    """Dispatch the next attempt of a task instance and start it."""
    following = host.dispatch(attempt.id)
    host.start(following)
    return following


def pod(attempt: Attempt, *, ended: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """Facts of a pod of an attempt: running, or with a terminated container (`ended`)."""
    created = (attempt.queued_at or datetime.now(UTC)) + timedelta(seconds=1)
    container: dict[str, Any] = {"name": "base", "state": "running"}
    if ended is not None:
        container = {"name": "base", "state": "terminated", **ended}
    return {
        "pod": f"pod-{uuid.uuid4().hex[:8]}",
        "namespace": "tasks",
        "node": "node-1",
        "created_at": created.isoformat(),
        "identity": {
            "task_instance_id": attempt.id,
            "try_number": attempt.try_number,
            "attempt_id": attempt.attempt_id,
        },
        "phase": "Running" if ended is None else "Failed",
        "restarts": False,
        "conditions": [],
        "container": container,
        **facts,
    }


def success(attempt: Attempt, **facts: Any) -> dict[str, Any]:
    return pod(
        attempt,
        ended={"reason": "Completed", "exit_code": 0},
        phase="Succeeded",
        record={"outcome": "success"},
        **facts,
    )


def crashed(attempt: Attempt, code: int = 1, **facts: Any) -> dict[str, Any]:
    return pod(attempt, ended={"reason": "Error", "exit_code": code}, **facts)


def evicted(attempt: Attempt, **facts: Any) -> dict[str, Any]:
    return pod(
        attempt,
        ended={"reason": "Error", "exit_code": 137},
        pod_reason="Evicted",
        pod_message="The node was low on resource: memory. ",
        **facts,
    )


def poke(attempt: Attempt, at: str = FAR) -> dict[str, Any]:
    return pod(
        attempt,
        ended={"reason": "Error", "exit_code": 75},
        record={"outcome": "reschedule", "reschedule_at": at},
    )


def silent(attempt: Attempt, **facts: Any) -> dict[str, Any]:
    """Exit 0 and no record."""
    return pod(attempt, ended={"reason": "Completed", "exit_code": 0}, phase="Succeeded", **facts)


def superseded(attempt: Attempt) -> Attempt:
    """The same attempt as its pod would still claim it after another one was dispatched."""
    return replace(attempt)


def settle(connection: Connection, *pods: dict[str, Any]) -> list[Row]:
    """Settle pods in one pass of one page."""
    opened = connection.execute(
        "select settle.open_pass(null, 'podsettle', 'files') as id"
    ).fetchone()
    assert opened
    rows = connection.execute(
        "select * from settle.settle_pods(%s, %s)", (opened["id"], Jsonb(list(pods)))
    ).fetchall()
    connection.execute("select settle.close_pass(%s, false, '{}')", (opened["id"],))
    return rows


class Passes:
    """Complete passes over all namespaces, on a clock that the test moves."""

    def __init__(self, connection: Connection) -> None:
        self.c = connection
        connection.execute("create table public.test_clock (ahead interval not null)")
        connection.execute("insert into public.test_clock values ('0')")
        connection.execute("grant select on public.test_clock to settle_owner")
        connection.execute(
            "create or replace function settle.clock() returns timestamptz language sql volatile"
            " set search_path = pg_catalog, pg_temp as"
            " 'select clock_timestamp() + c.ahead from public.test_clock as c'"
        )

    def later(self, seconds: float) -> None:
        self.c.execute(
            "update public.test_clock set ahead = ahead + make_interval(secs => %s)", (seconds,)
        )

    def run(
        self, *pods: dict[str, Any], complete: bool = True, namespace: str | None = None
    ) -> list[Row]:
        """Run one pass; returns the rows of the pods, then those of what ripened."""
        opened = self.c.execute(
            "select settle.open_pass(%s, 'podsettle', 'files') as id", (namespace,)
        ).fetchone()
        assert opened
        rows = self.c.execute(
            "select * from settle.settle_pods(%s, %s)", (opened["id"], Jsonb(list(pods)))
        ).fetchall()
        seen = [
            r["task_instance_id"] for r in rows if r["disposition"] not in ("stale", "unmatched")
        ]
        return rows + self.close(opened["id"], complete=complete, seen=seen)

    def close(self, pass_id: int, *, complete: bool, seen: list[Any]) -> list[Row]:
        return self.c.execute(
            "select * from settle.close_pass(%s, %s, %s)", (pass_id, complete, seen)
        ).fetchall()

    def every(self, seconds: float, count: int, *pods: dict[str, Any]) -> list[Row]:
        """Run passes, each some time after the one before; returns the rows of the last."""
        rows: list[Row] = []
        for _ in range(count):
            self.later(seconds)
            rows = self.run(*pods)
        return rows

    def suspicions(self) -> list[Row]:
        return self.c.execute(
            "select * from settle.suspicions order by task_instance_id"
        ).fetchall()


def pending(attempt: Attempt, reason: str = "ImagePullBackOff", **facts: Any) -> dict[str, Any]:
    """A pod that waits for what does not heal by itself."""
    return pod(
        attempt,
        phase="Pending",
        container={"name": "base", "state": "waiting", "reason": reason},
        **facts,
    )


def terminating(attempt: Attempt, grace: int = 30, **facts: Any) -> dict[str, Any]:
    """A pod that is being deleted and has not ended."""
    return pod(
        attempt,
        deletion_at="2026-09-01T10:00:00Z",
        deletion_grace_seconds=grace,
        termination_grace_seconds=grace,
        **facts,
    )


def report(connection: Connection, attempt: Attempt, outcome: str, **named: Any) -> Row:
    arguments = {"attempt_id": attempt.attempt_id, "outcome": outcome, **named}
    marks = ", ".join(f"{name} => %({name})s" for name in arguments)
    row = connection.execute(f"select * from settle.report({marks})", arguments).fetchone()
    assert row
    return row


def ledger(connection: Connection, ti: str) -> list[Row]:
    return connection.execute(
        "select * from settle.settlement where task_instance_id = %s order by id", (ti,)
    ).fetchall()
