"""Pods, from the API or from files, as the few facts that a settlement rests on.

Everything that Python knows about Kubernetes is here: which container is the task's, which status
fields count, whose pod it is, how a list is paged. What the facts mean for a task is not decided
here; the database does that from `PodFacts.as_json`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, Literal, NoReturn, TypeAlias

import ijson
import urllib3
from pydantic_core import from_json

from reconciler import text
from reconciler.record import INT4_MAX, INT4_MIN, NoRecord, Record, decode, parse_rfc3339

ContainerState = Literal["terminated", "running", "waiting", "absent"]
Json: TypeAlias = Mapping[str, object]

MAX_MESSAGE: Final = 1024
"""Characters kept of a pod's or a container's message."""

_MAX_NAME: Final = 253
_MAX_WORD: Final = 240
_MAX_CONDITIONS: Final = 32
_MAX_FINALIZERS: Final = 64
_MAX_ID: Final = 250
_MAX_NAMED_CONTAINERS: Final = 8

_NOTHING: Final[Json] = MappingProxyType({})
_NEVER_BEFORE: Final = datetime(1971, 1, 1, tzinfo=UTC)
_UUID: Final = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_DIGITS: Final = re.compile("[0-9]{1,19}")

# Why a native sidecar that never got up keeps the containers after it from starting.
_BLOCKING_REASONS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "RunContainerError",
        "SignatureValidationFailed",
    }
)


class BadPod(Exception):  # noqa: N818 -- the name that the callers agreed on
    """What was read is no pod at all; the message says what it is.

    Attributes:
        lost: It may be a pod that could not be read; False for an object of another kind.
    """

    def __init__(self, message: str, *, lost: bool = True) -> None:
        super().__init__(message)
        self.lost = lost


class _Malformed(Exception):  # noqa: N818 -- caught here, becomes a sentence
    pass


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose pod it is, according to its labels and annotations.

    Where `problem` is set the pod cannot be told to belong to anything and every other field is
    None; otherwise the fields that the profile knows are set.

    Attributes:
        task_instance_id: UUID in lower case.
        dag_id: As the host wrote it, at most 250 characters.
        run_id: As the host wrote it, at most 250 characters.
        task_id: As the host wrote it, at most 250 characters.
        map_index: -1 for a task that is not mapped.
        try_number: At least 1.
        attempt_id: The execution that the pod is; None where the host has none.
        problem: One sentence that names the label or annotation at fault.
    """

    task_instance_id: str | None = None
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    map_index: int | None = None
    try_number: int | None = None
    attempt_id: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """How a host marks its task pods.

    Attributes:
        name: The name that a user chooses it by.
        selector: The label selector that finds the pods.
        identify: Reads the identity from labels and annotations; raises what `identity` catches.
        attempt: Reads the attempt_id and leoflow's epoch, by which a record is tied to its pod.
    """

    name: str
    selector: str
    identify: Callable[[Json, Json], Identity]
    attempt: Callable[[Json, Json], tuple[str | None, int | None]]

    def identity(self, labels: Json, annotations: Json) -> Identity:
        """Read whose pod it is.

        Args:
            labels: The pod's labels, values of any type.
            annotations: The pod's annotations, values of any type.

        Returns:
            The identity, with `problem` set where it is missing or malformed. Nothing is raised.
        """
        try:
            return self.identify(labels, annotations)
        except _Malformed as malformed:
            return Identity(problem=str(malformed))


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of `status.conditions`; `at` is its lastTransitionTime, RFC 3339 in UTC."""

    type: str
    status: str | None
    reason: str | None
    at: str | None


@dataclass(frozen=True, slots=True)
class Container:
    """The task container: its current state, never an earlier one.

    Attributes:
        name: None where it could not be told which container is the task's.
        state: `absent` where the pod has no status for it.
        reason: The reason of that state.
        message: At most 1024 characters; None where the message was a record.
        exit_code: Only of a terminated container.
        started_at: RFC 3339 in UTC.
        finished_at: RFC 3339 in UTC.
        own_memory_limit: The container or the pod as a whole has a memory limit of its own.
        restart_count: How often it was restarted.
    """

    name: str | None
    state: ContainerState
    reason: str | None = None
    message: str | None = None
    exit_code: int | None = None
    started_at: str | None = None
    finished_at: str | None = None
    own_memory_limit: bool = False
    restart_count: int | None = None


@dataclass(frozen=True, slots=True)
class InitContainer:
    """The init container that holds the pod up, or failed it."""

    name: str
    state: ContainerState
    reason: str | None
    exit_code: int | None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PodFacts:
    """What one pod says about its task; all text is clipped and storable.

    Attributes:
        pod: metadata.name.
        namespace: metadata.namespace, `default` where there is none.
        uid: metadata.uid.
        resource_version: metadata.resourceVersion.
        node: spec.nodeName.
        created_at: RFC 3339 in UTC, as are all times here.
        identity: Whose pod it is.
        phase: status.phase.
        pod_reason: status.reason.
        pod_message: status.message, at most 1024 characters.
        restarts: The kubelet may start the task container again after it ends.
        deletion_at: metadata.deletionTimestamp.
        deletion_grace_seconds: metadata.deletionGracePeriodSeconds.
        termination_grace_seconds: spec.terminationGracePeriodSeconds.
        finalizers: metadata.finalizers.
        conditions: At most 32 of status.conditions.
        container: The task container.
        init: The init container that did not succeed, if any.
        record: The record in the task container's termination message.
        record_problem: Why that message holds no record; None where there is no message.
    """

    pod: str
    namespace: str
    uid: str | None
    resource_version: str | None
    node: str | None
    created_at: str | None
    identity: Identity
    phase: str | None
    pod_reason: str | None
    pod_message: str | None
    restarts: bool
    deletion_at: str | None
    deletion_grace_seconds: int | None
    termination_grace_seconds: int | None
    finalizers: tuple[str, ...]
    conditions: tuple[Condition, ...]
    container: Container
    init: InitContainer | None
    record: Record | None
    record_problem: str | None

    @classmethod
    def from_manifest(
        cls, manifest: object, *, profile: Profile, container: str | None = None
    ) -> PodFacts:
        """Read the facts from a manifest.

        Fields may be missing, null or of a wrong type: such a field counts as missing.

        Args:
            manifest: The decoded JSON of one pod.
            profile: How the host marks its pods.
            container: The name of the task container; None for `base`, else `task`, else the
                only one.

        Returns:
            The facts.

        Raises:
            BadPod: The manifest is no object, is of another kind, or has no metadata.name.
        """
        if not isinstance(manifest, dict):
            raise BadPod(f"expected a pod, found {_json_type(manifest)}")
        kind = manifest.get("kind")
        if kind is not None and kind != "Pod":
            shown = text.quote(kind) if isinstance(kind, str) else _json_type(kind)
            raise BadPod(f"expected kind Pod, found {shown}", lost=False)
        metadata = _dict(manifest, "metadata")
        pod = _text(metadata, "name", _MAX_NAME)
        if not pod:
            raise BadPod("the pod has no metadata.name")
        spec, status = _dict(manifest, "spec"), _dict(manifest, "status")
        labels, annotations = _dict(metadata, "labels"), _dict(metadata, "annotations")

        identity = profile.identity(labels, annotations)
        name, problem = _task_container(spec, status, container)
        if problem is not None and identity.problem is None:
            identity = Identity(problem=problem)
        declared = _named(spec, "containers", name) or _NOTHING
        task, record, record_problem = _container(
            name, declared, spec, status, profile.attempt(labels, annotations)
        )
        return cls(
            pod=pod,
            namespace=_text(metadata, "namespace", _MAX_NAME) or "default",
            uid=_text(metadata, "uid", _MAX_NAME),
            resource_version=_text(metadata, "resourceVersion", _MAX_NAME),
            node=_text(spec, "nodeName", _MAX_NAME),
            created_at=_time(metadata, "creationTimestamp"),
            identity=identity,
            phase=_text(status, "phase", _MAX_WORD),
            pod_reason=_text(status, "reason", _MAX_WORD),
            pod_message=_text(status, "message", MAX_MESSAGE),
            restarts=_restarts(declared, spec),
            deletion_at=_time(metadata, "deletionTimestamp"),
            deletion_grace_seconds=_int(metadata, "deletionGracePeriodSeconds"),
            termination_grace_seconds=_int(spec, "terminationGracePeriodSeconds"),
            finalizers=_finalizers(metadata),
            conditions=_conditions(status),
            container=task,
            init=_init(spec, status, task.state),
            record=record,
            record_problem=record_problem,
        )

    def as_json(self) -> dict[str, object]:
        """Return the facts in the form that `settle.settle_pods` takes.

        Returns:
            Objects, lists, strings, numbers, booleans and nulls only; every key is always there
            (`init` and `record` are null or an object). Times are RFC 3339 in UTC.
        """
        who, task, init, record = self.identity, self.container, self.init, self.record
        return {
            "pod": self.pod,
            "namespace": self.namespace,
            "uid": self.uid,
            "resource_version": self.resource_version,
            "node": self.node,
            "created_at": self.created_at,
            "identity": {
                "task_instance_id": who.task_instance_id,
                "dag_id": who.dag_id,
                "run_id": who.run_id,
                "task_id": who.task_id,
                "map_index": who.map_index,
                "try_number": who.try_number,
                "attempt_id": who.attempt_id,
                "problem": who.problem,
            },
            "phase": self.phase,
            "pod_reason": self.pod_reason,
            "pod_message": self.pod_message,
            "restarts": self.restarts,
            "deletion_at": self.deletion_at,
            "deletion_grace_seconds": self.deletion_grace_seconds,
            "termination_grace_seconds": self.termination_grace_seconds,
            "finalizers": list(self.finalizers),
            "conditions": [
                {"type": c.type, "status": c.status, "reason": c.reason, "at": c.at}
                for c in self.conditions
            ],
            "container": {
                "name": task.name,
                "state": task.state,
                "reason": task.reason,
                "message": task.message,
                "exit_code": task.exit_code,
                "started_at": task.started_at,
                "finished_at": task.finished_at,
                "own_memory_limit": task.own_memory_limit,
                "restart_count": task.restart_count,
            },
            "init": None
            if init is None
            else {
                "name": init.name,
                "state": init.state,
                "reason": init.reason,
                "exit_code": init.exit_code,
            },
            "record": None
            if record is None
            else {
                "outcome": record.outcome,
                "exit_code": record.exit_code,
                "failure_kind": record.failure_kind,
                "reason": record.reason,
                "reschedule_at": None
                if record.reschedule_at is None
                else _rfc3339(record.reschedule_at),
            },
            "record_problem": self.record_problem,
        }


# --- whose pod ---------------------------------------------------------------------------------


def _no_attempt(_labels: Json, _annotations: Json) -> tuple[str | None, int | None]:
    return None, None


def _podsettle(labels: Json, annotations: Json) -> Identity:
    return Identity(
        task_instance_id=_uuid(annotations, "podsettle.io/task-instance-id"),
        try_number=_number(labels, "label", "podsettle.io/try-number", least=1),
        attempt_id=_id(annotations, "podsettle.io/attempt-id"),
    )


def _podsettle_attempt(_labels: Json, annotations: Json) -> tuple[str | None, int | None]:
    try:
        return _id(annotations, "podsettle.io/attempt-id"), None
    except _Malformed:
        return None, None


def _leoflow(labels: Json, annotations: Json) -> Identity:
    return Identity(
        task_instance_id=_uuid(annotations, "leoflow.io/task-instance-id"),
        try_number=_number(labels, "label", "leoflow.io/try-number", least=1),
        attempt_id=str(_leoflow_epoch(labels)),
    )


def _leoflow_epoch(labels: Json) -> int:
    if labels.get("leoflow.io/attempt-epoch") is None:
        return 0
    return _number(labels, "label", "leoflow.io/attempt-epoch", least=0, most=2**63 - 1)


def _leoflow_attempt(labels: Json, _annotations: Json) -> tuple[str | None, int | None]:
    try:
        epoch = _leoflow_epoch(labels)
    except _Malformed:
        return None, None
    return str(epoch), epoch


def _airflow(labels: Json, annotations: Json) -> Identity:
    if "airflow_pod_revoked" in labels:
        raise _Malformed("Airflow itself revoked this pod (label airflow_pod_revoked)")
    map_index = -1
    if annotations.get("map_index") not in (None, "-1"):
        map_index = _number(annotations, "annotation", "map_index", least=0)
    return Identity(
        dag_id=_id(annotations, "dag_id"),
        run_id=_id(annotations, "run_id"),
        task_id=_id(annotations, "task_id"),
        map_index=map_index,
        try_number=_number(annotations, "annotation", "try_number", least=1),
    )


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("podsettle", "podsettle.io/managed=true", _podsettle, _podsettle_attempt),
            Profile("leoflow", "leoflow.io/run-id", _leoflow, _leoflow_attempt),
            # Airflow's pods carry no attempt: the time of creation has to do, and SQL judges it.
            Profile("airflow", "kubernetes_executor=True", _airflow, _no_attempt),
        )
    }
)
"""The profiles by name."""


def _marked(marks: Json, where: str, key: str) -> str:
    value = marks.get(key)
    if value is None:
        raise _Malformed(f"{where} {key} is missing")
    if not isinstance(value, str):
        raise _Malformed(f"{where} {key} is {_json_type(value)}, not text")
    return value


def _uuid(annotations: Json, key: str) -> str:
    value = _marked(annotations, "annotation", key)
    if _UUID.fullmatch(value) is None:
        raise _Malformed(f"annotation {key} is {text.quote(value)}, not a UUID")
    return value.lower()


def _id(annotations: Json, key: str) -> str:
    value = _marked(annotations, "annotation", key)
    if not value:
        raise _Malformed(f"annotation {key} is empty")
    if len(value) > _MAX_ID:
        raise _Malformed(
            f"annotation {key} is {text.quote(value)}, longer than {_MAX_ID} characters"
        )
    # An identity with a replaced character would be somebody else's.
    if text.storable(value) != value:
        raise _Malformed(f"annotation {key} is {text.quote(value)}, which no database can hold")
    return value


def _number(marks: Json, where: str, key: str, *, least: int, most: int = INT4_MAX) -> int:
    value = _marked(marks, where, key)
    if _DIGITS.fullmatch(value) is None or not least <= int(value) <= most:
        raise _Malformed(
            f"{where} {key} is {text.quote(value)}, not a whole number from {least} to {most}"
        )
    return int(value)


# --- which container, and what became of it ----------------------------------------------------


def _task_container(spec: Json, status: Json, wanted: str | None) -> tuple[str | None, str | None]:
    names = _names(spec, "containers") or _names(status, "containerStatuses")
    if wanted is not None:
        if wanted in names:
            return wanted, None
    else:
        for usual in ("base", "task"):
            if usual in names:
                return usual, None
        if len(names) == 1:
            return names[0], None
    if not names:
        return None, "the pod names no container"
    shown = ", ".join(text.quote(name) for name in names[:_MAX_NAMED_CONTAINERS])
    if len(names) > _MAX_NAMED_CONTAINERS:
        shown += f" and {len(names) - _MAX_NAMED_CONTAINERS} more"
    if wanted is not None:
        return None, (
            f"the pod has no container {text.quote(wanted)}; it has {shown}; --container chooses"
        )
    return None, f"which container is the task's cannot be told from {shown}; --container chooses"


def _names(owner: Json, key: str) -> list[str]:
    return [name for entry in _dicts(owner, key) if (name := _text(entry, "name", _MAX_NAME))]


def _named(owner: Json, key: str, name: str | None) -> Json | None:
    if name is not None:
        for entry in _dicts(owner, key):
            if _text(entry, "name", _MAX_NAME) == name:
                return entry
    return None


def _container(
    name: str | None,
    declared: Json,
    spec: Json,
    status: Json,
    attempt: tuple[str | None, int | None],
) -> tuple[Container, Record | None, str | None]:
    entry = _named(status, "containerStatuses", name)
    own_memory_limit = _has_memory_limit(declared) or _has_memory_limit(spec)
    if entry is None:
        return Container(name, "absent", own_memory_limit=own_memory_limit), None, None
    state, detail = _state(entry)
    message: str | None = None
    record: Record | None = None
    problem: str | None = None
    raw = detail.get("message")
    if isinstance(raw, str) and raw:
        if state == "terminated":
            attempt_id, attempt_epoch = attempt
            decoded = decode(raw, attempt_id=attempt_id, attempt_epoch=attempt_epoch)
            if isinstance(decoded, NoRecord):
                problem = decoded.cause
            else:
                record = decoded
        if record is None:
            message = text.clip(raw, MAX_MESSAGE)
    task = Container(
        name=name,
        state=state,
        reason=_text(detail, "reason", _MAX_WORD),
        message=message,
        exit_code=_int(detail, "exitCode") if state == "terminated" else None,
        started_at=_time(detail, "startedAt"),
        finished_at=_time(detail, "finishedAt") if state == "terminated" else None,
        own_memory_limit=own_memory_limit,
        restart_count=_int(entry, "restartCount"),
    )
    return task, record, problem


def _state(entry: Json) -> tuple[ContainerState, Json]:
    """Return the current state; a status that names none is waiting, as the API defines it."""
    state = entry.get("state")
    if state is None:
        return "waiting", _NOTHING
    if not isinstance(state, dict):
        return "absent", _NOTHING
    names: tuple[ContainerState, ...] = ("terminated", "running", "waiting")
    for name in names:
        detail = state.get(name)
        if isinstance(detail, dict):
            return name, detail
    return ("waiting" if all(state.get(name) is None for name in names) else "absent"), _NOTHING


def _restarts(declared: Json, spec: Json) -> bool:
    if _dicts(declared, "restartPolicyRules"):
        return True
    # The API server writes the default out; a manifest by hand may not.
    policy = _text(declared, "restartPolicy", _MAX_WORD) or _text(spec, "restartPolicy", _MAX_WORD)
    return policy != "Never"


def _has_memory_limit(owner: Json) -> bool:
    memory = _dict(_dict(owner, "resources"), "limits").get("memory")
    if isinstance(memory, str):
        return memory.strip() not in ("", "0")
    return isinstance(memory, int) and not isinstance(memory, bool) and memory > 0


def _init(spec: Json, status: Json, task: ContainerState) -> InitContainer | None:
    statuses = {
        name: entry
        for entry in _dicts(status, "initContainerStatuses")
        if (name := _text(entry, "name", _MAX_NAME))
    }
    for declared in _dicts(spec, "initContainers"):
        name = _text(declared, "name", _MAX_NAME)
        entry = statuses.get(name) if name else None
        if name is None or entry is None:
            continue
        state, detail = _state(entry)
        reason = _text(detail, "reason", _MAX_WORD)
        exit_code = _int(detail, "exitCode") if state == "terminated" else None
        if declared.get("restartPolicy") == "Always":
            # A native sidecar runs beside the task and ends after it: only one that never got up
            # says anything.
            telling = (
                state == "waiting"
                and reason in _BLOCKING_REASONS
                and task not in ("running", "terminated")
            )
        elif state == "terminated":
            telling = exit_code != 0 or reason == "OOMKilled"
        elif state == "waiting":
            telling = reason not in (None, "PodInitializing")
        else:
            telling = state == "running"
        if telling:
            return InitContainer(name, state, reason, exit_code)
    return None


def _conditions(status: Json) -> tuple[Condition, ...]:
    found: list[Condition] = []
    for entry in _dicts(status, "conditions"):
        kind = _text(entry, "type", _MAX_WORD)
        if kind:
            found.append(
                Condition(
                    kind,
                    _text(entry, "status", _MAX_WORD),
                    _text(entry, "reason", _MAX_WORD),
                    _time(entry, "lastTransitionTime"),
                )
            )
            if len(found) == _MAX_CONDITIONS:
                break
    return tuple(found)


def _finalizers(metadata: Json) -> tuple[str, ...]:
    entries = metadata.get("finalizers")
    if not isinstance(entries, list):
        return ()
    kept = [text.clip(entry, _MAX_NAME) for entry in entries if isinstance(entry, str) and entry]
    return tuple(kept[:_MAX_FINALIZERS])


# --- reading fields of any type ----------------------------------------------------------------


def _dict(owner: Json, key: str) -> Json:
    value = owner.get(key)
    return value if isinstance(value, dict) else _NOTHING


def _dicts(owner: Json, key: str) -> list[Json]:
    value = owner.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _text(owner: Json, key: str, limit: int) -> str | None:
    """Return a string field; the empty string, which Go leaves out, counts as missing."""
    value = owner.get(key)
    return text.clip(value, limit) if isinstance(value, str) and value else None


def _int(owner: Json, key: str) -> int | None:
    value = owner.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and INT4_MIN <= value <= INT4_MAX:
        return value
    return None


def _time(owner: Json, key: str) -> str | None:
    value = owner.get(key)
    return _normal_time(value) if isinstance(value, str) and len(value) <= 64 else None


@lru_cache(maxsize=4096)
def _normal_time(value: str) -> str | None:
    moment = parse_rfc3339(value)
    # The kubelet writes 1970-01-01 for what never happened.
    return None if moment is None or moment < _NEVER_BEFORE else _rfc3339(moment)


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat().removesuffix("+00:00") + "Z"


def _json_type(value: object) -> str:
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


# --- listings ----------------------------------------------------------------------------------

PAGE_SIZE: Final = 250
"""Pods a page; larger pages are throttled on small control planes (a seat for each 100 kB)."""

_MAX_PROBLEMS: Final = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """Some pods of a listing, and what was wrong among them."""

    pods: list[PodFacts]
    problems: list[str]


class Listing:
    """Pods, page by page, and how far the list can be trusted once its pages are read.

    Attributes:
        pages: The pages, once; nothing is read before the first is asked for. No earlier page is
            kept alive.
        incomplete_because: Why pods may be missing from the pages; the first cause counts. None
            while there is none.
        problems: One sentence for each thing that could not be read, the first thousand of them.
        api_date: The API server's clock, from its answer with the first page; None from files.
        api_date_monotonic: `time.monotonic()`, in seconds, when that answer came.
    """

    def __init__(self, source: Callable[[Listing], Iterator[Page]]) -> None:
        self.pages: Final[Iterator[Page]] = self._read(source)
        self.incomplete_because: str | None = None
        self.problems: list[str] = []
        self.api_date: datetime | None = None
        self.api_date_monotonic: float | None = None
        self._finished = False

    @property
    def complete(self) -> bool:
        """Whether all pages were read and no pod can be missing from them."""
        return self._finished and self.incomplete_because is None

    def _read(self, source: Callable[[Listing], Iterator[Page]]) -> Iterator[Page]:
        yield from source(self)
        self._finished = True

    def mark_incomplete(self, because: str) -> None:
        """Say, while reading, why pods may be missing."""
        if self.incomplete_because is None:
            self.incomplete_because = because

    def note(self, problem: str) -> None:
        """Keep, while reading, what was wrong."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        elif len(self.problems) == _MAX_PROBLEMS:
            self.problems.append("there are more problems than are listed here")


