"""settle.decide, every combination of its inputs, against the decision table written down again."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

from psycopg.types.json import Jsonb

from reconciler.database import Connection

STATES = ["none", "queued", "running", "success", "failed", "up_for_retry", "up_for_reschedule"]
TRIES = [(1, 0), (1, 1), (2, 1), (3, 5)]
EVIDENCE = [
    ("success", None),
    ("reschedule", None),
    ("not_final", None),
    ("clear", None),
    ("failed", None),
    ("failed", "infra"),
    ("failed", "application"),
    ("failed", "timeout"),
    ("failed", "manual"),
]
REFUNDS = [(0, 3), (2, 3), (3, 3), (5, 3), (0, 0), (1, 0)]
PROVISIONAL = [
    (False, None, False),
    (False, "infra", True),
    (True, "infra", True),
    (True, "infra", False),
    (True, None, False),
]


class Case(NamedTuple):
    state: str
    try_number: int
    max_tries: int
    retries: int | None
    same_attempt: bool
    verdict: str
    kind: str | None
    silence: str | None
    used: int
    cap: int
    provisional: bool
    provisional_kind: str | None
    provisional_refunded: bool


class Expected(NamedTuple):
    disposition: str
    state: str | None
    max_tries: int
    refund: int
    used: int
    provisional: bool
    backoff: str


def table(c: Case) -> Expected:
    """DESIGN section 8, row by row, with invariants I2, I3, I6 and I7 beside the rows they rest on."""

    def nothing(disposition: str, state: str | None = None) -> Expected:
        return Expected(disposition, state, c.max_tries, 0, c.used, False, "none")

    if c.verdict == "clear":
        if c.state == "none":
            return nothing("duplicate")
        fresh = max(c.max_tries, c.try_number) if c.retries is None else c.try_number + c.retries
        return Expected("settled", "none", fresh, 0, 0, False, "none")
    if not c.same_attempt:  # I2
        return nothing("stale")
    if c.provisional and c.state in {"failed", "up_for_retry"} and c.silence is None:  # I3
        if c.verdict == "success":
            back = int(c.provisional_refunded)
            return Expected(
                "overrode",
                "success",
                c.max_tries - back,
                -back,
                max(c.used - back, 0),
                False,
                "none",
            )
        if c.verdict == "failed" and c.kind == c.provisional_kind:
            return nothing("confirmed", c.state)
    if c.state not in {"queued", "running"}:
        return nothing("duplicate")
    if c.silence == "unripe":  # I6
        return nothing("suspected")
    if c.verdict == "not_final":
        return nothing("not_final")
    provisional = c.silence == "ripe"
    if c.verdict == "success":
        return Expected("settled", "success", c.max_tries, 0, c.used, provisional, "none")
    if c.verdict == "reschedule":
        return Expected(
            "settled", "up_for_reschedule", c.max_tries, 0, c.used, provisional, "reschedule"
        )
    if c.kind == "manual":
        return Expected("settled", "failed", c.max_tries, 0, c.used, provisional, "none")
    if c.kind == "infra" and c.used < c.cap:  # I7
        return Expected(
            "settled", "up_for_retry", c.max_tries + 1, 1, c.used + 1, provisional, "infra"
        )
    if c.try_number <= c.max_tries:
        backoff = "infra" if c.kind == "infra" else "retry"
        return Expected("settled", "up_for_retry", c.max_tries, 0, c.used, provisional, backoff)
    return Expected("settled", "failed", c.max_tries, 0, c.used, provisional, "none")


def test_i1_decide_agrees_with_the_decision_table_for_every_input(connection: Connection) -> None:
    cases = [
        Case(state, *tries, retries, same, *evidence, silence, *refunds, *provisional)
        for state, tries, retries, same, evidence, silence, refunds, provisional in itertools.product(
            STATES,
            TRIES,
            [1, None],
            [True, False],
            EVIDENCE,
            [None, "unripe", "ripe"],
            REFUNDS,
            PROVISIONAL,
        )
    ]
    rows = connection.execute(
        """
        select d.*
        from jsonb_array_elements(%s) with ordinality as a (c, n)
        cross join lateral settle.decide(
            c ->> 0, (c ->> 1)::int, (c ->> 2)::int, (c ->> 3)::int, (c ->> 4)::bool, c ->> 5, c ->> 6,
            c ->> 7, (c ->> 8)::int, (c ->> 9)::int, (c ->> 10)::bool, c ->> 11, (c ->> 12)::bool) as d
        order by a.n
        """,
        (Jsonb(cases),),
    ).fetchall()
    assert len(rows) == len(cases) > 90_000
    got: list[Any] = [Expected(*row.values()) for row in rows]
    wrong = [(c, g, w) for c, g in zip(cases, got, strict=True) if g != (w := table(c))]
    assert not wrong[:5], f"{len(wrong)} combinations differ"


def test_i1_decide_is_declared_immutable_and_reads_no_table(connection: Connection) -> None:
    row = connection.execute(
        "select provolatile, prosrc from pg_proc where oid = 'settle.decide'::regproc"
    ).fetchone()
    assert row
    assert row["provolatile"] == "i"
    assert not re.findall(r"(from|join|update|into)\s+settle\.", row["prosrc"])
