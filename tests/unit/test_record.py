from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconciler.record import NoRecord, Record, decode, parse_rfc3339

SUCCESS = '{"v":1,"outcome":"success"}'
NOON = datetime(2026, 8, 13, 12, 34, 56, tzinfo=UTC)


def reschedule(when: str) -> str:
    return json.dumps({"v": 1, "outcome": "reschedule", "reschedule_at": when})


@pytest.mark.parametrize(
    "message, expected",
    [
        (SUCCESS, Record(outcome="success")),
        (SUCCESS.encode(), Record(outcome="success")),
        (f"\n\t {SUCCESS} \r\n", Record(outcome="success")),
        ('{ "outcome" : "success" , "v" : 1 }', Record(outcome="success")),
        ('{"v":1,"outcome":"failed","exit_code":1}', Record(outcome="failed", exit_code=1)),
        ('{"v":1,"outcome":"failed","exit_code":-9}', Record(outcome="failed", exit_code=-9)),
        (
            '{"v":1,"outcome":"failed","exit_code":2147483647}',
            Record(outcome="failed", exit_code=2147483647),
        ),
        (
            '{"v":1,"outcome":"failed","failure_kind":"timeout","reason":"ExecutionTimeout"}',
            Record(outcome="failed", failure_kind="timeout", reason="ExecutionTimeout"),
        ),
        (
            '{"v":1,"outcome":"failed","failure_kind":"application"}',
            Record(outcome="failed", failure_kind="application"),
        ),
        (reschedule("2026-08-13T12:34:56Z"), Record(outcome="reschedule", reschedule_at=NOON)),
        ('{"v":1,"outcome":"success","later":{"a":[null,1.5]}}', Record(outcome="success")),
        ('{"v":1,"outcome":"failed","reason":""}', Record(outcome="failed", reason="")),
        (
            json.dumps({"v": 1, "outcome": "failed", "reason": "é" * 240}),
            Record(outcome="failed", reason="é" * 240),
        ),
        # What PostgreSQL cannot hold is replaced, one for one.
        (
            r'{"v":1,"outcome":"failed","reason":"a\u0000b\ud800c"}',
            Record(outcome="failed", reason="a\ufffdb\ufffdc"),
        ),
        (
            r'{"v":1,"outcome":"failed","reason":"\ud83d\ude00"}',
            Record(outcome="failed", reason="\U0001f600"),
        ),
        # Text before the record.
        (f"OCI runtime says: {SUCCESS}", Record(outcome="success")),
        (f"line one\n{{broken\n{SUCCESS}\n\n", Record(outcome="success")),
        (f'{{"v":1,"outcome":"failed"}}\n{SUCCESS}\n', Record(outcome="success")),
        (f'{SUCCESS}{{"v":1,"outcome":"failed"}}', Record(outcome="failed")),
        (b"\xff\xfe cut: " + SUCCESS.encode(), Record(outcome="success")),
        # U+2028 ends no line of JSON.
        (
            '{"v":1,"outcome":"failed","reason":"a\u2028b"}',
            Record(outcome="failed", reason="a\u2028b"),
        ),
        ('{"v":1,"outcome":"success","attempt_epoch":0}', Record("success", attempt_epoch=0)),
        ("x" * (4096 - len(SUCCESS)) + SUCCESS, Record(outcome="success")),
    ],
)
def test_accepts(message: str | bytes, expected: Record) -> None:
    assert decode(message) == expected