@dataclass(slots=True)
class _Batch:
    """The page that is being filled."""

    listing: Listing
    profile: Profile
    container: str | None
    pods: list[PodFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, manifest: object, where: str) -> None:
        try:
            self.pods.append(
                PodFacts.from_manifest(manifest, profile=self.profile, container=self.container)
            )
        except BadPod as bad:
            if bad.lost:
                self.lose(f"{where}: {bad}")
            else:
                self.note(f"{where}: {bad}")

    def note(self, problem: str) -> None:
        self.problems.append(problem)
        self.listing.note(problem)

    def lose(self, problem: str) -> None:
        self.note(problem)
        self.listing.mark_incomplete(problem)

    def __len__(self) -> int:
        return len(self.pods) + len(self.problems)

    def take(self) -> Page:
        page = Page(self.pods, self.problems)
        self.pods, self.problems = [], []
        return page


# --- from files --------------------------------------------------------------------------------

_CHUNK: Final = 1 << 16
_MAX_DEPTH: Final = 200
_LIST_KINDS: Final = ("PodList", "List")


class NoSuchPods(ValueError):  # noqa: N818 -- a wrong command line, not an error of the program
    """The path that should hold the pods is missing or cannot be opened."""


def read_files(
    path: str,
    *,
    profile: Profile,
    container: str | None = None,
    page_size: int = PAGE_SIZE,
) -> Listing:
    """Read pods from JSON as `kubectl get pods -o json` writes it.

    Args:
        path: A file with a Pod, a PodList or a List; a folder of such files (`*.json`, in order of
            name, not the folders below it); `-` for standard input.
        profile: How the host marks its pods.
        container: The name of the task container, see `PodFacts.from_manifest`.
        page_size: The greatest number of pods in a page.

    Returns:
        The listing. Whatever is wrong with a file is one of its problems: what could be read
        before the fault is in the pages, the other files are read on, and the listing is
        incomplete. Files are streamed: memory holds a page, not a file.

    Raises:
        NoSuchPods: There is no such path, or it may not be read.
    """
    sources: list[tuple[str, Path | None]]
    if path == "-":
        sources = [("standard input", None)]
    else:
        sources = [(file.name, file) for file in _files(Path(path))]

    def pages(listing: Listing) -> Iterator[Page]:
        batch = _Batch(listing, profile, container)
        if not sources:
            batch.lose(f"{text.escape(path)}: the folder holds no *.json file")
        for name, file in sources:
            shown = text.escape(text.clip(name, _MAX_NAME))
            for manifest, where in _manifests(shown, file, batch):
                batch.add(manifest, where)
                if len(batch) >= page_size:
                    yield batch.take()
        if len(batch):
            yield batch.take()

    return Listing(pages)


