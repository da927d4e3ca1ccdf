"""When a held pod may go (I5): the answer that the pass acts on after its commit."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.sql.hosts import (
    Host,
    Passes,
    again,
    crashed,
    pending,
    pod,
    running,
    silent,
    success,
    terminating,
)

DELETED = {"deletion_at": "2026-09-01T10:00:00Z", "deletion_grace_seconds": 0}


@pytest.fixture
def passes(host: Host) -> Passes:
    return Passes(host.c)


def may_go(passes: Passes, *pods: dict[str, Any]) -> list[bool]:
    return [row["release"] for row in passes.run(*pods) if row["ord"] is not None]


def test_i5_a_pod_may_go_once_it_is_settled_or_found_duplicate_or_stale(
    host: Host, passes: Passes
) -> None:
    attempt = running(host, retries=1)
    failed = crashed(attempt)
    assert may_go(passes, failed) == [True]
    assert may_go(passes, failed) == [True]
    again(host, attempt)
    assert may_go(passes, {**failed, "created_at": "2026-01-01T00:00:00Z"}) == [True]


def test_i5_what_is_not_settled_is_kept(host: Host, passes: Passes) -> None:
    kept = [pod, silent, pending, terminating]
    assert may_go(passes, *(make(running(host)) for make in kept)) == [False] * len(kept)


def test_i5_a_suspicion_that_ripened_frees_its_pod(host: Host, passes: Passes) -> None:
    pods = [silent(running(host)), terminating(running(host))]
    assert may_go(passes, *pods) == [False, False]
    passes.every(60, 7, *pods)
    assert may_go(passes, *pods) == [True, True]


def test_i5_a_running_pod_whose_task_was_given_up_is_kept_for_its_late_record(
    host: Host, passes: Passes
) -> None:
    attempt = running(host)
    passes.every(61, 3)
    assert host.row(attempt.id)["state"] == "up_for_retry"
    lives = pod(attempt)
    assert may_go(passes, lives) == [False]
    rows = passes.run(success(attempt))
    assert [(row["disposition"], row["release"]) for row in rows] == [("overrode", True)]


def test_i5_a_pod_of_no_known_task_goes_after_its_time_and_only_if_it_is_deleted(
    host: Host, passes: Passes
) -> None:
    def stranger(**facts: Any) -> dict[str, Any]:
        return success(running(host)) | {
            "identity": {"task_instance_id": str(uuid.uuid4()), "try_number": 1, "attempt_id": "x"},
            "uid": str(uuid.uuid4()),
            **facts,
        }

    alive, deleted = stranger(), stranger(**DELETED)
    assert may_go(passes, alive, deleted) == [False, False]
    passes.later(599)
    assert may_go(passes, alive, deleted) == [False, False]
    passes.later(2)
    assert may_go(passes, alive, deleted) == [False, True]
    # One that was not seen by a complete pass any more is forgotten.
    passes.run()
    assert may_go(passes, deleted) == [False]


def test_the_age_of_a_settlement_counts_from_the_ledger(host: Host, passes: Passes) -> None:
    attempt = running(host)
    done = success(attempt)
    assert passes.run(done)[0]["settled_age"].total_seconds() < 60
    passes.later(3600)
    assert passes.run(done)[0]["settled_age"].total_seconds() >= 3600
    assert passes.run(pod(running(host)))[0]["settled_age"] is None
