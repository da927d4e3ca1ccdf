"""SIGKILL of the shim at every line that it executes: no record, or a true one, and in order."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reconciler.record import Record, decode
from tests.shim.harness import ControlPlane, Ended, Shim, child

CRASH = Path(__file__).with_name("crash.py")

SCENARIOS = {
    "success": (child("push", "x=1", "y.json=2"), ()),
    "failed": (("/bin/sh", "-c", "exit 3"), ()),
    "reschedule": (child("reschedule", "2026-08-13T12:34:56Z"), ()),
    "timeout": (("/bin/sleep", "600"), ("--timeout", "0.05")),
    "not-started": (("no-such-program",), ()),
    "leftovers": (child("leave", "group", "0"), ()),
    "usage": (("/bin/true",), ("--kill-grace", "soon")),
}
TRUE_RECORDS: dict[str, dict[str, Any]] = {
    "success": {"outcome": "success"},
    "failed": {"outcome": "failed", "exit_code": 3},
    "reschedule": {"outcome": "reschedule"},
    "timeout": {"outcome": "failed", "failure_kind": "timeout", "exit_code": 143},
    "not-started": {"outcome": "failed", "exit_code": 127},
    "leftovers": {"outcome": "success"},
    "usage": {"outcome": "failed", "exit_code": 64},
}
PUSHES = {"success": ["/rpc/push", "/rpc/push"]}


def run_killed_at(line: str, scenario: str, folder: Path) -> tuple[Ended, list[str]]:
    folder.mkdir()
    shim = Shim([sys.executable, "-I", "-S", str(CRASH), line], folder)
    task, options = SCENARIOS[scenario]
    with ControlPlane() as control:
        running = shim.start(
            *task,
            options=control.options("--work-dir", str(folder), *options),
            start_new_session=True,
        )
        ended = running.end_when_killed()
    return ended, [path for path, _ in control.calls()]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_line_leaves_no_record_or_a_true_one(scenario: str, tmp_path: Path) -> None:
    whole, calls = run_killed_at("-", scenario, tmp_path / "whole")
    lines = [word.removeprefix("line ") for word in whole.err.splitlines() if "line " in word]
    reported = [] if scenario == "usage" else ["/rpc/report"]
    assert calls == PUSHES.get(scenario, []) + reported
    if scenario != "usage":
        # All of that is before the task, and the same in each scenario.
        lines = [line for line in lines if not line.startswith("options.py")]
    assert len(lines) > 30
    if not os.environ.get("CI"):
        # Each line in CI; a dozen of them, in their order, in the everyday run.
        lines = [*lines[:: len(lines) // 12], lines[-1]]

    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(
                lambda numbered: run_killed_at(numbered[1], scenario, tmp_path / f"{numbered[0]}"),
                enumerate(lines),
            )
        )
    with_record = killed = 0
    for line, (ended, calls) in zip(lines, results, strict=True):
        # A few lines are only reached when a process vanishes while it is looked at.
        killed += ended.code == 128 + signal.SIGKILL
        read = decode(ended.message, attempt_id="attempt-1")
        pushes = [path for path in calls if path == "/rpc/push"]
        if isinstance(read, Record):
            with_record += 1
            true = TRUE_RECORDS[scenario]
            assert {name: getattr(read, name) for name in true} == true, line
            # A record is only there once every push was accepted.
            assert pushes == PUSHES.get(scenario, []), line
        else:
            assert ended.message == "", line
            # And a report only goes out once the record is there.
            assert "/rpc/report" not in calls, line
    assert 0 < with_record < len(lines)
    assert killed > 0.9 * len(lines)


@pytest.mark.parametrize(
    ("answers", "requests", "record"),
    [
        (["hang"], 1, None),
        ([200, "hang"], 2, None),
        ([200, 200, "hang"], 3, {"v": 1, "outcome": "success", "attempt_id": "attempt-1"}),
    ],
    ids=["first-push", "second-push", "report"],
)
def test_a_kill_while_an_answer_is_awaited(shim: Shim, answers, requests, record) -> None:
    # The shim as it is shipped, killed from outside.
    with ControlPlane(*answers) as control:
        running = shim.start(*child("push", "x=1", "y=2"), options=control.options())
        for _ in range(requests):
            control.wait_for_request()
        running.signal(signal.SIGKILL)
        ended = running.end()
    assert (ended.code, ended.record) == (128 + signal.SIGKILL, record)


def test_a_kill_while_the_task_runs_leaves_no_record(shim: Shim) -> None:
    running = shim.start(*child("default"), start_new_session=True)
    assert running.line() == "ready"
    running.signal(signal.SIGKILL)
    assert running.end_when_killed().message == ""
