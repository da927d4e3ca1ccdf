"""Metrics, report, status and history: every figure is compared with a query of the ledger."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from reconciler import database as db
from tests.cli.conftest import Run
from tests.listeners.conftest import register, setting
from tests.listeners.test_consumers import samples
from tests.sql.hosts import (
    Passes,
    Standalone,
    again,
    crashed,
    evicted,
    pod,
    poke,
    running,
    settle,
    silent,
    success,
)

HOSTILE = '<script>alert(1)</script>"\u202e\n'


def one(connection: db.Connection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row
    return next(iter(row.values()))


def timed(facts: dict[str, Any], hours: float) -> dict[str, Any]:
    """Let the container of a pod have run for so long."""
    begin = 3 * 3600
    end = int(begin + hours * 3600)
    facts["container"] |= {
        "started_at": "2026-09-01T03:00:00Z",
        "finished_at": f"2026-09-01T{end // 3600:02}:{end % 3600 // 60:02}:{end % 60:02}Z",
    }
    return facts


@pytest.fixture
def history(connection: db.Connection, host: Standalone) -> Standalone:
    """A ledger with something of everything; then the clock is moved as tests like."""
    register(connection, "one", "two")
    connection.execute(
        "insert into settle.failure_rule (name, priority, exit_codes, failure_kind, reason)"
        " values ('spot', 95, '{[42,42]}', 'infra', 'SpotGone')"
    )
    setting(connection, "max_infra_refunds", "1")
    passes = Passes(connection)
    lost = [running(host, dag="d1", task="lost") for _ in range(1)]
    settle(connection, *(timed(evicted(a, node="n1"), 1.5) for a in lost))
    settle(connection, timed(evicted(again(host, lost[0]), node="n2"), 0.25))
    settle(
        connection,
        crashed(running(host, dag="d2", task="spot"), 42, node="n1"),
        timed(crashed(running(host, dag="d1", task="broke"), 3, node=HOSTILE), 0.5),
        pod(
            running(host, dag=HOSTILE, task=HOSTILE),
            ended={"reason": "Error", "exit_code": 1},
            record={"outcome": "failed", "exit_code": 1, "reason": HOSTILE},
        ),
        timed(success(running(host, dag="d1", task="won")), 4),
        success(running(host, dag="d1", task="won_untimed")),
        poke(running(host)),
    )
    quiet = running(host, dag="d1", task="quiet")
    no_word = silent(quiet)
    for _ in range(4):
        passes.run(no_word)
        passes.later(60)
    late = running(host, dag="d1", task="late")
    for _ in range(4):
        passes.run()
        passes.later(60)
    connection.execute("call settle.succeed(%s, 1)", (late.id,))
    by_hand = running(host)
    connection.execute("call settle.mark_failed(%s, 'my own words')", (by_hand.id,))
    running(host)
    host.dispatch(host.create())
    passes.run()
    assert one(connection, "select count(*) from settle.settlement where refund = -1") == 1
    return host


# --- metrics ------------------------------------------------------------------------------------

FAILED = "from settle.settlement where verdict = 'failed' and disposition = 'settled'"


def by_labels(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of one metric by the values of its labels, in order of the labels."""
    found = {}
    for sample, value in samples(text).items():
        if sample == name or sample.startswith(name + "{"):
            values = re.findall(r'="((?:[^"\\]|\\.)*)"', sample)
            found[tuple(json.loads(f'"{v}"') for v in values)] = value
    return found


