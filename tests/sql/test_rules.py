"""Operators' own rules, settings and policies, and what cannot be stored."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from reconciler.database import Connection
from tests.sql.hosts import Standalone, crashed, evicted, pod, running, silent


def classify(connection: Connection, facts: object) -> tuple[object, ...]:
    row = connection.execute("select * from settle.classify(%s)", (Jsonb(facts),)).fetchone()
    assert row
    return row["verdict"], row["failure_kind"], row["reason"], row["rule"]


@pytest.fixture
def attempt(connection: Connection):
    return running(Standalone(connection))


def add(connection: Connection, **columns: object) -> None:
    names = ", ".join(columns)
    marks = ", ".join(["%s"] * len(columns))
    connection.execute(
        f"insert into settle.failure_rule ({names}) values ({marks})", list(columns.values())
    )


def test_an_operators_rule_by_exit_code_and_reason(connection: Connection, attempt) -> None:
    assert classify(connection, crashed(attempt, 42))[1:] == ("application", "Error", "exit-code")
    add(
        connection,
        name="spot",
        priority=95,
        exit_codes="{[42,43]}",
        failure_kind="infra",
        reason="SpotGone",
    )
    assert classify(connection, crashed(attempt, 42)) == ("failed", "infra", "SpotGone", "spot")
    assert classify(connection, crashed(attempt, 44))[1] == "application"
    connection.execute("update settle.failure_rule set enabled = false where name = 'spot'")
    assert classify(connection, crashed(attempt, 42))[1] == "application"


def test_an_operators_rule_by_condition(connection: Connection, attempt) -> None:
    facts = crashed(
        attempt, conditions=[{"type": "Vendor", "status": "True", "reason": "Recycled", "at": None}]
    )
    add(
        connection,
        name="vendor",
        priority=55,
        condition_type="^Vendor$",
        failure_kind="infra",
        reason="$condition",
    )
    assert classify(connection, facts) == ("failed", "infra", "Recycled", "vendor")
    facts["conditions"][0]["status"] = "False"
    assert classify(connection, facts)[3] == "exit-code"


def test_an_operators_rule_for_pods_that_wait(connection: Connection, attempt) -> None:
    facts = pod(
        attempt,
        phase="Pending",
        container={"name": "base", "state": "absent"},
        conditions=[
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "at": None}
        ],
    )
    row = connection.execute("select * from settle.classify(%s)", (Jsonb(facts),)).fetchone()
    assert row
    assert (row["final"], row["reason"], row["silence"]) == (False, "Unschedulable", None)
    add(
        connection,
        name="quota",
        priority=50,
        applies_to="pending",
        container_reason="^Unschedulable$",
        failure_kind="infra",
        reason="$best",
        silence="pending",
    )
    row = connection.execute("select * from settle.classify(%s)", (Jsonb(facts),)).fetchone()
    assert row
    assert (row["final"], row["silence"], row["overdue_kind"], row["overdue_reason"]) == (
        False,
        "pending",
        "infra",
        "Unschedulable",
    )


def test_a_record_outranks_every_rule(connection: Connection, attempt) -> None:
    add(connection, name="all", priority=1, failure_kind="infra", reason="Everything")
    facts = crashed(attempt, 1, record={"outcome": "failed", "exit_code": 1})
    assert classify(connection, facts) == ("failed", "application", "Error", "record")
    assert classify(connection, silent(attempt, record={"outcome": "success"}))[0] == "success"


@pytest.mark.parametrize("code", [137, 143, 255])
def test_a_bare_failed_record_of_an_agent_that_the_platform_killed_is_infra(
    connection: Connection, attempt, code: int
) -> None:
    record = {"outcome": "failed", "exit_code": code}
    assert classify(connection, crashed(attempt, code, record=record))[1] == "application"
    ending = {"deletion_at": "2026-09-01T10:00:00Z"}
    assert classify(connection, crashed(attempt, code, record=record, **ending)) == (
        "failed",
        "infra",
        "PodDeleted",
        "deleted",
    )
    named = {**record, "failure_kind": "timeout", "reason": "ExecutionTimeout"}
    assert classify(connection, crashed(attempt, code, record=named, **ending))[1:3] == (
        "timeout",
        "ExecutionTimeout",
    )
    own = {
        **ending,
        "container": {
            "name": "base",
            "state": "terminated",
            "reason": "OOMKilled",
            "exit_code": 137,
            "own_memory_limit": True,
        },
    }
    assert classify(connection, crashed(attempt, code, record=record) | own)[1:3] == (
        "application",
        "OOMKilled",
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"failure_kind": "manual"},
        {"pod_reason": "(unclosed"},
        {"container_message": "[z-a]"},
        {"applies_to": "pending"},
        {"condition_reason": "x"},
        {"silence": "golden"},
    ],
)
def test_a_rule_that_makes_no_sense_cannot_be_stored(connection: Connection, columns: dict) -> None:
    with pytest.raises((psycopg.errors.CheckViolation, psycopg.errors.InvalidRegularExpression)):
        add(connection, name="bad", priority=1, **columns)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_infra_refunds", "-1"),
        ("max_infra_refunds", "many"),
        ("absent_after", "soon"),
        ("absent_after", "-1 s"),
        ("trust_exit_zero", "maybe"),
    ],
)
def test_a_setting_takes_only_its_kind(connection: Connection, name: str, value: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        connection.execute("update settle.setting set value = %s where name = %s", (value, name))
    assert refused.value.sqlstate in {"23514", "22007"}


def test_evicted_without_a_word_why_is_no_kind(connection: Connection, attempt) -> None:
    assert classify(connection, evicted(attempt) | {"pod_message": None})[1:3] == (None, "Evicted")
    assert classify(connection, evicted(attempt))[1:3] == ("infra", "Evicted")


def final(row) -> tuple[object, ...]:
    return row["final"], row["reason"], row["silence"], row["overdue_kind"], row["overdue_reason"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (False, "PodDeleted", "terminating", "infra", "PodDeleted")),
        ({"pod_reason": "NodeLost"}, (False, "NodeLost", "terminating", "infra", "NodeLost")),
        ({"pod_reason": "Evicted"}, (False, "PodDeleted", "terminating", "infra", "PodDeleted")),
        (
            {
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "DeletionByTaintManager",
                    }
                ]
            },
            (False, "DeletionByTaintManager", "terminating", "infra", "DeletionByTaintManager"),
        ),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True"}]},
            (False, "DisruptionTarget", "terminating", "infra", "DisruptionTarget"),
        ),
    ],
)
def test_a_pod_that_is_being_deleted_says_why(
    connection: Connection, attempt, facts, expected
) -> None:
    row = connection.execute(
        "select * from settle.classify(%s)",
        (Jsonb(pod(attempt, deletion_at="2026-09-01T10:00:00Z", **facts)),),
    ).fetchone()
    assert final(row) == expected
