"""What must hold for every routine and table, read from the catalog: a new one is covered by itself."""

from __future__ import annotations

import psycopg
import pytest

from reconciler.database import Connection

ROUTINES = "from pg_proc as p where p.pronamespace = 'settle'::regnamespace"


def names(connection: Connection, condition: str) -> list[str]:
    rows = connection.execute(
        f"select p.oid::regprocedure::text as name {ROUTINES} and {condition}"
    )
    return sorted(row["name"] for row in rows)


def test_there_are_routines(connection: Connection) -> None:
    assert len(names(connection, "true")) >= 20


@pytest.mark.parametrize(
    ("wrong", "condition"),
    [
        ("not owned by settle_owner", "p.proowner <> 'settle_owner'::regrole"),
        (
            "search_path not pinned",
            "not coalesce('search_path=pg_catalog, pg_temp' = any(p.proconfig), false)",
        ),
        ("executable by PUBLIC", "has_function_privilege('public', p.oid, 'execute')"),
        ("no comment", "obj_description(p.oid, 'pg_proc') is null"),
        (
            "overloaded",
            "exists (select from pg_proc as o where o.pronamespace = p.pronamespace"
            " and o.proname = p.proname and o.oid <> p.oid)",
        ),
        (
            "callable by a role but not as its owner",
            "not p.prosecdef and p.prorettype <> 'trigger'::regtype"
            " and p.proname <> 'contract_version' and exists (select from aclexplode(p.proacl) as a"
            " where a.grantee <> p.proowner)",
        ),
    ],
)
def test_no_routine_is(connection: Connection, wrong: str, condition: str) -> None:
    assert names(connection, condition) == [], wrong


def test_i12_only_our_own_schema_is_touched(host) -> None:
    """The other host's table: no column, trigger, index or constraint but its owner's."""
    rows = host.c.execute(
        "select nspname as schema, count(*) as n from pg_class c join pg_namespace n on n.oid = relnamespace"
        " where c.relowner = 'settle_owner'::regrole and nspname !~ '^pg_' group by 1"
    ).fetchall()
    assert [row["schema"] for row in rows] == ["settle"]
    if host.name == "jobs":
        triggers = host.c.execute(
            "select count(*) as n from pg_trigger where tgrelid = 'app.jobs'::regclass and not tgisinternal"
        ).fetchone()
        indexes = host.c.execute(
            "select count(*) as n from pg_indexes where schemaname = 'app' and tablename = 'jobs'"
        ).fetchone()
        assert (triggers, indexes) == ({"n": 0}, {"n": 2})


def test_nothing_in_the_schema_is_public(connection: Connection) -> None:
    rows = connection.execute(
        "select c.relname from pg_class as c cross join lateral aclexplode(c.relacl) as a"
        " where c.relnamespace = 'settle'::regnamespace and a.grantee = 0"
    ).fetchall()
    assert rows == []
    schema = connection.execute(
        "select has_schema_privilege('public', 'settle', 'usage') as usage"
    ).fetchone()
    assert schema == {"usage": False}


def test_every_table_and_view_is_described(connection: Connection) -> None:
    rows = connection.execute(
        "select relname from pg_class where relnamespace = 'settle'::regnamespace"
        " and relkind in ('r', 'v') and obj_description(oid, 'pg_class') is null"
    ).fetchall()
    assert rows == []


def test_every_constraint_is_named_by_its_meaning(connection: Connection) -> None:
    rows = connection.execute(
        "select conname from pg_constraint where connamespace = 'settle'::regnamespace"
        " and contype <> 'n' and conname !~ '_(pkey|key|fkey|check)$'"
    ).fetchall()
    assert rows == []


EXPECTED = {
    "settle_agent": {"report", "push"},
    "settle_reconciler": {
        "open_pass",
        "note_clock",
        "settle_pods",
        "close_pass",
        "classify",
        "ensure_listeners",
        "claim_events",
        "events_delivered",
        "event_failed",
        "release_events",
        "retry_events",
        "task_history",
        "report_figures",
    },
    "settle_reader": {"classify", "task_history", "report_figures"},
    "settle_operator": {
        "classify",
        "task_history",
        "report_figures",
        "succeed",
        "fail",
        "reschedule",
        "mark_failed",
        "clear",
        "register_listener",
        "unregister_listener",
        "retry_events",
        "create_task",
        "dispatch",
        "started",
    },
}

for _role in EXPECTED.keys() - {"settle_agent"}:
    # A function in a view runs with the rights of whoever reads the view.
    EXPECTED[_role] |= {"clock", "grace", "setting_value", "metric_reason"}


@pytest.mark.parametrize("role", sorted(EXPECTED))
def test_a_role_may_call_just_what_is_its_own(connection: Connection, role: str) -> None:
    rows = connection.execute(
        f"select p.proname {ROUTINES} and has_function_privilege(%s, p.oid, 'execute')", (role,)
    ).fetchall()
    assert {row["proname"] for row in rows} == EXPECTED[role] | {"contract_version"}


@pytest.mark.parametrize("role", sorted(EXPECTED))
def test_a_role_cannot_write_a_table_of_state(connection: Connection, role: str) -> None:
    connection.execute(f"set role {role}")
    for statement in (
        "update settle.task_instance set state = 'success'",
        "insert into settle.settlement (why) values ('forged')",
        "delete from settle.settlement",
        "delete from settle.outbox",
        "update settle.suspicion set passes = 99",
        "insert into settle.pushed (attempt_id, key, value) values ('a', 'b', '1')",
        "delete from settle.lease",
        "insert into settle.pass (profile, source) values ('x', 'api')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement)


def test_an_operator_keeps_own_rules_and_cannot_touch_ours(connection: Connection) -> None:
    connection.execute("set role settle_operator")
    connection.execute(
        "insert into settle.failure_rule (name, priority, failure_kind) values ('mine', 1, 'infra')"
    )
    changed = connection.execute("update settle.failure_rule set enabled = false").rowcount
    assert changed == 1
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(
            "insert into settle.failure_rule (name, priority, origin) values ('ours', 1, 'podsettle')"
        )
