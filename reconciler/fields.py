"""Fields of decoded JSON, of any type or missing: a wrong one counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

from reconciler import text
from reconciler.record import INT4_MAX, INT4_MIN, parse_rfc3339

Json: TypeAlias = Mapping[str, object]

NOTHING: Final[Json] = MappingProxyType({})
"""The empty object."""

MAX_NAME: Final = 253
"""Characters kept of a name."""

MAX_WORD: Final = 240
"""Characters kept of a token or a short sentence."""

_NEVER_BEFORE: Final = datetime(1971, 1, 1, tzinfo=UTC)


class Malformed(Exception):  # noqa: N818 -- caught by the readers, becomes a sentence
    """What was read is not what it should be; the message says how."""


def mapping(owner: Json, key: str) -> Json:
    """Return an object field; anything else is the empty object."""
    value = owner.get(key)
    return value if isinstance(value, dict) else NOTHING


def mappings(owner: Json, key: str) -> list[Json]:
    """Return the objects of an array field."""
    value = owner.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def string(owner: Json, key: str, limit: int) -> str | None:
    """Return a string field; the empty string, which Go leaves out, counts as missing."""
    value = owner.get(key)
    return text.clip(value, limit) if isinstance(value, str) and value else None


def integer(owner: Json, key: str) -> int | None:
    """Return a whole number that fits PostgreSQL's integer."""
    value = owner.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and INT4_MIN <= value <= INT4_MAX:
        return value
    return None


def moment(owner: Json, key: str) -> str | None:
    """Return an RFC 3339 time, normalised to UTC."""
    value = owner.get(key)
    return _normal_time(value) if isinstance(value, str) and len(value) <= 64 else None


@lru_cache(maxsize=4096)
def _normal_time(value: str) -> str | None:
    parsed = parse_rfc3339(value)
    # The kubelet writes 1970-01-01 for what never happened.
    return None if parsed is None or parsed < _NEVER_BEFORE else rfc3339(parsed)


def rfc3339(at: datetime) -> str:
    """Write a time in UTC as the API does."""
    return at.isoformat().removesuffix("+00:00") + "Z"


def json_type(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return "a number"
