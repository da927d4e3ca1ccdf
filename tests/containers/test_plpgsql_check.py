"""The bodies of the routines, which PostgreSQL itself takes on trust until they run.

plpgsql_check is in the image of this folder and not in the embedded server, so this is the one
place where a body that names a missing column is found before a call meets it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.rows import namedtuple_row

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.containers

# "warning extra" and performance are advice, such as a parameter never read; they are printed only.
# Unless the advice carries an SQLSTATE: that one would be raised when the routine runs.
REFUSED = {"error", "warning", "security"}
REFUSED_WITH_SQLSTATE = {"warning extra"}

# What is refused and yet no fault of the routine: a regular expression for the first line of the
# report, and what was found when somebody looked into it. None is known.
FALSE_ALARMS: dict[str, str] = {}

ROUTINES = """
    select p.oid::regprocedure::text as routine,
           p.oid,
           p.prosecdef as security_definer,
           p.proconfig as settings,
           p.prosrc as body,
           p.prorettype = 'pg_catalog.trigger'::regtype as for_trigger,
           t.tgrelid as relation,
           t.tgoldtable as old_table,
           t.tgnewtable as new_table
    from pg_catalog.pg_proc p
    join pg_catalog.pg_language l on l.oid = p.prolang
    left join pg_catalog.pg_trigger t on t.tgfoid = p.oid and not t.tgisinternal
    where p.pronamespace = 'settle'::regnamespace and l.lanname = 'plpgsql'
    order by 1, t.tgrelid
"""

CHECK = """
    select level, sqlstate, lineno, statement, message, detail, hint
    from plpgsql_check_function_tb(
        funcoid => %(oid)s::oid::regprocedure,
        relid => coalesce(%(relation)s::oid, 0)::regclass,
        oldtable => %(old_table)s::name,
        newtable => %(new_table)s::name,
        fatal_errors => false,
        all_warnings => true
    )
"""

# What may hold the word commit without being the statement.
NOT_CODE = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\bon\s+commit\b", re.IGNORECASE | re.DOTALL
)


@pytest.fixture
def connection(container_dsn: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """One transaction that is rolled back, so that the extension is gone again afterwards."""
    with psycopg.connect(container_dsn, prepare_threshold=None) as connection:
        yield connection
        connection.rollback()


def test_the_bodies_of_all_routines_are_sound(
    connection: psycopg.Connection[tuple[object, ...]],
) -> None:
    connection.execute("create extension if not exists plpgsql_check")
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        routines = cursor.execute(ROUTINES).fetchall()
        refused: list[str] = []
        for routine in routines:
            if routine.for_trigger and routine.relation is None:
                refused.append(f"{routine.routine}: a trigger function that no trigger calls")
                continue
            try:
                with connection.transaction():
                    findings = cursor.execute(CHECK, routine._asdict()).fetchall()
            except psycopg.Error as error:
                refused.append(f"{routine.routine}: could not be checked: {error}")
                continue
            for finding in findings:
                where = (
                    f"{routine.routine} line {finding.lineno}, {finding.statement or 'declaration'}"
                )
                report = f"{where}: {finding.level} {finding.sqlstate}: {finding.message}"
                report += "".join(
                    f"\n    {more}" for more in (finding.detail, finding.hint) if more
                )
                bad = finding.level in REFUSED or (
                    finding.level in REFUSED_WITH_SQLSTATE and finding.sqlstate != "00000"
                )
                if bad and not any(re.match(known, report) for known in FALSE_ALARMS):
                    refused.append(report)
                else:
                    print(report)
    assert routines, "there is no plpgsql routine in schema settle: nothing was checked"
    print(f"plpgsql_check: {len({routine.oid for routine in routines})} routines")
    assert not refused, "plpgsql_check:\n" + "\n".join(refused)


def test_no_pinned_routine_ends_its_transaction(
    connection: psycopg.Connection[tuple[object, ...]],
) -> None:
    """Such a COMMIT fails only when it runs (2D000), and plpgsql_check does not see it."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        pinned = [
            routine
            for routine in cursor.execute(ROUTINES).fetchall()
            if routine.security_definer or routine.settings
        ]
    assert pinned, "no routine in schema settle is security definer or has a SET clause"
    ending = [
        f"{routine.routine}: {found.group().lower()}"
        for routine in pinned
        for found in re.finditer(
            r"\b(commit|rollback)\b", NOT_CODE.sub(" ", routine.body), re.IGNORECASE
        )
    ]
    assert not ending, "\n".join(ending)
