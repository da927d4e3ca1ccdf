"""I8 and the five roles: what a task writes, and what a login may do, over real connections."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from reconciler import database as db
from reconciler.database import Connection
from tests.crash import command, world
from tests.crash.conftest import Template
from tests.crash.manifests import manifest, pod_list
from tests.crash.test_crash import RECONCILE, Ends
from tests.sql import hosts
from tests.sql.hosts import Attempt, Standalone
from tests.sql.test_catalog import EXPECTED

ROLES = ("settle_owner", "settle_reconciler", "settle_agent", "settle_operator", "settle_reader")


@contextmanager
def login(database: str, role: str) -> Iterator[str]:
    """A DSN of a user who has this role and nothing else."""
    name = f"user_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(f"create role {name} login password 'x' in role {role}")
        try:
            yield psycopg.conninfo.make_conninfo(database, user=name, password="x")
        finally:
            admin.execute(f"drop owned by {name} cascade")
            admin.execute(f"drop role {name}")


# --- what a task writes ---------------------------------------------------------------------------


def record(**fields: Any) -> str:
    return json.dumps({"v": 1, "outcome": "success", **fields})


SQL = (
    "'; drop table settle.settlement cascade; select settle.clear(id) from settle.task_instance; --"
)
EVIL = '\x1b[2J\x1b]0;owned\x07\r\n{"event": "pass finished"}\u202e\x00\ud800\x9b31m[bold red]'

# message -> the state that its own task ends in (the container exits 1, one try, no retry)
MESSAGES: dict[str, Callable[[Attempt], tuple[str, str]]] = {
    "another's attempt_id": lambda v: (record(attempt_id=v.attempt_id), "failed"),
    "an empty attempt_id": lambda _: (record(attempt_id=""), "failed"),
    "a list of attempt_ids": lambda v: (record(attempt_id=[v.attempt_id]), "failed"),
    "another's identity in unknown fields": lambda v: (
        record(
            task_instance_id=v.id,
            id=v.id,
            try_number=v.try_number,
            identity={"task_instance_id": v.id, "attempt_id": v.attempt_id},
            metadata={"annotations": {"podsettle.io/attempt-id": v.attempt_id}},
            failure_kind=None,
            refund=99,
            max_tries=99,
        ),
        "success|failed",
    ),
    "a refund for itself": lambda _: (
        record(outcome="failed", failure_kind="infra", reason="Evicted"),
        "failed",
    ),
    "a manual mark": lambda _: (record(outcome="failed", failure_kind="manual"), "failed"),
    "4 kB of escapes": lambda _: (
        record(outcome="failed", exit_code=1, reason="\x1b[31m\u202e\x00" * 230)[:4096],
        "failed",
    ),
    "control codes": lambda _: (record(outcome="failed", exit_code=1, reason=EVIL), "failed"),
    "raw control codes": lambda _: (EVIL, "failed"),
    "NULs": lambda _: ("\x00" * 4096, "failed"),
    "escaped NULs": lambda _: (
        record(outcome="failed", exit_code=1, reason="\x00" * 240),
        "failed",
    ),
    "lone surrogates": lambda _: ('{"v":1,"outcome":"failed","reason":"\\ud800\\udc"}', "failed"),
    "halves of surrogates": lambda _: (
        '{"v":1,"outcome":"failed","exit_code":1,"reason":"\\ud83d\\ud83d \\udca9"}',
        "failed",
    ),
    "1e400": lambda _: ('{"v":1,"outcome":"success","x":1e400,"exit_code":1e400}', "failed"),
    "a number of 4000 digits": lambda _: (
        '{"v":1,"outcome":"success","exit_code":' + "9" * 4000 + "}",
        "failed",
    ),
    "an exit code beyond int4": lambda _: (record(exit_code=2**31), "success|failed"),
    "1e131072 in an unknown field": lambda _: (
        '{"v":1,"outcome":"success","x":1e131072}',
        "success|failed",
    ),
    "NaN": lambda _: ('{"v":1,"outcome":"success","exit_code":NaN}', "failed"),
    "Infinity": lambda _: ('{"v":1,"outcome":"success","x":-Infinity}', "failed"),
    "depth": lambda _: ('{"v":1,"outcome":"success","x":' + "[" * 4000, "failed"),
    "closed depth": lambda _: (
        '{"v":1,"outcome":"success","x":' + "[" * 2000 + "]" * 2000 + "}",
        "success|failed",
    ),
    "SQL": lambda _: (SQL, "failed"),
    "SQL in a record": lambda _: (record(outcome="failed", exit_code=1, reason=SQL), "failed"),
    "placeholders": lambda _: (
        record(outcome="failed", exit_code=1, reason="%s %(pods)s $1 {0} {pods} ${HOME} \\"),
        "failed",
    ),
    "a time of its own": lambda _: (
        record(outcome="reschedule", reschedule_at="infinity"),
        "failed",
    ),
    "a far time": lambda _: (
        record(outcome="reschedule", reschedule_at="9999-12-31T23:59:60Z"),
        "failed|up_for_reschedule",
    ),
    "two records": lambda v: (record() + "\n" + record(attempt_id=v.attempt_id), "failed"),
    "two outcomes": lambda _: ('{"v":1,"outcome":"failed","outcome":"success"}', "failed"),
    "megabytes": lambda _: (record(outcome="failed", reason="x" * 3_000_000), "failed"),
}

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def untouched(connection: Connection, attempt: Attempt) -> tuple[Any, Any]:
    return Standalone(connection).row(attempt.id), hosts.ledger(connection, attempt.id)


def test_i8_a_forged_record_affects_no_other_attempt_and_breaks_no_line(
    connection: Connection, database: str, tmp_path: Path
) -> None:
    host = Standalone(connection)
    victim = hosts.running(host, retries=1)
    authors = {name: hosts.running(host) for name in MESSAGES}
    before = untouched(connection, victim)
    folder = tmp_path / "pods"
    folder.mkdir()
    for number, (name, make) in enumerate(MESSAGES.items()):
        pod = manifest("fail-norec", authors[name], f"pod-{number}", make(victim)[0])
        (folder / f"{number:03}.json").write_text(json.dumps(pod))
    arguments = ("--dsn", database, "--pods", str(folder))
    dry = command.run("reconcile", *arguments, "--dry-run", home=tmp_path)
    explained = command.run("explain", *arguments, home=tmp_path)
    done = command.run("reconcile", *arguments, "-o", "json", home=tmp_path)
    again = command.run("reconcile", *arguments, home=tmp_path)
    as_json = command.run("explain", *arguments, "-o", "json", home=tmp_path)
    shown = command.run("status", "--dsn", database, home=tmp_path)
    for run in (dry, explained, done, again, as_json, shown):
        assert run.code == 0, run.err
        assert CONTROL.findall(run.out + run.err) == []
        # A log line is one JSON object, and nobody else wrote one.
        assert len(run.events) == len(run.err.splitlines())
        assert [e["event"] for e in run.events].count("pass finished") <= 1
    assert done.out.isascii()
    rows = {row["pod"]: row for row in done.rows}
    assert len(rows) == len(done.rows) == len(MESSAGES)

    for number, (name, make) in enumerate(MESSAGES.items()):
        row = rows[f"pod-{number}"]
        author = authors[name]
        assert row["task_instance_id"] == author.id, name
        assert row["disposition"] == "settled", (name, row)
        state = host.row(author.id)
        assert state["state"] in make(victim)[1].split("|"), (name, row)
        assert state["max_tries"] == 0, name
        (entry,) = hosts.ledger(connection, author.id)
        assert entry["failure_kind"] in (None, "application"), name
        assert entry["refund"] == 0
        assert len(entry["reason"] or "") <= 240
    assert untouched(connection, victim) == before


@pytest.mark.parametrize("name", ["another's attempt_id", "two records"])
def test_i8_a_record_of_another_attempt_is_none_even_where_the_process_ended_well(
    connection: Connection, database: str, tmp_path: Path, name: str
) -> None:
    host = Standalone(connection)
    victim, author = hosts.running(host), hosts.running(host)
    before = untouched(connection, victim)
    file = tmp_path / "pods.json"
    file.write_text(pod_list(manifest("okrec", author, "p", MESSAGES[name](victim)[0])))
    run = command.run(
        "reconcile", "--dsn", database, "--pods", str(file), "-o", "json", home=tmp_path
    )
    (row,) = run.rows
    assert (row["disposition"], row["from_record"]) == ("suspected", False)
    assert host.row(author.id)["state"] == "running"
    assert untouched(connection, victim) == before


# --- what an agent says ---------------------------------------------------------------------------


def test_i8_an_agent_with_an_attempt_id_that_is_not_its_own_is_told_and_writes_nothing(
    connection: Connection, database: str
) -> None:
    host = Standalone(connection)
    attempt = hosts.running(host, retries=1)
    superseded = hosts.running(host, retries=1)
    hosts.report(connection, superseded, "reschedule", reschedule_at=hosts.FAR)
    current = host.dispatch(superseded.id)
    before = [untouched(connection, a) for a in (attempt, current)]
    known = str(attempt.attempt_id)
    wrong = [
        *("", " ", "%", "*", "_" * 36, "null", "0", "true", "' or true --", "{}", "\\", "\n"),
        *(attempt.id, str(superseded.attempt_id), known.upper() + " ", f" {known}", known[:-1]),
        *(known.replace("-", ""), f"{known}\n", f"{known}%", f"{{{known}}}", known[:8] + "%"),
        *(str(uuid.UUID(int=0)), "\u202e", "\ufffd" * 100, "9" * 400, "x" * 10_000_000),
    ]
    with login(database, "settle_agent") as dsn, db.connect(dsn) as agent:
        for guess in wrong:
            for outcome in ("success", "failed"):
                told = agent.execute(
                    "select * from settle.report(%s, %s)", (guess, outcome)
                ).fetchone()
                assert told
                assert (told["disposition"], told["state"]) == ("stale", None), guess
            kept = agent.execute("select * from settle.push(%s, 'k', '1')", (guess,)).fetchone()
            assert kept
            assert kept["disposition"] == "stale", guess
            # One answer for all of them: which ids there are cannot be found out.
            assert (
                told["why"]
                == kept["why"]
                == ("no task instance has this attempt as its current one")
            )
        for statement in (
            "select settle.report(null, 'success')",
            "select settle.push(null,'k','1')",
        ):
            with pytest.raises(psycopg.Error) as refused:
                agent.execute(statement)  # type: ignore[arg-type]
            assert refused.value.sqlstate == "ST002"
        assert [untouched(connection, a) for a in (attempt, current)] == before
        assert connection.execute("select * from settle.pushed").fetchall() == []
        # And with its own it is heard.
        assert hosts.report(agent, attempt, "success")["disposition"] == "settled"


@pytest.mark.parametrize(
    "wrong",
    [
        "outcome => 'clear'",
        "outcome => 'success; drop table x'",
        "outcome => repeat('x', 1000000)",
        "outcome => null",
        "outcome => 'failed', failure_kind => 'infra'",
        "outcome => 'failed', failure_kind => 'manual'",
        "outcome => 'reschedule'",
        "outcome => 'reschedule', reschedule_at => 'infinity'",
    ],
)
def test_i8_an_agent_cannot_say_what_is_not_its_own_to_say(
    connection: Connection, database: str, wrong: str
) -> None:
    attempt = hosts.running(Standalone(connection), retries=1)
    before = untouched(connection, attempt)
    with login(database, "settle_agent") as dsn, db.connect(dsn) as agent:
        with pytest.raises(psycopg.Error) as refused:
            agent.execute(
                f"select settle.report(%s, {wrong})",  # type: ignore[arg-type]
                (attempt.attempt_id,),
            )
        assert refused.value.sqlstate == "ST002"
        assert len(str(refused.value)) < 1000
    assert untouched(connection, attempt) == before


# --- who may do what ------------------------------------------------------------------------------


def refused_for_want_of_rights(connection: Connection, statement: sql.Composable) -> bool:
    """Try it, in a transaction that is rolled back; any other error means that it was allowed."""
    try:
        with connection.transaction(force_rollback=True):
            # A session that a test let wait for another one would prove nothing.
            connection.execute("set local lock_timeout = '20s'")
            connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    except psycopg.Error:
        return False
    return False


@pytest.mark.parametrize("role", ROLES)
def test_a_login_can_call_what_its_role_may_and_nothing_else(
    connection: Connection, database: str, role: str
) -> None:
    routines = connection.execute(
        "select p.proname as name, p.prokind as kind, p.prorettype = 'trigger'::regtype as trigger,"
        " array(select format_type(t.type, null) from unnest(p.proargtypes) with ordinality"
        " as t (type, n) order by t.n) as arguments"
        " from pg_proc as p where p.pronamespace = 'settle'::regnamespace"
    ).fetchall()
    assert len(routines) > 30
    allowed = set()
    with login(database, role) as dsn, db.connect(dsn) as connection_of_role:
        for routine in routines:
            if routine["trigger"]:
                continue
            arguments = sql.SQL(", ").join(
                sql.SQL("null::{}").format(sql.SQL(a)) for a in routine["arguments"]
            )
            statement = sql.SQL(
                "call {}({})" if routine["kind"] == "p" else "select {}({})"
            ).format(sql.Identifier("settle", routine["name"]), arguments)
            if not refused_for_want_of_rights(connection_of_role, statement):
                allowed.add(routine["name"])
    everything = {routine["name"] for routine in routines if not routine["trigger"]}
    expected = everything if role == "settle_owner" else EXPECTED[role] | {"contract_version"}
    assert allowed == expected


VIEWS_FOR = {"settle_reader", "settle_operator", "settle_reconciler"}
TABLES_FOR = {
    # The tables that are an operator's configuration; every other one is private.
    ("setting", "select"): VIEWS_FOR,
    ("setting", "update value"): {"settle_operator"},
    ("refund_policy", "select"): VIEWS_FOR,
    ("failure_rule", "select"): VIEWS_FOR,
    **{
        (table, what): {"settle_operator"}
        for table in ("refund_policy", "failure_rule")
        for what in ("insert", "update", "delete")
    },
}


@pytest.mark.parametrize("role", ROLES)
def test_a_login_can_read_and_write_what_its_role_may_and_nothing_else(
    connection: Connection, database: str, role: str
) -> None:
    relations = connection.execute(
        "select c.relname as name, c.relkind as kind, array(select a.attname::text from"
        " pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
        " and a.attgenerated = '' and a.attidentity = '' order by a.attnum) as columns"
        " from pg_class as c where c.relnamespace = 'settle'::regnamespace"
        " and c.relkind in ('r', 'v', 'm', 'S', 'p', 'f')"
    ).fetchall()
    assert {r["kind"] for r in relations} >= {"r", "v"}
    found: set[tuple[str, str]] = set()
    expected: set[tuple[str, str]] = set()
    with login(database, role) as dsn, db.connect(dsn) as user:
        for relation in relations:
            name, kind = relation["name"], relation["kind"]
            table = sql.Identifier("settle", name)
            # All columns: a function in a view is called with the reader's rights.
            tries: dict[str, str] = {"select": "select * from {}"}
            if kind == "S":
                tries = {"nextval": "select nextval('{}')", "select": "select from {} limit 0"}
            elif kind != "v":
                tries |= {
                    "insert": "insert into {} default values",
                    "delete": "delete from {} where false",
                    "truncate": "truncate {}",
                    "lock": "lock table {} in access exclusive mode",
                    "trigger": "create trigger t before insert on {} for each row"
                    " execute function suppress_redundant_updates_trigger()",
                    "drop": "drop table {}",
                    "alter": "alter table {} add column x int",
                }
                tries |= {
                    f"update {column}": f'update {{}} set "{column}" = null where false'
                    for column in relation["columns"]
                }
            else:
                tries |= {"drop": "drop view {}"}
            for what, statement in tries.items():
                if not refused_for_want_of_rights(user, sql.SQL(statement).format(table)):
                    found.add((name, what))
                verb = what.split()[0]
                if role == "settle_owner":
                    expected.add((name, what))
                elif kind == "v":
                    if what == "select" and role in VIEWS_FOR:
                        expected.add((name, what))
                elif role in TABLES_FOR.get((name, verb), TABLES_FOR.get((name, what), ())):
                    expected.add((name, what))
                elif what == "lock" and role in TABLES_FOR.get((name, "delete"), ()):
                    # Who may delete may lock.
                    expected.add((name, what))
    assert found == expected


@pytest.mark.parametrize("role", [r for r in ROLES if r != "settle_owner"])
def test_a_login_cannot_become_another_role_or_add_to_the_schema(
    connection: Connection, database: str, role: str
) -> None:
    statements = [
        *(f"set role {other}" for other in ROLES if other != role),
        *(f"grant {other} to current_user" for other in ROLES if other != role),
        "set session authorization settle_owner",
        "create table settle.mine (id int)",
        "create view settle.mine as select 1 as x",
        "create function settle.mine() returns int language sql as 'select 1'",
        "create or replace function settle.clock() returns timestamptz language sql as 'select now()'",
        "alter function settle.clock() owner to current_user",
        "alter function settle.clock() set search_path = public",
        "create type settle.mine as (id int)",
        "drop schema settle cascade",
        "alter default privileges for role settle_owner grant select on tables to public",
    ]
    with login(database, role) as dsn, db.connect(dsn) as user:
        for statement in statements:
            assert refused_for_want_of_rights(user, sql.SQL(statement)), statement


# --- names in the way -----------------------------------------------------------------------------


def put_in_the_way(connection: Connection, role_dsn: str) -> None:
    """Give a login a schema of its own, full of what the routines use, each of which raises."""
    user = psycopg.conninfo.conninfo_to_dict(role_dsn)["user"]
    connection.execute(f"create schema evil authorization {user}")  # type: ignore[arg-type]
    # Every ordinary function of pg_catalog that a routine of settle mentions, and ours too.
    shadows = connection.execute(
        "select p.oid::regprocedure::text as name, p.proname, format_type(p.prorettype, null) as gives,"
        " p.proretset, array(select format_type(t.type, null) from unnest(p.proargtypes)"
        " with ordinality as t (type, n) order by t.n) as arguments"
        " from pg_proc as p"
        " where p.prokind = 'f' and p.pronamespace in ('pg_catalog'::regnamespace, 'settle'::regnamespace)"
        " and not exists (select from unnest(array[p.prorettype] || p.proargtypes::oid[]) as a (type)"
        "   inner join pg_type as y on y.oid = a.type where y.typtype = 'p')"
        " and (p.pronamespace = 'settle'::regnamespace or exists (select from pg_proc as r"
        "   where r.pronamespace = 'settle'::regnamespace"
        "   and r.prosrc ~ ('\\m' || p.proname || '\\M\\s*\\(')))"
    ).fetchall()
    assert len(shadows) > 40
    for shadow in shadows:
        connection.execute(
            sql.SQL(
                "create function evil.{}({}) returns {} {} language plpgsql as"
                " $$ begin raise exception 'hijacked {}'; end $$"
            ).format(
                sql.Identifier(shadow["proname"]),
                sql.SQL(", ").join(sql.SQL(a) for a in shadow["arguments"]),
                sql.SQL("setof" if shadow["proretset"] else ""),
                sql.SQL(shadow["gives"]),
                sql.SQL(shadow["proname"]),
            )
        )
    for left, right in (("text", "text"), ("uuid", "uuid"), ("timestamptz", "timestamptz")):
        connection.execute(
            sql.SQL(
                "create function evil.hijack({0}, {1}) returns boolean language plpgsql as"
                " $$ begin raise exception 'hijacked operator'; end $$"
            ).format(sql.SQL(left), sql.SQL(right))
        )
        for operator in ("=", "<", "<>", "<=", ">"):
            connection.execute(
                sql.SQL(
                    "create operator evil.{} (leftarg = {}, rightarg = {}, function = evil.hijack)"
                ).format(sql.SQL(operator), sql.SQL(left), sql.SQL(right))
            )


def shadow_relations(user: Connection, names: list[str]) -> None:
    """Temporary tables and types of the names of ours, and of the system's."""
    for name in names:
        user.execute(sql.SQL("create temporary table {} (id int)").format(sql.Identifier(name)))
    user.execute("set search_path = evil, pg_temp, settle, pg_catalog, public")