def _files(path: Path) -> list[Path]:
    shown = text.quote(str(path), 200)
    try:
        if path.is_dir():
            return sorted(file for file in path.glob("*.json") if file.is_file())
        # Not opened to find out: of a named pipe that would take the writer away.
        if path.exists():
            if os.access(path, os.R_OK):
                return [path]
            raise NoSuchPods(f"{shown} may not be read")
    except OSError as error:
        raise NoSuchPods(f"{shown} cannot be read: {_why(error)}") from None
    raise NoSuchPods(f"there is no file or folder {shown}")


def _manifests(name: str, file: Path | None, batch: _Batch) -> Iterator[tuple[object, str]]:
    """Yield the pods of one file; what is wrong with the file goes to the batch."""
    try:
        if file is None:
            yield from _stream(name, sys.stdin.buffer, batch)
        else:
            with file.open("rb") as opened:
                yield from _stream(name, opened, batch)
    except OSError as error:
        batch.lose(f"{name}: cannot be read: {_why(error)}")


def _stream(name: str, opened: IO[bytes], batch: _Batch) -> Iterator[tuple[object, str]]:
    chunk = opened.read(_CHUNK)
    fault = _not_json(chunk)
    if fault is not None:
        batch.lose(f"{name}: {fault}")
        return
    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
    document = _Document()
    # The parser's own generators lose what they read before a fault; a list that is fed does not.
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events)
    items = 0
    while fault is None:
        broken = False
        try:
            if chunk:
                parser.send(chunk)
            else:
                parser.close()
        except ijson.JSONError:
            broken = True
        try:
            for manifest in document.feed(events):
                items += 1
                yield manifest, f"{name}: item {items}"
        except _Malformed as malformed:
            fault = str(malformed)
        else:
            if broken:
                fault = _fault(chunk, document)
        events.clear()
        if not chunk:
            break
        chunk = opened.read(_CHUNK)
    if fault is None:
        fault = document.fault()
    if document.closed and not document.is_list and document.is_pod:
        yield document.top, name
    if fault is not None:
        batch.lose(f"{name}: {fault}")


