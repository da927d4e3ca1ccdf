from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler import text


@pytest.mark.parametrize(
    "raw, limit, clipped",
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("abcd", 1, "…"),
        ("", 5, ""),
        ("a\x00b", 9, "a\ufffdb"),
        ("\ud800x", 9, "\ufffdx"),
        ("\U0001f600x", 9, "\U0001f600x"),
    ],
)
def test_clip(raw: str, limit: int, clipped: str) -> None:
    assert text.clip(raw, limit) == clipped


@pytest.mark.parametrize(
    "raw, escaped",
    [
        ("plain é", "plain é"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202eesrever", r"\u202eesrever"),
        ("\u2028", r"\u2028"),
        ("\x00\ud800", r"\x00\ud800"),
        ("\u009b", r"\x9b"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_escape(raw: str, escaped: str) -> None:
    assert text.escape(raw) == escaped


@given(st.text(alphabet=st.characters()), st.integers(1, 80))
def test_the_results_can_be_stored_and_shown(raw: str, limit: int) -> None:
    clipped = text.clip(raw, limit)
    assert len(clipped) <= limit
    assert "\x00" not in clipped
    clipped.encode("utf-8")
    assert len(text.storable(raw)) == len(raw)
    for shown in (text.escape(raw), text.quote(raw, limit)):
        assert shown.isprintable()
        shown.encode("utf-8")
