"""The procedures that people call in psql: each answers with one row, or with a code."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.sql.hosts import Host, again, crashed, evicted, ledger, running, settle, success

COLUMNS = ["disposition", "previous_state", "state", "max_tries", "why"]


def test_each_answers_with_one_readable_row(host: Host) -> None:
    calls = [
        ("call settle.succeed(%s, 1)", "success", "attempt 1 succeeded"),
        (
            "call settle.fail(%s, 1)",
            "up_for_retry",
            "unclassified failure (no reason given); try 1 of 2, will retry",
        ),
        (
            "call settle.fail(%s, 1, 'application', 'Bug', 3)",
            "up_for_retry",
            "application failure (Bug); try 1 of 2, will retry",
        ),
        (
            "call settle.fail(%s, 1, 'infra', 'Evicted', 137)",
            "up_for_retry",
            "infra failure (Evicted) refunded attempt 1; max_tries now 2 (refund 1/3), retry budget preserved",
        ),
        (
            "call settle.reschedule(%s, 1, '2031-01-01 00:00+00')",
            "up_for_reschedule",
            "attempt 1 asks to be run again at 2031-01-01T00:00:00Z",
        ),
        (
            "call settle.mark_failed(%s, 'wrong input')",
            "failed",
            "marked failed by a person: wrong input",
        ),
        ("call settle.mark_failed(%s)", "failed", "marked failed by a person"),
        ("call settle.clear(%s)", "none", "cleared; max_tries now 2, refunds start again at 0"),
    ]
    for call, state, why in calls:
        attempt = running(host, retries=1)
        cursor = host.c.execute(call, (attempt.id,))
        (row,) = cursor.fetchall()
        assert list(row) == COLUMNS
        assert (row["disposition"], row["previous_state"]) == ("settled", "running")
        assert (row["state"], row["why"]) == (state, why)
        after = host.row(attempt.id)
        assert (after["state"], after["max_tries"]) == (state, row["max_tries"])
        (entry,) = ledger(host.c, attempt.id)
        assert (entry["source"], entry["evidence"]) == ("person", {"person": entry["actor"]})


@pytest.mark.parametrize(
    ("call", "code", "named"),
    [
        ("call settle.succeed(%(nobody)s, 1)", "ST001", "no task instance"),
        ("call settle.fail(%(nobody)s, 1)", "ST001", "no task instance"),
        ("call settle.clear(null)", "ST001", "no task instance null"),
        ("call settle.mark_failed(%(nobody)s)", "ST001", "no task instance"),
        ("call settle.fail(%(ti)s, 1, 'cosmic rays')", "ST002", "'cosmic rays' is no failure kind"),
        ("call settle.fail(%(ti)s, 1, null, repeat('x', 241))", "ST002", "241 characters"),
        ("call settle.reschedule(%(ti)s, 1, null)", "ST002", "needs the time"),
        ("call settle.reschedule(%(ti)s, 1, 'infinity')", "ST002", "needs the time"),
        ("call settle.succeed(%(ti)s, null)", "ST002", "try_number must be 1 or more, not null"),
        ("call settle.succeed(%(ti)s, 0)", "ST002", "try_number must be 1 or more, not 0"),
        ("call settle.fail(%(ti)s, -3)", "ST002", "not -3"),
        ("call settle.succeed('no-uuid', 1)", "22P02", "no-uuid"),
    ],
)
def test_a_mistake_gets_a_code_and_changes_nothing(
    host: Host, call: str, code: str, named: str
) -> None:
    attempt = running(host, retries=1)
    before = host.row(attempt.id)
    with pytest.raises(psycopg.Error) as refused:
        host.c.execute(call, {"ti": attempt.id, "nobody": uuid.uuid4()})
    assert refused.value.sqlstate == code
    assert named in str(refused.value)
    assert host.row(attempt.id) == before
    assert ledger(host.c, attempt.id) == []


def test_i2_a_wrong_try_number_answers_stale(host: Host) -> None:
    attempt = running(host, retries=1)
    for call in ("call settle.succeed(%s, 2)", "call settle.fail(%s, 7, 'infra')"):
        row = host.c.execute(call, (attempt.id,)).fetchone()
        assert row
        assert (row["disposition"], row["state"]) == ("stale", "running")
        assert "the task instance is at try 1" in row["why"]
    assert ledger(host.c, attempt.id) == []


def test_i3_a_second_word_is_a_duplicate(host: Host) -> None:
    attempt = running(host, retries=1)
    host.c.execute("call settle.fail(%s, 1, 'application')", (attempt.id,))
    for call in ("call settle.succeed(%s, 1)", "call settle.mark_failed(%s)"):
        row = host.c.execute(call, (attempt.id,)).fetchone()
        assert row
        assert (row["disposition"], row["why"]) == (
            "duplicate",
            "the task instance is already up_for_retry",
        )
    assert len(ledger(host.c, attempt.id)) == 1


def test_a_manual_mark_is_never_retried_nor_refunded(host: Host) -> None:
    attempt = running(host, retries=5)
    row = host.c.execute("call settle.mark_failed(%s, 'stop')", (attempt.id,)).fetchone()
    assert row
    assert (row["state"], row["max_tries"]) == ("failed", 5)
    (entry,) = ledger(host.c, attempt.id)
    assert (entry["failure_kind"], entry["reason"], entry["refund"]) == ("manual", "stop", 0)


def test_i1_a_person_and_a_pass_come_to_the_same_end(host: Host) -> None:
    by_pass, by_person = running(host, retries=1), running(host, retries=1)
    settle(host.c, evicted(by_pass))
    host.c.execute("call settle.fail(%s, 1, 'infra', 'Evicted', 137)", (by_person.id,))
    ends = []
    for attempt in (by_pass, by_person):
        after, (entry,) = host.row(attempt.id), ledger(host.c, attempt.id)
        ends.append(
            [after[k] for k in ("state", "try_number", "max_tries")]
            + [entry[k] for k in ("verdict", "failure_kind", "refund", "refunds_used", "why")]
        )
    assert ends[0] == ends[1]


def test_a_cleared_task_runs_again_and_its_old_pod_changes_nothing(host: Host) -> None:
    old = running(host, retries=1)
    host.c.execute("call settle.clear(%s)", (old.id,))
    (row,) = settle(host.c, success(old))
    assert row["disposition"] == "duplicate"
    new = again(host, old)
    assert new.try_number == 2
    (row,) = settle(host.c, success(old))
    assert row["disposition"] == "stale"
    (row,) = settle(host.c, crashed(new))
    assert (row["state"], row["max_tries"]) == ("up_for_retry", 2)
    twice = [host.c.execute("call settle.clear(%s)", (old.id,)).fetchone() for _ in range(2)]
    assert [t["disposition"] for t in twice if t] == ["settled", "duplicate"]