@pytest.mark.parametrize(
    "message, cause",
    [
        (None, "empty"),
        ("", "empty"),
        (b"", "empty"),
        (" \n\t", "empty"),
        ("Traceback (most recent call last):", "the message is no JSON object"),
        ("[1]", "the message is no JSON object"),
        ("null", "the message is no JSON object"),
        ("\x00\x00", "the message is no JSON object"),
        ("\ufeff" + SUCCESS[:-1], "no valid JSON"),
        (SUCCESS[:-1], "the record is no valid JSON, or was cut"),
        (SUCCESS + "x", "the record is no valid JSON, or was cut"),
        (f"{SUCCESS} and a word after it", "no valid JSON"),
        ("{'v':1,'outcome':'success'}", "no valid JSON"),
        ('{"v":1,"outcome":"failed","reason":"a\tb"}', "no valid JSON"),
        ('{"outcome":"success"}', "v is missing"),
        ('{"v":2,"outcome":"success"}', "v is 2, not the integer 1"),
        ('{"v":true,"outcome":"success"}', "v is true, not"),
        ('{"v":1.0,"outcome":"success"}', "v is 1.0, not"),
        ('{"v":"1","outcome":"success"}', "v is '1', not"),
        ('{"v":null,"outcome":"success"}', "v is null, not"),
        ('{"v":[1],"outcome":"success"}', "v is a list, not"),
        ('{"v":1' + "0" * 3000 + ',"outcome":"success"}', "v is a huge number, not"),
        ('{"v":1}', "outcome is missing"),
        ('{"v":1,"outcome":"Success"}', "outcome is 'Success', not success, failed or"),
        ('{"v":1,"outcome":null}', "outcome is null"),
        ('{"v":1,"outcome":["success"]}', "outcome is a list"),
        ('{"v":1,"outcome":"failed","exit_code":null}', "exit_code is null, not an integer"),
        ('{"v":1,"outcome":"failed","exit_code":true}', "exit_code is true"),
        ('{"v":1,"outcome":"failed","exit_code":1.0}', "exit_code is 1.0"),
        ('{"v":1,"outcome":"failed","exit_code":"1"}', "exit_code is '1'"),
        ('{"v":1,"outcome":"failed","exit_code":1e400}', "exit_code is Infinity"),
        ('{"v":1,"outcome":"failed","exit_code":2147483648}', "exit_code does not fit 32 bits"),
        ('{"v":1,"outcome":"failed","exit_code":-2147483649}', "exit_code does not fit 32 bits"),
        ('{"v":1,"outcome":"failed","failure_kind":"infra"}', "failure_kind is 'infra', not"),
        ('{"v":1,"outcome":"failed","failure_kind":"manual"}', "failure_kind is 'manual'"),
        ('{"v":1,"outcome":"failed","failure_kind":null}', "failure_kind is null, not text"),
        ('{"v":1,"outcome":"failed","reason":7}', "reason is 7, not text"),
        ('{"v":1,"outcome":"failed","reason":null}', "reason is null"),
        (json.dumps({"v": 1, "outcome": "failed", "reason": "r" * 241}), "reason is longer"),
        ('{"v":1,"outcome":"reschedule"}', "reschedule_at is missing"),
        ('{"v":1,"outcome":"reschedule","reschedule_at":null}', "reschedule_at is null"),
        ('{"v":1,"outcome":"reschedule","reschedule_at":1786620896}', "reschedule_at is 1786"),
        ('{"v":1,"outcome":"success","reschedule_at":"soon"}', "reschedule_at is 'soon', not"),
        ('{"v":1,"outcome":"success","attempt_id":7}', "attempt_id is 7, not text"),
        ('{"v":1,"outcome":"success","attempt_id":null}', "attempt_id is null"),
        ('{"v":1,"outcome":"success","attempt_id":""}', "attempt_id is '', the pod names none"),
        ('{"v":1,"outcome":"success","attempt_epoch":"0"}', "attempt_epoch is '0'"),
        ('{"v":1,"outcome":"success","attempt_epoch":false}', "attempt_epoch is false"),
        ('{"v":1,"v":1,"outcome":"success"}', "the key 'v' stands there twice"),
        (r'{"v":1,"\u0076":1,"outcome":"success"}', "the key 'v' stands there twice"),
        ('{"v":1,"outcome":"success","x":{"a":1,"a":1}}', "the key 'a' stands there twice"),
        ('{"v":1,"outcome":"success","x":[NaN]}', "NaN is no JSON"),
        ('{"v":1,"outcome":"success","x":-Infinity}', "-Infinity is no JSON"),
        (SUCCESS + " " * 4070, "longer than 4096 bytes"),
        ("é" * 2048 + "x" + SUCCESS, "longer than 4096 bytes"),
        # A later line that starts like a record tells more than the whole.
        ('{"v":1,"outcome":"success"}\n{"v":3}', "v is 3"),
        ('some log\n{"v":1,"outcome":"done"}', "outcome is 'done'"),
    ],
)
def test_refuses(message: str | bytes | None, cause: str) -> None:
    decoded = decode(message)
    assert isinstance(decoded, NoRecord)
    assert cause in decoded.cause
    assert decoded.cause.isprintable()


