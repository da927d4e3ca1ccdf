"""The settle rules once more, as a small program of its own.

Written from DESIGN.md (sections 2, 7 and 8) and docs/suspicions.md, not from the SQL, for
test_machine.py to compare with. It knows no database: task instances, attempts and passes are
numbers in the order in which they were made, time is whole microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECOND = 1_000_000
ACTIVE = frozenset({"queued", "running"})

# The settings as they are installed.
GAP = 150 * SECOND
GRACE = {"absent": 60, "no_record": 60, "pending": 600, "terminating": 300}
LEASE = 15 * SECOND
INFRA_DELAY = (10 * SECOND, 40 * SECOND)


@dataclass(frozen=True)
class Said:
    """What evidence says of its attempt.

    Attributes:
        verdict: success, failed, reschedule or clear; what it would be, where it is a silence.
        final: False for a pod that has not ended.
        silence: The cause, where it is only a suspicion.
        own_grace: Seconds that the pod itself may take on top of the setting.
        at: When to run again, for a reschedule.
    """

    verdict: str | None
    kind: str | None = None
    reason: str | None = None
    final: bool = True
    record: bool = False
    silence: str | None = None
    own_grace: int = 0
    at: int | None = None

    def strength(self) -> tuple[int, bool, bool, bool]:
        """Order pods of one task instance in one page: the strongest is decided first."""
        order = ["success", "reschedule", "failed"]
        rank = order.index(self.verdict) if self.final and self.verdict else len(order)
        return rank, self.silence is not None, not self.record, self.kind is None


@dataclass(eq=False)
class Attempt:
    number: int
    task: Task
    try_number: int


@dataclass(frozen=True)
class Pod:
    """A pod as a pass lists it, with what it claims to be; attempt None: it names none."""

    name: str
    namespace: str
    task: int | None
    try_number: int
    attempt: int | None
    end: str
    said: Said


@dataclass
class Entry:
    """A row of the ledger."""

    task: int
    attempt: int | None
    try_number: int
    disposition: str
    verdict: str
    kind: str | None
    reason: str | None
    previous: str
    state: str
    refund: int
    used: int
    cap: int
    previous_max: int
    max_tries: int
    provisional: bool
    record: bool
    source: str
    pod: str | None
    settled_at: int
    next_try: tuple[int, int] | None = None
    """The earliest and the latest moment that next_try_at may have."""


@dataclass(eq=False)
class Suspicion:
    cause: str
    said: Said
    pod: str | None
    namespace: str | None
    seen_at: int
    seen_by: set[int]
    passes: int = 0
    age: int = 0
    counted_at: int | None = None

    def aged(self, now: int) -> int:
        """Age, if a complete pass counts it now: a longer gap than GAP counts nothing."""
        gap = now - self.counted_at if self.counted_at is not None else 0
        return self.age + (gap if gap <= GAP else 0)

    def grace(self) -> int:
        return (GRACE[self.cause] + self.said.own_grace) * SECOND


@dataclass(eq=False)
class Task:
    number: int
    dag: str
    name: str
    namespace: str | None
    retries: int
    retry_delay: int
    max_tries: int
    state: str = "none"
    try_number: int = 0
    attempt: Attempt | None = None
    queued_at: int | None = None
    next_try: tuple[int, int] | None = None
    used: int = 0
    """Refunds of this life."""
    doubtful: Entry | None = None
    """The provisional settlement of the current attempt, as long as a success would replace it."""
    suspicion: Suspicion | None = None


@dataclass(eq=False)
class Pass:
    number: int
    opened_at: int
    namespace: str | None
    api: bool
    seen: set[int] = field(default_factory=set)
    open: bool = True

    def covers(self, namespace: str | None) -> bool:
        return self.namespace is None or namespace == self.namespace


Row = tuple[object, ...]


class Model:
    """Everything that the database is to hold."""

    def __init__(self) -> None:
        self.now = 0
        self.tasks: list[Task] = []
        self.attempts: list[Attempt] = []
        self.passes: list[Pass] = []
        self.ledger: list[Entry] = []
        self.listeners: dict[str, bool] = {}
        self.outbox: list[tuple[int, str]] = []
        self.pushed: dict[tuple[int, str], int] = {}
        self.leases: dict[str | None, tuple[Pass, int]] = {}
        self.cap_setting = 3
        self.policies: dict[tuple[str, str | None], int] = {}

    # --- the orchestrator ------------------------------------------------------------------------

    def create(
        self, dag: str, name: str, namespace: str | None, retries: int, retry_delay: int
    ) -> Task:
        task = Task(len(self.tasks), dag, name, namespace, retries, retry_delay, max_tries=retries)
        self.tasks.append(task)
        return task

    def dispatch(self, task: Task) -> Attempt | None:
        """Begin an attempt; None: the task instance is in a state that has one, or is done."""
        if task.state not in {"none", "up_for_retry", "up_for_reschedule"}:
            return None
        if task.state != "up_for_reschedule":
            task.try_number += 1
        task.attempt = Attempt(len(self.attempts), task, task.try_number)
        self.attempts.append(task.attempt)
        task.state, task.queued_at, task.next_try, task.doubtful = "queued", self.now, None, None
        return task.attempt

    def started(self, attempt: Attempt) -> str:
        if attempt.task.attempt is not attempt:
            return "stale"
        if attempt.task.state != "queued":
            return "duplicate"
        attempt.task.state = "running"
        return "settled"

    def raise_max_tries(self, task: Task, by: int) -> None:
        """What a person does to the table by hand: the count of refunds starts again (I7)."""
        task.max_tries += by
        task.used = 0

    def cap(self, task: Task) -> int:
        for key in ((task.dag, task.name), (task.dag, None)):
            if key in self.policies:
                return self.policies[key]
        return self.cap_setting

    # --- agents and people -----------------------------------------------------------------------

    def report(self, attempt: Attempt, said: Said) -> Row:
        task = attempt.task
        if task.attempt is not attempt:
            return ("stale", None)
        return (self._settle(task, said, source="report"), task.state)

    def push(self, attempt: Attempt, key: str, value: int) -> str:
        task = attempt.task
        if task.attempt is not attempt:
            return "stale"
        if task.state not in ACTIVE and task.doubtful is None:
            return "duplicate"
        self.pushed[attempt.number, key] = value
        return "settled"

    def person(self, task: Task, try_number: int | None, said: Said) -> Row:
        """A person names no attempt but a try_number, or (a mark, a clear) the current one."""
        before = task.state
        if try_number not in {None, task.try_number}:
            return ("stale", before, before, task.max_tries)
        disposition = self._settle(task, said, source="person")
        return (disposition, before, task.state, task.max_tries)

    # --- passes ----------------------------------------------------------------------------------

    def open_pass(self, namespace: str | None, *, api: bool) -> Pass | None:
        """Open a pass; None: another one that lists the API holds the lease of this scope."""
        if api:
            _, until = self.leases.get(namespace, (None, self.now))
            if until > self.now:
                return None
        opened = Pass(len(self.passes), self.now, namespace, api)
        self.passes.append(opened)
        if api:
            self.leases[namespace] = (opened, self.now + LEASE)
        return opened

    def page(self, current: Pass, pods: list[Pod]) -> list[Row]:
        """Settle a page; returns disposition, previous state, state, max_tries, refund of each."""
        if current.api and self.leases.get(current.namespace, (None, 0))[0] is current:
            self.leases[current.namespace] = (current, self.now + LEASE)
        rows: dict[int, Row] = {}
        doubts: list[tuple[int, Task, Pod]] = []
        order = sorted(range(len(pods)), key=lambda n: (pods[n].said.strength(), n))
        for n in order:
            pod = pods[n]
            if pod.task is None:
                rows[n] = ("unmatched", None, None, None, None)
                continue
            task = self.tasks[pod.task]
            before = task.state
            written = len(self.ledger)
            if task.attempt is None or (pod.try_number, pod.attempt) != (
                task.try_number,
                task.attempt.number,
            ):
                disposition = "stale"
            else:
                disposition = self._settle(task, pod.said, source="pass", pod=pod.name)
            if disposition != "stale":
                current.seen.add(task.number)
            if disposition == "suspected":
                doubts.append((n, task, pod))
            refund = self.ledger[-1].refund if len(self.ledger) > written else 0
            rows[n] = (disposition, before, task.state, task.max_tries, refund)
        for task in {task for _, task, _ in doubts}:
            self._suspect(
                current,
                task,
                [
                    (p.said, p.name, p.namespace)
                    for _, t, p in sorted(doubts, key=lambda d: d[0])
                    if t is task
                ],
            )
        return [rows[n] for n in range(len(pods))]

    def close(self, current: Pass, *, complete: bool) -> list[Row]:
        """Close a pass; returns task, cause, disposition and state of each settled suspicion."""
        current.open = False
        if self.leases.get(current.namespace, (None, 0))[0] is current:
            del self.leases[current.namespace]
        if not complete:
            return []
        settled: list[Row] = []
        absent = {
            task: Said(
                "failed",
                "infra",
                "PodDeleted" if task.state == "running" else "PodAbsent",
                silence="absent",
            )
            for task in self.tasks
            if task.state in ACTIVE
            and task.queued_at is not None
            and task.queued_at < current.opened_at
            and current.covers(task.namespace)
            and task.number not in current.seen
        }
        for task in self.tasks:
            doubt = task.suspicion
            if doubt is None or not current.covers(doubt.namespace):
                continue
            saw = task in absent if doubt.cause == "absent" else current.number in doubt.seen_by
            if saw and doubt.passes >= 1 and doubt.aged(self.now) >= doubt.grace():
                said = absent[task] if doubt.cause == "absent" else doubt.said
                disposition = self._settle(task, said, source="pass", pod=doubt.pod, ripe=True)
                settled.append((task.number, doubt.cause, disposition, task.state))
                absent.pop(task, None)
        for task, said in absent.items():
            self._suspect(current, task, [(said, None, task.namespace)])
        for task in self.tasks:
            doubt = task.suspicion
            if doubt is None or not current.covers(doubt.namespace):
                continue
            if doubt.seen_at < current.opened_at:
                task.suspicion = None
            elif current.number in doubt.seen_by:
                doubt.age, doubt.passes, doubt.counted_at = (
                    doubt.aged(self.now),
                    doubt.passes + 1,
                    self.now,
                )
        return settled

    def _suspect(
        self,
        current: Pass,
        task: Task,
        doubts: list[tuple[Said, str | None, str | None]],
    ) -> None:
        """See doubts of one task instance; it has one suspicion at a time.

        The one that it has goes on while it is still seen, whatever else is; another takes its
        place only when it was not seen since the pass opened.
        """
        old = task.suspicion
        if old is not None:
            for said, pod, _ in doubts:
                if (said.silence, pod) == (old.cause, old.pod):
                    old.said, old.seen_at = said, self.now
                    old.seen_by.add(current.number)
                    return
            if old.seen_at >= current.opened_at:
                return
        said, pod, namespace = doubts[0]
        assert said.silence
        task.suspicion = Suspicion(said.silence, said, pod, namespace, self.now, {current.number})

    # --- the settle rule -------------------------------------------------------------------------

    def _settle(
        self, task: Task, said: Said, *, source: str, pod: str | None = None, ripe: bool = False
    ) -> str:
        """Section 8, for evidence of the current attempt: make the transition, if there is one."""
        verdict, doubtful = said.verdict, task.doubtful
        if verdict == "clear":
            if task.state == "none":
                return "duplicate"
            previous_max = task.max_tries
            task.max_tries, task.used = task.try_number + task.retries, 0
            self._write(task, said, "settled", "none", source, previous_max=previous_max)
            return "settled"

        if doubtful is not None and said.silence is None and said.final:
            if verdict == "success":
                # After a person's change of max_tries the count began anew: nothing to take back.
                back = int(doubtful.refund == 1 and task.max_tries == doubtful.max_tries)
                previous_max = task.max_tries
                task.max_tries -= back
                task.used -= back
                self._write(
                    task,
                    said,
                    "overrode",
                    "success",
                    source,
                    pod=pod,
                    refund=-back,
                    previous_max=previous_max,
                )
                return "overrode"
            if verdict == "failed" and said.kind == doubtful.kind:
                self._write(task, said, "confirmed", task.state, source, pod=pod)
                return "confirmed"

        if task.state not in ACTIVE:
            return "duplicate"
        if said.silence is not None and not ripe:
            return "suspected"
        if not said.final and not ripe:
            return "not_final"

        if verdict == "success":
            self._write(task, said, "settled", "success", source, pod=pod)
        elif verdict == "reschedule":
            assert said.at is not None
            self._write(
                task,
                said,
                "settled",
                "up_for_reschedule",
                source,
                pod=pod,
                next_try=(said.at, said.at),
            )
        elif said.kind == "infra" and task.used < self.cap(task):
            task.used += 1
            task.max_tries += 1
            self._write(
                task,
                said,
                "settled",
                "up_for_retry",
                source,
                pod=pod,
                refund=1,
                previous_max=task.max_tries - 1,
                provisional=ripe,
                next_try=self._after(*INFRA_DELAY),
            )
        elif said.kind != "manual" and task.try_number <= task.max_tries:
            delay = (task.retry_delay, task.retry_delay)
            self._write(
                task,
                said,
                "settled",
                "up_for_retry",
                source,
                pod=pod,
                provisional=ripe,
                next_try=self._after(*(INFRA_DELAY if said.kind == "infra" else delay)),
            )
        else:
            self._write(task, said, "settled", "failed", source, pod=pod, provisional=ripe)
        return "settled"

    def _after(self, least: int, most: int) -> tuple[int, int]:
        return self.now + least, self.now + most

    def _write(
        self,
        task: Task,
        said: Said,
        disposition: str,
        state: str,
        source: str,
        *,
        pod: str | None = None,
        refund: int = 0,
        previous_max: int | None = None,
        provisional: bool = False,
        next_try: tuple[int, int] | None = None,
    ) -> None:
        assert said.verdict
        entry = Entry(
            task=task.number,
            attempt=task.attempt.number if task.attempt else None,
            try_number=task.try_number,
            disposition=disposition,
            verdict=said.verdict,
            kind=said.kind,
            reason=said.reason,
            previous=task.state,
            state=state,
            refund=refund,
            used=task.used,
            cap=self.cap(task),
            previous_max=task.max_tries if previous_max is None else previous_max,
            max_tries=task.max_tries,
            provisional=provisional,
            record=said.record,
            source=source,
            pod=pod,
            settled_at=self.now,
            next_try=next_try,
        )
        self.ledger.append(entry)
        task.doubtful = entry if provisional else None
        if disposition == "confirmed":
            return
        task.state, task.next_try, task.suspicion = state, next_try, None
        self.outbox.extend(
            (len(self.ledger) - 1, name) for name, enabled in self.listeners.items() if enabled
        )
