"""podsettle install: once, again, twenty at once, over psql, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from reconciler import database as db
from reconciler import install as installer
from reconciler import resources
from tests.conftest import JOBS_HOST

CATALOG = """
select 'routine ' || p.oid::regprocedure || ' ' || pg_get_functiondef(p.oid) || ' ' || coalesce(p.proacl::text, '')
from pg_proc p where p.pronamespace = 'settle'::regnamespace
union all
select 'column ' || c.oid::regclass || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || ' '
    || coalesce(c.relacl::text, '') || coalesce(a.attacl::text, '')
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 where c.relnamespace = 'settle'::regnamespace
union all
select 'constraint ' || conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
from pg_constraint where connamespace = 'settle'::regnamespace
union all
select 'index ' || indexdef from pg_indexes where schemaname = 'settle'
union all
select 'rule ' || to_jsonb(r)::text from settle.failure_rule r
union all
select 'setting ' || to_jsonb(s)::text from settle.setting s
order by 1
"""


def catalog(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(CATALOG)]


def transactions(dsn: str) -> int:
    """Return the id that a write would get: a second install must not have used one up."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select max(xmin::text::bigint) from settle.migration").fetchone()
        assert row
        return row[0]


def test_a_second_install_changes_nothing(new_database: Callable[..., str]) -> None:
    dsn = new_database(None)
    with db.connect(dsn) as connection:
        first = installer.install(connection)
        before, written = catalog(dsn), transactions(dsn)
        assert installer.install(connection) == []
    assert first[0] == "migrations/0001_schema.sql"
    assert first[-1] == "grants.sql"
    assert (catalog(dsn), transactions(dsn)) == (before, written)


def test_twenty_installs_at_once_end_well(new_database: Callable[..., str]) -> None:
    dsn, alone = new_database(None), new_database()
    results: list[object] = []
    barrier = threading.Barrier(20)

    def one() -> None:
        try:
            with db.connect(dsn) as connection:
                barrier.wait()
                results.append(installer.install(connection))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, list) for result in results), results
    names = [name for result in results if isinstance(result, list) for name in result]
    once = {script.name for step in installer.steps() for script in step.scripts}
    # Grants follow whatever changed, so each install that did some of the work applies them.
    assert sorted(set(names)) == sorted(once)
    assert all(names.count(name) == 1 for name in once if name != "grants.sql")
    assert catalog(dsn) == catalog(alone)


def test_a_changed_migration_is_refused_and_named(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "sql"
    shutil.copytree(resources.sql_folder(), copy)
    monkeypatch.setattr(resources, "sql_folder", lambda: copy)
    path = copy / "migrations" / "0002_settlement.sql"
    path.write_text(path.read_text() + "-- tampered\n")
    before = catalog(database)
    with (
        db.connect(database) as connection,
        pytest.raises(db.DatabaseRefused, match="migrations/0002_settlement.sql was changed"),
    ):
        installer.install(connection)
    assert catalog(database) == before


def test_a_changed_routine_is_applied_again_and_keeps_its_grants(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "sql"
    shutil.copytree(resources.sql_folder(), copy)
    monkeypatch.setattr(resources, "sql_folder", lambda: copy)
    path = copy / "routines" / "passes.sql"
    path.write_text("drop function settle.open_pass(text, text, text);\n" + path.read_text())
    before = catalog(database)
    with db.connect(database) as connection:
        assert installer.install(connection) == ["routines/passes.sql", "grants.sql"]
    assert catalog(database) == before


def test_a_step_that_fails_leaves_nothing_of_itself(
    new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "sql"
    shutil.copytree(resources.sql_folder(), copy)
    monkeypatch.setattr(resources, "sql_folder", lambda: copy)
    (copy / "migrations" / "0099_bad.sql").write_text(
        "create table settle.half (x int);\nselect 1/0;\n"
    )
    dsn = new_database(None)
    with db.connect(dsn) as connection:
        with pytest.raises(db.DatabaseRefused, match="migrations/0099_bad.sql: division by zero"):
            installer.install(connection)
        row = connection.execute("select to_regclass('settle.half') as t").fetchone()
        assert row == {"t": None}
        (copy / "migrations" / "0099_bad.sql").unlink()
        assert installer.install(connection)[0].startswith("routines/")


def test_another_host_is_refused(database: str) -> None:
    with db.connect(database) as connection:
        with pytest.raises(db.DatabaseRefused, match="has hosts/standalone.sql"):
            installer.install(connection, JOBS_HOST)
        with pytest.raises(installer.UnknownHost, match="nowhere is unknown; known: standalone"):
            installer.install(connection, "nowhere")


def test_the_psql_script_installs_the_same_and_can_be_run_again(
    new_database: Callable[..., str], tmp_path: Path
) -> None:
    printed, installed = new_database(None), new_database()
    script = tmp_path / "install.sql"
    script.write_text("".join(installer.script_for_psql()))
    runs = [
        subprocess.run(
            [
                str(db.embedded_psql()),
                "--no-psqlrc",
                "--quiet",
                "--dbname",
                printed,
                "--file",
                str(script),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(2)
    ]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, ""), (0, "")]
    assert catalog(printed) == catalog(installed)
    with db.connect(printed) as connection:
        assert installer.install(connection) == []


def test_the_contract_is_checked_with_both_numbers(new_database: Callable[..., str]) -> None:
    dsn = new_database()
    with db.connect(dsn) as connection:
        db.check_contract(connection)
        connection.execute(
            "create or replace function settle.contract_version() returns integer language sql as 'select 99'"
        )
        with pytest.raises(
            db.DatabaseRefused,
            match="contract 99, this command contract 1; the command is the older",
        ):
            db.check_contract(connection)
    with (
        db.connect(new_database(None)) as connection,
        pytest.raises(db.DatabaseRefused, match="run podsettle install"),
    ):
        db.check_contract(connection)
