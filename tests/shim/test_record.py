"""The record that the shim writes is the record that the reconciler reads."""

from __future__ import annotations

import datetime as dt
import json

import pytest

from reconciler.record import Record, decode
from tests.shim.harness import Shim, child
from tests.shim.record_table import ATTEMPT, CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_end_gives_its_code_and_its_record(shim, case: Case) -> None:
    check(shim, case)


def check(shim: Shim, case: Case) -> None:
    """Run a case, compare its message, and read it back as the reconciler does."""
    ended = shim.run(*case.command, options=case.options)
    assert (ended.code, ended.record) == (case.code, case.record)
    assert ended.message.isascii()
    assert len(ended.message) < 900

    read = decode(ended.message, attempt_id=case.record.get("attempt_id"))
    assert isinstance(read, Record)
    at = case.record.get("reschedule_at")
    assert (read.outcome, read.exit_code, read.failure_kind, read.reason, read.reschedule_at) == (
        case.record["outcome"],
        case.record.get("exit_code"),
        case.record.get("failure_kind"),
        case.record.get("reason"),
        None if at is None else dt.datetime.fromisoformat(at),
    )


def test_a_record_of_another_attempt_is_none_for_the_decoder(shim) -> None:
    ended = shim.run("/bin/true", options=("--attempt-id", ATTEMPT))
    assert isinstance(decode(ended.message, attempt_id=ATTEMPT), Record)
    assert not isinstance(decode(ended.message, attempt_id="another"), Record)


def test_a_reason_that_needs_escapes_still_fits(shim) -> None:
    # 240 characters of six bytes each, or twelve, would be far over the 900 bytes.
    for char in ("\u00fc", "\U0001f40d"):
        ended = shim.run(
            "/no/" + char * 40 + ("/" + char * 40) * 5, options=("--attempt-id", "a" * 200)
        )
        assert len(ended.message) < 900
        assert isinstance(decode(ended.message, attempt_id="a" * 200), Record)
        assert ended.record is not None
        assert ended.record["reason"].startswith("CommandNotFound: /no/" + char * 20)


def test_the_record_replaces_what_the_task_wrote(shim) -> None:
    long = json.dumps({"v": 1, "outcome": "success", "reason": "x" * 2000})
    ended = shim.run("/bin/sh", "-c", f"printf '%s' '{long}' > {shim.record_path}; exit 3")
    assert ended.record == {"v": 1, "outcome": "failed", "exit_code": 3}


def test_a_record_of_an_earlier_run_is_gone_when_the_task_starts(shim) -> None:
    shim.record_path.write_text('{"v":1,"outcome":"success"}')
    ended = shim.run("/bin/cat", str(shim.record_path))
    assert ended.out == ""


@pytest.mark.parametrize("what", ["fifo", "folder", "link"])
def test_a_reschedule_file_that_is_no_plain_file_is_a_failure(shim, what: str) -> None:
    make = {"fifo": "mkfifo", "folder": "mkdir", "link": "ln -s /etc/passwd"}[what]
    ended = shim.run("/bin/sh", "-c", f'{make} "$PODSETTLE_RESCHEDULE_FILE"; exit 75')
    assert ended.code == 75
    assert ended.record is not None
    assert ended.record["outcome"] == "failed"
    assert ended.record["reason"].startswith("BadRescheduleTime: ")


def test_nothing_stays_in_the_work_folder(shim, tmp_path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    options = ("--work-dir", str(work))
    assert shim.run("/bin/true", options=options).code == 0
    assert shim.run(*child("reschedule", "2026-08-13T12:34:56Z"), options=options).code == 75
    assert list(work.iterdir()) == []
