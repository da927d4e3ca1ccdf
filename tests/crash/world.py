"""One night of task pods, made once and copied for each run, and what is left at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from reconciler import passes as run_passes
from reconciler.database import Connection, Row, Settle
from reconciler.listing import Listing, Page
from reconciler.pods import PROFILES, PodFacts
from tests.crash.manifests import Manifest, alive, facts, manifest
from tests.sql.hosts import Attempt, Passes, Standalone, again, running

LISTENERS = ("mail", "metrics")
SCOPE = run_passes.Scope(namespace=None, profile="podsettle", source="files", judges_absence=True)
API_SCOPE = run_passes.Scope(namespace=None, profile="podsettle", source="api", judges_absence=True)


@dataclass(frozen=True)
class Night:
    """The pods that are there, and the task instances by name."""

    pods: list[Manifest]
    tasks: dict[str, Attempt]


def build(connection: Connection) -> Night:
    """Fill a fresh database, and stop its clock: from then on it goes by `later` alone."""
    host, passes = Standalone(connection), Passes(connection)
    for listener in LISTENERS:
        connection.execute("select settle.register_listener(%s)", (listener,))

    tasks: dict[str, Attempt] = {}

    def begin(name: str, retries: int = 1) -> Attempt:
        tasks[name] = running(host, task=name, retries=retries)
        return tasks[name]

    # Given up on as absent: its success comes late, in this night's list.
    begin("late")
    passes.later(5)
    passes.run()
    passes.later(61)
    passes.run()
    # Suspected once, and ripe at the next complete pass.
    quiet = manifest("ok-norec", begin("quiet"), "quiet")
    begin("gone")
    passes.later(5)
    passes.run(facts(quiet))
    passes.later(100)
    assert {s["passes"] for s in passes.suspicions()} == {1}
    assert host.row(tasks["late"].id)["max_tries"] == 2

    # A poke, and its successor with the same try_number; the pod of the first one lingers.
    first = begin("poked")
    passes.run(facts(manifest("resched", first, "poked-1")), complete=False)
    tasks["poked"] = again(host, first)
    assert tasks["poked"].try_number == first.try_number
    begin("lost")  # no pod: a suspicion that is new
    pods = [
        manifest("okrec", first, "poked-1"),
        manifest("hard-success", begin("recovered"), "recovered"),
        manifest("evict-running", begin("evicted"), "evicted"),
        quiet,
        manifest("fail-norec", begin("crashed", retries=0), "crashed"),
        manifest("resched", begin("poke"), "poke"),
        alive(tasks["poked"], "poked-2"),
        manifest("ok-norec", begin("hushed"), "hushed"),
        manifest("imgpull", begin("stuck"), "stuck"),
        manifest("okrec", tasks["late"], "late"),
    ]
    passes.later(5)
    connection.execute(
        "alter table public.test_clock add column stopped_at timestamptz default clock_timestamp()"
    )
    connection.execute(
        "create or replace function settle.clock() returns timestamptz language sql volatile"
        " security definer set search_path = pg_catalog, pg_temp as"
        " 'select c.stopped_at + c.ahead from public.test_clock as c'"
    )
    return Night(pods, tasks)


def later(connection: Connection, seconds: int) -> None:
    """Let time go by."""
    connection.execute(
        "update public.test_clock set ahead = ahead + make_interval(secs => %s)", (seconds,)
    )


def clean_pass(
    connection: Connection, pods: list[Manifest], *, scope: run_passes.Scope = SCOPE
) -> run_passes.Pass:
    """One undisturbed pass in this process, two pods a page, as the command runs it."""

    def pages(_: Listing) -> Any:
        for start in range(0, len(pods), 2):
            yield Page(
                [
                    PodFacts.from_manifest(pod, profile=PROFILES["podsettle"], container=None)
                    for pod in pods[start : start + 2]
                ],
                [],
            )

    return run_passes.run(Settle(connection), Listing(pages), scope, lambda _: None)


def complete_passes(connection: Connection) -> int:
    row = connection.execute(
        "select count(*) as n from settle.pass where complete and settle.lease_scope(namespace) = '*'"
    ).fetchone()
    assert row
    return int(row["n"])


def _shown(row: Row, without: set[str], moments: set[str]) -> Row:
    return {
        key: (value is not None if key in moments else value)
        for key, value in row.items()
        if key not in without
    }


def end(connection: Connection) -> dict[str, Any]:
    """Everything that a pass may write, but for ids of rows and moments."""
    task_rows = connection.execute("select * from settle.task_instance order by task_id").fetchall()
    ledger = connection.execute("select * from settle.settlement order by task_id, id").fetchall()
    for row in ledger:
        row["evidence"].pop("suspected_since", None)
    number = {row["id"]: (row["task_id"], n) for n, row in enumerate(ledger)}
    outbox = connection.execute("select settlement_id, listener from settle.outbox").fetchall()
    suspicions = connection.execute(
        "select * from settle.suspicion order by task_instance_id"
    ).fetchall()
    return {
        "tasks": [
            _shown(row, set(), {"created_at", "queued_at", "started_at", "ended_at"})
            | {
                # A retry waits from the moment of its settlement; a poke names its moment.
                "next_try_at": row["next_try_at"]
                if row["state"] == "up_for_reschedule"
                else row["next_try_at"] is not None
            }
            for row in task_rows
        ],
        "ledger": [_shown(row, {"id"}, {"settled_at", "next_try_at", "pass_id"}) for row in ledger],
        "outbox": Counter((*number[row["settlement_id"]], row["listener"]) for row in outbox),
        "suspicions": [
            _shown(row, {"age", "seen_by"}, {"first_seen_at", "last_seen_at", "counted_at"})
            for row in suspicions
        ],
        "leases": connection.execute("select scope from settle.lease").fetchall(),
    }


def summary(state: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """State, try_number, max_tries and transitions of each task instance."""
    moves = Counter(row["task_id"] for row in state["ledger"] if row["disposition"] != "confirmed")
    return {
        row["task_id"]: (row["state"], row["try_number"], row["max_tries"], moves[row["task_id"]])
        for row in state["tasks"]
    }


EXPECTED = {
    # state, try_number, max_tries, transitions
    "late": ("success", 1, 1, 2),
    "quiet": ("up_for_retry", 1, 1, 1),
    "gone": ("up_for_retry", 1, 2, 1),
    "poked": ("running", 1, 1, 1),
    "lost": ("running", 1, 1, 0),
    "recovered": ("success", 1, 1, 1),
    "evicted": ("up_for_retry", 1, 2, 1),
    "crashed": ("failed", 1, 0, 1),
    "poke": ("up_for_reschedule", 1, 1, 1),
    "hushed": ("running", 1, 1, 0),
    "stuck": ("running", 1, 1, 0),
}
SUSPECTED = {"lost": "absent", "hushed": "no_record", "stuck": "pending"}
