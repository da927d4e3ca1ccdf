"""create_task, dispatch and started, and the rows that the standalone host cannot hold."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from reconciler.database import Connection
from tests.sql.hosts import Standalone, running, settle, success


@pytest.fixture
def host(connection: Connection) -> Standalone:
    return Standalone(connection)


def test_a_task_is_made_once(host: Standalone) -> None:
    first, second = host.create(task="t", retries=2), host.create(task="t", retries=7)
    assert first == second
    row = host.row(first)
    assert (row["state"], row["try_number"], row["max_tries"], row["attempt_id"]) == (
        "none",
        0,
        2,
        None,
    )


def test_a_dispatch_begins_an_attempt_of_its_own(host: Standalone) -> None:
    ti = host.create(retries=1)
    first = host.dispatch(ti)
    assert first.try_number == 1
    assert uuid.UUID(first.attempt_id or "").version == 4
    row = host.row(ti)
    assert (row["state"], row["attempt_id"]) == ("queued", first.attempt_id)
    host.c.execute("call settle.fail(%s, 1, 'application')", (ti,))
    second = host.dispatch(ti)
    assert (second.try_number, second.attempt_id != first.attempt_id) == (2, True)
    host.c.execute("call settle.reschedule(%s, 2, now())", (ti,))
    third = host.dispatch(ti)
    assert (third.try_number, third.attempt_id != second.attempt_id) == (2, True)


def test_only_what_waits_can_be_dispatched(host: Standalone) -> None:
    attempt = running(host)
    for state in ("running", "success"):
        with pytest.raises(psycopg.Error, match=f"is {state}, it cannot be dispatched") as refused:
            host.dispatch(attempt.id)
        assert refused.value.sqlstate == "ST003"
        settle(host.c, success(attempt))
    with pytest.raises(psycopg.Error) as refused:
        host.dispatch(str(uuid.uuid4()))
    assert refused.value.sqlstate == "ST001"


def test_started_answers_settled_duplicate_or_stale(host: Standalone) -> None:
    first = host.dispatch(host.create())
    call = "select settle.started(%s) as answer"

    def started(attempt_id: str | None) -> str:
        row = host.c.execute(call, (attempt_id,)).fetchone()
        assert row
        return row["answer"]

    assert [started(first.attempt_id) for _ in range(2)] == ["settled", "duplicate"]
    at = host.row(first.id)["started_at"]
    host.c.execute("call settle.reschedule(%s, 1, now())", (first.id,))
    assert started(first.attempt_id) == "duplicate"
    second = host.dispatch(first.id)
    assert started(first.attempt_id) == "stale"
    assert host.row(first.id)["state"] == "queued"
    assert started(second.attempt_id) == "settled"
    assert host.row(first.id)["started_at"] > at
    with pytest.raises(psycopg.Error) as refused:
        started(None)
    assert refused.value.sqlstate == "ST002"


@pytest.mark.parametrize(
    "arguments",
    [
        "'', 'r', 't'",
        "'d', 'r', repeat('t', 251)",
        "'d', 'r', 't', -2",
        "'d', 'r', 't', -1, -1",
        "null, 'r', 't'",
    ],
)
def test_an_impossible_task_is_refused_with_a_code(host: Standalone, arguments: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        host.c.execute(f"select settle.create_task({arguments})")
    assert refused.value.sqlstate == "ST002"


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'sleeping'", "task_instance_state_check"),
        ("state = 'running', started_at = null", "task_instance_times_check"),
        ("state = 'failed'", "task_instance_times_check"),
        ("state = 'up_for_retry', ended_at = now()", "task_instance_times_check"),
        ("next_try_at = now()", "task_instance_times_check"),
        ("attempt_id = null", "task_instance_attempt_check"),
        ("queued_at = null", "task_instance_attempt_check"),
        ("retries = -1", "task_instance_numbers_check"),
        ("max_tries = -1", "task_instance_numbers_check"),
        ("map_index = -2", "task_instance_numbers_check"),
        ("task_id = ''", "task_instance_names_check"),
    ],
)
def test_an_illegal_row_is_impossible(host: Standalone, change: str, constraint: str) -> None:
    attempt = running(host)
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        host.c.execute(f"update settle.task_instance set {change} where id = %s", (attempt.id,))
    assert refused.value.diag.constraint_name == constraint


def test_two_attempts_cannot_share_an_attempt_id(host: Standalone) -> None:
    one, other = running(host), running(host)
    with pytest.raises(psycopg.errors.UniqueViolation):
        host.c.execute(
            "update settle.task_instance set attempt_id = %s where id = %s",
            (one.attempt_id, other.id),
        )
