"""A pod as the few facts that a settlement rests on.

Which container is the task's, which status fields count, whose pod it is. What the facts mean for a
task is not decided here; the database does that from `PodFacts.as_json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from reconciler import text
from reconciler.fields import (
    MAX_NAME,
    MAX_WORD,
    NOTHING,
    Json,
    Malformed,
    integer,
    json_type,
    mapping,
    mappings,
    moment,
    rfc3339,
    string,
)
from reconciler.record import INT4_MAX, NoRecord, Record, decode

ContainerState = Literal["terminated", "running", "waiting", "absent"]

MAX_MESSAGE: Final = 1024
"""Characters kept of a pod's or a container's message."""

_MAX_CONDITIONS: Final = 32
_MAX_FINALIZERS: Final = 64
_MAX_ID: Final = 250
_MAX_NAMED_CONTAINERS: Final = 8

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
        except Malformed as malformed:
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
        message_policy: terminationMessagePolicy as declared.
        message_path: terminationMessagePath as declared.
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
    message_policy: str | None = None
    message_path: str | None = None


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
            raise BadPod(f"expected a pod, found {json_type(manifest)}")
        kind = manifest.get("kind")
        if kind is not None and kind != "Pod":
            shown = text.quote(kind) if isinstance(kind, str) else json_type(kind)
            raise BadPod(f"expected kind Pod, found {shown}", lost=False)
        metadata = mapping(manifest, "metadata")
        pod = string(metadata, "name", MAX_NAME)
        if not pod:
            raise BadPod("the pod has no metadata.name")
        spec, status = mapping(manifest, "spec"), mapping(manifest, "status")
        labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")

        identity = profile.identity(labels, annotations)
        name, problem = _task_container(spec, status, container)
        if problem is not None and identity.problem is None:
            identity = Identity(problem=problem)
        declared = _named(spec, "containers", name) or NOTHING
        task, record, record_problem = _container(
            name, declared, spec, status, profile.attempt(labels, annotations)
        )
        return cls(
            pod=pod,
            namespace=string(metadata, "namespace", MAX_NAME) or "default",
            uid=string(metadata, "uid", MAX_NAME),
            resource_version=string(metadata, "resourceVersion", MAX_NAME),
            node=string(spec, "nodeName", MAX_NAME),
            created_at=moment(metadata, "creationTimestamp"),
            identity=identity,
            phase=string(status, "phase", MAX_WORD),
            pod_reason=string(status, "reason", MAX_WORD),
            pod_message=string(status, "message", MAX_MESSAGE),
            restarts=_restarts(declared, spec),
            deletion_at=moment(metadata, "deletionTimestamp"),
            deletion_grace_seconds=integer(metadata, "deletionGracePeriodSeconds"),
            termination_grace_seconds=integer(spec, "terminationGracePeriodSeconds"),
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
                else rfc3339(record.reschedule_at),
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
    except Malformed:
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
    except Malformed:
        return None, None
    return str(epoch), epoch


def _airflow(labels: Json, annotations: Json) -> Identity:
    if "airflow_pod_revoked" in labels:
        raise Malformed("Airflow itself revoked this pod (label airflow_pod_revoked)")
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
        raise Malformed(f"{where} {key} is missing")
    if not isinstance(value, str):
        raise Malformed(f"{where} {key} is {json_type(value)}, not text")
    return value


def _uuid(annotations: Json, key: str) -> str:
    value = _marked(annotations, "annotation", key)
    if _UUID.fullmatch(value) is None:
        raise Malformed(f"annotation {key} is {text.quote(value)}, not a UUID")
    return value.lower()


def _id(annotations: Json, key: str) -> str:
    value = _marked(annotations, "annotation", key)
    if not value:
        raise Malformed(f"annotation {key} is empty")
    if len(value) > _MAX_ID:
        raise Malformed(
            f"annotation {key} is {text.quote(value)}, longer than {_MAX_ID} characters"
        )
    # An identity with a replaced character would be somebody else's.
    if text.storable(value) != value:
        raise Malformed(f"annotation {key} is {text.quote(value)}, which no database can hold")
    return value


def _number(marks: Json, where: str, key: str, *, least: int, most: int = INT4_MAX) -> int:
    value = _marked(marks, where, key)
    if _DIGITS.fullmatch(value) is None or not least <= int(value) <= most:
        raise Malformed(
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
    return [name for entry in mappings(owner, key) if (name := string(entry, "name", MAX_NAME))]


def _named(owner: Json, key: str, name: str | None) -> Json | None:
    if name is not None:
        for entry in mappings(owner, key):
            if string(entry, "name", MAX_NAME) == name:
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
    policy = string(declared, "terminationMessagePolicy", MAX_WORD)
    path = string(declared, "terminationMessagePath", MAX_WORD)
    if entry is None:
        absent = Container(
            name,
            "absent",
            own_memory_limit=own_memory_limit,
            message_policy=policy,
            message_path=path,
        )
        return absent, None, None
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
        reason=string(detail, "reason", MAX_WORD),
        message=message,
        exit_code=integer(detail, "exitCode") if state == "terminated" else None,
        started_at=moment(detail, "startedAt"),
        finished_at=moment(detail, "finishedAt") if state == "terminated" else None,
        own_memory_limit=own_memory_limit,
        restart_count=integer(entry, "restartCount"),
        message_policy=policy,
        message_path=path,
    )
    return task, record, problem


def _state(entry: Json) -> tuple[ContainerState, Json]:
    """Return the current state; a status that names none is waiting, as the API defines it."""
    state = entry.get("state")
    if state is None:
        return "waiting", NOTHING
    if not isinstance(state, dict):
        return "absent", NOTHING
    names: tuple[ContainerState, ...] = ("terminated", "running", "waiting")
    for name in names:
        detail = state.get(name)
        if isinstance(detail, dict):
            return name, detail
    return ("waiting" if all(state.get(name) is None for name in names) else "absent"), NOTHING


def _restarts(declared: Json, spec: Json) -> bool:
    if mappings(declared, "restartPolicyRules"):
        return True
    # The API server writes the default out; a manifest by hand may not.
    policy = string(declared, "restartPolicy", MAX_WORD) or string(spec, "restartPolicy", MAX_WORD)
    return policy != "Never"


def _has_memory_limit(owner: Json) -> bool:
    memory = mapping(mapping(owner, "resources"), "limits").get("memory")
    if isinstance(memory, str):
        return memory.strip() not in ("", "0")
    return isinstance(memory, int) and not isinstance(memory, bool) and memory > 0


def _init(spec: Json, status: Json, task: ContainerState) -> InitContainer | None:
    statuses = {
        name: entry
        for entry in mappings(status, "initContainerStatuses")
        if (name := string(entry, "name", MAX_NAME))
    }
    for declared in mappings(spec, "initContainers"):
        name = string(declared, "name", MAX_NAME)
        entry = statuses.get(name) if name else None
        if name is None or entry is None:
            continue
        state, detail = _state(entry)
        reason = string(detail, "reason", MAX_WORD)
        exit_code = integer(detail, "exitCode") if state == "terminated" else None
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
    for entry in mappings(status, "conditions"):
        kind = string(entry, "type", MAX_WORD)
        if kind:
            found.append(
                Condition(
                    kind,
                    string(entry, "status", MAX_WORD),
                    string(entry, "reason", MAX_WORD),
                    moment(entry, "lastTransitionTime"),
                )
            )
            if len(found) == _MAX_CONDITIONS:
                break
    return tuple(found)


def _finalizers(metadata: Json) -> tuple[str, ...]:
    entries = metadata.get("finalizers")
    if not isinstance(entries, list):
        return ()
    kept = [text.clip(entry, MAX_NAME) for entry in entries if isinstance(entry, str) and entry]
    return tuple(kept[:_MAX_FINALIZERS])
