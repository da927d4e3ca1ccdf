"""The real PgBouncer, in transaction mode: nothing rests on a session, nothing is left in one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler import database as db
from tests.containers.postgres import start_pgbouncer
from tests.crash import command, world
from tests.crash.conftest import Template
from tests.crash.proxy import Proxy
from tests.crash.sessions import Session, errors_of, sessions, tries
from tests.crash.test_crash import RECONCILE, Ends, command_of, lock
from tests.sql import hosts
from tests.sql.hosts import Standalone

PROGRAM_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def require_pgbouncer() -> None:
    """Skip where there is none; in CI that is a failure."""
    if shutil.which("pgbouncer", path=PROGRAM_PATH) is None:
        told = "there is no pgbouncer on this machine: apt-get install pgbouncer"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)


Pool = Callable[[str, int], Any]


@pytest.fixture
def pool() -> Pool:
    """Puts a pool of some sessions before a database; gives the DSN through it."""
    require_pgbouncer()

    @contextmanager
    def pooled(dsn: str, size: int) -> Iterator[str]:
        # The embedded server's socket lies in a folder that only its own user may enter.
        with (
            Proxy(dsn) as reachable,
            start_pgbouncer(reachable.dsn, {"default_pool_size": str(size)}) as through,
        ):
            yield through

    return pooled


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_machine_without_pgbouncer_is_told_of_in_ci_and_seen_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    expected = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(expected, match="apt-get install pgbouncer"):
        require_pgbouncer()


def settings_of_the_pooled_session(through: str) -> dict[str, Any]:
    """What a client finds in the one session of a pool of one."""
    names = (
        *("statement_timeout", "lock_timeout", "search_path", "role", "session_authorization"),
        *(
            "check_function_bodies",
            "client_min_messages",
            "transaction_isolation",
            "enable_seqscan",
        ),
        *("idle_in_transaction_session_timeout", "TimeZone", "DateStyle"),
    )
    with db.connect(through, application="probe") as connection:
        found = {
            name: (connection.execute(f"show {name}").fetchone() or {}).popitem()[1]
            for name in names
        }
        for name, query in {
            "prepared": "select count(*) as n from pg_prepared_statements",
            "advisory": "select count(*) as n from pg_locks"
            " where pid = pg_backend_pid() and locktype = 'advisory'",
            "temporary": "select count(*) as n from pg_class"
            " where relnamespace = pg_my_temp_schema()",
            "cursors": "select count(*) as n from pg_cursors where name <> ''",
            "pid": "select pg_backend_pid() as n",
        }.items():
            row = connection.execute(query).fetchone()
            assert row
            found[name] = row["n"]
    return found


def test_what_a_session_keeps_would_be_seen_by_the_next_client(database: str, pool: Pool) -> None:
    """The other tests rest on this: a pool of one hands on whatever is left behind."""
    with pool(database, 1) as through:
        before = settings_of_the_pooled_session(through)
        with db.connect(through) as connection:
            connection.execute("set statement_timeout = '7s'")
        after = settings_of_the_pooled_session(through)
        assert after == before | {"statement_timeout": "7s"}
        with (
            psycopg.connect(through, autocommit=True, prepare_threshold=0) as one,
            psycopg.connect(through, autocommit=True, prepare_threshold=0) as two,
        ):
            one.execute("select %s::text", ("a",))
            with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
                two.execute("select %s::int", (1,))


def test_install_through_pgbouncer_leaves_nothing_in_the_session(
    new_database: Callable[..., str], pool: Pool, tmp_path: Path
) -> None:
    with pool(new_database(None), 1) as through:
        before = settings_of_the_pooled_session(through)
        runs = [command.run("install", "--dsn", through, home=tmp_path) for _ in range(2)]
        assert [run.code for run in runs] == [0, 0], runs[0].err
        assert runs[1].out == "up to date, nothing was changed\n"
        assert settings_of_the_pooled_session(through) == before


def test_i9_a_pass_through_pgbouncer_ends_as_any_other_and_leaves_nothing_in_the_session(
    template: Template, ends: Ends, pool: Pool, tmp_path: Path
) -> None:
    with template.copy() as dsn, pool(dsn, 1) as through:
        before = settings_of_the_pooled_session(through)
        arguments = (*RECONCILE, "--pods", str(template.file), "--complete", "--dsn", through)
        done = command.run(*arguments, home=tmp_path)
        assert done.code == 0, done.err
        assert len(done.rows) >= len(template.night.pods)
        assert settings_of_the_pooled_session(through) == before
        for name in ("explain", "status"):
            more = ["--pods", str(template.file)] if name == "explain" else []
            shown = command.run(name, "--dsn", through, "-o", "json", *more, home=tmp_path)
            assert shown.code == 0, shown.err
        assert settings_of_the_pooled_session(through) == before
        with db.connect(dsn) as connection:
            assert world.end(connection) == ends[0]


@pytest.mark.parametrize("size", [1, 2])
def test_i9_two_passes_at_once_through_a_pool_of_one_or_two(
    template: Template, ends: Ends, pool: Pool, tmp_path: Path, size: int
) -> None:
    with ExitStack() as open_:
        dsn = open_.enter_context(template.copy())
        through = open_.enter_context(pool(dsn, size))
        watch, [holder] = open_.enter_context(sessions(dsn, "holder"))
        lock(holder.connection, template, "recovered")
        arguments = (*RECONCILE, "--page-size", "1", "--pods", str(template.file), "--complete")
        one = open_.enter_context(
            command_of(command.start(*arguments, "--dsn", through, home=tmp_path))
        )
        watch.until_a_pass_waits()
        two = open_.enter_context(
            command_of(command.start(*arguments, "--dsn", through, home=tmp_path))
        )
        if size == 1:
            # The other one has no session until the first one's transaction is over.
            until_a_client_waits(through)
        else:
            watch.until(
                "select from pg_stat_activity where datname = current_database()"
                " and application_name = 'podsettle' and wait_event_type = 'Lock'"
                " having count(*) = 2",
                what="two passes do not wait for the row",
            )
        holder.rollback()
        runs = [command.finish(process) for process in (one, two)]
        assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
        moved = [
            row["task_instance_id"]
            for run in runs
            for row in run.rows
            if row["disposition"] in ("settled", "overrode")
        ]
        assert len(moved) == len(set(moved)) > 0
        end = world.end(watch.connection)
        for state in (end, expected := dict(ends[1])):
            state["suspicions"] = [s | {"passes": 0} for s in state["suspicions"]]
        assert end == expected


def until_a_client_waits(through: str) -> None:
    """Ask PgBouncer's own console, which is a database of this name."""
    console = psycopg.conninfo.make_conninfo(through, dbname="pgbouncer")
    # It speaks the simple protocol alone.
    with psycopg.connect(
        console, autocommit=True, cursor_factory=psycopg.ClientCursor
    ) as connection:
        for _ in tries("no client of PgBouncer waits for a session"):
            cursor = connection.execute("show pools")
            column = [c.name for c in cursor.description or ()].index("cl_waiting")
            if any(row[column] > 0 for row in cursor.fetchall()):
                return


def test_i3_reports_of_many_agents_through_a_pool_of_two(database: str, pool: Pool) -> None:
    with pool(database, 2) as through, ExitStack() as open_:
        host = Standalone(open_.enter_context(db.connect(database)))
        attempts = [hosts.running(host, retries=1) for _ in range(20)]
        agents = [open_.enter_context(Session(through, f"agent-{n}")) for n in range(6)]

        def agent(number: int) -> Callable[[db.Connection], list[str]]:
            def tell(connection: db.Connection) -> list[str]:
                told = []
                for attempt in attempts[number:] + attempts[:number]:
                    connection.execute(
                        "select * from settle.push(%s, 'k', %s)",
                        (attempt.attempt_id, json.dumps(number)),
                    )
                    told.append(hosts.report(connection, attempt, "success")["disposition"])
                return told

            return tell

        futures = [session.start(agent(n)) for n, session in enumerate(agents)]
        assert errors_of(*futures) == []
        answers = [answer for future in futures for answer in future.result()]
        assert answers.count("settled") == len(attempts)
        assert set(answers) == {"settled", "duplicate"}
        assert {host.row(a.id)["state"] for a in attempts} == {"success"}
        assert all(len(hosts.ledger(host.c, a.id)) == 1 for a in attempts)
