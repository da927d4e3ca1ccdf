"""Delivery by real processes: a listener that raises, hangs or dies loses and blocks nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler import database as db
from tests.cli.conftest import COMMAND, Run
from tests.listeners.conftest import Probe, outbox, register, setting
from tests.sql.hosts import (
    Attempt,
    Standalone,
    again,
    crashed,
    evicted,
    poke,
    running,
    settle,
    success,
)

Deliver = Callable[..., Run]


def fail(connection: db.Connection, host: Standalone, *tasks: str) -> list[Attempt]:
    """Settle a crash of each task."""
    attempts = [running(host, task=task) for task in tasks]
    settle(connection, *(crashed(attempt) for attempt in attempts))
    return attempts


# --- what is told -------------------------------------------------------------------------------


def test_each_transition_reaches_its_hooks(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    register(connection, "recorder")
    lost, broke = running(host, task="lost"), running(host, task="broke")
    settle(connection, evicted(lost), crashed(broke, 3))
    settle(connection, success(again(host, lost)))
    waits = running(host, task="waits")
    settle(connection, poke(waits))
    connection.execute("call settle.clear(%s)", (broke.id,))
    run = deliver()
    assert run.code == 0, run.err
    assert run.out == "recorder: 5 delivered, 0 failed, 0 set aside\n"
    # In order for each task instance; nothing is promised across them.
    told = sorted(
        probe.told("recorder"), key=lambda line: ["lost", "broke", "waits"].index(line["task"])
    )
    assert [(line["hook"], line["task"]) for line in told] == [
        ("failed", "lost"),
        ("retry", "lost"),
        ("success", "lost"),
        ("failed", "broke"),
        ("cleared", "broke"),
        ("reschedule", "waits"),
    ]
    assert told[0] | {"id": 0, "error": ""} == {
        "hook": "failed",
        "id": 0,
        "task": "lost",
        "previous_state": "running",
        "state": "up_for_retry",
        "try_number": 1,
        "max_tries": 1,
        "error": "",
        "kind": "infra",
        "reason": "Evicted",
        "refund": [True, 1, 3],
    }
    assert told[0]["error"].startswith("infra failure (Evicted) refunded attempt 1")
    assert (told[1]["kind"], told[1]["reason"]) == ("infra", "Evicted")
    assert (told[3]["state"], told[3]["kind"], told[3]["reason"]) == (
        "failed",
        "application",
        "Error",
    )
    assert sorted({line["id"] for line in told}) == [
        row["id"] for row in outbox(connection, "recorder")
    ]
    assert deliver().out == "nothing is due\n"
    assert len(probe.told("recorder")) == len(told)


def test_a_listener_that_declares_fewer_arguments_is_called_all_the_same(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    register(connection, "old")
    fail(connection, host, "a")
    run = deliver()
    (told,) = probe.told("old")
    assert (told["previous_state"], told["task"]) == ("running", "a")
    assert "application failure (Error)" in told["error"]
    # What it prints is kept apart from what the command answers.
    assert "printed by a listener" in run.err
    assert run.out == "old: 1 delivered, 0 failed, 0 set aside\n"


def test_an_event_holds_no_evidence_and_no_secret(
    connection: db.Connection, host: Standalone
) -> None:
    register(connection, "recorder")
    attempt = running(host, task="a")
    settle(
        connection,
        crashed(attempt, pod_message="password hunter2", args=["--token", "hunter2"]),
    )
    row = connection.execute(
        "select c.event::text as event from settle.claim_events('recorder', gen_random_uuid(), 9) as c"
    ).fetchone()
    assert row
    assert '"failure_kind": "application"' in row["event"]
    assert "hunter2" not in row["event"]
    assert attempt.attempt_id not in row["event"]


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise once", r"RuntimeError: no\nway"),
        ("exit once", "SystemExit: bye"),
        ("hang once", "no answer within 1 s; its process was killed"),
        ("kill once", "its process ended with signal 9"),
        ("leave once", "no answer within 1 s; its process was killed"),
    ],
)
def test_a_listener_in_trouble_loses_and_blocks_nothing(
    connection: db.Connection,
    host: Standalone,
    probe: Probe,
    deliver: Deliver,
    how: str,
    told: str,
) -> None:
    register(connection, "recorder", "troubled")
    fail(connection, host, "a", "bad", "z")
    probe.trouble("bad", how)
    run = deliver("--event-timeout", "1")
    assert run.code == 0, run.err
    # The other listener, and the other events of this one.
    assert probe.tasks("recorder") == ["a", "bad", "z"]
    assert sorted(probe.tasks("troubled")) == ["a", "z"]
    (problem,) = [e["problem"] for e in run.events if e["event"] == "delivery problem"]
    a, bad, z = outbox(connection, "troubled")
    assert problem == f"event {bad['id']}: {told}"
    assert a["delivered_at"]
    assert z["delivered_at"]
    assert (bad["delivered_at"], bad["set_aside_at"], bad["claim"]) == (None, None, None)
    assert (bad["tries"], bad["last_error"]) == (1, told)
    assert deliver().out == "nothing is due\n"
    connection.execute(
        "update settle.outbox set due_at = settle.clock() where id = %s", (bad["id"],)
    )
    assert deliver().out == "troubled: 1 delivered, 0 failed, 0 set aside\n"
    assert probe.told("troubled")[-1]["id"] == bad["id"]
    # At least once, each with the same id: nothing but the bad one was begun twice.
    assert sorted(line["id"] for line in probe.told("begun")) == [
        a["id"],
        bad["id"],
        bad["id"],
        z["id"],
    ]


def test_a_deliverer_that_is_killed_loses_nothing(
    connection: db.Connection, database: str, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    """Parent and child are gone in the middle of a call; nobody gives anything back."""
    register(connection, "troubled")
    setting(connection, "outbox_claim", "0 s")
    fail(connection, host, "a", "bad", "z")
    probe.trouble("bad", "hang")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PODSETTLE_")}
    parent = subprocess.Popen(
        [COMMAND, "deliver", "--dsn", database, "--event-timeout", "60"],
        env=environment | probe.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while "bad" not in probe.tasks("begun"):
        assert parent.poll() is None
    children = [
        int(pid)
        for task in Path(f"/proc/{parent.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    parent.kill()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    parent.wait()
    probe.no_more_trouble()
    assert deliver().code == 0
    assert sorted(set(probe.tasks("troubled"))) == ["a", "bad", "z"]
    assert all(row["delivered_at"] for row in outbox(connection, "troubled"))


def test_a_hung_listener_does_not_outlive_its_parent(
    connection: db.Connection, database: str, host: Standalone, probe: Probe
) -> None:
    register(connection, "troubled")
    fail(connection, host, "bad")
    probe.trouble("bad", "hang")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PODSETTLE_")}
    parent = subprocess.Popen(
        [COMMAND, "deliver", "--dsn", database, "--event-timeout", "2"],
        env=environment | probe.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while "bad" not in probe.tasks("begun"):
        assert parent.poll() is None
    parent.kill()
    # The child holds standard error open: this returns once it has ended, and hangs if it does not.
    parent.communicate()
    assert parent.returncode == -signal.SIGKILL


def test_events_of_a_task_instance_wait_for_one_that_is_tried_again(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    register(connection, "recorder", "troubled")
    first = running(host, task="a", retries=1)
    settle(connection, crashed(first))
    settle(connection, success(again(host, first)))
    fail(connection, host, "other")
    probe.trouble("a", "raise once")
    assert "troubled: 1 delivered, 1 failed, 0 set aside" in deliver().out
    assert probe.tasks("troubled") == ["other"]
    hooks = [line["hook"] for line in probe.told("recorder") if line["task"] == "a"]
    assert hooks == ["failed", "retry", "success"]
    connection.execute("update settle.outbox set due_at = settle.clock()")
    assert "troubled: 2 delivered" in deliver().out
    assert [(t["task"], t["event"]) for t in probe.told("troubled")] == [
        ("other", "failed"),
        ("a", "retry"),
        ("a", "success"),
    ]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_after_its_tries_an_event_is_set_aside_and_may_be_taken_up_again(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver, how: str
) -> None:
    register(connection, "troubled")
    setting(connection, "outbox_tries", "3")
    setting(connection, "outbox_backoff", "0 s")
    first = running(host, task="bad", retries=1)
    settle(connection, crashed(first))
    settle(connection, success(again(host, first)))
    probe.trouble("bad", how)
    run = deliver()
    assert run.out == "troubled: 0 delivered, 4 failed, 2 set aside\n"
    probe.no_more_trouble()
    stuck = connection.execute(
        "select task_id, state, tries, set_aside, failure_kind, last_error from settle.stuck_events order by id"
    ).fetchall()
    assert [(s["task_id"], s["state"], s["tries"], s["set_aside"]) for s in stuck] == [
        ("bad", "up_for_retry", 3, True),
        ("bad", "success", 3, True),
    ]
    assert stuck[0]["failure_kind"] == "application"
    assert stuck[0]["last_error"]
    # What comes later no longer waits for it.
    settle(connection, crashed(again_from_clear(connection, host, first)))
    assert deliver().out == "troubled: 2 delivered, 0 failed, 0 set aside\n"
    assert deliver("--again", "troubled").out == (
        "troubled: 2 events taken up again\ntroubled: 2 delivered, 0 failed, 0 set aside\n"
    )
    assert [t["event"] for t in probe.told("troubled")] == ["cleared", "retry", "retry", "success"]
    # The same ids as at the first try.
    assert {t["id"] for t in probe.told("troubled")} == {t["id"] for t in probe.told("begun")}
    assert connection.execute("select * from settle.stuck_events").fetchall() == []


def again_from_clear(connection: db.Connection, host: Standalone, attempt: Attempt) -> Attempt:
    connection.execute("call settle.clear(%s)", (attempt.id,))
    return again(host, attempt)


# --- listeners that cannot be used --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "listener 'broken' cannot be loaded: ModuleNotFoundError"),
        ("misspelt", "no_such_argument"),
        ("hookless", "has no hook"),
        ("absent", "listener 'absent' is not installed here; 1 events wait"),
        ("callbacks", "PODSETTLE_CALLBACKS is not set"),
    ],
)
def test_a_listener_that_cannot_be_loaded_costs_no_try(
    connection: db.Connection,
    host: Standalone,
    probe: Probe,
    deliver: Deliver,
    name: str,
    why: str,
) -> None:
    register(connection, name, "recorder")
    fail(connection, host, "a")
    run = deliver()
    assert run.code == 0
    (problem,) = [e for e in run.events if e["event"] == "delivery problem"]
    assert problem["listener"] == name
    assert why in problem["problem"]
    (waiting,) = outbox(connection, name)
    assert (waiting["tries"], waiting["claim"], waiting["delivered_at"]) == (0, None, None)
    assert probe.tasks("recorder") == ["a"]


def test_an_entry_point_cannot_take_the_name_of_a_shipped_listener(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    register(connection, "log")
    fail(connection, host, "a")
    run = deliver()
    assert [e["task_id"] for e in run.events if e["event"] == "TaskInstance Finished"] == ["a"]
    assert probe.told("recorder") == []


def test_deliver_refuses_a_name_that_nobody_has(deliver: Deliver) -> None:
    run = deliver("--listeners", "recorder,nobody")
    assert run.code == 2
    assert "nobody is not installed here" in run.err


def test_listeners_are_registered_by_name_and_one_that_is_off_stays_off(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    register(connection, "old")
    connection.execute("select settle.unregister_listener('old')")
    run = deliver(PODSETTLE_LISTENERS="recorder, old")
    assert run.code == 0
    assert [e["listener"] for e in run.events if e["event"] == "listener is off"] == ["old"]
    rows = connection.execute("select name, enabled from settle.listener order by name").fetchall()
    assert [(row["name"], row["enabled"]) for row in rows] == [("old", False), ("recorder", True)]
    fail(connection, host, "a")
    assert outbox(connection, "old") == []
    # Only the named ones are told from here.
    register(connection, "troubled")
    fail(connection, host, "b")
    assert deliver("--listeners", "recorder").out == (
        "recorder: 2 delivered, 0 failed, 0 set aside\n"
    )
    assert probe.told("troubled") == []


def test_nothing_is_delivered_in_no_time(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Deliver
) -> None:
    """At the deadline a child is asked to stop; what it had in hand is given back, uncharged."""
    register(connection, "recorder")
    fail(connection, host, "a", "b")
    assert deliver("--deliver-within", "0").code == 0
    undelivered = [row for row in outbox(connection, "recorder") if not row["delivered_at"]]
    assert {(row["tries"], row["claim"]) for row in undelivered} <= {(0, None)}
    assert len(probe.told("recorder")) + len(undelivered) == 2
