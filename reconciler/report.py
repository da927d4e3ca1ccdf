"""The report: figures of the ledger (settle.report_figures) as one page that needs nothing else.

No script, no font, no request: the page says so itself in its Content-Security-Policy. Every figure
stands in a table or a `<data>` element as well as in a picture. Nothing is counted here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from reconciler import text

_STYLE: Final = Path(__file__).with_name("report.css")

KINDS: Final = ("infra", "application", "timeout", "manual", "unknown")
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_./])(?=\w)")
_NAMES: Final = {"unknown": "no kind proven"}


def page(figures: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        figures: What settle.report_figures() returns.

    Returns:
        HTML; every name in it is escaped, whoever wrote it.
    """
    totals = figures["totals"]
    begin, until = _time(figures["from"]), _time(figures["until"])
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        (
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        '<meta name="referrer" content="no-referrer">',
        f"<title>podsettle report, {_day(begin)} to {_day(until)}</title>",
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>",
        "<header><h1>What failed, why, and what was saved</h1>",
        f"<p>podsettle, {_moment(begin)} to {_moment(until)}. All times are UTC.</p>",
        "</header><main>",
        _tiles(totals),
        _over_time(figures),
        '<div class="pair">',
        _reasons(figures["reasons"]),
        _nodes(figures["nodes"]),
        '</div><div class="pair">',
        _refunds(figures["refunds"], totals),
        _kept(figures["kept"], totals),
        "</div></main>",
        "<footer>An attempt is one pod of a task; each failed attempt counts, retried or not.",
        "Every figure is of the ledger: <code>select settle.report_figures(days)</code>.</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _say(value: object) -> str:
    """Return a name that somebody wrote: escaped, and breakable between its words."""
    shown = text.escape(text.clip(str(value), 200))
    return "<wbr>".join(html.escape(word) for word in _WORDS.split(shown))


def _time(value: str) -> datetime:
    return datetime.fromisoformat(value).astimezone(UTC)


def _day(at: datetime) -> str:
    return f"{at.day} {at:%b %Y}"


def _moment(at: datetime) -> str:
    return f'<time datetime="{at.isoformat()}">{at.day} {at:%b %Y, %H:%M}</time>'


def _data(name: str, value: float, shown: str | None = None) -> str:
    said = f"{value:,}" if shown is None else shown
    return f'<data data-figure="{name}" value="{value}">{said}</data>'


def _hours(value: float) -> str:
    if value == 0:
        return "0 h"
    if value < 1:
        minutes = value * 60
        return f"{minutes:.0f} min" if minutes >= 1 else "&lt;1 min"
    return f"{value:,.1f} h" if value < 100 else f"{value:,.0f} h"


def _count(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"


def _tiles(totals: Mapping[str, Any]) -> str:
    back = totals["refunds"] - totals["taken_back"]
    tiles = (
        (
            _data("failures", totals["failures"]),
            "",
            "failed attempts",
            f"{_hours(totals['lost_hours'])} of work in them",
        ),
        (
            _data("refunds_kept", back),
            "good",
            "retries given back",
            f"{_count(totals['refused'], 'more was', 'more were')} charged, past the cap"
            if totals["refused"]
            else "none was past the cap",
        ),
        (
            _data("kept", totals["kept"]),
            "good",
            "finished tasks recovered",
            "by what their pod recorded",
        ),
        (
            _data("kept_hours", totals["kept_hours"], _hours(totals["kept_hours"])),
            "good",
            "of work not run again",
            f"measured on {_count(totals['kept_timed'], 'pod', 'pods')}",
        ),
    )
    items = "".join(
        f'<li><span class="n {mood}">{figure}</span><span class="what">{what}</span>'
        f'<span class="more">{more}</span></li>'
        for figure, mood, what, more in tiles
    )
    return f'<ul class="tiles" aria-label="In short">{items}</ul>'


def _section(identity: str, title: str, lead: str, body: str) -> str:
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">{title}</h2>'
        f"<p>{lead}</p>{body}</section>"
    )


def _label(at: datetime, unit: str) -> str:
    return f"{at:%H}:00" if unit == "hour" else f"{at.day} {at:%b}"


def _top(most: int) -> int:
    """Return the top of the axis: the next 2, 4, 10 times a power of ten."""
    size = 1
    while True:
        for step in (2, 4, 10):
            if most <= step * size:
                return step * size
        size *= 10


def _over_time(figures: Mapping[str, Any]) -> str:
    title, unit = "Failures by kind", figures["unit"]
    lead = (
        f"Failed attempts each {unit}. <b>Infra</b> is the platform's doing and not charged, within"
        " the cap; <b>application</b> is the task's own."
    )
    buckets: Sequence[Mapping[str, Any]] = figures["by_time"]
    by_kind = figures["by_kind"]
    kinds = [kind for kind in KINDS if by_kind.get(kind)]
    if not kinds:
        return _section("time", title, lead, '<p class="none">Nothing failed in this time.</p>')
    legend = "".join(
        f'<li><i class="{kind}"></i>{_NAMES.get(kind, kind)} '
        f"<b>{_data(f'kind-{kind}', by_kind[kind])}</b></li>"
        for kind in kinds
    )
    top = _top(max(sum(bucket["kinds"].values()) for bucket in buckets))
    bars = []
    for place, bucket in enumerate(buckets):
        floor = 0.0
        for kind in kinds:
            height = bucket["kinds"].get(kind, 0) / top * 100
            if height:
                bars.append(
                    f'<rect class="{kind}" x="{place * 10 + 1}" width="8" '
                    f'y="{100 - floor - height:.3f}" height="{height:.3f}"/>'
                )
            floor += height
    width = len(buckets) * 10
    peak = max(buckets, key=lambda bucket: sum(bucket["kinds"].values()))
    told = (
        f"Bars from {_label(_time(buckets[0]['at']), unit)} to "
        f"{_label(_time(buckets[-1]['at']), unit)}; the highest is "
        f"{_count(sum(peak['kinds'].values()), 'failure', 'failures')} on "
        f"{_label(_time(peak['at']), unit)}. The table below has every number."
    )
    lines = "".join(
        f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}" '
        'vector-effect="non-scaling-stroke"/>'
        for y in (0.5, 50)
    )
    ticks = [buckets[0], buckets[len(buckets) // 2], buckets[-1]] if len(buckets) > 2 else buckets
    chart = (
        f'<ul class="legend">{legend}</ul>'
        f'<div class="chart"><div class="y" aria-hidden="true"><span>{top:,}</span>'
        f"<span>{top // 2:,}</span><span>0</span></div>"
        f'<svg role="img" aria-labelledby="ct cd" viewBox="0 0 {width} 100" '
        f'preserveAspectRatio="none"><title id="ct">{title} over time</title>'
        f'<desc id="cd">{told}</desc>{lines}{"".join(bars)}</svg>'
        '<div class="x" aria-hidden="true">'
        + "".join(f"<span>{_label(_time(bucket['at']), unit)}</span>" for bucket in ticks)
        + "</div></div>"
    )
    rows = (
        (
            _moment_cell(bucket["at"], unit),
            *(
                _data(f"time-{kind}", bucket["kinds"].get(kind, 0))
                if bucket["kinds"].get(kind)
                else "·"
                for kind in kinds
            ),
        )
        for bucket in buckets
        if bucket["kinds"]
    )
    table = _table(
        f"Failed attempts each {unit} by kind; what is not listed had none",
        (unit, *(_NAMES.get(kind, kind) for kind in kinds)),
        rows,
    )
    return _section(
        "time", title, lead, f"{chart}<details><summary>The numbers</summary>{table}</details>"
    )


def _moment_cell(value: str, unit: str) -> str:
    at = _time(value)
    shown = f"{at.day} {at:%b, %H}:00" if unit == "hour" else _day(at)
    return f'<time datetime="{at.isoformat()}">{shown}</time>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{value}</td>" for value in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _bar(share: float, kind: str) -> str:
    return (
        f'<span class="bar" aria-hidden="true"><i class="{kind}" '
        f'style="width:{max(share * 100, 1.5):.1f}%"></i></span>'
    )


def _reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    title = "The reasons that cost most"
    lead = "By failed attempts. Hours are what the failed containers had run for."
    if not rows:
        return _section("reasons", title, lead, '<p class="none">None.</p>')
    most = max(row["failures"] for row in rows)
    return _section(
        "reasons",
        title,
        lead,
        _table(
            "Failed attempts by reason, the ten with most",
            ("reason", "failed", "given back", "lost"),
            (
                (
                    f"{_say(row['reason'])} <small>{_NAMES.get(row['kind'], row['kind'])}</small>"
                    + _bar(row["failures"] / most, row["kind"]),
                    _data("reason-failures", row["failures"]),
                    _data("reason-refunds", row["refunds"]),
                    _data("reason-hours", row["hours"], _hours(row["hours"])),
                )
                for row in rows
            ),
        ),
    )


def _nodes(rows: Sequence[Mapping[str, Any]]) -> str:
    title = "The nodes that cost most"
    lead = "By infra failures: a node high up here is worth a look by whoever runs the cluster."
    if not rows:
        return _section("nodes", title, lead, '<p class="none">None.</p>')
    most = max(1, *(row["infra"] for row in rows))
    return _section(
        "nodes",
        title,
        lead,
        _table(
            "Failed attempts by node, the ten with most infra failures",
            ("node", "infra", "failed", "lost"),
            (
                (
                    _say(row["node"]) + _bar(row["infra"] / most, "infra"),
                    _data("node-infra", row["infra"]),
                    _data("node-failures", row["failures"]),
                    _data("node-hours", row["hours"], _hours(row["hours"])),
                )
                for row in rows
            ),
        ),
    )


def _task(row: Mapping[str, Any]) -> str:
    return f"{_say(row['task_id'])} <small>{_say(row['dag_id'])}</small>"


def _refunds(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> str:
    title = "Retries given back"
    lead = (
        f"{_count(totals['refunds'], 'infra failure', 'infra failures')} did not count against the "
        "task's retries. Charged is what came after the cap."
    )
    if totals["taken_back"]:
        back = _count(totals["taken_back"], "refund was", "refunds were")
        lead += f" {back} taken back: the task had succeeded after all."
    if not rows:
        return _section("refunds", title, lead, '<p class="none">None.</p>')
    return _section(
        "refunds",
        title,
        lead,
        _table(
            "Infra failures by task, the ten with most refunds",
            ("task", "given back", "charged"),
            (
                (
                    _task(row),
                    _data("refund-n", row["n"]),
                    _data("refund-refused", row["refused"]),
                )
                for row in rows
            ),
        ),
    )


def _kept(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> str:
    title = "Work not run again"
    lead = (
        "Tasks that had finished, but whose report never came: the record on their pod settled them"
        " as success. Where agents do not report at all, that is every success."
    )
    missing = totals["kept"] - totals["kept_timed"]
    if missing:
        lead += f" {_count(missing, 'of them has', 'of them have')} no times and no hours here."
    if not rows:
        return _section("kept", title, lead, '<p class="none">None.</p>')
    return _section(
        "kept",
        title,
        lead,
        _table(
            "Recovered successes by task, the ten with most hours",
            ("task", "recovered", "saved"),
            (
                (
                    _task(row),
                    _data("kept-n", row["n"]),
                    _data("kept-row-hours", row["hours"], _hours(row["hours"])),
                )
                for row in rows
            ),
        ),
    )
