"""Puts the SQL into a database: once for migrations, again for whatever changed, safely at once.

Each step is one transaction that takes an advisory lock first, so installs that meet queue up and
find the work done. Nothing here decides what the SQL does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, LiteralString

import psycopg

from reconciler import resources
from reconciler.database import OLDEST_SERVER, Connection, DatabaseRefused, refusals

_BOOTSTRAP: Final = "migrations/0001_schema.sql"
_LOCK: Final[LiteralString] = "select pg_advisory_xact_lock(7001, 1)"
_OWNER: Final[LiteralString] = "set local role settle_owner"
_LATE_BINDING: Final[LiteralString] = "set local check_function_bodies = off"
_RECORD: Final[LiteralString] = (
    "insert into settle.migration (name, checksum) values (%(name)s, %(checksum)s)"
    " on conflict on constraint migration_pkey do update"
    " set checksum = excluded.checksum, applied_at = now(), applied_by = session_user"
)


class UnknownHost(ValueError):  # noqa: N818 -- a wrong command line, not an error of the program
    """There is no such host file."""


@dataclass(frozen=True)
class Script:
    """One SQL file.

    Attributes:
        name: Its path below the SQL folder, the key in settle.migration.
        body: Its text.
    """

    name: str
    body: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.body.encode()).hexdigest()

    @property
    def once(self) -> bool:
        """A migration: applied once, never changed."""
        return self.name.startswith("migrations/")


@dataclass(frozen=True)
class Step:
    """Scripts that are applied in one transaction."""

    scripts: tuple[Script, ...]


def steps(host: str = "standalone") -> tuple[Step, ...]:
    """Return the steps of an install, in order.

    Args:
        host: The name of a file in sql/hosts, or a path that ends in .sql.

    Returns:
        Each migration, all routines, the host, the views, the grants.

    Raises:
        UnknownHost: There is no such host.
    """
    folder = resources.sql_folder()

    def read(path: Path) -> Script:
        return Script(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))

    if host.endswith(".sql"):
        path = Path(host)
        if not path.is_file():
            raise UnknownHost(f"--host {host}: there is no such file")
        host_script = Script(f"hosts/{path.name}", path.read_text(encoding="utf-8"))
    else:
        path = folder / "hosts" / f"{host}.sql"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in (folder / "hosts").glob("*.sql")))
            raise UnknownHost(f"--host {host} is unknown; known: {known}, or a path to a .sql")
        host_script = read(path)
    return (
        *(Step((read(path),)) for path in sorted((folder / "migrations").glob("*.sql"))),
        Step(tuple(read(path) for path in sorted((folder / "routines").glob("*.sql")))),
        Step((host_script,)),
        Step((read(folder / "views.sql"),)),
        Step((read(folder / "grants.sql"),)),
    )


def install(connection: Connection, host: str = "standalone") -> list[str]:
    """Bring a database to this version.

    Args:
        connection: As a superuser, or a role that may create roles and, in this database, a schema.
        host: See `steps`.

    Returns:
        The names of the scripts that were applied; empty if nothing had changed.

    Raises:
        UnknownHost: See `steps`.
        DatabaseRefused: The server is too old, a migration was changed after it was applied, the
            database has another host, or the server refuses.
    """
    if connection.info.server_version < OLDEST_SERVER:
        raise DatabaseRefused(
            f"PostgreSQL {connection.info.server_version // 10000} is too old, 15 is the oldest"
        )
    applied: list[str] = []
    for step in steps(host):
        names = ", ".join(script.name for script in step.scripts[:1])
        with refusals(f"install failed at {names}"), connection.transaction():
            connection.execute(_LOCK)
            due = [script for script in step.scripts if _is_due(connection, script)]
            # A routine that was dropped and made again lost its grants.
            if step.scripts[0].name == "grants.sql" and applied:
                due = list(step.scripts)
            for script in due:
                _apply(connection, script)
            applied.extend(script.name for script in due)
    return applied


def _is_due(connection: Connection, script: Script) -> bool:
    row = connection.execute("select to_regclass('settle.migration') is null as fresh").fetchone()
    if row is None or row["fresh"]:
        return True
    if script.name != _BOOTSTRAP:
        connection.execute(_OWNER)
    if script.name.startswith("hosts/"):
        other = connection.execute(
            "select name from settle.migration where name like 'hosts/%%' and name <> %(name)s",
            {"name": script.name},
        ).fetchone()
        if other is not None:
            raise DatabaseRefused(
                f"this database has {other['name']}, {script.name} cannot be put beside it; "
                "use another database"
            )
    found = connection.execute(
        "select checksum from settle.migration where name = %(name)s", {"name": script.name}
    ).fetchone()
    if found is None:
        return True
    if found["checksum"] == script.checksum:
        return False
    if script.once:
        raise DatabaseRefused(
            f"{script.name} was changed after it was applied (checksum {found['checksum'][:12]} in "
            f"the database, {script.checksum[:12]} here); restore it and write a new migration"
        )
    return True


def _apply(connection: Connection, script: Script) -> None:
    if script.name != _BOOTSTRAP:
        connection.execute(_OWNER)
    # Routines call each other and the host's table, whichever comes first.
    connection.execute(_LATE_BINDING)
    try:
        connection.execute(script.body)
    except psycopg.Error as error:
        with refusals(f"install failed in {script.name}"):
            raise error from None
    connection.execute(_RECORD, {"name": script.name, "checksum": script.checksum})


def script_for_psql(host: str = "standalone") -> Iterator[str]:
    r"""Write the same install as a psql script.

    Args:
        host: See `steps`.

    Yields:
        Pieces of text; psql's \if asks the ledger what is due, so it can be run again.
    """
    yield (
        "-- podsettle install, for psql. Safe to run again: what is there already is left alone.\n"
        "\\set ON_ERROR_STOP on\n"
    )
    for step in steps(host):
        yield "\nbegin;\nset local client_min_messages = warning;\n"
        yield f"{_LOCK} as locked \\gset\n{_LATE_BINDING};\n"
        for script in step.scripts:
            yield from _script_for_psql(script)
        yield "commit;\n"


def _script_for_psql(script: Script) -> Iterator[str]:
    ledger = f"from settle.migration where name = '{script.name}'"
    due = "true"
    if script.name != _BOOTSTRAP:
        yield f"{_OWNER};\n"
        if script.name != "grants.sql":
            due = f"not exists (select {ledger} and checksum = '{script.checksum}')"
    else:
        due = "to_regclass('settle.migration') is null"
    if script.once and script.name != _BOOTSTRAP:
        yield (
            f"do $check$ begin if exists (select {ledger} and checksum <> '{script.checksum}') then"
            f" raise exception '{script.name} was changed after it was applied'"
            " using errcode = 'ST010'; end if; end $check$;\n"
        )
    yield f"select {due} as due \\gset\n\\if :due\n\\echo '{script.name}'\n{script.body.rstrip()}\n"
    record = _RECORD.replace("%(name)s", f"'{script.name}'").replace(
        "%(checksum)s", f"'{script.checksum}'"
    )
    yield f"{record};\n\\endif\n"