@pytest.mark.parametrize(
    "when, moment",
    [
        ("2026-08-13T12:34:56Z", NOON),
        ("2026-08-13t12:34:56z", NOON),
        ("2026-08-13T12:34:56+00:00", NOON),
        ("2026-08-13T12:34:56-00:00", NOON),
        ("2026-08-13T14:04:56+01:30", NOON),
        ("2026-08-12T12:35:56-23:59", NOON),
        ("2026-08-13T12:34:56.5Z", NOON.replace(microsecond=500_000)),
        ("2026-08-13T12:34:56.123456789Z", NOON.replace(microsecond=123_456)),
        ("2026-08-13T12:34:56.9999999999Z", NOON.replace(microsecond=999_999)),
        ("2028-02-29T00:00:00Z", datetime(2028, 2, 29, tzinfo=UTC)),
        ("9999-12-31T23:59:59Z", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ("2026-08-13", None),
        ("2026-08-13T12:34:56", None),
        ("2026-08-13T12:34Z", None),
        ("2026-08-13 12:34:56Z", None),
        ("20260813T123456Z", None),
        ("2026-W33-4T12:34:56Z", None),
        ("2026-225T12:34:56Z", None),
        ("2026-08-13T12:34:56,5Z", None),
        ("2026-08-13T12:34:56.Z", None),
        ("2026-08-13T12:34:56+01", None),
        ("2026-08-13T12:34:56+0100", None),
        ("2026-08-13T12:34:56+24:00", None),
        ("2026-08-13T12:34:56+01:60", None),
        ("2026-08-13T24:00:00Z", None),
        ("2026-08-13T12:60:00Z", None),
        ("2026-12-31T23:59:60Z", None),
        ("2026-02-29T00:00:00Z", None),
        ("2026-13-01T00:00:00Z", None),
        ("0000-01-01T00:00:00Z", None),
        ("9999-12-31T23:59:59-00:01", None),
        ("0001-01-01T00:00:00+00:01", None),
        (" 2026-08-13T12:34:56Z", None),
        ("2026-08-13T12:34:56Z\n", None),
        ("٢٠٢٦-08-13T12:34:56Z", None),
        ("+2026-08-13T12:34:56Z", None),
        ("", None),
    ],
)
def test_times(when: str, moment: datetime | None) -> None:
    assert parse_rfc3339(when) == moment
    decoded = decode(reschedule(when))
    if moment is None:
        assert isinstance(decoded, NoRecord)
        assert "reschedule_at" in decoded.cause
    else:
        assert decoded == Record(outcome="reschedule", reschedule_at=moment)
        assert isinstance(decoded, Record)
        assert decoded.reschedule_at is not None
        assert decoded.reschedule_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    "fields, attempt_id, attempt_epoch, accepted",
    [
        ({}, None, None, True),
        ({}, "a", None, True),
        ({"attempt_id": "a"}, "a", None, True),
        ({"attempt_id": "a"}, "b", None, False),
        ({"attempt_id": "a"}, "A", None, False),
        ({"attempt_id": "a"}, None, None, False),
        # leoflow leaves out 0.
        ({}, "0", 0, True),
        ({"attempt_epoch": 0}, None, None, True),
        ({"attempt_epoch": 0}, "0", 0, True),
        ({"attempt_epoch": 3}, "3", 3, True),
        ({"attempt_epoch": 3}, "4", 4, False),
        ({"attempt_epoch": 3}, None, None, False),
        ({"attempt_epoch": -1}, None, None, False),
        ({}, "3", 3, False),
        # A record that names the attempt itself needs no number besides.
        ({"attempt_id": "3"}, "3", 3, True),
        ({"attempt_id": "3", "attempt_epoch": 2}, "3", 3, False),
    ],
)
def test_a_record_speaks_only_for_its_own_attempt(
    fields: dict[str, Any], attempt_id: str | None, attempt_epoch: int | None, accepted: bool
) -> None:
    """I8: the message of one attempt says nothing about another."""
    message = json.dumps({"v": 1, "outcome": "success", **fields})
    decoded = decode(message, attempt_id=attempt_id, attempt_epoch=attempt_epoch)
    assert isinstance(decoded, Record) is accepted
    if isinstance(decoded, NoRecord):
        assert "attempt_" in decoded.cause


