"""What a person or a program reads: tables, JSON lines, log lines. Nothing is decided here."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TextIO
from uuid import UUID

import structlog
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from reconciler import text
from reconciler.pods import PodFacts

FIELDS: Final = (
    "pod",
    "namespace",
    "task_instance_id",
    "try_number",
    "final",
    "verdict",
    "from_record",
    "failure_kind",
    "reason",
    "rule",
    "disposition",
    "previous_state",
    "state",
    "why",
)
"""The keys of one pod's object, in order (docs/commands.md)."""

_DISPOSITION_STYLES: Final = {
    "settled": "green",
    "overrode": "green",
    "confirmed": "green",
    "suspected": "yellow",
    "unmatched": "red",
}
_QUIET: Final = frozenset({"duplicate", "not_final", "stale"})
_MOST_ROWS: Final = 200


def start_logs(stream: TextIO | None = None) -> None:
    """Send JSON events to standard error, one a line."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(ensure_ascii=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def console() -> Console:
    """Return standard output for people; what is no terminal gets lines of 140 characters."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=140)


def log() -> Any:
    """Return the logger of structured events."""
    return structlog.get_logger()


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    return str(value)


def json_line(row: Mapping[str, Any], extra: Iterable[str] = ()) -> str:
    """Return one pod as one line of ASCII JSON: nothing in it can forge a line or steer a terminal.

    Args:
        row: The fields by name; what is missing is null.
        extra: Further keys to append.
    """
    picked = {name: row.get(name) for name in (*FIELDS, *extra)}
    return json.dumps(picked, default=_plain, ensure_ascii=True, separators=(",", ":"))


def cell(value: object, limit: int = 120) -> str:
    """Return a value as one safe cell of a table."""
    if value is None:
        return "-"
    if value is True or value is False:
        return "yes" if value else "no"
    return escape_markup(text.escape(text.clip(str(value), limit)))


class PassTable:
    """The pods of a pass for a person: what moved or needs a look; the rest is counted.

    Memory stays flat: at most 200 rows are kept, JSON lines have all of them.
    """

    def __init__(self, *, dry_run: bool) -> None:
        title = "what would happen (dry run, nothing was written)" if dry_run else "this pass"
        self._table = Table(title=title, title_justify="left", header_style="bold")
        for column in ("pod", "try", "verdict", "disposition"):
            self._table.add_column(column, overflow="fold")
        self._table.add_column("why", overflow="fold", ratio=1)
        self._hidden = 0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a page of rows."""
        for row in rows:
            if row["disposition"] in _QUIET:
                continue
            if self._table.row_count >= _MOST_ROWS:
                self._hidden += 1
                continue
            state = row["disposition"]
            if row["state"] != row["previous_state"]:
                state = f"{state}: {row['previous_state']} -> {row['state']}"
            self._table.add_row(
                cell(row["pod"]),
                cell(row["try_number"]),
                cell(" ".join(row[k] for k in ("verdict", "failure_kind", "reason") if row[k])),
                cell(state),
                cell(row["why"], 240),
                style=_DISPOSITION_STYLES.get(row["disposition"]),
            )

    def show(self, console: Console, counts: Mapping[str, int]) -> None:
        """Print the table and one line of counts."""
        if self._table.row_count:
            console.print(self._table)
        if self._hidden:
            console.print(f"… and {self._hidden} more; --output json shows all")
        told = ", ".join(
            f"{n} {name}" for name, n in sorted(counts.items()) if name != "pods" and n
        )
        console.print(f"{counts.get('pods', 0)} pods: {told or 'nothing to do'}")


def print_explanations(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print, for each pod, the verdict, the rule that gave it, and the facts that it read."""
    for row in rows:
        told = [str(row[name]) for name in ("verdict", "failure_kind", "reason") if row[name]]
        if not row["final"]:
            told.insert(0, "not final")
        why = f"rule {row['rule']}: {row['why']}" if row["rule"] else row["why"]
        if row["silence"] and not row["final"]:
            why += f"; if it stays so: failed {row['overdue_kind']} {row['overdue_reason']}"
        console.print(f"[bold]{cell(row['facts']['pod'])}[/bold]  {cell(' '.join(told))}")
        console.print(f"    {cell(why, 400)}", highlight=False)
        console.print(f"    {cell(facts_line(row['facts']), 600)}", highlight=False, style="dim")


def json_document(value: object) -> str:
    """Return any answer of the database as one line of ASCII JSON."""
    return json.dumps(value, default=_plain, ensure_ascii=True, separators=(",", ":"))