def test_every_metric_agrees_with_a_query(
    connection: db.Connection, database: str, history: Standalone, podsettle: Callable[..., Run]
) -> None:
    run = podsettle("metrics", "--dsn", database)
    assert run.code == 0, run.err
    text = run.out

    def query(statement: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(str(v) for v in list(row.values())[:-1]): float(list(row.values())[-1])
            for row in connection.execute(statement).fetchall()
        }

    closed = "('Evicted', 'Error', 'NoRecord', 'PodDeleted', 'SpotGone')"
    expected = {
        "ti_failures_total": "select dag_id, coalesce(failure_kind, 'none'),"
        f" case when reason is null then 'none' when reason in {closed} then reason else 'other' end,"
        f" task_id, count(*) {FAILED} group by 1, 2, 3, 4",
        "operator_failures_total": "select coalesce(failure_kind, 'none'), 'unknown', count(*)"
        f" {FAILED} group by 1, 2",
        "refunds_total": "select dag_id, reason, count(*) from settle.settlement where refund = 1 group by 1, 2",
        "refunds_taken_back_total": "select count(*) from settle.settlement where refund = -1",
        "refunds_refused_total": f"select dag_id, count(*) {FAILED} and failure_kind = 'infra' and refund = 0 group by 1",
        "settlements_total": "select source, verdict, count(*) from settle.settlement"
        " where disposition <> 'confirmed' group by 1, 2",
        "unsettled_task_instances": "select state, count(*) from settle.task_instance"
        " where state in ('queued', 'running') group by 1",
        "outbox_pending": "select listener, count(*) from settle.outbox group by 1",
        "outbox_set_aside": "select name, 0 from settle.listener",
        "pass_pods": "select '*' as namespace, 0 as value",
    }
    for name, statement in expected.items():
        assert by_labels(text, f"podsettle_{name}") == query(statement), name
    suspected = by_labels(text, "podsettle_suspicions_open")
    assert suspected == {("no_record",): 0, ("pending",): 0, ("terminating",): 0, ("absent",): 2}
    last = one(
        connection,
        "select extract(epoch from max(closed_at))::float8 from settle.pass where complete",
    )
    assert by_labels(text, "podsettle_last_complete_pass_timestamp_seconds") == {("*",): last}
    duration = one(
        connection,
        "select extract(epoch from closed_at - opened_at)::float8 from settle.pass order by id desc limit 1",
    )
    assert by_labels(text, "podsettle_pass_duration_seconds") == {("*",): duration}
    assert min(by_labels(text, "podsettle_outbox_oldest_seconds").values()) > 0
    # Each metric is told what it is.
    names = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line[:1] != "#"}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert names == typed


def test_reasons_that_anybody_can_write_make_no_series(
    connection: db.Connection, host: Standalone
) -> None:
    settle(
        connection,
        *(
            pod(
                running(host, task="same"),
                ended={"reason": "Error", "exit_code": 1},
                record={"outcome": "failed", "exit_code": 1, "reason": f"row {n} is bad"},
            )
            for n in range(1)
        ),
    )
    for n in range(5):
        attempt = running(host, task=f"t{n}")
        connection.execute("call settle.mark_failed(%s, %s)", (attempt.id, f"note {n}"))
    rows = connection.execute(
        "select distinct labels ->> 'reason' as reason from settle.metrics"
        " where name = 'podsettle_ti_failures_total'"
    ).fetchall()
    assert rows == [{"reason": "other"}]


def test_a_reader_may_read_the_metrics_and_the_report(
    connection: db.Connection, history: Standalone
) -> None:
    connection.execute("grant select on public.test_clock to settle_reader")
    connection.execute("set role settle_reader")
    assert one(connection, "select count(*) from settle.metrics") > 10
    assert one(connection, "select settle.report_figures(7) -> 'totals' ->> 'failures'")


def test_a_pass_counts_the_pods_that_it_listed(connection: db.Connection, host: Standalone) -> None:
    """What ripened is settled by the pass, and was no pod of its list."""
    passes = Passes(connection)
    running(host)
    while not one(connection, "select count(*) from settle.settlement where provisional"):
        passes.later(60)
        passes.run(crashed(running(host)), evicted(running(host)))
    assert (
        one(connection, "select counts from settle.pass order by id desc limit 1")["settled"] == 3
    )
    pods = "select value from settle.metrics where name = 'podsettle_pass_pods'"
    assert one(connection, pods) == 2


# --- the report ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a program, or a screen reader, finds in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.bars: dict[str, float] = defaultdict(float)
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._in.append(tag)
        if tag == "data":
            self.figures[str(found["data-figure"])].append(float(str(found["value"])))
        if tag == "th":
            self.cells.append("")
        if tag == "rect":
            self.bars[str(found["class"])] += float(str(found["height"]))

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "th" in self._in:
            self.cells[-1] += data

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


@pytest.fixture
def page(
    database: str, history: Standalone, podsettle: Callable[..., Run], tmp_path: Path
) -> tuple[str, Page]:
    path = tmp_path / "report.html"
    run = podsettle("report", "--dsn", database, "--html", str(path), "--days", "7")
    assert run.code == 0, run.err
    text = path.read_text()
    return text, Page(text)


