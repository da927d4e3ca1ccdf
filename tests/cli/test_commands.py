"""The command as a user meets it: real processes, a real database."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler import database as db
from reconciler import render
from tests.cli.conftest import Run
from tests.sql.hosts import Attempt, Standalone, running

CORPUS = Path(__file__).parent.parent / "corpus"
Podsettle = Callable[..., Run]


@pytest.fixture
def host(connection: db.Connection) -> Standalone:
    return Standalone(connection)


def manifest(case: str, attempt: Attempt | None = None, **metadata: Any) -> dict[str, Any]:
    """A corpus pod that claims to be of an attempt."""
    pod = json.loads((CORPUS / f"{case}.json").read_text())
    if attempt is not None:
        pod["metadata"]["labels"] = {"podsettle.io/try-number": str(attempt.try_number)}
        pod["metadata"]["annotations"] = {
            "podsettle.io/task-instance-id": attempt.id,
            "podsettle.io/attempt-id": attempt.attempt_id,
        }
    pod["metadata"] |= metadata
    return pod


def as_list(*pods: Any) -> str:
    return json.dumps({"apiVersion": "v1", "items": list(pods), "kind": "List", "metadata": {}})


# --- explain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["reports", "cluster"])
def test_i4_explain_gives_every_corpus_pod_its_verdict(
    database: str, podsettle: Podsettle, folder: str
) -> None:
    run = podsettle(
        "explain", "--dsn", database, "--pods", str(CORPUS / folder), "--output", "json"
    )
    assert run.code == 0, run.err
    rows = {row["pod"]: row for row in run.rows}
    wrong = []
    cases = sorted((CORPUS / folder).glob("*.json"))
    assert len(cases) == len(rows) == len(run.rows) > 20
    for case in cases:
        want = json.loads((CORPUS / "expected" / folder / case.name).read_text())
        row = rows[json.loads(case.read_text())["metadata"]["name"]]
        got = {
            key: row[key] for key in ("final", "verdict", "from_record", "failure_kind", "reason")
        }
        if got != {key: want[key] for key in got}:
            wrong.append((case.name, got))
        if overdue := want.get("when_deletion_overdue"):
            got = (row["overdue_kind"], row["overdue_reason"])
            if got != (overdue["failure_kind"], overdue["reason"]):
                wrong.append((case.name, got))
        if row["verdict"] == "success":
            assert row["from_record"]
    assert wrong == []


def test_explain_tells_a_person_the_rule_and_the_facts(database: str, podsettle: Podsettle) -> None:
    run = podsettle(
        "explain", "--dsn", database, "--pods", str(CORPUS / "cluster" / "evict-running.json")
    )
    assert run.code == 0
    assert "failed infra EvictionByEvictionAPI" in run.out
    assert "rule disruption" in run.out
    assert "DisruptionTarget=True EvictionByEvictionAPI" in run.out


def test_explain_needs_no_task_and_writes_nothing(database: str, podsettle: Podsettle) -> None:
    podsettle("explain", "--dsn", database, "--pods", str(CORPUS / "cluster"))
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*) from settle.pass").fetchone() == (0,)


# --- reconcile ----------------------------------------------------------------------------------


def test_a_pass_over_standard_input_settles(
    host: Standalone, database: str, podsettle: Podsettle
) -> None:
    won, lost = running(host, retries=1), running(host, retries=1)
    pods = as_list(
        manifest("cluster/hard-success", won),
        manifest("cluster/evict-running", lost),
        manifest("cluster/okrec"),
    )
    run = podsettle(
        "reconcile", "--pods", "-", "--output", "json", stdin=pods, PODSETTLE_DSN=database
    )
    assert run.code == 0, run.err
    assert [list(row) for row in run.rows] == [list(render.FIELDS)] * 3
    assert [row["disposition"] for row in run.rows] == ["settled", "settled", "unmatched"]
    first = run.rows[0]
    assert (first["task_instance_id"], first["try_number"], first["from_record"]) == (
        won.id,
        1,
        True,
    )
    assert (first["previous_state"], first["state"]) == ("running", "success")
    assert host.row(won.id)["state"] == "success"
    assert host.row(lost.id)["max_tries"] == 2
    (finished,) = [e for e in run.events if e["event"] == "pass finished"]
    assert (finished["pods"], finished["settled"], finished["refunded"], finished["unmatched"]) == (
        3,
        2,
        1,
        1,
    )


def test_i9_a_second_pass_changes_nothing(
    host: Standalone, database: str, podsettle: Podsettle
) -> None:
    attempt = running(host)
    pods = as_list(manifest("cluster/okrec", attempt))
    runs = [
        podsettle("reconcile", "--dsn", database, "--pods", "-", "-o", "json", stdin=pods)
        for _ in range(2)
    ]
    assert [run.rows[0]["disposition"] for run in runs] == ["settled", "duplicate"]


def test_a_dry_run_says_the_same_and_leaves_nothing(
    host: Standalone, database: str, podsettle: Podsettle
) -> None:
    attempt = running(host)
    pods = as_list(manifest("cluster/okrec", attempt))
    command = ("reconcile", "--dsn", database, "--pods", "-", "-o", "json")
    dry = podsettle(*command, "--dry-run", stdin=pods)
    assert dry.code == 0
    assert host.row(attempt.id)["state"] == "running"
    assert host.c.execute("select count(*) as n from settle.pass").fetchone() == {"n": 0}
    wet = podsettle(*command, stdin=pods)
    assert dry.rows == wet.rows


def test_the_table_shows_what_moved(host: Standalone, database: str, podsettle: Podsettle) -> None:
    attempt = running(host)
    run = podsettle(
        "reconcile",
        "--dsn",
        database,
        "--pods",
        "-",
        stdin=as_list(manifest("cluster/evict-running", attempt)),
    )
    assert "running -> up_for_retry" in run.out
    assert "refunded attempt 1" in run.out
    assert "1 pods: 1 refunded, 1 settled" in run.out


def test_another_clusters_output_is_no_error(database: str, podsettle: Podsettle) -> None:
    pods = as_list(
        *(json.loads(case.read_text()) for case in sorted((CORPUS / "reports").glob("*.json")))
    )
    run = podsettle("reconcile", "--dsn", database, "--pods", "-", "--dry-run", stdin=pods)
    assert run.code == 0, run.err
    assert "unmatched" in run.out


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("this is no JSON", "is not JSON"),
        ('{"kind": "Pod", ', "is cut off in the middle"),
        ("", "is empty"),
        (json.dumps({"kind": "Service", "metadata": {"name": "s"}}), "kind 'Service'"),
        ("apiVersion: v1\nkind: Pod\n", "is YAML"),
        ("[]", "is a JSON array"),
    ],
)
def test_a_bad_file_is_one_line_and_the_others_are_settled(
    host: Standalone, database: str, podsettle: Podsettle, tmp_path: Path, bad: str, told: str
) -> None:
    attempt = running(host)
    folder = tmp_path / "pods"
    folder.mkdir()
    (folder / "a-bad.json").write_text(bad)
    (folder / "b-good.json").write_text(json.dumps(manifest("cluster/okrec", attempt)))
    run = podsettle("reconcile", "--dsn", database, "--pods", str(folder), "-o", "json")
    assert run.code == 3
    assert host.row(attempt.id)["state"] == "success"
    (problem,) = [e["problem"] for e in run.events if e["event"] == "not read"]
    assert "a-bad.json" in problem
    assert told in problem
    assert "the list is incomplete" in run.err.splitlines()[-1]


def test_pods_that_are_odd_do_not_stop_the_others(
    host: Standalone, database: str, podsettle: Podsettle
) -> None:
    attempt = running(host)
    huge = manifest("cluster/fail-norec", running(host))
    huge["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "x" * 10_000_000
    no_status = manifest("cluster/okrec", running(host))
    del no_status["status"]
    bad_uuid = manifest("cluster/okrec", Attempt("not-a-uuid", 1, "a"))
    bad_try = manifest("cluster/okrec", Attempt(str(uuid.uuid4()), 1, "a"))
    bad_try["metadata"]["labels"]["podsettle.io/try-number"] = "first"
    run = podsettle(
        "reconcile",
        "--dsn",
        database,
        "--pods",
        "-",
        "-o",
        "json",
        stdin=as_list(huge, no_status, bad_uuid, bad_try, manifest("cluster/okrec", attempt)),
    )
    assert run.code == 0, run.err
    assert [row["disposition"] for row in run.rows] == [
        "settled",
        "not_final",
        "unmatched",
        "unmatched",
        "settled",
    ]
    assert "'not-a-uuid', not a UUID" in run.rows[2]["why"]
    assert "'first'" in run.rows[3]["why"]
    assert host.row(attempt.id)["state"] == "success"


def test_i8_what_a_task_wrote_cannot_forge_a_line_or_steer_a_terminal(
    host: Standalone, database: str, podsettle: Podsettle
) -> None:
    attempt = running(host)
    evil = manifest("cluster/okrec", attempt, name='x\x1b[2J\n{"forged": true}\u202e[bold]')
    record = {
        "v": 1,
        "outcome": "failed",
        "exit_code": 1,
        "reason": "\x1b[31mred\r\n[link=x]\u0000\ud800",
    }
    state = evil["status"]["containerStatuses"][0]["state"]["terminated"]
    state["message"] = json.dumps(record)
    pods = as_list(evil)
    as_json = podsettle(
        "reconcile", "--dsn", database, "--pods", "-", "-o", "json", "--dry-run", stdin=pods
    )
    as_table = podsettle("reconcile", "--dsn", database, "--pods", "-", stdin=pods)
    explained = podsettle("explain", "--dsn", database, "--pods", "-", stdin=pods)
    assert (as_json.code, as_table.code, explained.code) == (0, 0, 0)
    assert len(as_json.out.splitlines()) == 1
    for run in (as_json, as_table, explained):
        assert "\x1b" not in run.out + run.err
        assert "\u202e" not in run.out + run.err
    assert host.row(attempt.id)["state"] == "failed"


# --- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["reconcile", "--pods", "-"], "--dsn (or PODSETTLE_DSN) is missing"),
        (["explain", "--dsn", "{dsn}"], "name one POD"),
        (["explain", "--dsn", "{dsn}", "--pods", "/no/such/pods"], "there is no file or folder"),
        (["reconcile", "--dsn", "{dsn}", "--complete"], "--complete is for --pods"),
        (["reconcile", "--dsn", "{dsn}", "--pods", "-", "-l", "a=b"], "--selector is for the API"),
        (["reconcile", "--dsn", "{dsn}", "-n", "x", "-A"], "exclude each other"),
        (["reconcile", "--dsn", "{dsn}", "--profile", "slurm"], "slurm"),
        (["install", "--dsn", "{dsn}", "--host", "nowhere"], "nowhere is unknown"),
        (["settle-everything"], "No such command"),
    ],
)
def test_exit_2_for_a_wrong_command_line(
    database: str, podsettle: Podsettle, arguments: list[str], told: str
) -> None:
    run = podsettle(*(a.format(dsn=database) for a in arguments))
    assert (run.code, told in run.err) == (2, True), run.err


def test_exit_4_when_the_database_cannot_be_used(
    database: str, new_database: Callable[..., str], podsettle: Podsettle
) -> None:
    def run(dsn: str) -> Run:
        return podsettle("reconcile", "--dsn", dsn, "--pods", "-", stdin=as_list())

    cases = {
        "postgresql://127.0.0.1:1/none": "no connection to Postgres at 127.0.0.1",
        "this is no dsn": "is no connection string",
        new_database(None): "run podsettle install",
    }
    for dsn, told in cases.items():
        done = run(dsn)
        assert (done.code, told in done.err) == (4, True), done.err
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "create or replace function settle.contract_version() returns integer language sql as 'select 2'"
        )
    done = run(database)
    assert done.code == 4
    assert "contract 2, this command contract 1" in done.err


def test_exit_4_without_the_right_role(database: str, podsettle: Podsettle) -> None:
    name = f"nobody_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"create role {name} login password 'x'")
    try:
        dsn = psycopg.conninfo.make_conninfo(database, user=name, password="x")
        run = podsettle("reconcile", "--dsn", dsn, "--pods", "-", stdin=as_list())
        assert run.code == 4
        assert "GRANT settle_reconciler TO" in run.err
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f"grant settle_reconciler to {name}")
        run = podsettle("reconcile", "--dsn", dsn, "--pods", "-", stdin=as_list())
        assert run.code == 0, run.err
    finally:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f"drop owned by {name}")
            connection.execute(f"drop role {name}")


def test_exit_5_without_a_cluster(database: str, podsettle: Podsettle, tmp_path: Path) -> None:
    run = podsettle("reconcile", "--dsn", database)
    assert (run.code, "KUBECONFIG" in run.err) == (5, True), run.err


# --- install, demo -------------------------------------------------------------------------------


def test_install_tells_what_it_did(new_database: Callable[..., str], podsettle: Podsettle) -> None:
    dsn = new_database(None)
    runs = [podsettle("install", "--dsn", dsn) for _ in range(2)]
    assert [run.code for run in runs] == [0, 0]
    assert "applied migrations/0001_schema.sql" in runs[0].out
    assert runs[1].out == "up to date, nothing was changed\n"
    printed = podsettle("install", "--print")
    assert printed.code == 0
    assert "create schema settle" in printed.out


@pytest.mark.parametrize("command", [[], ["install"], ["reconcile"], ["explain"], ["demo"]])
def test_help_says_which_variable_sets_an_option(podsettle: Podsettle, command: list[str]) -> None:
    run = podsettle(*command, "--help")
    assert run.code == 0
    if command in (["reconcile"], ["explain"], ["install"]):
        assert "PODSETTLE_DSN" in run.out
