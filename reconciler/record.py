"""The outcome record that a task leaves in its termination message (version 1).

Decoding is strict and total: every text is either a record that follows the rules to the letter,
or it is no record and the cause says why. What a record means for a task is not decided here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, Literal, NoReturn, cast

from reconciler import text

MAX_MESSAGE_BYTES: Final = 4096
"""What the kubelet keeps of a termination message, per container."""

MAX_REASON_CHARACTERS: Final = 240

INT4_MIN: Final = -(2**31)
INT4_MAX: Final = 2**31 - 1

Outcome = Literal["success", "failed", "reschedule"]
RecordedKind = Literal["application", "timeout"]

_OUTCOMES: Final = ("success", "failed", "reschedule")
_KINDS: Final = ("application", "timeout")
_RECORD_START: Final = '{"v":'
_WHITE_SPACE: Final = " \t\r\n\v\f"

_RFC3339: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)


@dataclass(frozen=True, slots=True)
class Record:
    """A valid record.

    Attributes:
        v: The version, always 1.
        outcome: What the task says of itself.
        exit_code: The exit code of the task's process, if named.
        failure_kind: The kind that the task itself can know, if named.
        reason: At most 240 characters of untrusted text, storable as it is.
        reschedule_at: When to run again, in UTC; always set for the outcome `reschedule`.
        attempt_id: The attempt that the record names, if any; it is the pod's own.
        attempt_epoch: leoflow's number of the attempt, if named; it is the pod's own.
    """

    outcome: Outcome
    v: Literal[1] = 1
    exit_code: int | None = None
    failure_kind: RecordedKind | None = None
    reason: str | None = None
    reschedule_at: datetime | None = None
    attempt_id: str | None = None
    attempt_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class NoRecord:
    """There is no valid record.

    Attributes:
        cause: Why not, in a few words, fit to be shown and stored; `empty` where there was no
            message at all.
    """

    cause: str


class _Refused(Exception):  # noqa: N818 -- a verdict on the text, not an error of the program
    def __init__(self, cause: str, *, rank: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.rank = rank


# How much a cause tells: prose nothing, a broken object something, a broken rule names itself.
_PROSE, _BROKEN, _RULE = range(3)


def decode(
    message: str | bytes | None, *, attempt_id: str | None = None, attempt_epoch: int | None = None
) -> Record | NoRecord:
    """Find the record in a termination message.

    The kubelet may put text before the record and cuts a long message at its front, so three
    readings are tried: the whole text, its last line that is not empty, and from the last `{"v":`
    to the end. The first that is a record wins.

    Args:
        message: The message as it stands in the container's status; untrusted.
        attempt_id: The attempt of the pod that the message comes from; None where it is not known.
        attempt_epoch: leoflow's number of that attempt; None where the pod has none.

    Returns:
        The record, or the most telling cause why there is none. Nothing is raised, whatever the
        message holds.
    """
    if message is None:
        return NoRecord("empty")
    if isinstance(message, bytes):
        size = len(message)
        message = message[: MAX_MESSAGE_BYTES + 1].decode("utf-8", "replace")
    else:
        size = len(message)
        if size <= MAX_MESSAGE_BYTES:
            size = len(message.encode("utf-8", "surrogatepass"))
    if size > MAX_MESSAGE_BYTES:
        return NoRecord(f"the message is longer than {MAX_MESSAGE_BYTES} bytes")
    whole = message.strip(_WHITE_SPACE)
    if not whole:
        return NoRecord("empty")

    best = _Refused("", rank=-1)
    tried: set[str] = set()
    for candidate in (whole, _last_line(whole), _from_last_start(whole)):
        if candidate is None or candidate in tried:
            continue
        tried.add(candidate)
        try:
            return _read(candidate, attempt_id, attempt_epoch)
        except _Refused as refused:
            if refused.rank > best.rank:
                best = refused
    return NoRecord(best.cause)


def parse_rfc3339(value: str) -> datetime | None:
    """Read a point in time in the form of RFC 3339, and no other form of ISO 8601.

    Args:
        value: Date, time with seconds and zone, such as `2026-08-13T12:34:56.123456789+02:00`.

    Returns:
        The time in UTC, fractions cut to microseconds; None where the text has another form or
        names no real time (a leap second counts as none: neither Python nor Go can hold one).
    """
    match = _RFC3339.fullmatch(value)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, sign, off_hours, off_minutes = match.groups()
    zone = UTC
    if sign is not None:
        hours, minutes = int(off_hours), int(off_minutes)
        if hours > 23 or minutes > 59:
            return None
        offset = timedelta(hours=hours, minutes=minutes)
        zone = timezone(-offset if sign == "-" else offset)
    microsecond = int(fraction[:6].ljust(6, "0")) if fraction else 0
    try:
        date = datetime(int(year), int(month), int(day), tzinfo=zone)
        moment = date.replace(
            hour=int(hour), minute=int(minute), second=int(second), microsecond=microsecond
        )
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _last_line(whole: str) -> str:
    # Only a line feed ends a line: characters such as U+2028 may stand inside a JSON string.
    return whole.rpartition("\n")[2].strip(_WHITE_SPACE)


def _from_last_start(whole: str) -> str | None:
    start = whole.rfind(_RECORD_START)
    return None if start < 0 else whole[start:]


def _read(candidate: str, attempt_id: str | None, attempt_epoch: int | None) -> Record:
    if not candidate.startswith("{"):
        raise _Refused("the message is no JSON object", rank=_PROSE)
    try:
        fields = json.loads(candidate, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _Refused("the record is nested too deeply", rank=_BROKEN) from None
    except ValueError:
        raise _Refused("the record is no valid JSON, or was cut", rank=_BROKEN) from None
    record = _checked(cast("dict[str, object]", fields))
    _check_attempt(record, attempt_id, attempt_epoch)
    return record


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {text.quote(key)} stands there twice", rank=_RULE)
            seen.add(key)
    return fields


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON", rank=_RULE)


def _checked(fields: dict[str, object]) -> Record:
    if "v" not in fields:
        raise _Refused("v is missing", rank=_RULE)
    version = fields["v"]
    if type(version) is not int or version != 1:
        raise _wrong("v", version, "the integer 1")
    if "outcome" not in fields:
        raise _Refused("outcome is missing", rank=_RULE)
    outcome = fields["outcome"]
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        raise _wrong("outcome", outcome, "success, failed or reschedule")

    exit_code = _integer(fields, "exit_code")
    if exit_code is not None and not INT4_MIN <= exit_code <= INT4_MAX:
        raise _Refused("exit_code does not fit 32 bits", rank=_RULE)
    kind = _string(fields, "failure_kind")
    if kind is not None and kind not in _KINDS:
        raise _wrong("failure_kind", kind, "application or timeout")
    reason = _string(fields, "reason")
    if reason is not None and len(reason) > MAX_REASON_CHARACTERS:
        raise _Refused(f"reason is longer than {MAX_REASON_CHARACTERS} characters", rank=_RULE)
    reschedule_at = None
    when = _string(fields, "reschedule_at")
    if when is not None:
        reschedule_at = parse_rfc3339(when)
        if reschedule_at is None:
            raise _wrong("reschedule_at", when, "a time of RFC 3339 with a zone")
    elif outcome == "reschedule":
        raise _Refused("reschedule_at is missing", rank=_RULE)
    return Record(
        outcome=cast("Outcome", outcome),
        exit_code=exit_code,
        failure_kind=cast("RecordedKind | None", kind),
        reason=None if reason is None else text.storable(reason),
        reschedule_at=reschedule_at,
        attempt_id=_string(fields, "attempt_id"),
        attempt_epoch=_integer(fields, "attempt_epoch"),
    )


def _check_attempt(record: Record, attempt_id: str | None, attempt_epoch: int | None) -> None:
    if record.attempt_id is not None and record.attempt_id != attempt_id:
        whose = "the pod names none" if attempt_id is None else "not this pod's"
        raise _Refused(f"attempt_id is {text.quote(record.attempt_id)}, {whose}", rank=_RULE)
    if record.attempt_epoch is None and (record.attempt_id is not None or attempt_epoch is None):
        return
    # leoflow leaves the number out where it is 0, so a record without it is one of epoch 0.
    if (record.attempt_epoch or 0) != (attempt_epoch or 0):
        whose = "the pod names none" if attempt_epoch is None else f"this pod's is {attempt_epoch}"
        raise _Refused(f"attempt_epoch is {_shown(record.attempt_epoch or 0)}, {whose}", rank=_RULE)


def _integer(fields: dict[str, object], name: str) -> int | None:
    if name not in fields:
        return None
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "an integer")
    return value


def _string(fields: dict[str, object], name: str) -> str | None:
    if name not in fields:
        return None
    value = fields[name]
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: object, wanted: str) -> _Refused:
    return _Refused(f"{name} is {_shown(value)}, not {wanted}", rank=_RULE)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return text.quote(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a huge number"
    return json.dumps(value)
