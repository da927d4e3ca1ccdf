"""`podsettle demo`: the main job on an embedded Postgres, with pods that a real kubelet wrote.

Tasks are made and dispatched as an orchestrator would, each recorded pod is labelled as one of
their attempts, and one ordinary pass settles them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.table import Table

from reconciler import database, listing, passes, pods, resources
from reconciler.install import install
from reconciler.render import cell

DATABASE: Final = "podsettle_demo"


@dataclass(frozen=True)
class Story:
    """One task of the demo.

    Attributes:
        task: Its task_id.
        pod: The recorded pod, a file name without its ending.
        retries: The retries that its author gave it.
        plain: What happened, in plain words.
        lingers: The pod is of an earlier attempt; a newer one runs.
    """

    task: str
    pod: str
    retries: int
    plain: str
    lingers: bool = False


STORIES: Final = (
    Story("load_orders", "hard-success", 0, "finished, then died before it could report"),
    Story("train_model", "evict-running", 1, "its node was drained under it"),
    Story("join_tables", "oom-own-limit", 1, "used more memory than its own limit"),
    Story("call_partner", "deadline", 1, "ran past its deadline"),
    Story("export_csv", "native-sidecar", 1, "done; its sidecar was killed with 137"),
    Story("check_schema", "fail-norec", 1, "exited 3, a bug of its own"),
    Story("wait_for_file", "resched", 1, "asks to be run again later"),
    Story("poke_sensor", "okrec", 1, "an old pod of an earlier poke lingers", lingers=True),
)


def stop() -> bool:
    """Stop the embedded Postgres; False if there was none."""
    folder = database.embedded_folder()
    if not (folder / "PG_VERSION").exists():
        return False
    database.stop_embedded(folder)
    return True


def run(console: Console) -> None:
    """Run the demo and print it.

    Raises:
        DatabaseRefused: The embedded Postgres is missing or does not start.
    """
    server = database.start_embedded(database.embedded_folder(), keep_running=True)
    dsn = psycopg.conninfo.make_conninfo(server, dbname=DATABASE)
    with database.connect(server) as admin:
        # A demo begins at the beginning, so that its figures are the same each time.
        admin.execute(f"drop database if exists {DATABASE} with (force)")
        admin.execute(f"create database {DATABASE}")
    folder = Path(tempfile.mkdtemp(prefix="podsettle-demo-"))
    try:
        with database.connect(dsn) as connection:
            install(connection)
            ids = _dispatch(connection, folder)
            before = _states(connection)
            rows: list[database.Row] = []
            passes.run(
                database.Settle(connection),
                listing.read_files(str(folder), profile=pods.PROFILES["podsettle"]),
                passes.Scope(
                    namespace=None, profile="podsettle", source="files", judges_absence=False
                ),
                rows.extend,
            )
            after = _states(connection)
            _show(console, ids, before, after, {str(r["task_instance_id"]): r for r in rows})
            _show_saved(console, connection)
    finally:
        shutil.rmtree(folder)
    console.print("Look around (the embedded Postgres stays up; podsettle demo --stop ends it):")
    console.print(f"  {_psql()} '{dsn}'", soft_wrap=True, highlight=False, markup=False)
    console.print("  select * from settle.settlements;   call settle.clear('<task_instance_id>');")


def _dispatch(connection: database.Connection, folder: Path) -> dict[str, str]:
    """Make the tasks, dispatch them, and write their pods as `kubectl get -o json` would."""
    ids: dict[str, str] = {}
    manifests: list[dict[str, Any]] = []
    for story in STORIES:
        ti = _one(
            connection,
            "select settle.create_task('demo', 'today', %s, -1, %s, interval '5 min') as id",
            (story.task, story.retries),
        )["id"]
        ids[story.task] = str(ti)
        attempt = _one(connection, "select * from settle.dispatch(%s)", (ti,))
        connection.execute("select settle.started(%s)", (attempt["attempt_id"],))
        if story.lingers:
            connection.execute("call settle.reschedule(%s, %s, now())", (ti, attempt["try_number"]))
            newer = _one(connection, "select * from settle.dispatch(%s)", (ti,))
            connection.execute("select settle.started(%s)", (newer["attempt_id"],))
        manifests.append(_manifest(story, str(ti), attempt))
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    (folder / "pods.json").write_text(body, encoding="utf-8")
    return ids


def _manifest(story: Story, ti: str, attempt: database.Row) -> dict[str, Any]:
    path = resources.recorded_folder() / f"{story.pod}.json"
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    manifest["metadata"] |= {
        "name": f"{story.task.replace('_', '-')}-{attempt['try_number']}",
        "labels": {
            "podsettle.io/managed": "true",
            "podsettle.io/try-number": str(attempt["try_number"]),
        },
        "annotations": {
            "podsettle.io/task-instance-id": ti,
            "podsettle.io/attempt-id": attempt["attempt_id"],
        },
    }
    return manifest


def _one(connection: database.Connection, statement: Any, arguments: tuple[Any, ...]) -> Any:
    return connection.execute(statement, arguments).fetchone()


def _states(connection: database.Connection) -> dict[str, database.Row]:
    rows = connection.execute(
        "select id::text, state, try_number, max_tries from settle.task_instance"
    ).fetchall()
    return {row["id"]: row for row in rows}


def _show(
    console: Console,
    ids: dict[str, str],
    before: dict[str, database.Row],
    after: dict[str, database.Row],
    rows: dict[str, database.Row],
) -> None:
    table = Table(title="One pass over eight pods", title_justify="left", header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("what happened")
    table.add_column("before", no_wrap=True)
    table.add_column("after", no_wrap=True)
    table.add_column("max_tries", no_wrap=True)
    table.add_column("why", ratio=1)
    for story in STORIES:
        ti = ids[story.task]
        was, now, row = before[ti], after[ti], rows[ti]
        tries = str(was["max_tries"])
        if now["max_tries"] != was["max_tries"]:
            tries = f"{tries} -> {now['max_tries']}"
        state = now["state"] if row["disposition"] != "stale" else f"{now['state']} (untouched)"
        table.add_row(story.task, story.plain, was["state"], state, tries, cell(row["why"], 240))
    console.print(table)


def _show_saved(console: Console, connection: database.Connection) -> None:
    """Say what was saved; every figure is counted in the ledger."""
    saved = _one(
        connection,
        """
        select
            count(*) filter (where verdict = 'success' and evidence ->> 'phase' = 'Failed')
                as recovered,
            count(*) filter (where refund = 1) as refunded,
            count(*) filter (where failure_kind in ('application', 'timeout')) as charged,
            count(*) filter (where verdict = 'success' and evidence ->> 'phase' <> 'Failed')
                as succeeded,
            count(*) filter (where verdict = 'reschedule') as rescheduled
        from settle.settlements where source = 'pass'
        """,
        (),
    )
    console.print("What this pass saved:", style="bold")
    for count, words in (
        (saved["recovered"], "success recovered from a Failed pod: its work is not run again"),
        (saved["succeeded"], "success taken from the record, whatever its sidecar did"),
        (saved["refunded"], "infra failure refunded: the task keeps its own retries"),
        (saved["charged"], "failures charged to the task, each with its kind and reason"),
        (saved["rescheduled"], "task parked until the time it asked for"),
    ):
        console.print(f"  {count}  {words}", highlight=False)


def _psql() -> str:
    return shutil.which("psql") or str(database.embedded_psql())