def loss(facts: PodFacts, row: Mapping[str, Any]) -> str:
    """Return what is lost if a held pod goes now, in one sentence."""
    said = "its end" if facts.record is None else f"the record {facts.record.outcome!r}"
    if row["disposition"] is None:
        return f"{said} is lost, unless it was settled"
    if row["disposition"] == "duplicate" and not row["final"]:
        return "settled already; it has not ended, and a late record of it is lost"
    if row["disposition"] in ("duplicate", "stale"):
        return "settled already, nothing is lost"
    if row["disposition"] == "unmatched":
        return f"of no known task ({text.escape(row['why'])}); {said} is lost"
    if row["verdict"] is None:
        return "it has not ended; its end will not be held"
    told = " ".join(row[name] for name in ("verdict", "failure_kind", "reason") if row[name])
    return f"NOT SETTLED YET, {text.escape(told)} is lost; run podsettle reconcile first"


def span(value: timedelta | None) -> str:
    """Return a time span for a person: the two largest units."""
    if value is None:
        return "-"
    seconds = int(value.total_seconds())
    for unit, size, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            rest = seconds % size // part
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"


def _sheet(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            *(span(v) if isinstance(v, timedelta) else cell(_moment(v), 200) for v in row)
        )
    return table


def _moment(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return value


def _task(row: Mapping[str, Any]) -> str:
    mapped = "" if row["map_index"] == -1 else f"[{row['map_index']}]"
    return f"{row['dag_id']} / {row['run_id']} / {row['task_id']}{mapped}"


def print_status(console: Console, sections: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Print what an operator asks first: what is open, what is doubted, whether passes run."""
    if sections["unsettled"]:
        for row in sections["unsettled"]:
            console.print(f"{row['n']} {row['state']}, the oldest for {span(row['oldest'])}")
    else:
        console.print("nothing is unsettled")
    if sections["suspicions"]:
        console.print(
            _sheet(
                "suspected, settled when the time is up (it counts only while complete passes run)",
                ("task", "try", "suspected for", "would become", "pod", "passes", "time left"),
                (
                    (
                        _task(row),
                        row["try_number"],
                        row["cause"],
                        f"failed {row['failure_kind'] or 'no kind'} {row['reason']}",
                        row["pod"],
                        row["passes"],
                        row["time_left"],
                    )
                    for row in sections["suspicions"]
                ),
            )
        )
    if sections["provisional"]:
        console.print(
            _sheet(
                "settled provisionally: a late success still replaces these",
                ("task", "try", "state", "kind", "reason", "settled at"),
                (
                    (
                        _task(row),
                        row["try_number"],
                        row["state"],
                        row["failure_kind"],
                        row["reason"],
                        row["settled_at"],
                    )
                    for row in sections["provisional"]
                ),
            )
        )
    if sections["refunds"]:
        console.print(
            _sheet(
                "retries given back in the last 7 days",
                ("node", "reason", "refunds", "taken back", "last at"),
                (
                    (row["node"], row["reason"], row["refunds"], row["taken_back"], row["last_at"])
                    for row in sections["refunds"]
                ),
            )
        )
    if sections["listeners"]:
        console.print(
            _sheet(
                "listeners",
                ("listener", "on", "not delivered", "the oldest for", "set aside"),
                (
                    (
                        row["name"],
                        row["enabled"],
                        row["pending"],
                        row["oldest_age"],
                        row["set_aside"],
                    )
                    for row in sections["listeners"]
                ),
            )
        )
    if sections["stuck"]:
        console.print(
            _sheet(
                "events that are stuck (podsettle deliver --again LISTENER takes up what was set"
                " aside)",
                ("event", "listener", "task", "became", "for", "tries", "set aside", "last error"),
                (
                    (
                        row["id"],
                        row["listener"],
                        _task(row),
                        row["state"],
                        row["age"],
                        row["tries"],
                        row["set_aside"],
                        row["last_error"],
                    )
                    for row in sections["stuck"]
                ),
            )
        )
    if sections["passes"]:
        console.print(
            _sheet(
                "last passes",
                ("pass", "opened", "took", "scope", "complete", "counts"),
                (
                    (
                        row["id"],
                        row["opened_at"],
                        row["duration"],
                        row["namespace"] or "all namespaces",
                        "still open" if row["complete"] is None else row["complete"],
                        ", ".join(f"{n} {name}" for name, n in sorted(row["counts"].items())),
                    )
                    for row in sections["passes"]
                ),
            )
        )
    else:
        console.print("no pass has run yet: podsettle reconcile runs one")


def print_history(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the ledger of one task instance, attempt by attempt, with the evidence."""
    console.print(f"[bold]{cell(_task(rows[0]))}[/bold]", highlight=False)
    attempt = None
    for row in rows:
        this = (row["try_number"], row["attempt_id"])
        if this != attempt:
            attempt = this
            console.print(f"[bold]try {row['try_number']}[/bold]", highlight=False)
        said = " ".join(str(row[k]) for k in ("verdict", "failure_kind", "reason") if row[k])
        console.print(
            f"  {cell(_moment(row['settled_at']))}  {cell(said)}: "
            f"{row['previous_state']} -> {row['state']}"
            + ("" if row["disposition"] == "settled" else f" ({row['disposition']})")
            + (" (provisional)" if row["provisional"] else ""),
            highlight=False,
        )
        console.print(f"    {cell(row['why'], 400)}", highlight=False)
        console.print(f"    {cell(_evidence_line(row), 800)}", highlight=False, style="dim")


def _evidence_line(row: Mapping[str, Any]) -> str:
    """Return whose word a ledger row rests on, in one line."""
    facts = row["evidence"]
    told = [
        {
            "pass": f"pass {row['pass_id']}",
            "report": "a report of the agent",
            "person": f"a person ({row['actor']})",
        }[row["source"]]
    ]
    if row["rule"] and row["source"] == "pass":
        told.append(f"rule {row['rule']}")
    if row["pod"]:
        told.append(f"pod {row['pod']}" + (f" on {row['node']}" if row["node"] else ""))
    if row["refund"]:
        word = "given" if row["refund"] == 1 else "taken back"
        told.append(f"refund {word}, {row['refunds_used']}/{row['refund_cap']}")
    if isinstance(facts.get("container"), Mapping):
        # The ledger drops what is null.
        whole = dict.fromkeys(
            (
                "phase",
                "pod_reason",
                "pod_message",
                "restarts",
                "deletion_at",
                "deletion_grace_seconds",
                "termination_grace_seconds",
                "init",
                "record",
                "record_problem",
            )
        )
        container = {
            name: facts["container"].get(name)
            for name in ("name", "state", "reason", "exit_code", "finished_at")
        }
        init = facts.get("init")
        conditions = [
            {name: c.get(name) for name in ("type", "status", "reason", "at")}
            for c in facts.get("conditions", [])
        ]
        told.append(
            facts_line(
                {
                    **whole,
                    **facts,
                    "container": container,
                    "conditions": conditions,
                    "init": None
                    if init is None
                    else {name: init.get(name) for name in ("name", "state")},
                }
            )
        )
    if "suspected_since" in facts:
        told.append(
            f"suspected since {facts['suspected_since']}, "
            f"seen by {facts.get('complete_passes')} complete passes"
        )
    return "; ".join(told)


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return the facts that a verdict rests on, in one line."""
    container = facts["container"]
    told = [f"phase {facts['phase']}"]
    if facts["pod_reason"]:
        told.append(f"pod reason {facts['pod_reason']}")
    if facts["pod_message"]:
        told.append(f"pod message {facts['pod_message'].strip()!r}")
    ended = f"container {container['name']} {container['state']}"
    if container["reason"]:
        ended += f" {container['reason']}"
    if container["exit_code"] is not None:
        ended += f" exit {container['exit_code']}"
    if container["finished_at"]:
        ended += f" at {container['finished_at']}"
    told.append(ended)
    if facts["restarts"]:
        told.append("container may be restarted")
    told.extend(
        f"{c['type']}={c['status']} {c['reason']} at {c['at']}"
        for c in facts["conditions"]
        if c["type"] in ("DisruptionTarget", "TerminationTarget")
    )
    if facts["deletion_at"]:
        told.append(
            f"deletion at {facts['deletion_at']}, grace "
            f"{facts['deletion_grace_seconds']}/{facts['termination_grace_seconds']} s"
        )
    if facts["init"]:
        told.append(f"init container {facts['init']['name']} {facts['init']['state']}")
    if facts["record"]:
        told.append(
            "record " + json.dumps({k: v for k, v in facts["record"].items() if v is not None})
        )
    elif facts["record_problem"]:
        told.append(f"no record: {facts['record_problem']}")
    return "; ".join(told)