@pytest.mark.parametrize("depth", [10, 1000, 2000])
def test_nesting_never_raises(depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        inner = opening * depth + ("1" if opening != "[" else "") + closing * depth
        decoded = decode('{"v":1,"outcome":"success","x":' + inner + "}")
        assert isinstance(decoded, Record | NoRecord)
        decode(opening * depth)


# --- against an independent reading of the rules ------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_KEYS = (
    "v",
    "outcome",
    "exit_code",
    "failure_kind",
    "reason",
    "reschedule_at",
    "attempt_id",
    "attempt_epoch",
)
_VALUES = st.one_of(
    st.sampled_from(
        [
            *(1, 0, 2, 1.0, True, False, None, "", "1", "success", "failed", "reschedule"),
            *("application", "timeout", "infra", "r" * 240, "r" * 241, "2026-08-13T12:34:56Z"),
            *("2026-08-13T12:34:56.123456789+02:00", "2026-08-13T12:34:56", "2026-02-30T00:00:00Z"),
            *(2**31, -(2**31) - 1, 143, "mine", "other", 7),
        ]
    ),
    _JSON,
)


class BadError(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise BadError
    return dict(pairs)


def _no_constant(_: str) -> None:
    raise BadError


def lawful(candidate: str, attempt_id: str | None, attempt_epoch: int | None) -> bool:
    """The rules of the record once more, one after the other, as plainly as possible."""
    try:
        fields = json.loads(
            candidate, object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError, BadError):
        return False
    if type(fields) is not dict:
        return False

    def is_whole(value: Any) -> bool:
        return type(value) is int

    def is_time(value: Any) -> bool:
        if type(value) is not str or not value.isascii() or value != value.strip():
            return False
        if not re.match(r"^\d{4}-\d\d-\d\d[tT]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)$", value):
            return False
        try:
            # Fractions beyond microseconds are legal and do not matter for the question.
            datetime.fromisoformat(re.sub(r"\.\d+", "", value).upper()).astimezone(UTC)
        except (ValueError, OverflowError):
            return False
        return True

    rules = {
        "v": lambda v: is_whole(v) and v == 1,
        "outcome": lambda v: type(v) is str and v in {"success", "failed", "reschedule"},
        "exit_code": lambda v: is_whole(v) and -(2**31) <= v < 2**31,
        "failure_kind": lambda v: type(v) is str and v in {"application", "timeout"},
        "reason": lambda v: type(v) is str and len(v) <= 240,
        "reschedule_at": is_time,
        "attempt_id": lambda v: type(v) is str and v == attempt_id,
        "attempt_epoch": lambda v: is_whole(v) and v == (attempt_epoch or 0),
    }
    required = {"v", "outcome"}
    if fields.get("outcome") == "reschedule":
        required.add("reschedule_at")
    if attempt_epoch and "attempt_id" not in fields:
        required.add("attempt_epoch")
    return required <= set(fields) and all(
        rule(fields[name]) for name, rule in rules.items() if name in fields
    )


def expected(message: str, attempt_id: str | None, attempt_epoch: int | None) -> bool:
    if len(message.encode("utf-8", "surrogatepass")) > 4096:
        return False
    whole = message.strip(" \t\r\n\v\f")
    candidates = [whole, whole.split("\n")[-1].strip(" \t\r\n\v\f")]
    if '{"v":' in whole:
        candidates.append('{"v":' + whole.split('{"v":')[-1])
    return any(lawful(candidate, attempt_id, attempt_epoch) for candidate in candidates)


_ATTEMPTS = st.sampled_from([(None, None), ("mine", None), ("0", 0), ("7", 7)])


@given(message=st.text() | st.binary() | st.none(), attempt=_ATTEMPTS)
@example(message="\ud800", attempt=(None, None))
@example(message='{"v":1,"outcome":"\ud800"}', attempt=(None, None))
@example(message="\x00" * 5000, attempt=(None, None))
def test_decoding_never_raises(
    message: str | bytes | None, attempt: tuple[str | None, int | None]
) -> None:
    """I8: any text at all is either a record or has a cause."""
    decoded = decode(message, attempt_id=attempt[0], attempt_epoch=attempt[1])
    if isinstance(decoded, NoRecord):
        assert decoded.cause
        assert decoded.cause.isprintable()
        decoded.cause.encode()


@settings(max_examples=400)
@given(
    fields=st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=3), _VALUES, max_size=8),
    base=st.booleans(),
    before=st.sampled_from(["", "runtime: ", "line\n", '{"v":1}\n', SUCCESS + "\n", '{"v":']),
    after=st.sampled_from(["", "\n", " ", "}", "\nbye", ",", "\u00a0"]),
    attempt=_ATTEMPTS,
)
def test_agrees_with_the_rules(
    fields: dict[str, Any],
    base: bool,
    before: str,
    after: str,
    attempt: tuple[str | None, int | None],
) -> None:
    if base:
        fields = {"v": 1, "outcome": "failed", **fields}
    message = before + json.dumps(fields, separators=(",", ":")) + after
    decoded = decode(message, attempt_id=attempt[0], attempt_epoch=attempt[1])
    assert isinstance(decoded, Record) is expected(message, *attempt)


