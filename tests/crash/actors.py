"""Everybody who may act on one task instance at the same moment, each as one call of the API."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from reconciler.database import Connection, Row
from tests.sql import hosts
from tests.sql.hosts import Attempt, Passes, Standalone

Call = Callable[[Connection], Any]
LISTENERS = ("mail", "metrics")


@dataclass
class Scene:
    """One task instance in a namespace of its own, so that no pass judges another's."""

    passes: Passes
    attempt: Attempt
    namespace: str

    def open_pass(self) -> int:
        row = self.passes.c.execute(
            "select settle.open_pass(%s, 'podsettle', 'files') as id", (self.namespace,)
        ).fetchone()
        assert row
        return int(row["id"])

    def silent_pass(self) -> None:
        """A complete pass that sees no pod of it."""
        self.passes.close(self.open_pass(), complete=True, seen=[])

    def state(self) -> dict[str, Any]:
        """All that is kept about it, but for ids and moments."""
        c, ti = self.passes.c, self.attempt.id
        row = Standalone(c).row(ti)
        entries = hosts.ledger(c, ti)
        told = c.execute(
            "select count(*) as n from settle.outbox as o join settle.settlement as s"
            " on s.id = o.settlement_id where s.task_instance_id = %s",
            (ti,),
        ).fetchone()
        assert told
        return {
            **{k: row[k] for k in ("state", "try_number", "max_tries")},
            "same attempt": row["attempt_id"] == self.attempt.attempt_id,
            "ledger": [
                {
                    k: entry[k]
                    for k in (
                        *("disposition", "previous_state", "state", "try_number", "failure_kind"),
                        *("reason", "refund", "refunds_used", "previous_max_tries", "max_tries"),
                        *("provisional", "source"),
                    )
                }
                for entry in entries
            ],
            "outbox": told["n"],
            "suspicions": c.execute(
                "select cause, try_number, passes from settle.suspicion"
                " where task_instance_id = %s",
                (ti,),
            ).fetchall(),
            "pushed": c.execute(
                "select key, value from settle.pushed where task_instance_id = %s", (ti,)
            ).fetchall(),
        }


def begin(passes: Passes, *, queued: bool = False) -> Scene:
    host, namespace = Standalone(passes.c), f"n-{uuid.uuid4().hex}"
    row = passes.c.execute(
        "select settle.create_task('d', 'r', %s, p_retries => 1, p_namespace => %s)::text as id",
        (namespace, namespace),
    ).fetchone()
    assert row
    attempt = host.dispatch(row["id"])
    if not queued:
        host.start(attempt)
    passes.later(2)
    return Scene(passes, attempt, namespace)


# --- in which state the task instance is ---------------------------------------------------------


def running(passes: Passes) -> Scene:
    return begin(passes)


def queued(passes: Passes) -> Scene:
    return begin(passes, queued=True)


def ripe(passes: Passes) -> Scene:
    """Absent for so long that the next complete pass settles it."""
    scene = begin(passes)
    scene.silent_pass()
    passes.later(61)
    return scene


def provisional(passes: Passes) -> Scene:
    """Settled as absent, refunded."""
    scene = ripe(passes)
    scene.silent_pass()
    passes.later(2)
    return scene


def poked(passes: Passes) -> Scene:
    """Waiting to be run again with the same try_number."""
    scene = begin(passes)
    hosts.report(passes.c, scene.attempt, "reschedule", reschedule_at=hosts.FAR)
    return scene


SCENES = {scene.__name__: scene for scene in (running, queued, ripe, provisional, poked)}


# --- who acts -------------------------------------------------------------------------------------


def _pod(make: Callable[[Attempt], dict[str, Any]]) -> Callable[[Scene], Call]:
    def actor(scene: Scene) -> Call:
        opened, pod = scene.open_pass(), make(scene.attempt) | {"namespace": scene.namespace}

        def call(connection: Connection) -> Any:
            (row,) = connection.execute(
                "select disposition from settle.settle_pods(%s, %s)", (opened, Jsonb([pod]))
            ).fetchall()
            return row["disposition"]

        return call

    return actor


def _silence(scene: Scene) -> Call:
    opened = scene.open_pass()

    def call(connection: Connection) -> Any:
        rows = connection.execute(
            "select disposition from settle.close_pass(%s, true, '{}')", (opened,)
        ).fetchall()
        return [row["disposition"] for row in rows]

    return call


def _answer(statement: str, *values: Any, by: str = "id") -> Callable[[Scene], Call]:
    def actor(scene: Scene) -> Call:
        who = scene.attempt.id if by == "id" else scene.attempt.attempt_id

        def call(connection: Connection) -> Any:
            row: Row | None = connection.execute(
                statement,  # type: ignore[arg-type]
                (who, *values),
            ).fetchone()
            assert row
            return row["disposition"]

        return call

    return actor


ACTORS: dict[str, Callable[[Scene], Call]] = {
    "pass: success": _pod(hosts.success),
    "pass: crash": _pod(hosts.crashed),
    "pass: evicted": _pod(hosts.evicted),
    "pass: poke": _pod(hosts.poke),
    "pass: exit 0": _pod(hosts.silent),
    "pass: pending": _pod(hosts.pending),
    "close_pass": _silence,
    "report: success": _answer("select * from settle.report(%s, 'success')", by="attempt"),
    "report: failed": _answer("select * from settle.report(%s, 'failed', 1)", by="attempt"),
    "report: reschedule": _answer(
        "select * from settle.report(%s, 'reschedule', reschedule_at => %s)",
        hosts.FAR,
        by="attempt",
    ),
    "push": _answer("select * from settle.push(%s, 'k', '1')", by="attempt"),
    "started": _answer("select settle.started(%s) as disposition", by="attempt"),
    "person: succeed": _answer("call settle.succeed(%s, 1)"),
    "person: fail infra": _answer("call settle.fail(%s, 1, 'infra', 'by hand')"),
    "person: mark_failed": _answer("call settle.mark_failed(%s, 'a note')"),
    "clear": _answer("call settle.clear(%s)"),
    "dispatch": _answer("select 'try ' || try_number as disposition from settle.dispatch(%s)"),
}


def outcome(call: Call, connection: Connection) -> Any:
    """The answer, or the SQLSTATE of our own refusal."""
    try:
        return call(connection)
    except psycopg.Error as refused:
        if not (refused.sqlstate or "").startswith("ST"):
            raise
        return refused.sqlstate


def check_invariants(scene: Scene) -> None:
    """I3, I7, I11: what must hold of any history."""
    state = scene.state()
    moves = [entry for entry in state["ledger"] if entry["disposition"] != "confirmed"]
    assert state["outbox"] == len(moves) * len(LISTENERS)
    entries = hosts.ledger(scene.passes.c, scene.attempt.id)
    by_attempt: dict[Any, list[str]] = {}
    for entry in entries:
        if entry["verdict"] != "clear":
            by_attempt.setdefault(entry["attempt_id"], []).append(entry["disposition"])
    for dispositions in by_attempt.values():
        assert dispositions.count("settled") <= 1, entries
        assert dispositions.count("overrode") <= 1, entries
        assert dispositions.count("confirmed") <= 1, entries
        assert dispositions[0] == "settled", entries
    max_tries = 1
    for entry in entries:
        assert entry["previous_max_tries"] == max_tries, entries
        max_tries = entry["max_tries"]
        if entry["verdict"] != "clear":
            assert max_tries == entry["previous_max_tries"] + entry["refund"], entries
    assert state["max_tries"] == max_tries
    if moves and state["same attempt"]:
        assert state["state"] == moves[-1]["state"]