def _not_json(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; write it as UTF-8"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:200]
    if not start:
        return "is empty"
    if start.startswith(b"{"):
        return None
    if start.startswith(b"["):
        return "is a JSON array, not a Pod, a PodList or a List"
    if re.match(rb"(?:---|%YAML|#|apiVersion:|kind:|metadata:|items:)", start):
        return "is YAML, not JSON; kubectl writes JSON with -o json"
    return "is not JSON"


def _fault(chunk: bytes, document: _Document) -> str:
    if not chunk:
        return "is cut off in the middle"
    if document.closed:
        return "goes on after the end of its JSON"
    return "is broken JSON"


class _Document:
    """One JSON object that is being parsed: the items of a list one by one, all else as a whole.

    Attributes:
        top: The object, without its `items` where they are an array.
        is_list: It has, or should have, `items`.
        closed: Its end was reached.
    """

    def __init__(self) -> None:
        self.is_list = False
        self.closed = False
        self._depth = 0
        self._key: object = None
        self._in_items = False
        self._whole = ijson.ObjectBuilder()
        self._item: Any = None

    @property
    def top(self) -> dict[str, object]:
        value: dict[str, object] = self._whole.value
        return value

    def feed(self, events: Iterable[tuple[str, object]]) -> Iterator[object]:
        """Take parser events; yield each item of the list that they complete."""
        for event, value in events:
            if event in ("start_map", "start_array"):
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise _Malformed("is nested too deeply to be pods")
            elif event in ("end_map", "end_array"):
                self._depth -= 1
            if self._in_items:
                if self._depth == 1:
                    self._in_items = False
                    continue
                if self._item is None:
                    self._item = ijson.ObjectBuilder()
                self._item.event(event, value)
                if self._depth == 2:
                    item, self._item = self._item.value, None
                    self._check_kind()
                    yield item
                continue
            if self._depth == 1 and event == "map_key":
                self._key = value
            elif self._depth == 2 and event == "start_array" and self._key == "items":
                self.is_list = self._in_items = True
                self._whole.event("null", None)
                continue
            self._whole.event(event, value)
            if self._depth == 0:
                self.closed = True
                self.is_list = self.is_list or self.top.get("kind") in _LIST_KINDS

    @property
    def is_pod(self) -> bool:
        """Whether nothing says that the object as a whole is anything but a pod."""
        return self.top.get("kind") in (None, "Pod")

    def fault(self) -> str | None:
        """Return what is wrong with the object as a whole, once it was read."""
        try:
            self._check_kind()
        except _Malformed as malformed:
            return str(malformed)
        if self.is_list and "items" not in self.top:
            return "is a list with no items"
        if self.is_list and self.top["items"] is not None:
            return f"is a list whose items are {_json_type(self.top['items'])}"
        if self.is_list and _text(_dict(self.top, "metadata"), "continue", _MAX_WORD):
            return "is one page of a longer list (metadata.continue is set)"
        return None

    def _check_kind(self) -> None:
        kind = self.top.get("kind")
        # The items of a typed list do not say their kind, so a list of something else would pass.
        if kind is not None and kind not in (_LIST_KINDS if self.is_list else ("Pod",)):
            shown = text.quote(kind) if isinstance(kind, str) else _json_type(kind)
            raise _Malformed(f"expected a Pod, a PodList or a List, found kind {shown}")


def _why(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.escape(text.clip(told or type(error).__name__, _MAX_WORD))


# --- from the API ------------------------------------------------------------------------------

_CONNECT_SECONDS: Final = 10.0
_PAGE_SECONDS: Final = 180.0
_RETRIES: Final = 5
_MAX_WAIT_SECONDS: Final = 30.0
_BODY_TRIES: Final = 3
_MAX_EXPIRIES: Final = 20
_SERVICE_ACCOUNT_NAMESPACE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubernetesRefused(Exception):  # noqa: N818 -- the name that the callers agreed on
    """The API server answered that it will not do this; the message says what would help."""


class KubernetesUnreachable(Exception):  # noqa: N818 -- the name that the callers agreed on
    """There is no API server to talk to; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A configured connection to an API server.

    Attributes:
        api: The official client's ApiClient.
        address: The server's URL.
        namespace: The namespace of the kubeconfig's context, or of the pod that this runs in.
    """

    api: Any
    address: str
    namespace: str


def connect(context: str | None = None) -> Cluster:
    """Configure the official client as kubectl would be; no request is made.

    The files named by KUBECONFIG count, else the default file; where none exists, the service
    account of the pod that this runs in.

    Args:
        context: The kubeconfig's context; None for its current one.

    Returns:
        The connection. Its requests wait for a busy server (429, 5xx, Retry-After), a few times
        and never longer than half a minute.

    Raises:
        KubernetesUnreachable: There is no configuration, or it is broken.
    """
    from kubernetes import client

    configuration = client.Configuration()
    configuration.retries = _patience()
    try:
        namespace = _configure(configuration, context)
        return Cluster(client.ApiClient(configuration), configuration.host, namespace or "default")
    # A broken kubeconfig surfaces as whatever the parsers under the client happen to raise.
    except Exception as error:
        raise KubernetesUnreachable(
            f"no usable Kubernetes configuration: {_why(error).rstrip('.')}; set KUBECONFIG, or "
            "run in a pod with a service account"
        ) from error


def _configure(configuration: Any, context: str | None) -> str:
    """Fill the client's configuration; return the namespace that goes with it."""
    from kubernetes import config

    loaders: Any = config
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    parts = [Path(part).expanduser() for part in files.split(os.pathsep) if part]
    # An unknown context is an error of the kubeconfig, never a reason to try something else.
    if context is not None or any(part.is_file() for part in parts):
        joined = os.pathsep.join(map(str, parts))
        loaders.load_kube_config(joined, context=context, client_configuration=configuration)
        return _context_namespace(loaders, joined, context)
    loaders.load_incluster_config(client_configuration=configuration)
    return Path(_SERVICE_ACCOUNT_NAMESPACE).read_text("utf-8").strip()


def _context_namespace(loaders: Any, files: str, context: str | None) -> str:
    contexts, current = loaders.list_kube_config_contexts(files)
    chosen = next((c for c in contexts if c.get("name") == context), current)
    return _text(_dict(chosen or {}, "context"), "namespace", _MAX_NAME) or "default"


class _Patience(urllib3.Retry):
    """The library's retries, with a bound on what a server may ask for."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        wait = super().get_retry_after(response)
        return None if wait is None else min(wait, _MAX_WAIT_SECONDS)


def _patience() -> urllib3.Retry:
    return _Patience(
        total=_RETRIES,
        connect=2,
        read=2,
        redirect=0,
        status=_RETRIES,
        allowed_methods={"GET"},
        status_forcelist={429, 500, 502, 503, 504},
        backoff_factor=0.5,
        backoff_max=10,
        raise_on_status=False,
        raise_on_redirect=False,
    )


def read_api(
    cluster: Cluster,
    *,
    profile: Profile,
    namespace: str | None = None,
    all_namespaces: bool = False,
    selector: str | None = None,
    container: str | None = None,
    page_size: int = PAGE_SIZE,
    read_timeout: float = 60.0,
) -> Listing:
    """List pods from the API server.

    The list is a consistent one (no resourceVersion is sent, so nothing comes from a stale cache).
    If its token expires between pages, it is begun anew once, and pods of earlier pages come
    again; if that happens a second time it goes on from the newer state that the server offers,
    and counts as incomplete.

    Args:
        cluster: Where to list, from `connect`.
        profile: How the host marks its pods.
        namespace: The namespace; None for the cluster's own.
        all_namespaces: List every namespace instead.
        selector: A label selector; None for the profile's, empty for all pods.
        container: The name of the task container, see `PodFacts.from_manifest`.
        page_size: Pods a page (`limit`).
        read_timeout: The longest silence of the server, in seconds.

    Returns:
        The listing. Reading its first page raises KubernetesRefused where the server says no, and
        KubernetesUnreachable where it does not answer or only with errors; what fails later, or
        is no pod list, makes the listing incomplete.
    """
    where = None if all_namespaces else (namespace or cluster.namespace)
    labels = profile.selector if selector is None else selector
    reader = _ApiReader(cluster, where, labels, page_size, read_timeout)

    def pages(listing: Listing) -> Iterator[Page]:
        batch = _Batch(listing, profile, container)
        token: str | None = None
        number = expiries = 0
        while True:
            try:
                answer = reader.page(token)
            except _Expired as expired:
                expiries += 1
                if expiries == 1:
                    token = None
                    continue
                listing.mark_incomplete("the list expired twice while it was read")
                if expired.token is None or expiries > _MAX_EXPIRIES:
                    return
                token = expired.token
                continue
            except _NoPage as failed:
                if number == 0:
                    failed.raise_public()
                listing.mark_incomplete(f"page {number + 1}: {failed}")
                return
            number += 1
            if number == 1:
                listing.api_date = reader.date
                listing.api_date_monotonic = reader.date_monotonic
            following = _read_page(answer, f"page {number}", batch)
            del answer
            yield batch.take()
            if following is None:
                return
            if following == token:
                listing.mark_incomplete("the API server offers the same page again and again")
                return
            token = following

    return Listing(pages)


class _Expired(Exception):  # noqa: N818 -- a turn in the protocol
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self.token = token


class _NoPage(Exception):  # noqa: N818 -- becomes a public error or a reason
    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused

    def raise_public(self) -> NoReturn:
        raise (KubernetesRefused if self.refused else KubernetesUnreachable)(str(self)) from self


class _ApiReader:
    """Gets raw pages; keeps the server's clock as its last answer showed it."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str | None,
        selector: str,
        page_size: int,
        read_timeout: float,
    ) -> None:
        from kubernetes import client

        self._core: Any = client.CoreV1Api(cluster.api)
        self._api_exception: type[Exception] = client.ApiException
        self._address = text.escape(text.clip(cluster.address, _MAX_WORD))
        self._namespace = namespace
        self._where = (
            "in all namespaces" if namespace is None else f"in namespace {text.quote(namespace)}"
        )
        self._query: dict[str, Any] = {
            "limit": page_size,
            "_preload_content": False,
            "_request_timeout": (_CONNECT_SECONDS, read_timeout),
        }
        if selector:
            self._query["label_selector"] = selector
        self.date: datetime | None = None
        self.date_monotonic: float | None = None

    def page(self, token: str | None) -> bytes:
        """Return the body of one page.

        Raises:
            _Expired: The token is too old.
            _NoPage: There will be no page.
        """
        for attempt in range(1, _BODY_TRIES + 1):
            try:
                return self._get(token)
            except self._api_exception as error:
                self._refuse(error, token)
            except (
                urllib3.exceptions.MaxRetryError,
                urllib3.exceptions.LocationValueError,
            ) as error:
                raise self._unreachable(error) from error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                # The answer began and broke off: the same page may be asked for again.
                if attempt == _BODY_TRIES:
                    raise self._unreachable(error) from error
        raise AssertionError

    def _get(self, token: str | None) -> bytes:
        query = dict(self._query)
        if token is not None:
            query["_continue"] = token
        if self._namespace is None:
            response = self._core.list_pod_for_all_namespaces(**query)
        else:
            response = self._core.list_namespaced_pod(self._namespace, **query)
        self.date_monotonic = time.monotonic()
        self.date = _http_date(response.headers.get("Date"))
        deadline = self.date_monotonic + _PAGE_SECONDS
        body = bytearray()
        with closing(response):
            for chunk in response.stream(_CHUNK):
                body += chunk
                if time.monotonic() > deadline:
                    raise _NoPage(
                        f"the answer took longer than {_PAGE_SECONDS:.0f} s", refused=False
                    )
        return bytes(body)

    def _refuse(self, error: Any, token: str | None) -> NoReturn:
        status = error.status if isinstance(error.status, int) else 0
        said = _status_body(error.body)
        if status == 410 and token is not None:
            raise _Expired(_text(_dict(said, "metadata"), "continue", 1 << 16)) from error
        reason = _text(said, "message", _MAX_WORD) or str(error.reason or "no reason given")
        told = text.escape(text.clip(reason, _MAX_WORD))
        what = f"list pods {self._where}"
        if status == 403:
            role = "ClusterRole" if self._namespace is None else "Role"
            raise _NoPage(
                f"Kubernetes does not allow to {what}: {told}; bind a {role} with the verb list on "
                "pods to this account, or choose another --namespace",
                refused=True,
            ) from error
        if status == 401:
            raise _NoPage(
                f"Kubernetes does not accept the credentials to {what}: {told}; log in again, or "
                "check the service account's token",
                refused=True,
            ) from error
        if status == 0:
            raise self._unreachable(error) from error
        busy = status == 429 or status >= 500
        advice = "try again later" if busy else "check the selector and the server's address"
        raise _NoPage(
            f"Kubernetes answered {status} to {what}: {told}; {advice}", refused=not busy
        ) from error

    def _unreachable(self, error: Exception) -> _NoPage:
        return _NoPage(
            f"no answer from Kubernetes at {self._address} to list pods {self._where}: "
            f"{_transport_cause(error)}; check the network and KUBECONFIG",
            refused=False,
        )


def _transport_cause(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    # Protocol errors repeat themselves in their arguments; the others name a connection object.
    told = cause.args[0] if isinstance(cause, urllib3.exceptions.ProtocolError) else cause
    plain = re.sub(r"^<?HTTPS?Connection(?:Pool)?\b.*?[)>]: ", "", str(told)).rstrip(".")
    return text.escape(text.clip(plain or type(error).__name__, _MAX_WORD))


def _read_page(body: bytes, where: str, batch: _Batch) -> str | None:
    """Put the pods of one page into the batch; return the token of the next page, if any."""
    try:
        page = _parse(body)
    except (ValueError, RecursionError):
        batch.lose(f"{where}: the API server's answer is no valid JSON")
        return None
    if not isinstance(page, dict) or page.get("kind") != "PodList":
        batch.lose(f"{where}: the API server's answer is no PodList")
        return None
    items = page.get("items")
    if isinstance(items, list):
        for number, item in enumerate(items, start=1):
            batch.add(item, f"{where}, item {number}")
    elif items is not None or "items" not in page:
        # Null is Go's empty list; anything else must not pass for one.
        batch.lose(f"{where}: the API server's answer holds no list of items")
    return _text(_dict(page, "metadata"), "continue", 1 << 16)


def _parse(body: bytes) -> object:
    try:
        return from_json(body)
    except ValueError:
        # The strict parser refuses a whole page for one lone surrogate or one broken byte.
        return json.loads(body.decode("utf-8", "replace"))


def _status_body(body: object) -> Json:
    # Bytes or text, depending on the client's version.
    if isinstance(body, str):
        body = body.encode("utf-8", "replace")
    if isinstance(body, bytes):
        try:
            status = _parse(body)
        except (ValueError, RecursionError):
            return _NOTHING
        if isinstance(status, dict):
            return status
    return _NOTHING


def _http_date(value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else None