def test_every_figure_of_the_page_agrees_with_a_query(
    connection: db.Connection, page: tuple[str, Page]
) -> None:
    _, found = page
    hours = (
        "sum(extract(epoch from (evidence #>> '{container,finished_at}')::timestamptz"
        " - (evidence #>> '{container,started_at}')::timestamptz)) / 3600"
    )
    kept = "from settle.settlement where verdict = 'success' and source = 'pass'"

    def column(query: str) -> list[float]:
        return [float(v) for row in connection.execute(query).fetchall() for v in row.values()]

    assert found.figures["failures"] == column(f"select count(*) {FAILED}")
    assert found.figures["refunds_kept"] == column("select sum(refund) from settle.settlement")
    assert found.figures["kept"] == column(f"select count(*) {kept}") == [2]
    assert found.figures["kept_hours"] == column(f"select {hours} {kept}") == [4]
    kinds = {
        name.removeprefix("kind-"): values
        for name, values in found.figures.items()
        if name.startswith("kind-")
    }
    assert kinds == {
        row["kind"]: [row["n"]]
        for row in connection.execute(
            f"select coalesce(failure_kind, 'unknown') as kind, count(*) as n {FAILED} group by 1"
        ).fetchall()
    }
    assert set(kinds) == {"infra", "application", "manual", "unknown"}
    # The picture: heights are in proportion to the numbers beside it.
    per_failure = {kind: found.bars[kind] / kinds[kind][0] for kind in kinds}
    assert max(per_failure.values()) == pytest.approx(min(per_failure.values()), rel=1e-3)
    for kind, values in kinds.items():
        assert sum(found.figures[f"time-{kind}"]) == values[0]
    by_reason = (
        f"select count(*) as n, count(*) filter (where refund = 1) as r, coalesce({hours}, 0) as h"
        f" {FAILED} group by coalesce(reason, 'none'), failure_kind"
    )
    shown = zip(
        *(found.figures[f"reason-{name}"] for name in ("failures", "refunds", "hours")), strict=True
    )
    assert sorted((n, r, round(h, 6)) for n, r, h in shown) == sorted(
        (row["n"], row["r"], round(float(row["h"]), 6))
        for row in connection.execute(by_reason).fetchall()
    )
    by_node = connection.execute(
        "select count(*) filter (where failure_kind = 'infra') as infra, count(*) as n,"
        f" coalesce({hours}, 0) as h {FAILED} and node is not null group by node"
        " order by infra desc, h desc, node"
    ).fetchall()
    assert found.figures["node-infra"] == [row["infra"] for row in by_node]
    assert found.figures["node-failures"] == [row["n"] for row in by_node]
    assert found.figures["node-hours"] == pytest.approx([float(row["h"]) for row in by_node])
    refunds = connection.execute(
        "select count(*) filter (where refund = 1) as n, count(*) filter (where refund = 0) as no"
        f" {FAILED} and failure_kind = 'infra' group by dag_id, task_id order by n desc, dag_id, task_id"
    ).fetchall()
    assert found.figures["refund-n"] == [row["n"] for row in refunds]
    assert found.figures["refund-refused"] == [row["no"] for row in refunds]
    assert sum(found.figures["kept-n"]) == 2
    assert sum(found.figures["kept-row-hours"]) == 4


