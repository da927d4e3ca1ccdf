"""The routines of a deliverer: who has what in hand, in which order, and for how long."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

from reconciler import database as db
from tests.listeners.conftest import outbox, register, setting
from tests.sql.hosts import Passes, Standalone, again, crashed, running, settle, success


def claim(connection: db.Connection, limit: int = 20, claim: str | None = None) -> list[Any]:
    """Claim events; returns (claim, ids, tries)."""
    token = claim or str(uuid.uuid4())
    rows = connection.execute(
        "select * from settle.claim_events('one', %s::uuid, %s)", (token, limit)
    ).fetchall()
    return [token, [row["id"] for row in rows], [row["tries"] for row in rows]]


def crash(connection: db.Connection, n: int) -> list[int]:
    """Settle n crashes; returns the ids of their events."""
    host = Standalone(connection)
    settle(connection, *(crashed(running(host)) for _ in range(n)))
    return [row["id"] for row in outbox(connection, "one")]


@pytest.fixture(autouse=True)
def _registered(connection: db.Connection) -> None:
    register(connection, "one")


def test_two_deliverers_share_and_do_not_wait(connection: db.Connection, database: str) -> None:
    ids = crash(connection, 5)
    with db.connect(database) as other, other.transaction():
        # Not committed yet: the rows are locked, and passed over.
        _, first, _ = claim(other, 2)
        _, second, _ = claim(connection)
        assert (first, second) == (ids[:2], ids[2:])
    assert claim(connection)[1] == []


def test_an_event_in_hand_of_another_keeps_later_ones_of_its_task_instance(
    connection: db.Connection, database: str
) -> None:
    host = Standalone(connection)
    attempt = running(host, retries=1)
    settle(connection, crashed(attempt))
    settle(connection, success(again(host, attempt)))
    first, second = (row["id"] for row in outbox(connection, "one"))
    with db.connect(database) as other, other.transaction():
        token, ids, _ = claim(other)
        assert ids == [first]
        assert claim(connection)[1] == []
    assert claim(connection)[1] == []
    connection.execute("select settle.events_delivered(%s, %s)", (token, [first]))
    assert claim(connection)[1] == [second]


def test_a_claim_expires_and_the_late_one_changes_nothing(connection: db.Connection) -> None:
    ids = crash(connection, 1)
    clock = Passes(connection)
    late, _, _ = claim(connection)
    clock.later(119)
    assert claim(connection)[1] == []
    clock.later(2)
    token, got, tries = claim(connection)
    assert (got, tries) == (ids, [2])
    for statement, said in (
        ("select settle.events_delivered(%s, array[%s::bigint])", 0),
        ("select settle.event_failed(%s, %s, 'late')", "lost"),
    ):
        row = connection.execute(statement, (late, ids[0])).fetchone()
        assert row
        assert list(row.values()) == [said]
    assert connection.execute("select settle.release_events(%s)", (late,)).fetchone() == {
        "release_events": 0
    }
    assert str(outbox(connection, "one")[0]["claim"]) == token


def test_each_delivery_keeps_the_rest_of_the_claim(connection: db.Connection) -> None:
    ids = crash(connection, 3)
    clock = Passes(connection)
    token, _, _ = claim(connection)
    for event_id, statement in (
        (ids[0], "select settle.events_delivered(%s, array[%s::bigint])"),
        (ids[1], "select settle.event_failed(%s, %s, 'no')"),
    ):
        clock.later(100)
        connection.execute(statement, (token, event_id))
    clock.later(100)
    assert ids[2] not in claim(connection)[1]


def test_what_was_tried_before_comes_alone_and_after_what_is_fresh(
    connection: db.Connection,
) -> None:
    ids = crash(connection, 4)
    setting(connection, "outbox_claim", "0 s")
    assert claim(connection, 3)[1] == ids[:3]
    # As after a deliverer that died: its claims are over.
    assert claim(connection)[1:] == [[ids[3]], [1]]
    alone = [claim(connection) for _ in range(4)]
    assert [c[1] for c in alone] == [[event_id] for event_id in ids]
    assert [c[2] for c in alone] == [[2]] * 4


def test_what_was_given_back_counts_no_try(connection: db.Connection) -> None:
    ids = crash(connection, 2)
    token, _, _ = claim(connection)
    connection.execute("select settle.release_events(%s)", (token,))
    assert claim(connection)[1:] == [ids, [1, 1]]


def test_the_wait_doubles_up_to_its_limit(connection: db.Connection) -> None:
    crash(connection, 1)
    clock = Passes(connection)
    setting(connection, "outbox_backoff_max", "50 s")
    waits = []
    for _ in range(4):
        token, ids, _ = claim(connection)
        connection.execute("select settle.event_failed(%s, %s, 'no')", (token, ids[0]))
        waited = 0
        while not claim(connection)[1]:
            clock.later(5)
            waited += 5
        waits.append(waited)
        connection.execute(
            "update settle.outbox set claim = null, due_at = null, tries = tries - 1"
        )
    assert waits == [15, 30, 50, 50]


def test_a_last_try_that_died_is_set_aside(connection: db.Connection) -> None:
    crash(connection, 1)
    setting(connection, "outbox_claim", "0 s")
    setting(connection, "outbox_tries", "2")
    assert [claim(connection)[2] for _ in range(3)] == [[1], [2], []]
    (row,) = outbox(connection, "one")
    assert row["set_aside_at"]
    assert row["last_error"] == "its deliverer ended without a word"


def test_a_listener_that_is_off_keeps_what_it_has(connection: db.Connection) -> None:
    ids = crash(connection, 1)
    connection.execute("select settle.unregister_listener('one')")
    assert claim(connection)[1] == []
    register(connection, "one")
    assert claim(connection)[1] == ids


@pytest.mark.parametrize(
    ("statement", "sqlstate"),
    [
        ("select * from settle.claim_events('one', null, 1)", "ST002"),
        ("select * from settle.claim_events('one', gen_random_uuid(), 0)", "ST002"),
        ("select settle.ensure_listeners('{Not a name}')", "ST002"),
        ("select settle.retry_events('nobody')", "ST001"),
    ],
)
def test_a_mistake_is_raised(connection: db.Connection, statement: str, sqlstate: str) -> None:
    with pytest.raises(psycopg.Error) as raised:
        connection.execute(statement)
    assert raised.value.sqlstate == sqlstate


def test_the_history_of_delivery_costs_a_claim_nothing(connection: db.Connection) -> None:
    """It reads what is open, not what was delivered."""
    crash(connection, 1)
    connection.execute("update settle.outbox set delivered_at = now()")
    connection.execute("insert into settle.listener (name) values ('two')")
    connection.execute(
        "insert into settle.settlement overriding system value select (jsonb_populate_record(s, jsonb_build_object('id', s.id + n))).*"
        " from settle.settlement as s, generate_series(1, 3000) as n"
    )
    connection.execute(
        "insert into settle.outbox (settlement_id, listener, task_key, delivered_at)"
        " select s.id, 'one', s.task_key, now() from settle.settlement as s where s.id > 1"
    )
    connection.execute("select setval('settle.settlement_id_seq', 9000)")
    crash(connection, 1)
    connection.execute("vacuum analyze settle.outbox")
    plan = connection.execute(
        "explain (format json) select o.id from settle.outbox as o where o.listener = 'one'"
        " and o.delivered_at is null and o.set_aside_at is null order by o.tries, o.id limit 20"
    ).fetchone()
    assert plan
    assert "outbox_due_idx" in str(plan)
    assert len(claim(connection)[1]) == 1
