"""The settle rules under any order of events: the database against the model in model.py.

Each example is a script that hypothesis makes up: dispatches, pods with every kind of end, lost
and lingering pods, late reports, people, passes that are complete or not and that overlap, outages.
The model plays it at once; the database plays it in one round trip (machine.sql) on a clock that
stands still, in a transaction that is rolled back. Then every step's answer and state and the
whole end are compared, and the invariants are asserted on what the database did.

PODSETTLE_MACHINE_EXAMPLES sets the number of examples (everyday 200, CI 5000). The same ones are
made up each time, unless PODSETTLE_MACHINE_EXPLORE is set.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from reconciler import database as db
from reconciler.install import install
from tests.sql import hosts
from tests.sql.model import (
    ACTIVE,
    GAP,
    GRACE,
    SECOND,
    Attempt,
    Model,
    Pass,
    Pod,
    Said,
    Suspicion,
    Task,
)

EXAMPLES = int(os.environ.get("PODSETTLE_MACHINE_EXAMPLES", "200"))
EXPLORE = bool(os.environ.get("PODSETTLE_MACHINE_EXPLORE"))
STEPS = 30
VACUUM_EVERY = 100
"""Examples that are rolled back leave dead rows; too many of them make every scan slow."""

AGAIN = 86_400 * SECOND
NAMESPACES = ["a", "b"]

# --- what pods can look like, and what section 7 makes of each --------------------------------------

_NOBODY = hosts.Attempt("", 0, None)
_DRAINED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
_DELETED = {
    "deletion_at": "2026-09-01T10:00:00Z",
    "deletion_grace_seconds": 30,
    "termination_grace_seconds": 30,
}


def _killed(code: int, reason: str = "Error", **facts: Any) -> dict[str, Any]:
    return hosts.pod(_NOBODY, ended={"reason": reason, "exit_code": code}, **facts)


ENDS: dict[str, tuple[Said, dict[str, Any]]] = {
    "running": (Said(None, final=False), hosts.pod(_NOBODY)),
    "success": (Said("success", record=True), hosts.success(_NOBODY)),
    "terminating": (
        Said("failed", "infra", "PodDeleted", final=False, silence="terminating", own_grace=30),
        hosts.terminating(_NOBODY),
    ),
    "slow to end": (
        Said("failed", "infra", "PodDeleted", final=False, silence="terminating", own_grace=90),
        hosts.terminating(_NOBODY, grace=90),
    ),
    "silent": (Said("failed", None, "NoRecord", silence="no_record"), hosts.silent(_NOBODY)),
    "stuck": (
        Said("failed", "infra", "ImagePullBackOff", final=False, silence="pending"),
        hosts.pending(_NOBODY),
    ),
    "starting": (Said(None, final=False), hosts.pending(_NOBODY, "ContainerCreating")),
    "crashed": (Said("failed", "application", "Error"), hosts.crashed(_NOBODY)),
    "said failed": (
        Said("failed", "application", "Error", record=True),
        hosts.crashed(_NOBODY, record={"outcome": "failed", "exit_code": 1}),
    ),
    "said timeout": (
        Said("failed", "timeout", "ExecutionTimeout", record=True),
        _killed(
            143,
            record={
                "outcome": "failed",
                "exit_code": 143,
                "failure_kind": "timeout",
                "reason": "ExecutionTimeout",
            },
        ),
    ),
    "said failed, killed": (
        Said("failed", "infra", "PodDeleted", record=True),
        _killed(143, record={"outcome": "failed", "exit_code": 143}, **_DELETED),
    ),
    "evicted": (Said("failed", "infra", "Evicted"), hosts.evicted(_NOBODY)),
    "drained": (
        Said("failed", "infra", "EvictionByEvictionAPI"),
        _killed(143, conditions=_DRAINED),
    ),
    "drained, but done": (
        Said("success", record=True),
        _killed(143, conditions=_DRAINED, record={"outcome": "success"}, **_DELETED),
    ),
    "out of memory": (
        Said("failed", "application", "OOMKilled"),
        hosts.pod(
            _NOBODY, ended={"reason": "OOMKilled", "exit_code": 137, "own_memory_limit": True}
        ),
    ),
    "deadline": (
        Said("failed", "timeout", "DeadlineExceeded"),
        _killed(137, pod_reason="DeadlineExceeded"),
    ),
    "killed by nobody": (Said("failed", None, "Error"), _killed(137)),
    "poke": (
        Said("reschedule", record=True, at=AGAIN),
        hosts.poke(_NOBODY, "2026-09-02T00:00:00Z"),
    ),
}

REPORTS = {
    "success": Said("success"),
    "failed": Said("failed", "application", "Error"),
    "timeout": Said("failed", "timeout", "ExecutionTimeout"),
    "reschedule": Said("reschedule", at=AGAIN),
}
SAYINGS = {
    "succeed": Said("success"),
    "fail": Said("failed", None, "seen it"),
    "fail infra": Said("failed", "infra", "seen it"),
    "fail application": Said("failed", "application", "seen it"),
    "fail timeout": Said("failed", "timeout", "seen it"),
    "fail manual": Said("failed", "manual", "seen it"),
    "reschedule": Said("reschedule", at=AGAIN),
    "mark failed": Said("failed", "manual", "enough"),
    "clear": Said("clear"),
}
RULES = {
    "absent": "absent",
    "no_record": "no-record",
    "pending": "never-starts",
    "terminating": "terminating",
}

few = st.integers(0, 7)
"""Picks from a list that grows, newest first, so that small numbers and the present go together."""
ends = st.sampled_from(list(ENDS))
waits = st.sampled_from([1, 5, 16, 29, 30, 31, 60, 61, 90, 149, 150, 151, 300, 400, 700, 40_000])


@dataclass
class Step:
    """One operation for the database and what the model says of it."""

    op: dict[str, Any]
    result: Any
    tasks: list[Any]
    suspicions: list[Any]
    ledger: int


class Machine(RuleBasedStateMachine):
    """Makes up a script, plays it on the model, then on the database, and compares."""

    def __init__(self, play: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        super().__init__()
        self.play = play
        self.model = Model()
        self.steps: list[Step] = []
        self.pods: list[Pod] = []
        self.open: list[Pass] = []
        self.names = 0

    # --- the script --------------------------------------------------------------------------

    def do(self, verb: str, result: Any = None, **op: Any) -> None:
        m = self.model
        self.steps.append(
            Step(
                {"do": verb, "at": m.now, **op},
                list(result) if isinstance(result, tuple) else result,
                [
                    (t.state, t.try_number, t.max_tries, t.attempt and t.attempt.number, t.next_try)
                    for t in m.tasks
                ],
                [
                    [t.number, s.cause, t.attempt and t.attempt.number, s.pod, s.passes, s.age]
                    for t in m.tasks
                    if (s := t.suspicion)
                ],
                len(m.ledger),
            )
        )

    def task(self, n: int) -> Task:
        return self.model.tasks[-1 - n % len(self.model.tasks)]

    def attempt(self, n: int) -> Attempt:
        return self.model.attempts[-1 - n % len(self.model.attempts)]

    def later(self, seconds: int) -> None:
        # To a whole second: passes that each took one tick are then exactly so far apart.
        self.model.now = (self.model.now // SECOND + seconds) * SECOND

    def pod(self, of: Attempt, end: str, **claims: Any) -> None:
        self.names += 1
        task = of.task
        claim = {
            "task": task.number,
            "try_number": of.try_number,
            "attempt": of.number,
            **claims,
        }
        namespace = task.namespace or NAMESPACES[task.number % 2]
        self.pods.append(Pod(f"p{self.names}", namespace, end=end, said=ENDS[end][0], **claim))

    def open_pass(self, namespace: str | None, *, api: bool) -> Pass | None:
        # Two transactions never begin in the same instant.
        self.model.now += 1
        opened = self.model.open_pass(namespace, api=api)
        self.do("open", opened is not None, namespace=namespace, api=api)
        return opened

    def page(self, current: Pass, pods: list[Pod]) -> None:
        rows = self.model.page(current, pods)
        listed = [
            {
                "task": p.task,
                "try": p.try_number,
                "attempt": p.attempt,
                "facts": ENDS[p.end][1] | {"pod": p.name, "namespace": p.namespace},
            }
            for p in pods
        ]
        self.do("page", [list(r) for r in rows], **{"pass": current.number}, pods=listed)

    def close(self, current: Pass, *, complete: bool) -> None:
        rows = self.model.close(current, complete=complete)
        self.do(
            "close",
            [[task, RULES[str(cause)], *rest] for task, cause, *rest in rows],
            **{"pass": current.number},
            complete=complete,
            seen=sorted(current.seen),
        )

    # --- the orchestrator ----------------------------------------------------------------------

    @initialize(listeners=st.integers(0, 2), retries=st.integers(0, 2))
    def begin(self, listeners: int, retries: int) -> None:
        for n in range(listeners):
            self.listener(f"l{n}", on=True)
        self.create(retries, None)
        self.dispatch(0, "running", started=True)

    @precondition(lambda self: len(self.model.tasks) < 4)
    @rule(retries=st.integers(0, 2), namespace=st.sampled_from([None, *NAMESPACES]))
    def create(self, retries: int, namespace: str | None) -> None:
        n = len(self.model.tasks)
        dag, name, delay = f"d{n % 2}", f"t{n}", 300
        self.model.create(dag, name, namespace, retries, delay * SECOND)
        self.do(
            "create",
            dag=dag,
            name=name,
            namespace=namespace,
            retries=retries,
            retry_delay=delay,
        )

    @rule(n=few, end=st.none() | ends, started=st.booleans())
    def dispatch(self, n: int, end: str | None, *, started: bool) -> None:
        """The next attempt, mostly of what can have one, after a clear where it is done."""
        task = self.task(n)
        if n < 6:
            idle = [t for t in self.model.tasks if t.state not in ACTIVE]
            if not idle and len(self.model.tasks) < 4:
                self.create(n % 3, None)
                idle = self.model.tasks[-1:]
            task = idle[-1 - n % len(idle)] if idle else task
            if task.state in {"success", "failed"}:
                self.person(task, None, Said("clear"))
        self.attempts_again(task, end, started=started)

    def attempts_again(self, task: Task, end: str | None, *, started: bool = True) -> None:
        attempt = self.model.dispatch(task)
        self.do("dispatch", attempt.try_number if attempt else {"error": "ST003"}, task=task.number)
        if attempt is None:
            return
        if started:
            self.start(attempt)
        if end is not None:
            self.pod(attempt, end)

    def start(self, attempt: Attempt) -> None:
        self.do("started", self.model.started(attempt), attempt=attempt.number)

    @precondition(lambda self: any(t.used for t in self.model.tasks))
    @rule(n=few, by=st.integers(0, 2), end=st.none() | ends)
    def counts_anew(self, n: int, by: int, end: str | None) -> None:
        """A person clears what was refunded, or raises its max_tries in the table; it goes on."""
        refunded = [t for t in self.model.tasks if t.used]
        task = refunded[n % len(refunded)]
        if by:
            self.model.raise_max_tries(task, by)
            self.do("raise", task=task.number, by=by)
        else:
            self.person(task, None, SAYINGS["clear"])
        self.attempts_again(task, end)
        self.look(1)

    @rule(n=few, what=st.sampled_from(["cap", "d0", "d1", "t0", "l0", "l1"]), cap=st.integers(0, 3))
    def person_changes(self, n: int, what: str, cap: int) -> None:
        """A person changes the cap, or who listens."""
        if what == "cap":
            self.model.cap_setting = cap
            self.do("setting", name="max_infra_refunds", value=str(cap))
        elif what[0] == "l":
            self.listener(what, on=cap < 2)
        else:
            dag, name = ("d0", "t0") if what == "t0" else (what, None)
            self.model.policies[dag, name] = cap
            self.do("policy", dag=dag, name=name, cap=cap)

    def listener(self, name: str, *, on: bool) -> None:
        if on or name in self.model.listeners:
            self.model.listeners[name] = on
            self.do("listen" if on else "unlisten", name=name)

    # --- pods ----------------------------------------------------------------------------------

    @precondition(lambda self: self.pods)
    @rule(n=few, end=ends)
    def pod_becomes(self, n: int, end: str) -> None:
        at = len(self.pods) - 1 - n % len(self.pods)
        self.pods[at] = replace(self.pods[at], end=end, said=ENDS[end][0])

    @precondition(lambda self: self.pods)
    @rule(n=few)
    def pod_vanishes(self, n: int) -> None:
        del self.pods[-1 - n % len(self.pods)]

    @precondition(lambda self: len(self.pods) < 8)
    @rule(
        n=few,
        end=ends,
        claims=st.sampled_from(["own", "own", "own", "other", "no attempt", "try", "unknown"]),
    )
    def another_pod(self, n: int, end: str, claims: str) -> None:
        """Another pod of an attempt, made twice or not seen so far; or one that claims to be."""
        attempt = self.attempt(n)
        if claims == "own":
            self.pod(attempt, end)
        elif claims == "other":
            others = [a.number for a in self.model.attempts if a is not attempt]
            self.pod(attempt, end, attempt=others[-1] if others else None)
        elif claims == "no attempt":
            self.pod(attempt, end, attempt=None)
        elif claims == "try":
            self.pod(attempt, end, try_number=attempt.try_number + 1)
        else:
            self.pod(attempt, end, task=None)

    # --- agents and people -----------------------------------------------------------------------

    @rule(
        n=few,
        what=st.sampled_from(["started", "push", *REPORTS]),
        times=st.integers(1, 2),
        key=st.sampled_from(["return_value", "link"]),
    )
    def agent(self, n: int, what: str, times: int, key: str) -> None:
        """What the agent of a current or superseded attempt calls, in time or late, repeated."""
        attempt = self.attempt(n)
        for time in range(times):
            if what == "started":
                self.start(attempt)
            elif what == "push":
                kept = self.model.push(attempt, key, time)
                self.do("push", kept, attempt=attempt.number, key=key, value=time)
            else:
                said = REPORTS[what]
                self.do(
                    "report",
                    self.model.report(attempt, said),
                    attempt=attempt.number,
                    outcome=said.verdict,
                    # One that says no more than failed is an application's Error.
                    kind=None if what == "failed" else said.kind,
                    reason=None if what == "failed" else said.reason,
                    again=said.at,
                )

    def person(self, task: Task, try_number: int | None, said: Said) -> None:
        self.do(
            "person",
            self.model.person(task, try_number, said),
            task=task.number,
            verdict=said.verdict,
            kind=said.kind,
            reason=said.reason,
            again=said.at,
            **{"try": try_number},
        )

    @rule(n=few, saying=st.sampled_from(list(SAYINGS)), off=st.sampled_from([0, 0, 0, -1, 1]))
    def says(self, n: int, saying: str, off: int) -> None:
        task = self.task(n)
        said = SAYINGS[saying]
        whole = saying in {"mark failed", "clear"}
        self.person(task, None if whole else max(task.try_number + off, 1), said)

    @precondition(lambda self: any(t.doubtful for t in self.model.tasks))
    @rule(
        n=few,
        how=st.sampled_from(["record", "record", "report", "push", "person"]),
        what=st.sampled_from(["success", "evicted", "said failed", "silent", "running"]),
    )
    def comes_back(self, n: int, how: str, what: str) -> None:
        """Something late of an attempt that was settled for its silence."""
        doubtful = [t for t in self.model.tasks if t.doubtful]
        task = doubtful[n % len(doubtful)]
        assert task.attempt
        if how == "record":
            self.pod(task.attempt, what)
            self.look(1)
        elif how == "person":
            self.says(-1 - task.number, "succeed" if what == "success" else "fail infra", 0)
        else:
            at = len(self.model.attempts) - 1 - task.attempt.number
            outcome = "success" if what == "success" else "failed"
            self.agent(at, "push" if how == "push" else outcome, 1, "link")

    # --- passes and time -------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 3),
        seconds=waits,
        complete=st.sampled_from([True, True, True, False]),
        namespace=st.sampled_from([None, None, None, *NAMESPACES]),
        pages=st.integers(1, 2),
        api=st.booleans(),
    )
    def passes(
        self, count: int, seconds: int, complete: bool, namespace: str | None, pages: int, api: bool
    ) -> None:
        """Whole passes, each some time after the one before."""
        for _ in range(count):
            self.later(seconds)
            current = self.open_pass(namespace, api=api)
            if current is None:
                continue
            pods = [p for p in self.pods if current.covers(p.namespace)]
            half = len(pods) // pages
            for page in (pods,) if pages == 1 else (pods[half:], pods[:half]):
                self.page(current, page)
            self.close(current, complete=complete)

    @precondition(lambda self: self.doubts())
    @rule(n=few, gap=st.sampled_from([60, 149, 150]), off=st.sampled_from([0, 0, 1, -1, 30]))
    def watch(self, n: int, gap: int, off: int) -> None:
        """Passes until the grace of a suspicion is over, to the second, or just not."""
        doubts = self.doubts()
        doubt = doubts[n % len(doubts)]
        left = (doubt.grace() - doubt.aged(self.model.now)) // SECOND + off
        self.look(1)
        while left > 0:
            self.look(min(gap, left))
            left -= gap

    def doubts(self) -> list[Suspicion]:
        return [t.suspicion for t in self.model.tasks if t.suspicion]

    def look(self, seconds: int) -> None:
        """One plain pass, so much later."""
        self.passes(1, seconds, complete=True, namespace=None, pages=1, api=False)

    @rule(n=few, end=st.sampled_from([None, "silent", "stuck", "terminating", "slow to end"]))
    def goes_silent(self, n: int, end: str | None) -> None:
        """An attempt of which nothing more is heard than silence, and a pass that sees it."""
        self.dispatch(n % 6, end, started=n % 2 == 0)
        self.look(5)

    @precondition(lambda self: len(self.open) < 2)
    @rule(namespace=st.sampled_from([None, None, *NAMESPACES]), api=st.booleans())
    def opens(self, namespace: str | None, *, api: bool) -> None:
        current = self.open_pass(namespace, api=api)
        if current is not None:
            self.open.append(current)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1), skip=few)
    def lists(self, which: int, skip: int) -> None:
        """A page of an open pass: all pods but a few."""
        current = self.open[which % len(self.open)]
        pods = [p for p in self.pods if current.covers(p.namespace)]
        self.page(current, pods[skip // 4 :])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1), complete=st.sampled_from([True, True, False]))
    def closes(self, which: int, *, complete: bool) -> None:
        self.close(self.open.pop(which % len(self.open)), complete=complete)

    @rule(seconds=waits)
    def waits(self, seconds: int) -> None:
        """Time goes by; with hours of it, an outage of the pass, whatever was open still open."""
        self.later(seconds)

    # --- the comparison --------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.steps:
            return
        script = [step.op for step in self.steps]
        got = self.play(script)
        self.compare(got)
        for invariant in INVARIANTS:
            invariant(Done(script, got))

    def compare(self, got: dict[str, Any]) -> None:
        for n, (step, answer) in enumerate(zip(self.steps, got["steps"], strict=True)):
            where = f"step {n}, {step.op}"
            assert answer["result"] == step.result, where
            assert len(answer["tasks"] or []) == len(step.tasks), where
            for task, (row, want) in enumerate(zip(answer["tasks"] or [], step.tasks, strict=True)):
                assert tuple(row[:4]) == want[:4], f"{where}: task {task}"
                assert _within(row[4], want[4]), f"{where}: next_try_at of task {task}"
            assert answer["suspicions"] == step.suspicions, where
            assert answer["ledger"] == step.ledger, where
        m = self.model
        for task in m.tasks:
            rows = [row for row in got["ledger"] if row["task"] == task.number]
            entries = [(n, e) for n, e in enumerate(m.ledger) if e.task == task.number]
            for row, (n, entry) in zip(rows, entries, strict=True):
                want = vars(entry).copy()
                assert _within(row["next_try"], want.pop("next_try")), (row, entry)
                assert {name: row[name] for name in want} == want, (row, entry)
                told = sorted(listener for at, listener in m.outbox if at == n)
                assert row["told"] == told, (row, told)
        assert got["outbox"] == len(m.outbox)
        assert got["pushed"] == [[a, k, v] for (a, k), v in sorted(m.pushed.items())]
        assert got["open"] == [p.number for p in m.passes if p.open]
        assert got["leases"] == sorted(holder.number for holder, _ in m.leases.values())


def _within(moment: int | None, allowed: tuple[int, int] | None) -> bool:
    if moment is None or allowed is None:
        return moment is allowed is None
    return allowed[0] <= moment <= allowed[1]


# --- the invariants, of what the database did, whatever the model thinks ----------------------------


class Done:
    """A played script: each operation, what the database answered, and the rows that it wrote."""

    def __init__(self, script: list[dict[str, Any]], got: dict[str, Any]) -> None:
        self.script = script
        self.answers: list[dict[str, Any]] = got["steps"]
        self.ledger: list[dict[str, Any]] = got["ledger"]
        counts = [0, *(answer["ledger"] for answer in self.answers)]
        self.written = [self.ledger[a:b] for a, b in pairwise(counts)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
        return iter(zip(self.script, self.answers, self.written, strict=True))

    def of_attempts(self) -> dict[tuple[int, int | None], list[dict[str, Any]]]:
        """The ledger by attempt, clears left out: they say nothing of an attempt."""
        found: dict[tuple[int, int | None], list[dict[str, Any]]] = {}
        for row in self.ledger:
            if row["verdict"] != "clear":
                found.setdefault((row["task"], row["attempt"]), []).append(row)
        return found


def i2_evidence_acts_only_on_the_attempt_that_it_comes_from(done: Done) -> None:
    current: list[Any] = []
    for op, answer, written in done:
        for row in written:
            assert current[row["task"]][3] == row["attempt"], (op, row)
            if op["do"] == "report":
                assert row["attempt"] == op["attempt"], (op, row)
            elif op["do"] == "page":
                (pod,) = [p for p in op["pods"] if p["facts"]["pod"] == row["pod"]]
                claim = (pod["task"], pod["attempt"], pod["try"])
                assert claim == (row["task"], row["attempt"], row["try_number"]), (op, row)
            elif op["do"] == "person":
                assert (row["task"], row["try_number"]) == (
                    op["task"],
                    row["try_number"] if op["try"] is None else op["try"],
                ), (op, row)
        current = answer["tasks"] or []


def i3_an_attempt_is_settled_once(done: Done) -> None:
    for rows in done.of_attempts().values():
        assert rows[0]["disposition"] == "settled", rows
        assert len(rows) == 1 or (rows[0]["provisional"] and len(rows) == 2), rows
        if len(rows) == 2:
            assert rows[1]["disposition"] in {"overrode", "confirmed"}, rows
            assert rows[1]["source"] != "pass" or rows[1]["rule"] not in RULES.values(), rows


def i4_nothing_is_a_success_that_nobody_said(done: Done) -> None:
    for row in done.ledger:
        if row["state"] == "success":
            assert row["record"] or row["source"] in {"report", "person"}, row


def i6_silence_is_settled_late_and_provisionally(done: Done) -> None:
    """Two complete passes must have seen it themselves, and its grace be over in between.

    Without the time in which no complete pass ran.
    """
    complete = {
        op["pass"]: n for n, op in enumerate(done.script) if op["do"] == "close" and op["complete"]
    }
    sightings: dict[tuple[str, Any], list[tuple[int, int]]] = {}
    for n, (op, answer, written) in enumerate(done):
        if op["do"] == "page":
            for pod, row in zip(op["pods"], answer["result"], strict=True):
                if row[0] == "suspected":
                    key = ("pod", pod["facts"]["pod"])
                    sightings.setdefault(key, []).append((op["pass"], op["at"]))
        elif op["do"] == "close" and op["complete"]:
            for task in range(len(answer["tasks"] or [])):
                if task not in op["seen"]:
                    key = ("absent", task)
                    sightings.setdefault(key, []).append((op["pass"], op["at"]))
        for row in written:
            cause = {rule: cause for cause, rule in RULES.items()}.get(row["rule"])
            assert row["provisional"] == (cause is not None), row
            if cause is None:
                continue
            assert op["do"] == "close", (op, row)
            key = ("absent", row["task"]) if cause == "absent" else ("pod", row["pod"])
            seen = [(p, at) for p, at in sightings.get(key, []) if complete.get(p, n + 1) <= n]
            assert len({p for p, _ in seen}) >= 2, (op, row, seen)
            since = min(at for _, at in seen)
            closes = [done.script[c]["at"] for c in complete.values() if c <= n]
            gaps = [b - a for a, b in pairwise(sorted(closes)) if a >= since]
            counted = sum(gap for gap in gaps if gap <= GAP)
            assert counted >= GRACE[cause] * SECOND, (op, row, seen, closes)


def i7_only_infra_is_refunded_within_the_cap(done: Done) -> None:
    used: Counter[int] = Counter()
    left: dict[int, int] = {}
    for row in done.ledger:
        task = row["task"]
        if row["verdict"] == "clear" or left.get(task, row["previous_max"]) != row["previous_max"]:
            used[task] = 0
        used[task] += row["refund"]
        assert row["used"] == used[task] >= 0, row
        if row["refund"] == 1:
            assert row["kind"] == "infra", row
            assert used[task] <= row["cap"], row
        if row["verdict"] != "clear":
            assert row["max_tries"] == row["previous_max"] + row["refund"], row
        if row["kind"] == "infra" and row["disposition"] == "settled" and row["refund"] == 0:
            assert used[task] >= row["cap"], row
        left[task] = row["max_tries"]
    # A refund is taken back at most once, and only where there was one.
    for rows in done.of_attempts().values():
        assert sum(row["refund"] for row in rows) in {0, 1}, rows


def i11_a_transition_writes_one_ledger_row_and_one_outbox_row_a_listener(done: Done) -> None:
    listening: set[str] = set()
    states: list[str] = []
    for op, answer, written in done:
        if op["do"] == "listen":
            listening.add(op["name"])
        elif op["do"] == "unlisten":
            listening.discard(op["name"])
        for task, row in enumerate(answer["tasks"] or []):
            before = states[task] if task < len(states) else "none"
            moves = [r for r in written if r["task"] == task and r["disposition"] != "confirmed"]
            if op["do"] in {"dispatch", "started"}:
                assert not moves, (op, moves)
            else:
                chain = [before, *(r["state"] for r in moves)]
                assert [r["previous"] for r in moves] == chain[:-1], (op, moves)
                assert chain[-1] == row[0], (op, moves)
        for row in written:
            told = [] if row["disposition"] == "confirmed" else sorted(listening)
            assert row["told"] == told, (op, row)
        states = [row[0] for row in answer["tasks"] or []]


INVARIANTS = [
    i2_evidence_acts_only_on_the_attempt_that_it_comes_from,
    i3_an_attempt_is_settled_once,
    i4_nothing_is_a_success_that_nobody_said,
    i6_silence_is_settled_late_and_provisionally,
    i7_only_infra_is_refunded_within_the_cap,
    i11_a_transition_writes_one_ledger_row_and_one_outbox_row_a_listener,
]


# --- the test ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine_connection(embedded_dsn: str) -> Iterator[db.Connection]:
    """One database for all examples; locks are not under test here."""
    name = "machine"
    with psycopg.connect(embedded_dsn, autocommit=True) as admin:
        admin.execute(f'create database "{name}"')
        with db.connect(psycopg.conninfo.make_conninfo(embedded_dsn, dbname=name)) as connection:
            install(connection)
            connection.execute((Path(__file__).parent / "machine.sql").read_text())
            yield connection
        admin.execute(f'drop database "{name}" with (force)')


@pytest.fixture
def play(
    machine_connection: db.Connection,
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    played = 0

    def play(script: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal played
        played += 1
        if played % VACUUM_EVERY == 0:
            machine_connection.execute("vacuum")
        with machine_connection.transaction(force_rollback=True):
            row = machine_connection.execute(
                "select public.play(%s) as got", (Jsonb(script),)
            ).fetchone()
        assert row
        return row["got"]

    return play


def test_any_order_of_events_ends_as_the_model_says(
    play: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """I2, I3, I4, I6, I7 and I11, and that the whole database agrees with the model."""
    run_state_machine_as_test(
        lambda: Machine(play),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=not EXPLORE,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
