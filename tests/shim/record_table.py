"""What the shim writes and what the reconciler must read in it: one table that holds both together.

Each case is run for real; its message is compared with `record` and decoded by
`reconciler.record.decode`, which must give `record` again.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

ATTEMPT = "0197e3a2-5b7c-7def-8123-456789abcdef"
PYTHON = (sys.executable, "-I", "-S", "-c")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    command: tuple[str, ...]
    code: int
    record: dict[str, Any]
    options: tuple[str, ...] = ()


def _exit(code: int) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f"exit {code}")


def _killed(number: int) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f"kill -{number} $$")


def _reschedule(text: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f"printf '{text}' > \"$PODSETTLE_RESCHEDULE_FILE\"; exit 75")


def _failed(code: int, **more: Any) -> dict[str, Any]:
    return {"v": 1, "outcome": "failed", "exit_code": code, **more}


def _at(time: str) -> dict[str, Any]:
    return {"v": 1, "outcome": "reschedule", "reschedule_at": time}


def _bad_time(text: str) -> dict[str, Any]:
    return _failed(75, reason=f"BadRescheduleTime: {text}")


CASES = [
    Case("success", ("/bin/true",), 0, {"v": 1, "outcome": "success"}),
    *(
        Case(f"exit-{code}", _exit(code), code, _failed(code))
        for code in (1, 2, 64, 69, 75, 124, 125, 126, 127, 128, 137, 143, 255)
    ),
    *(
        Case(f"killed-by-{number}", _killed(number), 128 + number, _failed(128 + number))
        for number in (1, 2, 3, 6, 9, 11, 13, 15, 34, 64)
    ),
    Case(
        "not-found",
        ("no-such-program",),
        127,
        _failed(
            127,
            failure_kind="application",
            reason="CommandNotFound: no-such-program: No such file or directory",
        ),
    ),
    Case(
        "not-executable",
        ("/etc/passwd",),
        126,
        _failed(
            126,
            failure_kind="application",
            reason="CommandNotRunnable: /etc/passwd: Permission denied",
        ),
    ),
    Case(
        "timeout",
        ("/bin/sleep", "600"),
        143,
        _failed(143, failure_kind="timeout", reason="ExecutionTimeout"),
        options=("--timeout", "0.05"),
    ),
    Case(
        "reschedule",
        _reschedule("2026-08-13T12:34:56Z"),
        75,
        _at("2026-08-13T12:34:56Z"),
    ),
    Case(
        "reschedule-newline-and-zone",
        _reschedule("2026-08-13T14:34:56.25+02:00\\n"),
        75,
        _at("2026-08-13T12:34:56.250000Z"),
    ),
    Case(
        "reschedule-nanoseconds",
        _reschedule("2026-08-13T12:34:56.123456789Z"),
        75,
        _at("2026-08-13T12:34:56.123456Z"),
    ),
    Case(
        "reschedule-no-zone",
        _reschedule("2026-08-13T12:34:56"),
        75,
        _bad_time("'2026-08-13T12:34:56' has no zone"),
    ),
    Case("reschedule-words", _reschedule("soon"), 75, _bad_time("'soon' is no RFC 3339 time")),
    Case("reschedule-empty", _reschedule(""), 75, _bad_time("'' is no RFC 3339 time")),
    Case(
        "reschedule-before-year-1",
        _reschedule("0001-01-01T00:00:00+05:00"),
        75,
        _bad_time("'0001-01-01T00:00:00+05:00' is no RFC 3339 time"),
    ),
    Case("reschedule-long", _reschedule("x" * 300), 75, _bad_time("300 bytes long")),
    Case(
        "reschedule-file-but-exit-0",
        ("/bin/sh", "-c", 'echo 2026-08-13T12:34:56Z > "$PODSETTLE_RESCHEDULE_FILE"'),
        0,
        {"v": 1, "outcome": "success"},
    ),
    Case(
        "attempt",
        _exit(1),
        1,
        _failed(1, attempt_id=ATTEMPT),
        options=("--attempt-id", ATTEMPT),
    ),
    Case(
        "reason-clipped",
        ("/no/" + "long/" * 60,),
        127,
        _failed(
            127,
            failure_kind="application",
            reason=("CommandNotFound: /no/" + "long/" * 60)[:240],
        ),
    ),
    Case(
        "reason-quoted",
        ('a"b\\c\nd\te',),
        127,
        _failed(
            127,
            failure_kind="application",
            reason='CommandNotFound: a"b\\c d e: No such file or directory',
        ),
    ),
    Case(
        "reason-not-ascii",
        ("\u00fc\U0001f40d",),
        127,
        _failed(
            127,
            failure_kind="application",
            reason="CommandNotFound: \u00fc\U0001f40d: No such file or directory",
        ),
    ),
    Case(
        "reason-not-utf-8",
        ("\udcff",),
        127,
        _failed(
            127,
            failure_kind="application",
            reason="CommandNotFound: ?: No such file or directory",
        ),
    ),
    Case(
        "usage",
        ("/bin/true",),
        64,
        _failed(
            64,
            reason="ShimUsage: --timeout: 'soon' is not usable; give seconds above 0",
        ),
        options=("--timeout", "soon"),
    ),
]
