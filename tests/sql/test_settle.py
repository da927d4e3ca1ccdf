"""What a page of pods does to task instances, on the standalone host and on another one."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from reconciler.database import Connection
from reconciler.pods import PROFILES, PodFacts
from tests.sql.hosts import (
    FAR,
    Host,
    again,
    crashed,
    evicted,
    ledger,
    pod,
    poke,
    running,
    settle,
    silent,
    success,
)

CORPUS = Path(__file__).parent.parent / "corpus"
CASES = sorted(CORPUS.glob("reports/*.json")) + sorted(CORPUS.glob("cluster/*.json"))


def outcomes(connection: Connection) -> int:
    row = connection.execute("select count(*) as n from settle.outbox").fetchone()
    assert row
    return row["n"]


# --- one attempt ------------------------------------------------------------------------------


def test_i4_a_success_record_is_a_success_though_the_pod_failed(host: Host) -> None:
    attempt = running(host, retries=2)
    (row,) = settle(host.c, {**success(attempt), "phase": "Failed"})
    assert (row["disposition"], row["verdict"], row["from_record"]) == ("settled", "success", True)
    assert (row["previous_state"], row["state"]) == ("running", "success")
    after = host.row(attempt.id)
    assert (after["state"], after["try_number"], after["max_tries"]) == ("success", 1, 2)
    assert after["ended_at"] is not None


def test_i4_exit_0_and_phase_succeeded_are_not_success(host: Host) -> None:
    attempt = running(host)
    (row,) = settle(host.c, silent(attempt))
    assert (row["disposition"], row["verdict"], row["reason"]) == (
        "suspected",
        "failed",
        "NoRecord",
    )
    assert host.row(attempt.id)["state"] == "running"
    assert ledger(host.c, attempt.id) == []


def test_exit_0_is_success_where_the_setting_trusts_it_and_nothing_disrupted(host: Host) -> None:
    host.c.execute("update settle.setting set value = 'true' where name = 'trust_exit_zero'")
    trusted, deleted = running(host), running(host)
    rows = settle(host.c, silent(trusted), silent(deleted, deletion_at="2026-09-01T10:00:00Z"))
    assert [(r["verdict"], r["failure_kind"]) for r in rows] == [
        ("success", None),
        ("failed", "infra"),
    ]
    assert host.row(trusted.id)["state"] == "success"


def test_a_crash_costs_a_retry_and_the_last_one_fails(host: Host) -> None:
    attempt = running(host, retries=1)
    settle(host.c, crashed(attempt))
    after = host.row(attempt.id)
    assert (after["state"], after["max_tries"]) == ("up_for_retry", 1)
    assert (after["next_try_at"] - after["ended_at"]).total_seconds() == 300
    (row,) = settle(host.c, crashed(again(host, attempt)))
    assert (row["state"], row["failure_kind"], row["refund"]) == ("failed", "application", 0)
    assert host.row(attempt.id)["next_try_at"] is None


def test_a_reschedule_keeps_the_try_and_its_time(host: Host) -> None:
    attempt = running(host)
    (row,) = settle(host.c, poke(attempt))
    assert (row["verdict"], row["state"]) == ("reschedule", "up_for_reschedule")
    assert host.row(attempt.id)["next_try_at"].isoformat() == FAR.replace("Z", "+00:00")
    assert host.dispatch(attempt.id).try_number == 1


def test_what_is_not_final_is_left_alone(host: Host) -> None:
    attempt = running(host)
    (row,) = settle(host.c, pod(attempt))
    assert (row["disposition"], row["final"], row["verdict"]) == ("not_final", False, None)
    assert host.row(attempt.id)["state"] == "running"


# --- refunds ----------------------------------------------------------------------------------


def test_i7_infra_is_refunded_up_to_the_cap_and_then_charged(host: Host) -> None:
    attempt = running(host, retries=0)
    for n in (1, 2, 3):
        (row,) = settle(host.c, evicted(attempt))
        assert (row["state"], row["refund"], row["max_tries"]) == ("up_for_retry", 1, n)
        assert row["why"] == (
            f"infra failure (Evicted) refunded attempt {n}; max_tries now {n} (refund {n}/3), "
            "retry budget preserved"
        )
        attempt = again(host, attempt)
    (row,) = settle(host.c, evicted(attempt))
    assert (row["state"], row["refund"], row["max_tries"]) == ("failed", 0, 3)
    assert row["failure_kind"] == "infra"
    assert "refund 3/3 already used" in row["why"]
    assert [r["refund"] for r in ledger(host.c, attempt.id)] == [1, 1, 1, 0]


def test_i7_an_infra_retry_beyond_the_cap_spends_a_real_retry(host: Host) -> None:
    attempt = running(host, dag="capped", retries=1)
    host.c.execute("insert into settle.refund_policy values ('capped', null, 0)")
    (row,) = settle(host.c, evicted(attempt))
    assert (row["state"], row["refund"], row["max_tries"]) == ("up_for_retry", 0, 1)
    assert "refunds are off, max_infra_refunds is 0" in row["why"]


def test_i7_only_infra_is_refunded(host: Host) -> None:
    attempts = [running(host, retries=1) for _ in range(3)]
    rows = settle(
        host.c,
        crashed(attempts[0]),
        pod(
            attempts[1], ended={"exit_code": 137, "reason": "Error"}, pod_reason="DeadlineExceeded"
        ),
        crashed(attempts[2], 137),
    )
    assert [r["failure_kind"] for r in rows] == ["application", "timeout", None]
    assert [(r["refund"], r["max_tries"]) for r in rows] == [(0, 1)] * 3


def test_i7_the_count_starts_again_when_a_person_changed_max_tries(host: Host) -> None:
    host.c.execute("update settle.setting set value = '1' where name = 'max_infra_refunds'")
    attempt = running(host)
    settle(host.c, evicted(attempt))
    host.raise_max_tries(attempt.id, 1)
    (row,) = settle(host.c, evicted(again(host, attempt)))
    assert (row["refund"], row["max_tries"]) == (1, 3)
    assert ledger(host.c, attempt.id)[-1]["refunds_used"] == 1


def test_i7_a_clear_begins_a_new_life(host: Host) -> None:
    host.c.execute("update settle.setting set value = '1' where name = 'max_infra_refunds'")
    attempt = running(host, retries=1)
    settle(host.c, evicted(attempt))
    host.c.execute("call settle.clear(%s)", (attempt.id,))
    after = host.row(attempt.id)
    assert (after["state"], after["try_number"], after["max_tries"]) == ("none", 1, 2)
    (row,) = settle(host.c, evicted(again(host, attempt)))
    assert (row["refund"], row["max_tries"]) == (1, 3)


def test_i7_an_ordinary_failure_between_does_not_reset_the_count(host: Host) -> None:
    host.c.execute("update settle.setting set value = '2' where name = 'max_infra_refunds'")
    attempt = running(host, retries=5)
    settle(host.c, evicted(attempt))
    attempt = again(host, attempt)
    settle(host.c, crashed(attempt))
    attempt = again(host, attempt)
    settle(host.c, evicted(attempt))
    attempt = again(host, attempt)
    (row,) = settle(host.c, evicted(attempt))
    assert row["refund"] == 0
    assert [r["refunds_used"] for r in ledger(host.c, attempt.id)] == [1, 1, 2, 2]


def test_the_closest_refund_policy_wins(host: Host) -> None:
    host.c.execute("insert into settle.refund_policy values ('d1', null, 0), ('d1', 'special', 2)")
    caps = [
        settle(host.c, evicted(running(host, dag=dag, task=task)))[0]["why"]
        for dag, task in [("d1", "plain"), ("d1", "special"), ("d2", "special")]
    ]
    assert "refunds are off" in caps[0]
    assert "(refund 1/2)" in caps[1]
    assert "(refund 1/3)" in caps[2]


def test_an_infra_retry_waits_a_short_jittered_deterministic_time(host: Host) -> None:
    attempts = [running(host) for _ in range(20)]
    settle(host.c, *map(evicted, attempts))
    waits = []
    for attempt in attempts:
        after = host.row(attempt.id)
        waits.append((after["next_try_at"] - after["ended_at"]).total_seconds())
    assert all(10 <= wait <= 40 for wait in waits)
    assert len(set(waits)) > 15
    same = host.c.execute(
        "select settle.infra_backoff(%(k)s, 1) = settle.infra_backoff(%(k)s, 1) as same",
        {"k": uuid.uuid4()},
    ).fetchone()
    assert same
    assert same["same"]


# --- which attempt ----------------------------------------------------------------------------


def test_i2_a_lingering_pod_of_an_earlier_try_is_stale(host: Host) -> None:
    first = running(host, retries=1)
    settle(host.c, crashed(first))
    again(host, first)
    (row,) = settle(host.c, success(first))
    assert (row["disposition"], row["settlement_id"]) == ("stale", None)
    assert host.row(first.id)["state"] == "running"


@pytest.mark.parametrize("started", [True, False], ids=["running", "queued"])
def test_i2_a_lingering_poke_with_the_same_try_number_is_stale(host: Host, started: bool) -> None:
    """facts/leoflow.md 1130: try_number alone is not an attempt."""
    first = running(host)
    settle(host.c, poke(first))
    second = host.dispatch(first.id)
    if started:
        host.start(second)
    assert second.try_number == first.try_number
    # Where the host has no attempt_id the time of the pod's creation has to tell.
    old = {"created_at": "2026-01-01T00:00:00Z"}
    rows = settle(host.c, success(first, **old), crashed(first, **old), poke(first) | old)
    assert {row["disposition"] for row in rows} == {"stale"}
    assert host.row(first.id)["state"] == ("running" if started else "queued")
    (row,) = settle(host.c, success(second))
    assert row["disposition"] == "settled"


def test_i3_an_attempt_is_settled_once(host: Host) -> None:
    attempt = running(host, retries=3)
    settle(host.c, crashed(attempt))
    before = host.row(attempt.id)
    rows = settle(host.c, success(attempt), evicted(attempt))
    assert [row["disposition"] for row in rows] == ["duplicate", "duplicate"]
    assert host.row(attempt.id) == before
    assert len(ledger(host.c, attempt.id)) == 1


def test_of_two_pods_of_one_attempt_in_a_page_the_success_counts(host: Host) -> None:
    attempt = running(host)
    rows = settle(host.c, evicted(attempt), success(attempt), silent(attempt), pod(attempt))
    assert [row["disposition"] for row in rows] == [
        "duplicate",
        "settled",
        "duplicate",
        "duplicate",
    ]
    assert host.row(attempt.id)["state"] == "success"
    assert len(ledger(host.c, attempt.id)) == 1


def test_a_pod_of_nobody_is_unmatched_and_the_others_are_settled(host: Host) -> None:
    attempt = running(host)
    stranger = success(attempt) | {
        "identity": {"task_instance_id": str(uuid.uuid4()), "try_number": 1, "attempt_id": "x"}
    }
    nameless = success(attempt) | {
        "identity": {"problem": "label podsettle.io/try-number is missing"}
    }
    rows = settle(host.c, stranger, nameless, success(attempt))
    assert [row["disposition"] for row in rows] == ["unmatched", "unmatched", "settled"]
    assert "no task instance" in rows[0]["why"]
    assert rows[1]["why"] == "label podsettle.io/try-number is missing"


def test_a_task_instance_is_found_by_its_four_names(host: Host) -> None:
    """Profile airflow has no id of its own."""
    attempt = running(host, dag="by-name", task="t")
    named = success(attempt)
    named["identity"] = {
        "dag_id": "by-name",
        "run_id": "r",
        "task_id": "t",
        "map_index": -1,
        "try_number": 1,
        "attempt_id": attempt.attempt_id,
    }
    other = {**named, "identity": {**named["identity"], "map_index": 3}}
    rows = settle(host.c, named, other)
    assert [row["disposition"] for row in rows] == ["settled", "unmatched"]
    assert str(rows[0]["task_instance_id"]) == attempt.id


# --- what is written --------------------------------------------------------------------------


def test_i11_a_transition_writes_one_ledger_row_and_one_outbox_row_a_listener(host: Host) -> None:
    host.c.execute("select settle.register_listener('log'), settle.register_listener('hook')")
    host.c.execute("select settle.register_listener('off'), settle.unregister_listener('off')")
    attempts = [running(host, retries=1) for _ in range(4)]
    settle(
        host.c, success(attempts[0]), evicted(attempts[1]), crashed(attempts[2]), poke(attempts[3])
    )
    settle(host.c, *map(success, attempts))
    for attempt in attempts:
        assert len(ledger(host.c, attempt.id)) == 1
    assert outcomes(host.c) == 8
    told = host.c.execute(
        "select listener, count(distinct settlement_id) as n from settle.outbox group by 1 order by 1"
    ).fetchall()
    assert told == [{"listener": "hook", "n": 4}, {"listener": "log", "n": 4}]


def test_i11_a_transition_that_fails_leaves_nothing(host: Host) -> None:
    attempt = running(host)
    host.c.execute("select settle.register_listener('log')")
    with pytest.raises(psycopg.Error, match="boom"), host.c.transaction():
        settle(host.c, evicted(attempt))
        host.c.execute("do $$ begin raise exception 'boom'; end $$")
    assert host.row(attempt.id)["state"] == "running"
    assert ledger(host.c, attempt.id) == []
    assert outcomes(host.c) == 0


def test_the_ledger_keeps_the_evidence_it_rests_on(host: Host) -> None:
    attempt = running(host)
    facts = evicted(attempt)
    settle(host.c, facts)
    (row,) = ledger(host.c, attempt.id)
    assert (row["pod"], row["namespace"], row["node"]) == (facts["pod"], "tasks", "node-1")
    assert (row["rule"], row["source"], row["from_record"]) == ("evicted-node", "pass", False)
    assert row["evidence"]["pod_message"] == "The node was low on resource: memory. "
    assert row["exit_code"] == 137


@pytest.mark.parametrize(
    "statement",
    [
        "update settle.settlement set why = ''",
        "delete from settle.settlement",
        "truncate settle.settlement cascade",
    ],
)
def test_the_ledger_is_append_only_even_for_a_superuser(host: Host, statement: str) -> None:
    settle(host.c, evicted(running(host)))
    with pytest.raises(psycopg.Error) as refused:
        host.c.execute(statement)
    assert refused.value.sqlstate == "ST005"


def test_the_other_host_gets_its_own_row_on_a_retry(host: Host) -> None:
    if host.name == "standalone":
        installed = host.c.execute("select to_regclass('app.job_history') as t").fetchone()
        assert installed == {"t": None}
        return
    retried, done = running(host, retries=1), running(host)
    settle(host.c, evicted(retried), success(done))
    rows = host.c.execute("select job_id::text, attempt_no, kind from app.job_history").fetchall()
    assert rows == [{"job_id": retried.id, "attempt_no": 1, "kind": "infra"}]
    status = host.c.execute("select status::text from app.jobs order by status").fetchall()
    assert [row["status"] for row in status] == ["again", "done"]


# --- the corpus -------------------------------------------------------------------------------


def test_every_corpus_pod_settles_as_its_verdict_says(host: Host) -> None:
    assert len(CASES) >= 80
    attempts, pods, expected = [], [], []
    for case in CASES:
        expected.append(json.loads((CORPUS / "expected" / case.relative_to(CORPUS)).read_text()))
        attempt = running(host, retries=1)
        facts = PodFacts.from_manifest(
            json.loads(case.read_text()), profile=PROFILES["podsettle"]
        ).as_json()
        identity = pod(attempt)
        attempts.append(attempt)
        pods.append(
            facts | {"identity": identity["identity"], "created_at": identity["created_at"]}
        )
    rows = settle(host.c, *pods)
    wrong = []
    for case, attempt, want, row in zip(CASES, attempts, expected, rows, strict=True):
        got = {
            key: row[key] for key in ("final", "verdict", "from_record", "failure_kind", "reason")
        }
        if got != {key: want[key] for key in got}:
            wrong.append((case.name, got, want))
        after = host.row(attempt.id)
        if not want["final"]:
            state, dispositions = "running", {"not_final", "suspected"}
        elif want["verdict"] == "failed" and row["disposition"] == "suspected":
            # Exit 0 with no record and no sign of disruption rests on silence.
            assert want["failure_kind"] is None
            assert case.stem in {
                "046-oomkilled-exit0-succeeded",
                "053-node-hard-reboot-docker-exit0",
                "ok-norec",
                "preemptor",
            }
            state, dispositions = "running", {"suspected"}
        else:
            state = {
                "success": "success",
                "reschedule": "up_for_reschedule",
                "failed": "up_for_retry",
            }[want["verdict"]]
            dispositions = {"settled"}
        if row["disposition"] not in dispositions or after["state"] != state:
            wrong.append((case.name, row["disposition"], after["state"]))
        refunded = int(want["final"] and want["failure_kind"] == "infra")
        if after["max_tries"] != 1 + refunded:
            wrong.append((case.name, "max_tries", after["max_tries"]))
    assert wrong == []


# --- the contract of the calls ------------------------------------------------------------------


def test_an_empty_page_is_no_error(host: Host) -> None:
    assert settle(host.c) == []


@pytest.mark.parametrize(
    ("pods", "state"),
    [
        ('{"pod": "x"}', "ST002"),
        ("null", "ST002"),
        ("[1]", "ST006"),
        ('[{"pod": "x", "container": {"exit_code": "many"}}]', "ST006"),
        ('[{"pod": "x", "identity": {"task_instance_id": "no", "try_number": 1}}]', "ST006"),
        ('[{"pod": "x", "deletion_at": "yesterday-ish"}]', "ST006"),
    ],
)
def test_facts_of_a_wrong_shape_are_refused_with_a_code(
    connection: Connection, pods: str, state: str
) -> None:
    opened = connection.execute(
        "select settle.open_pass(null, 'podsettle', 'files') as id"
    ).fetchone()
    assert opened
    with pytest.raises(psycopg.Error) as refused:
        connection.execute("select * from settle.settle_pods(%s, %s::jsonb)", (opened["id"], pods))
    assert refused.value.sqlstate == state


def test_a_pass_is_opened_and_closed_once(connection: Connection) -> None:
    opened = connection.execute(
        "select settle.open_pass('ns', 'podsettle', 'api') as id"
    ).fetchone()
    assert opened
    connection.execute("select settle.close_pass(%s, true, '{}')", (opened["id"],))
    row = connection.execute("select * from settle.passes").fetchone()
    assert row
    assert (row["id"], row["namespace"], row["complete"]) == (opened["id"], "ns", True)
    for statement in (
        "select settle.close_pass(%s, true, '{}')",
        "select * from settle.settle_pods(%s, '[]')",
    ):
        with pytest.raises(psycopg.Error) as refused:
            connection.execute(statement, (opened["id"],))
        assert refused.value.sqlstate == "ST004"
    with pytest.raises(psycopg.Error) as refused:
        connection.execute("select settle.open_pass(null, null, 'telepathy')")
    assert refused.value.sqlstate == "ST002"


def test_a_pass_counts_what_it_did(host: Host) -> None:
    attempts = [running(host) for _ in range(3)]
    settle(host.c, success(attempts[0]), evicted(attempts[1]), silent(attempts[2]), {"pod": "who"})
    row = host.c.execute("select counts from settle.passes").fetchone()
    assert row == {"counts": {"settled": 2, "refunded": 1, "suspected": 1, "unmatched": 1}}


def test_settling_needs_no_session_state(host: Host) -> None:
    """Jsonb is sent as one parameter: a page is one round trip."""
    attempt = running(host)
    opened = host.c.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    assert opened
    rows = host.c.execute(
        "select disposition from settle.settle_pods(%s, %s)",
        (opened["id"], Jsonb([success(attempt)])),
    ).fetchall()
    assert rows == [{"disposition": "settled"}]