def test_names_of_the_callers_own_have_no_effect_on_what_runs_as_the_owner(
    connection: Connection, database: str
) -> None:
    host = Standalone(connection)
    names = [
        row["relname"]
        for row in connection.execute(
            "select relname::text from pg_class where relnamespace = 'settle'::regnamespace"
            " and relkind in ('r', 'v', 'c') union select unnest(array['pg_proc', 'pg_class',"
            " 'pg_type', 'pg_settings', 'text', 'uuid', 'interval'])"
        )
    ]
    reported, recovered, succeeded = (hosts.running(host, retries=1) for _ in range(3))
    with login(database, "settle_agent") as dsn:
        put_in_the_way(connection, dsn)
        with db.connect(dsn) as user:
            shadow_relations(user, names)
            with pytest.raises(psycopg.errors.RaiseException, match="hijacked"):
                user.execute("select 'a'::pg_catalog.text = 'b'::pg_catalog.text")
            told = user.execute(
                "select disposition, state from settle.report(%s, 'failed', 1, 'timeout', 'r')",
                (reported.attempt_id,),
            ).fetchone()
            assert told == {"disposition": "settled", "state": "up_for_retry"}
            kept = user.execute(
                "select * from settle.push(%s, 'k', '1')", (recovered.attempt_id,)
            ).fetchone()
            assert kept
            assert kept["disposition"] == "settled"
    connection.execute("drop schema if exists evil cascade")
    with login(database, "settle_reconciler") as dsn:
        put_in_the_way(connection, dsn)
        with db.connect(dsn) as user:
            shadow_relations(user, names)
            opened = user.execute(
                "select settle.open_pass(null, 'podsettle', 'api') as id"
            ).fetchone()
            assert opened
            (row,) = user.execute(
                "select disposition, state from settle.settle_pods(%s, %s)",
                (opened["id"], Jsonb([hosts.success(recovered)])),
            ).fetchall()
            assert row == {"disposition": "settled", "state": "success"}
            user.execute("select * from settle.close_pass(%s, true, '{}')", (opened["id"],))
    connection.execute("drop schema if exists evil cascade")
    with login(database, "settle_operator") as dsn:
        put_in_the_way(connection, dsn)
        with db.connect(dsn) as user:
            shadow_relations(user, names)
            marked = user.execute("call settle.succeed(%s, 1)", (succeeded.id,)).fetchone()
            assert marked
            assert (marked["disposition"], marked["state"]) == ("settled", "success")
    states = [host.row(a.id)["state"] for a in (reported, recovered, succeeded)]
    assert states == ["up_for_retry", "success", "success"]


