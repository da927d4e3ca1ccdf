"""What listeners are told: the event, the task instance in it, and the hooks that receive them.

An event is built in SQL from one ledger row (settle.event_payload); nothing is decided or added
here. Authors of listeners import these names from `reconciler.listeners`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pluggy

PROJECT: Final = "podsettle"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInstance:
    """The task instance as it is after the transition.

    Attributes:
        id: Its id when the transition was made.
        dag_id: Its DAG.
        run_id: Its run.
        task_id: Its task.
        map_index: -1 for a task that is not mapped.
        try_number: The attempt that ended.
        max_tries: The last try_number that is retried.
        state: For example `failed` or `up_for_retry`.
        operator: None where the host keeps none.
    """

    id: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int
    max_tries: int
    state: str
    operator: str | None = None

    @property
    def name(self) -> str:
        """Its four names as one text: dag/run/task, and [index] of a mapped one."""
        mapped = "" if self.map_index == -1 else f"[{self.map_index}]"
        return f"{self.dag_id}/{self.run_id}/{self.task_id}{mapped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refund:
    """What became of the retry.

    Attributes:
        given: This failure was not charged.
        taken_back: A late success took an earlier refund back.
        n: Refunds of this life of the task instance, this one included.
        cap: How many there may be.
    """

    given: bool
    taken_back: bool
    n: int
    cap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One transition of one task instance.

    Attributes:
        id: The same at every delivery of this event to this listener: deduplicate by it.
        kind: `failed` (for good), `retry`, `success`, `reschedule` or `cleared`.
        settled_at: When, by the database's clock.
        previous_state: The state before.
        task_instance: What it became.
        failure_kind: infra, application, timeout, manual; None where nothing proves one.
        reason: A short token such as Evicted; what a person noted, if the kind is manual.
        exit_code: The container's, if it is known.
        refund: What became of the retry.
        why: One sentence.
        provisional: It rests on silence; a late success may still replace it.
        payload: All of it as JSON values (docs/task-instance-event.schema.json), to hand on.
    """

    id: int
    kind: str
    settled_at: datetime
    previous_state: str
    task_instance: TaskInstance
    failure_kind: str | None
    reason: str | None
    exit_code: int | None
    refund: Refund
    why: str
    provisional: bool
    payload: Mapping[str, Any]

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Event:
        """Read what settle.event_payload() built."""
        return cls(
            id=payload["id"],
            kind=payload["event"],
            settled_at=datetime.fromisoformat(payload["settled_at"]),
            previous_state=payload["previous_state"],
            task_instance=TaskInstance(**payload["task_instance"], state=payload["state"]),
            failure_kind=payload["failure_kind"],
            reason=payload["reason"],
            exit_code=payload["exit_code"],
            refund=Refund(**payload["refund"]),
            why=payload["why"],
            provisional=payload["provisional"],
            payload=payload,
        )


class Hooks:
    """The hooks of a listener. It implements those that it wants, with the arguments it wants.

    All calls for one event are one delivery: if one of them raises, all are made again later.
    """

    @hookspec
    def on_task_instance_event(self, event: Event) -> None:
        """Receive every event, whatever it is; called before the others."""

    @hookspec
    def on_task_instance_failed(
        self,
        previous_state: str,
        task_instance: TaskInstance,
        error: str,
        failure_kind: str | None,
        reason: str | None,
        event: Event,
    ) -> None:
        """Receive each failed attempt, as in Airflow also one that is retried.

        `task_instance.state` tells which: `failed` (for good) or `up_for_retry`.
        """

    @hookspec
    def on_task_instance_retry(
        self,
        previous_state: str,
        task_instance: TaskInstance,
        error: str,
        failure_kind: str | None,
        reason: str | None,
        event: Event,
    ) -> None:
        """Receive a failed attempt that will be run again; called after `failed`."""

    @hookspec
    def on_task_instance_success(
        self, previous_state: str, task_instance: TaskInstance, event: Event
    ) -> None:
        """Receive a success, also one that replaced a provisional failure."""

    @hookspec
    def on_task_instance_reschedule(
        self, previous_state: str, task_instance: TaskInstance, event: Event
    ) -> None:
        """Receive an attempt that asks to be run again at a time."""

    @hookspec
    def on_task_instance_cleared(
        self, previous_state: str, task_instance: TaskInstance, event: Event
    ) -> None:
        """Receive a task instance that a person cleared for a new life."""