_MOMENTS = st.datetimes(
    datetime(2, 1, 1),  # noqa: DTZ001 -- the zone is drawn beside it
    datetime(9998, 12, 31),  # noqa: DTZ001
    timezones=st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m))),
)


@st.composite
def lawful_fields(draw: st.DrawFn) -> tuple[dict[str, Any], str | None]:
    outcome = draw(st.sampled_from(["success", "failed", "reschedule"]))
    fields: dict[str, Any] = {"v": 1, "outcome": outcome}
    if outcome == "reschedule" or draw(st.booleans()):
        fields["reschedule_at"] = draw(_MOMENTS).isoformat()
    optional = {
        "exit_code": st.integers(-(2**31), 2**31 - 1),
        "failure_kind": st.sampled_from(["application", "timeout"]),
        "reason": st.text(max_size=240),
        "attempt_id": st.text(max_size=40),
    }
    for name, values in optional.items():
        if draw(st.booleans()):
            fields[name] = draw(values)
    extra = draw(st.dictionaries(st.text(min_size=1, max_size=6), _JSON, max_size=2))
    fields = {**{k: v for k, v in extra.items() if k not in _KEYS}, **fields}
    order = draw(st.permutations(list(fields)))
    return {name: fields[name] for name in order}, fields.get("attempt_id")


@given(
    lawful_fields(),
    st.sampled_from(["", "older line\n", '{"v":1,"outcome":"failed"}\n\n', "\n{\n"]),
)
def test_accepts_every_lawful_record(built: tuple[dict[str, Any], str | None], before: str) -> None:
    fields, attempt_id = built
    message = before + json.dumps(fields) + "\n"
    if len(message.encode()) > 4096:
        return
    decoded = decode(message, attempt_id=attempt_id)
    assert isinstance(decoded, Record), decoded
    assert decoded.outcome == fields["outcome"]
    assert decoded.exit_code == fields.get("exit_code")
    assert decoded.failure_kind == fields.get("failure_kind")
    if "reason" in fields:
        assert decoded.reason is not None
        assert len(decoded.reason) == len(fields["reason"])
        assert "\x00" not in decoded.reason
        decoded.reason.encode()
    if "reschedule_at" in fields:
        assert decoded.reschedule_at == datetime.fromisoformat(fields["reschedule_at"])