# --- a pass with the rights of a pass -------------------------------------------------------------


def test_i9_a_login_of_settle_reconciler_runs_whole_passes_and_no_more(
    template: Template, ends: Ends, tmp_path: Path
) -> None:
    with template.copy() as dsn, login(dsn, "settle_reconciler") as limited:
        arguments = (*RECONCILE, "--pods", str(template.file), "--complete", "--dsn", limited)
        dry = command.run(*arguments, "--dry-run", home=tmp_path)
        done = command.run(*arguments, home=tmp_path)
        assert (dry.code, done.code) == (0, 0), done.err
        with db.connect(dsn) as connection:
            assert without_actors(world.end(connection)) == without_actors(ends[0])
            actors = connection.execute(
                "select distinct actor from settle.settlement"
                " where pass_id = (select max(id) from settle.pass)"
            ).fetchall()
            user = psycopg.conninfo.conninfo_to_dict(limited)["user"]
            assert actors == [{"actor": user}]
        shown = command.run("status", "--dsn", limited, home=tmp_path)
        assert shown.code == 0, shown.err
        installed = command.run("install", "--dsn", limited, home=tmp_path)
        assert command.refused_in_one_sentence(installed)


def without_actors(end: dict[str, Any]) -> dict[str, Any]:
    return end | {"ledger": [entry | {"actor": None} for entry in end["ledger"]]}