def test_the_page_needs_nothing_else_and_runs_nothing(page: tuple[str, Page]) -> None:
    text, found = page
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=", text)
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in found.tags)
    policy = [a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    # What somebody wrote is text, shown with nothing invisible in it.
    assert "<script>" not in text
    assert "\u202e" not in text
    assert any("<script>alert(1)</script>" in cell for cell in found.cells)


def test_the_page_can_be_read_aloud_and_on_a_phone(page: tuple[str, Page]) -> None:
    _, found = page
    assert found.count("h1") == 1
    sections = [a for tag, a in found.tags if tag == "section"]
    headings = {a.get("id") for tag, a in found.tags if tag == "h2"}
    assert {a["aria-labelledby"] for a in sections} == headings
    assert len(sections) == 5
    assert found.count("table") == found.count("caption") == 5
    assert all(a.get("scope") in ("row", "col") for tag, a in found.tags if tag == "th")
    (picture,) = [a for tag, a in found.tags if tag == "svg"]
    named = {a.get("id") for tag, a in found.tags if tag in ("title", "desc")}
    assert set(str(picture["aria-labelledby"]).split()) <= named
    assert ("html", {"lang": "en"}) in found.tags
    assert any(
        a.get("name") == "viewport" and "width=device-width" in str(a["content"])
        for tag, a in found.tags
        if tag == "meta"
    )


@pytest.mark.parametrize(("days", "unit"), [(1, "hour"), (30, "day"), (400, "week")])
def test_an_empty_ledger_makes_a_page_too(
    connection: db.Connection,
    database: str,
    podsettle: Callable[..., Run],
    tmp_path: Path,
    days: int,
    unit: str,
) -> None:
    path = tmp_path / "report.html"
    run = podsettle("report", "--dsn", database, "--html", str(path), "--days", str(days))
    assert (run.code, run.out) == (0, f"wrote {path}\n")
    assert "Nothing failed in this time." in path.read_text()
    assert f"Failed attempts each {unit}." in path.read_text()
    assert Page(path.read_text()).figures["failures"] == [0]


def test_the_report_says_where_it_cannot_write(
    database: str, podsettle: Callable[..., Run]
) -> None:
    run = podsettle("report", "--dsn", database, "--html", "/no/such/folder/x.html")
    assert run.code == 2
    assert "No such file or directory" in run.err


# --- status and history -------------------------------------------------------------------------


def test_status_tells_refunds_by_node_and_what_is_stuck(
    connection: db.Connection, database: str, history: Standalone, podsettle: Callable[..., Run]
) -> None:
    setting(connection, "outbox_stuck_after", "0 s")
    sections = json.loads(podsettle("status", "--dsn", database, "--output", "json").out)
    assert sorted(
        (r["node"], r["reason"], r["refunds"], r["taken_back"])
        for r in sections["refunds"]
        if r["node"]
    ) == [
        ("n1", "Evicted", 1, 0),
        ("n1", "SpotGone", 1, 0),
    ]
    pending = one(connection, "select count(*) from settle.outbox where listener = 'one'")
    assert [(e["name"], e["pending"], e["set_aside"]) for e in sections["listeners"]] == [
        ("one", pending, 0),
        ("two", pending, 0),
    ]
    assert len(sections["stuck"]) == 20
    shown = podsettle("status", "--dsn", database).out
    assert "retries given back in the last 7 days" in shown
    assert "events that are stuck" in shown


@pytest.mark.parametrize("by", ["id", "names"])
def test_explain_tells_the_whole_history_of_a_task(
    connection: db.Connection,
    database: str,
    history: Standalone,
    podsettle: Callable[..., Run],
    by: str,
) -> None:
    task = "d1/r/lost"
    if by == "id":
        task = str(one(connection, "select id from settle.task_instance where task_id = 'lost'"))
    run = podsettle("explain", "--dsn", database, "--task", task)
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert lines[0] == "d1 / r / lost"
    assert [line for line in lines if line.startswith("try")] == ["try 1", "try 2"]
    assert "infra failure (Evicted) refunded attempt 1; max_tries now 1 (refund 1/1)" in run.out
    assert "not refunded (refund 1/1 already used)" in run.out
    assert "rule evicted-node" in run.out
    assert "The node was low on resource" in run.out
    rows = podsettle("explain", "--dsn", database, "--task", task, "--output", "json").rows
    assert [row["why"] for row in rows] == [
        row["why"]
        for row in connection.execute(
            "select why from settle.settlement where task_id = 'lost' order by id"
        ).fetchall()
    ]
    assert rows[0]["evidence"]["pod_reason"] == "Evicted"


def test_explain_tells_what_silence_and_a_person_did(
    connection: db.Connection, database: str, history: Standalone, podsettle: Callable[..., Run]
) -> None:
    out = podsettle("explain", "--dsn", database, "--task", "d1/r/late").out
    assert "failed infra PodDeleted: running -> up_for_retry (provisional)" in out
    assert "suspected since" in out
    assert "success: up_for_retry -> success (overrode)" in out
    assert f"a person ({connection.info.user}); refund taken back, 0/1" in out


def test_explain_finds_a_task_whose_host_gave_it_another_id(
    connection: db.Connection, database: str, history: Standalone, podsettle: Callable[..., Run]
) -> None:
    old = one(connection, "select id from settle.task_instance where task_id = 'lost'")
    connection.execute(
        "update settle.task_instance set id = gen_random_uuid() where task_id = 'lost'"
    )
    assert "try 2" in podsettle("explain", "--dsn", database, "--task", str(old)).out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--task", "nonsense"), "--task is an id, or DAG/RUN/TASK"),
        (("--task", "a/b/c"), "nothing was ever settled of such a task"),
        (("--task", "a/b/c", "pod"), "name one POD of the cluster, or give --pods or --task"),
        ((), "name one POD of the cluster, or give --pods or --task"),
    ],
)
def test_explain_refuses_what_names_nothing(
    database: str, podsettle: Callable[..., Run], arguments: tuple[str, ...], why: str
) -> None:
    run = podsettle("explain", "--dsn", database, *arguments)
    assert run.code == 2
    assert why in run.err
