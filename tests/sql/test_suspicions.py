"""What rests on silence (I6), what replaces it (I3), and that no length of an outage matters (I10)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.hosts import (
    Host,
    Passes,
    again,
    crashed,
    evicted,
    ledger,
    pending,
    pod,
    poke,
    report,
    running,
    silent,
    success,
    terminating,
)


@pytest.fixture
def passes(host: Host) -> Passes:
    return Passes(host.c)


# cause -> (pods of an attempt that is doubted for it, passes a minute apart until it is settled)
CAUSES: dict[str, Any] = {
    "absent": (lambda a: [], 2),
    "no_record": (lambda a: [silent(a)], 2),
    "terminating": (lambda a: [terminating(a)], 7),
    "pending": (lambda a: [pending(a)], 11),
}
KINDS = {
    "absent": ("infra", "PodDeleted"),
    "no_record": (None, "NoRecord"),
    "terminating": ("infra", "PodDeleted"),
    "pending": ("infra", "ImagePullBackOff"),
}
causes = pytest.mark.parametrize("cause", list(CAUSES))


def doubted(host: Host, passes: Passes, cause: str, retries: int = 1):
    """An attempt with its pods, seen by a first complete pass."""
    attempt = running(host, retries=retries)
    passes.later(5)
    pods = CAUSES[cause][0](attempt)
    rows = passes.run(*pods)
    assert all(row["disposition"] == "suspected" for row in rows)
    return attempt, pods


@causes
def test_i6_a_suspicion_ripens_over_complete_passes_and_is_settled_provisionally(
    host: Host, passes: Passes, cause: str
) -> None:
    attempt, pods = doubted(host, passes, cause)
    needed = CAUSES[cause][1]
    for _ in range(needed - 2):
        passes.every(60, 1, *pods)
        assert host.row(attempt.id)["state"] == "running"
    (open_suspicion,) = passes.suspicions()
    assert (open_suspicion["cause"], open_suspicion["passes"]) == (cause, needed - 1)
    rows = passes.every(61, 1, *pods)
    kind, reason = KINDS[cause]
    settled = rows[-1]
    assert (settled["disposition"], settled["verdict"]) == ("settled", "failed")
    assert (settled["failure_kind"], settled["reason"]) == (kind, reason)
    after = host.row(attempt.id)
    assert (after["state"], after["max_tries"]) == ("up_for_retry", 2 if kind == "infra" else 1)
    (entry,) = ledger(host.c, attempt.id)
    assert entry["provisional"]
    assert entry["evidence"]["complete_passes"] == needed
    assert passes.suspicions() == []


@causes
def test_i6_one_pass_is_never_enough_however_late(host: Host, passes: Passes, cause: str) -> None:
    attempt, pods = doubted(host, passes, cause)
    passes.later(100_000)
    passes.run(*pods)
    assert host.row(attempt.id)["state"] == "running"
    (open_suspicion,) = passes.suspicions()
    assert open_suspicion["passes"] == 2
    assert open_suspicion["age"].total_seconds() == 0


@causes
def test_i6_incomplete_passes_ripen_nothing(host: Host, passes: Passes, cause: str) -> None:
    attempt, pods = doubted(host, passes, cause)
    for _ in range(30):
        passes.later(60)
        passes.run(*pods, complete=False)
    assert host.row(attempt.id)["state"] == "running"
    assert [s["passes"] for s in passes.suspicions()] == [1]


@causes
def test_i6_a_suspicion_dies_when_its_cause_is_gone(host: Host, passes: Passes, cause: str) -> None:
    attempt, pods = doubted(host, passes, cause)
    passes.every(60, 1, pod(attempt))
    assert passes.suspicions() == []
    # It starts again from nothing.
    passes.every(60, 1, *pods)
    assert [s["passes"] for s in passes.suspicions()] == [1]
    assert host.row(attempt.id)["state"] == "running"


@causes
@pytest.mark.parametrize("by", ["record", "report", "person"])
def test_i3_a_late_success_replaces_a_provisional_settlement_and_takes_the_refund_back(
    host: Host, passes: Passes, cause: str, by: str
) -> None:
    if by == "report" and host.name == "jobs":
        by = "record"  # A host with no attempt_id has nothing to report with.
    attempt, pods = doubted(host, passes, cause)
    passes.every(61, 12, *pods)
    before = host.row(attempt.id)
    assert before["state"] == "up_for_retry"
    if by == "record":
        (row,) = passes.run(success(attempt))
    elif by == "report":
        row = report(host.c, attempt, "success")
    else:
        row = host.c.execute("call settle.succeed(%s, 1)", (attempt.id,)).fetchone()
    assert row
    assert row["disposition"] == "overrode"
    after = host.row(attempt.id)
    assert (after["state"], after["max_tries"], after["try_number"]) == ("success", 1, 1)
    refunds = [entry["refund"] for entry in ledger(host.c, attempt.id)]
    assert refunds == ([1, -1] if KINDS[cause][0] == "infra" else [0, 0])
    assert ledger(host.c, attempt.id)[-1]["refunds_used"] == 0


@causes
def test_i3_a_late_failure_does_not_replace_it(host: Host, passes: Passes, cause: str) -> None:
    attempt, pods = doubted(host, passes, cause)
    passes.every(61, 12, *pods)
    before = host.row(attempt.id)
    failed = crashed(attempt, record={"outcome": "failed", "exit_code": 1})
    (row,) = passes.run(failed)
    assert row["disposition"] == "duplicate"
    assert host.row(attempt.id) == before
    (row,) = passes.run(success(attempt))
    assert row["disposition"] == "overrode"


def test_i3_proof_of_the_same_kind_confirms_it_and_then_nothing_replaces_it(
    host: Host, passes: Passes
) -> None:
    attempt, _ = doubted(host, passes, "absent")
    passes.every(61, 2)
    before = host.row(attempt.id)
    (row,) = passes.run(evicted(attempt))
    assert (row["disposition"], row["state"]) == ("confirmed", "up_for_retry")
    assert host.row(attempt.id) == before
    (row,) = passes.run(success(attempt))
    assert row["disposition"] == "duplicate"
    dispositions = [entry["disposition"] for entry in ledger(host.c, attempt.id)]
    assert dispositions == ["settled", "confirmed"]


def test_i3_after_the_next_dispatch_a_late_success_is_stale(host: Host, passes: Passes) -> None:
    attempt, _ = doubted(host, passes, "absent")
    passes.every(61, 2)
    again(host, attempt)
    (row,) = passes.run(success(attempt, created_at="2026-01-01T00:00:00Z"))
    assert row["disposition"] == "stale"
    assert host.row(attempt.id)["state"] == "running"


def test_a_pending_task_that_never_started_is_refunded_within_the_cap(
    host: Host, passes: Passes
) -> None:
    attempt = host.dispatch(host.create(retries=0))
    states = []
    for _ in range(4):
        passes.later(5)
        stuck = pending(attempt)
        passes.run(stuck)
        passes.every(60, 10, stuck)
        after = host.row(attempt.id)
        states.append((after["state"], after["max_tries"]))
        if after["state"] == "failed":
            break
        passes.later(60)
        attempt = host.dispatch(attempt.id)
    assert states == [("up_for_retry", 1), ("up_for_retry", 2), ("up_for_retry", 3), ("failed", 3)]


def test_a_terminating_pod_gets_its_own_grace_first(host: Host, passes: Passes) -> None:
    attempt = running(host)
    pods = [terminating(attempt, grace=3600)]
    passes.every(60, 65, *pods)
    assert host.row(attempt.id)["state"] == "running"
    (row,) = passes.every(60, 1, *pods)[1:]
    assert row["disposition"] == "settled"


# --- absence -------------------------------------------------------------------------------------


def test_absence_is_judged_of_what_was_active_before_the_pass_opened(
    host: Host, passes: Passes
) -> None:
    opened = host.c.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    assert opened
    passes.later(1)
    running(host)
    passes.close(opened["id"], complete=True, seen=[])
    assert passes.suspicions() == []


def test_a_record_found_in_the_same_pass_is_settled_before_absence_is_judged(
    host: Host, passes: Passes
) -> None:
    attempt, _ = doubted(host, passes, "absent")
    passes.later(61)
    rows = passes.run(success(attempt))
    assert [row["disposition"] for row in rows] == ["settled"]
    assert host.row(attempt.id)["state"] == "success"
    assert not ledger(host.c, attempt.id)[0]["provisional"]


def test_absence_can_be_switched_off(host: Host, passes: Passes) -> None:
    host.c.execute("update settle.setting set value = 'false' where name = 'judge_absence'")
    attempt = running(host)
    passes.every(60, 5)
    assert (passes.suspicions(), host.row(attempt.id)["state"]) == ([], "running")


def test_passes_over_different_namespaces_never_judge_each_others_rows(
    connection, passes_standalone
) -> None:
    passes = passes_standalone
    ids = {}
    for namespace in ("a", "b"):
        row = connection.execute(
            "select settle.create_task('d', 'r', %s, p_namespace => %s) as id",
            (namespace, namespace),
        ).fetchone()
        ids[namespace] = row["id"]
        connection.execute("select settle.dispatch(%s)", (row["id"],))
    nowhere = connection.execute("select settle.create_task('d', 'r', 'nowhere') as id").fetchone()[
        "id"
    ]
    connection.execute("select settle.dispatch(%s)", (nowhere,))

    def states():
        rows = connection.execute("select id, state from settle.task_instance").fetchall()
        return {row["id"]: row["state"] for row in rows}

    for _ in range(5):
        passes.later(60)
        passes.run(namespace="a")
    assert states() == {ids["a"]: "up_for_retry", ids["b"]: "queued", nowhere: "queued"}
    assert passes.suspicions() == []
    # Passes of one namespace neither ripen nor end the suspicions of another.
    for namespace in ("b", "a", "b", "a"):
        passes.later(60)
        passes.run(namespace=namespace)
    assert states()[ids["b"]] == "up_for_retry"
    for _ in range(3):
        passes.later(60)
        passes.run()
    assert states()[nowhere] == "up_for_retry"


def test_a_queued_task_without_a_pod_is_told_from_a_running_one(host: Host, passes: Passes) -> None:
    queued, started = host.dispatch(host.create()), running(host)
    passes.every(61, 3)
    reasons = [ledger(host.c, a.id)[0]["reason"] for a in (queued, started)]
    assert reasons == ["PodAbsent", "PodDeleted"]


def test_two_passes_at_once_do_not_end_each_others_suspicions(host: Host, passes: Passes) -> None:
    attempt, _ = doubted(host, passes, "no_record")
    passes.later(30)
    first = host.c.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    passes.later(1)
    passes.run(silent(attempt))
    assert first
    passes.close(first["id"], complete=True, seen=[attempt.id])
    assert [s["cause"] for s in passes.suspicions()] == ["no_record"]


def test_two_doubtful_pods_of_one_attempt_ripen_all_the_same(host: Host, passes: Passes) -> None:
    attempt = running(host, retries=1)
    pods = [silent(attempt), terminating(attempt)]
    passes.run(*pods)
    passes.every(61, 1, *reversed(pods))
    assert host.row(attempt.id)["state"] == "up_for_retry"


def test_i6_a_pass_counts_only_what_it_saw_itself(host: Host, passes: Passes) -> None:
    """A long pass that began before the end must not count what a short one beside it saw."""
    attempt = running(host)
    passes.later(1)
    long = host.c.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    assert long
    passes.later(1)
    passes.run(silent(attempt))
    passes.later(70)
    passes.close(long["id"], complete=True, seen=[attempt.id])
    assert [s["passes"] for s in passes.suspicions()] == [1]
    assert host.row(attempt.id)["state"] == "running"


def test_an_absence_is_settled_as_what_it_is_at_the_end(host: Host, passes: Passes) -> None:
    attempt = host.dispatch(host.create())
    passes.later(1)
    passes.run()
    host.start(attempt)
    passes.every(61, 1)
    assert ledger(host.c, attempt.id)[0]["reason"] == "PodDeleted"


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outage", [30, 90, 240, 400, 700])
def test_i10_the_length_of_an_outage_does_not_change_the_result(
    host: Host, passes: Passes, outage: int
) -> None:
    """facts/leoflow.md 900: a short outage must not be worse than a long one."""
    how = {
        "running": lambda a: [pod(a)],
        "success": lambda a: [success(a)],
        "lost report": lambda a: [success(a) | {"phase": "Failed"}],
        "crash": lambda a: [crashed(a)],
        "evicted": lambda a: [evicted(a)],
        "poke": lambda a: [poke(a)],
        "exit 0": lambda a: [silent(a)],
        "stuck pending": lambda a: [pending(a)],
        "stuck terminating": lambda a: [terminating(a)],
        "gone": lambda a: [],
    }
    attempts = {name: running(host, retries=1) for name in how}
    alive = [pod(attempt) for attempt in attempts.values()]
    passes.every(60, 3, *alive)
    passes.later(outage)
    ended = [p for name, attempt in attempts.items() for p in how[name](attempt)]
    passes.run(*ended)
    states = {name: host.row(attempt.id)["state"] for name, attempt in attempts.items()}
    # The first pass after it settles what is proven, and concludes nothing from the silence.
    assert states == {
        "running": "running",
        "success": "success",
        "lost report": "success",
        "crash": "up_for_retry",
        "evicted": "up_for_retry",
        "poke": "up_for_reschedule",
        "exit 0": "running",
        "stuck pending": "running",
        "stuck terminating": "running",
        "gone": "running",
    }
    passes.every(60, 11, *ended)
    end = {}
    for name, attempt in attempts.items():
        after = host.row(attempt.id)
        end[name] = (after["state"], after["max_tries"], len(ledger(host.c, attempt.id)))
    assert end == {
        "running": ("running", 1, 0),
        "success": ("success", 1, 1),
        "lost report": ("success", 1, 1),
        "crash": ("up_for_retry", 1, 1),
        "evicted": ("up_for_retry", 2, 1),
        "poke": ("up_for_reschedule", 1, 1),
        "exit 0": ("up_for_retry", 1, 1),
        "stuck pending": ("up_for_retry", 2, 1),
        "stuck terminating": ("up_for_retry", 2, 1),
        "gone": ("up_for_retry", 2, 1),
    }


@pytest.mark.parametrize("skew", [-7200, -6, 0, 6, 7200])
def test_i10_a_skewed_api_server_does_not_make_a_pod_stale(
    host: Host, passes: Passes, skew: int
) -> None:
    """Where there is no attempt_id the pod's creation is compared, corrected for the skew."""
    attempt = running(host)
    opened = host.c.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    assert opened
    offset = host.c.execute(
        "select settle.note_clock(%s, date_trunc('second', settle.clock() + make_interval(secs => %s)), '0')"
        " as o",
        (opened["id"], skew),
    ).fetchone()
    assert offset
    assert abs(offset["o"].total_seconds() - skew) <= 0.6
    created = host.c.execute(
        "select date_trunc('second', %s + make_interval(secs => %s)) as at",
        (attempt.queued_at, skew),
    ).fetchone()
    older = host.c.execute(
        "select date_trunc('second', %s - interval '5 s' + make_interval(secs => %s)) as at",
        (attempt.queued_at, skew),
    ).fetchone()
    assert created
    assert older
    from psycopg.types.json import Jsonb

    dispositions = [
        host.c.execute(
            "select disposition from settle.settle_pods(%s, %s)",
            (opened["id"], Jsonb([success(attempt, created_at=at.isoformat())])),
        ).fetchone()
        for at in (older["at"], created["at"])
    ]
    # With an attempt_id the time does not matter at all.
    old = "stale" if host.name == "jobs" else "settled"
    new = "settled" if host.name == "jobs" else "duplicate"
    assert [d["disposition"] for d in dispositions if d] == [old, new]
