from __future__ import annotations

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.pods import PROFILES, BadPod, PodFacts
from tests.unit.conftest import CORPUS, corpus_files

PODSETTLE = PROFILES["podsettle"]
TI = "7d8f1a52-3c5e-4d55-9a0b-0f2f8e6f0c11"
SUCCESS = '{"v":1,"outcome":"success"}'

Corpus = dict[str, dict[str, Any]]


def read(manifest: object, profile: str = "podsettle", container: str | None = None) -> Any:
    """Return the facts in the form that the database gets."""
    facts = PodFacts.from_manifest(manifest, profile=PROFILES[profile], container=container)
    return json.loads(json.dumps(facts.as_json()))


def pod(**parts: Any) -> dict[str, Any]:
    """A pod of this profile whose task is over; dotted names replace a part (`None` drops it)."""
    manifest: dict[str, Any] = {
        "kind": "Pod",
        "metadata": {
            "name": "task",
            "namespace": "tasks",
            "labels": {"podsettle.io/managed": "true", "podsettle.io/try-number": "2"},
            "annotations": {
                "podsettle.io/task-instance-id": TI,
                "podsettle.io/attempt-id": "attempt-7",
            },
        },
        "spec": {"containers": [{"name": "base"}], "restartPolicy": "Never"},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "base", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
            ],
        },
    }
    for name, value in parts.items():
        *path, last = name.split("__")
        owner = manifest
        for key in path:
            owner = owner[key]
        owner[last] = value
    return manifest


# --- the corpus --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", corpus_files(), ids=lambda file: file.stem)
def test_the_record_is_found_exactly_where_it_decides(file: Path) -> None:
    wanted = json.loads((CORPUS / "expected" / file.parent.name / file.name).read_text("utf-8"))
    facts = read(json.loads(file.read_text("utf-8")))
    if wanted["from_record"]:
        assert facts["record"]["outcome"] == wanted["verdict"]
        assert facts["record_problem"] is None
        assert facts["container"]["message"] is None
    if wanted["verdict"] == "success":
        assert facts["record"] is not None, "I4"


def test_the_shape_of_the_facts(corpus: Corpus) -> None:
    assert read(corpus["okrec"]) == {
        "pod": "okrec",
        "namespace": "default",
        "uid": "29aae874-ba70-45c4-a66f-a3b7ffb91969",
        "resource_version": "997",
        "node": "node1",
        "created_at": "2026-11-30T17:43:52Z",
        "identity": {
            "task_instance_id": None,
            "dag_id": None,
            "run_id": None,
            "task_id": None,
            "map_index": None,
            "try_number": None,
            "attempt_id": None,
            "problem": "annotation podsettle.io/task-instance-id is missing",
        },
        "phase": "Succeeded",
        "pod_reason": None,
        "pod_message": None,
        "restarts": False,
        "deletion_at": None,
        "deletion_grace_seconds": None,
        "termination_grace_seconds": 5,
        "finalizers": ["podsettle.io/outcome"],
        "conditions": [
            {
                "type": "PodReadyToStartContainers",
                "status": "False",
                "reason": None,
                "at": "2026-11-30T17:43:56Z",
            },
            {
                "type": "Initialized",
                "status": "True",
                "reason": "PodCompleted",
                "at": "2026-11-30T17:43:52Z",
            },
            {
                "type": "Ready",
                "status": "False",
                "reason": "PodCompleted",
                "at": "2026-11-30T17:43:55Z",
            },
            {
                "type": "ContainersReady",
                "status": "False",
                "reason": "PodCompleted",
                "at": "2026-11-30T17:43:55Z",
            },
            {
                "type": "PodScheduled",
                "status": "True",
                "reason": None,
                "at": "2026-11-30T17:43:52Z",
            },
        ],
        "container": {
            "name": "base",
            "state": "terminated",
            "reason": "Completed",
            "message": None,
            "exit_code": 0,
            "started_at": "2026-11-30T17:43:54Z",
            "finished_at": "2026-11-30T17:43:54Z",
            # status.resources holds a limit that nobody set; only the spec counts.
            "own_memory_limit": False,
            "restart_count": 0,
        },
        "init": None,
        "record": {
            "outcome": "success",
            "exit_code": None,
            "failure_kind": None,
            "reason": None,
            "reschedule_at": None,
        },
        "record_problem": None,
    }


def test_what_the_corpus_holds_of_special_things(corpus: Corpus) -> None:
    facts = {name: read(manifest) for name, manifest in corpus.items()}

    # The task container, not the sidecar beside it and not index 0.
    for name in ("sidecar-keeps-pod-running-success-record", "sidecar-killed-137-base-ok"):
        assert facts[name]["container"]["exit_code"] == 0, name
    assert facts["sidecar-keeps-pod-running-success-record"]["phase"] == "Running"
    assert facts["native-sidecar"]["init"] is None
    # Never an earlier state.
    restarted = facts["restarted-container-laststate-oom"]
    assert restarted["restarts"] is True
    assert restarted["container"]["state"] == "running"
    assert restarted["container"]["exit_code"] is None
    assert facts["evicted-own-limit-container-waiting"]["container"]["state"] == "waiting"
    # A pod that was turned away has no container status at all.
    assert facts["outofcpu-new-prefix"]["container"]["state"] == "absent"
    assert facts["outofcpu-new-prefix"]["container"]["name"] == "base"
    assert facts["outofcpu-new-prefix"]["pod_reason"] == "OutOfcpu"
    assert facts["topology-affinity-error-spaces"]["pod_reason"] == "Topology Affinity Error"
    # 1970 is the kubelet's word for never.
    assert facts["starterr"]["container"]["started_at"] is None
    assert facts["starterr"]["container"]["finished_at"] is not None
    # Init containers.
    assert facts["initfail"]["init"] == {
        "name": "init",
        "state": "terminated",
        "reason": "Error",
        "exit_code": 3,
    }
    assert facts["init-oomkilled-exit0-stuck-pending"]["init"]["reason"] == "OOMKilled"
    # Whose limit it was.
    assert facts["oomkilled-base-own-limit"]["container"]["own_memory_limit"] is True
    # Text that is no record stays text.
    assert facts["garbage"]["record"] is None
    assert facts["garbage"]["record_problem"] == "the message is no JSON object"
    assert facts["garbage"]["container"]["message"]
    assert facts["ok-norec"]["record_problem"] is None, "no message, nothing to complain of"
    # Older lines before the record.
    assert facts["termination-log-with-older-lines"]["record"]["outcome"] == "success"
    assert facts["resched"]["record"]["reschedule_at"].endswith("Z")
    # A pod that a finalizer holds: the kubelet has reset the grace, the spec still knows it.
    held = facts["del-running-rec"]
    assert held["deletion_at"] >= held["container"]["finished_at"]
    assert held["deletion_grace_seconds"] == 0
    assert held["termination_grace_seconds"] == 5
    assert held["finalizers"] == ["podsettle.io/outcome"]
    taint = {c["type"]: c for c in facts["taint"]["conditions"]}
    assert taint["DisruptionTarget"]["reason"] == "DeletionByTaintManager"


# --- whose pod ---------------------------------------------------------------------------------


def test_identity_of_this_projects_pods() -> None:
    facts = read(pod(metadata__annotations={
        "podsettle.io/task-instance-id": TI.upper(), "podsettle.io/attempt-id": "attempt-7"
    }))  # fmt: skip
    assert facts["identity"] == {
        "task_instance_id": TI,
        "dag_id": None,
        "run_id": None,
        "task_id": None,
        "map_index": None,
        "try_number": 2,
        "attempt_id": "attempt-7",
        "problem": None,
    }


@pytest.mark.parametrize(
    "marks, problem",
    [
        ({"task-instance-id": "x"}, "annotation podsettle.io/task-instance-id is 'x', not a UUID"),
        ({"task-instance-id": "{" + TI + "}"}, "not a UUID"),
        ({"task-instance-id": TI.replace("-", "")}, "not a UUID"),
        ({"task-instance-id": TI + "\n"}, r"\n', not a UUID"),
        ({"task-instance-id": "\x1b[2J\u202e"}, r"is '\x1b[2J\u202e', not a UUID"),
        ({"task-instance-id": "y" * 10_000}, "y…', not a UUID"),
        ({"task-instance-id": 5067}, "task-instance-id is a number, not text"),
        ({"task-instance-id": None}, "annotation podsettle.io/task-instance-id is missing"),
        ({"attempt-id": None}, "annotation podsettle.io/attempt-id is missing"),
        ({"attempt-id": ""}, "annotation podsettle.io/attempt-id is empty"),
        ({"attempt-id": ["a"]}, "attempt-id is a list, not text"),
        ({"attempt-id": "a" * 251}, "longer than 250 characters"),
        ({"attempt-id": "a\x00"}, "which no database can hold"),
        ({"attempt-id": "a\ud800"}, "which no database can hold"),
        ({"try-number": None}, "label podsettle.io/try-number is missing"),
        ({"try-number": "0"}, "try-number is '0', not a whole number from 1 to 2147483647"),
        ({"try-number": "2147483648"}, "not a whole number"),
        ({"try-number": "-1"}, "not a whole number"),
        ({"try-number": "+1"}, "not a whole number"),
        ({"try-number": " 1"}, "not a whole number"),
        ({"try-number": "1.0"}, "not a whole number"),
        ({"try-number": "1_0"}, "not a whole number"),
        ({"try-number": "٣"}, "not a whole number"),
        ({"try-number": "²"}, "not a whole number"),
        ({"try-number": "9" * 5000}, "not a whole number"),
        ({"try-number": 2}, "try-number is a number, not text"),
    ],
)
def test_a_malformed_identity_is_one_clear_sentence(marks: dict[str, Any], problem: str) -> None:
    manifest = pod()
    for key, value in marks.items():
        where = "labels" if key == "try-number" else "annotations"
        manifest["metadata"][where][f"podsettle.io/{key}"] = value
    identity = read(manifest)["identity"]
    assert problem in identity["problem"]
    assert identity["problem"].isprintable()
    assert len(identity["problem"]) < 250
    assert [value for key, value in identity.items() if key != "problem"] == [None] * 7


@pytest.mark.parametrize("marks", [None, [], "x", 7])
def test_labels_and_annotations_of_any_type(marks: object) -> None:
    facts = read(pod(metadata__labels=marks, metadata__annotations=marks))
    assert "is missing" in facts["identity"]["problem"]


@pytest.mark.parametrize(
    "epoch, attempt_id, problem",
    [
        (None, "0", None),
        ("0", "0", None),
        ("3", "3", None),
        ("03", "3", None),
        ("9223372036854775807", "9223372036854775807", None),
        ("9223372036854775808", None, "label leoflow.io/attempt-epoch is"),
        ("-1", None, "label leoflow.io/attempt-epoch is '-1'"),
        ("x", None, "label leoflow.io/attempt-epoch is 'x'"),
    ],
)
def test_identity_of_leoflows_pods(
    epoch: str | None, attempt_id: str | None, problem: str | None
) -> None:
    labels = {"leoflow.io/try-number": "1", "leoflow.io/run-id": "r"}
    if epoch is not None:
        labels["leoflow.io/attempt-epoch"] = epoch
    annotations = {"leoflow.io/task-instance-id": TI}
    identity = read(
        pod(metadata__labels=labels, metadata__annotations=annotations), profile="leoflow"
    )["identity"]
    if problem is None:
        assert (identity["task_instance_id"], identity["try_number"]) == (TI, 1)
        assert identity["attempt_id"] == attempt_id
        assert identity["problem"] is None
    else:
        assert problem in identity["problem"]
        assert identity["attempt_id"] is None


@pytest.mark.parametrize(
    "epoch, message, accepted",
    [
        ("3", '{"v":1,"outcome":"success","attempt_epoch":3}', True),
        ("3", '{"v":1,"outcome":"success","attempt_epoch":2}', False),
        ("3", SUCCESS, False),
        (None, SUCCESS, True),
        (None, '{"v":1,"outcome":"success","attempt_epoch":1}', False),
        ("x", '{"v":1,"outcome":"success","attempt_epoch":1}', False),
    ],
)
def test_leoflows_records_are_tied_to_the_epoch(
    epoch: str | None, message: str, accepted: bool
) -> None:
    manifest = ended(message)
    manifest["metadata"]["labels"] = {"leoflow.io/try-number": "1"}
    if epoch is not None:
        manifest["metadata"]["labels"]["leoflow.io/attempt-epoch"] = epoch
    assert (read(manifest, profile="leoflow")["record"] is not None) is accepted


AIRFLOW = {"dag_id": "Étl.dag", "task_id": "g.t", "run_id": "manual__2026-09-01T00:00:00+00:00"}


@pytest.mark.parametrize(
    "more, map_index, problem",
    [
        ({}, -1, None),
        ({"map_index": "-1"}, -1, None),
        ({"map_index": "0"}, 0, None),
        ({"map_index": "17"}, 17, None),
        ({"map_index": "-2"}, None, "annotation map_index is '-2'"),
        ({"map_index": ""}, None, "annotation map_index is ''"),
        ({"try_number": None}, None, "annotation try_number is missing"),
        ({"try_number": "0"}, None, "annotation try_number is '0'"),
        ({"dag_id": None}, None, "annotation dag_id is missing"),
        ({"run_id": ""}, None, "annotation run_id is empty"),
        ({"task_id": "t" * 251}, None, "annotation task_id is"),
    ],
)
def test_identity_of_airflows_pods(
    more: dict[str, Any], map_index: int | None, problem: str | None
) -> None:
    manifest = pod(metadata__annotations={**AIRFLOW, "try_number": "2", **more})
    identity = read(manifest, profile="airflow")["identity"]
    if problem is None:
        assert identity == {
            "task_instance_id": None,
            **AIRFLOW,
            "map_index": map_index,
            "try_number": 2,
            "attempt_id": None,
            "problem": None,
        }
    else:
        assert problem in identity["problem"]
        assert identity["dag_id"] is None


def test_a_pod_that_airflow_revoked_is_left_alone() -> None:
    manifest = pod(metadata__annotations={**AIRFLOW, "try_number": "2"})
    manifest["metadata"]["labels"]["airflow_pod_revoked"] = ""
    assert "Airflow itself revoked" in read(manifest, profile="airflow")["identity"]["problem"]


# --- the task container ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, wanted, found",
    [
        (["base"], None, "base"),
        (["istio-proxy", "task", "base"], None, "base"),
        (["istio-proxy", "task"], None, "task"),
        (["anything"], None, "anything"),
        (["base", "main"], "main", "main"),
        (["one", "two"], None, None),
        (["base"], "main", None),
        ([], None, None),
    ],
)
def test_which_container_is_the_tasks(
    names: list[str], wanted: str | None, found: str | None
) -> None:
    facts = read(
        pod(
            spec__containers=[{"name": name} for name in names],
            status__containerStatuses=[
                {"name": name, "state": {"terminated": {"exitCode": number}}}
                for number, name in enumerate(reversed(names))
            ],
        ),
        container=wanted,
    )
    assert facts["container"]["name"] == found
    if found is not None:
        assert facts["container"]["exit_code"] == list(reversed(names)).index(found)
        assert facts["identity"]["problem"] is None
        return
    assert facts["container"]["state"] == "absent"
    problem = facts["identity"]["problem"]
    assert facts["identity"]["task_instance_id"] is None
    assert all(repr(name) in problem for name in names)
    assert ("--container" in problem) is bool(names)


def test_containers_are_known_from_the_status_where_there_is_no_spec() -> None:
    assert read(pod(spec=None))["container"]["exit_code"] == 1


@pytest.mark.parametrize(
    "state, expected",
    [
        ({"terminated": {"exitCode": 3}}, ("terminated", 3)),
        ({"terminated": {}}, ("terminated", None)),
        ({"terminated": {"exitCode": True}}, ("terminated", None)),
        ({"terminated": {"exitCode": 2**40}}, ("terminated", None)),
        ({"terminated": None, "running": {}}, ("running", None)),
        ({"waiting": {"reason": "ContainerCreating", "exitCode": 1}}, ("waiting", None)),
        ({}, ("waiting", None)),
        (None, ("waiting", None)),
        ({"terminated": "yes"}, ("absent", None)),
        ("terminated", ("absent", None)),
        ([], ("absent", None)),
    ],
)
def test_the_state_of_the_container(state: object, expected: tuple[str, int | None]) -> None:
    status = {"name": "base", "state": state, "lastState": {"terminated": {"exitCode": 99}}}
    task = read(pod(status__containerStatuses=[status]))["container"]
    assert (task["state"], task["exit_code"]) == expected


@pytest.mark.parametrize(
    "spec, declared, restarts",
    [
        ("Never", {}, False),
        ("OnFailure", {}, True),
        ("Always", {}, True),
        (None, {}, True),
        (7, {}, True),
        ("Always", {"restartPolicy": "Never"}, False),
        ("Never", {"restartPolicy": "OnFailure"}, True),
        ("Never", {"restartPolicy": None}, False),
        ("Never", {"restartPolicyRules": []}, False),
        ("Never", {"restartPolicyRules": [{"action": "Restart"}]}, True),
    ],
)
def test_whether_the_container_may_start_again(
    spec: object, declared: dict[str, Any], restarts: bool
) -> None:
    containers = [{"name": "side", "restartPolicy": "Always"}, {"name": "base", **declared}]
    manifest = pod(spec__restartPolicy=spec, spec__containers=containers)
    assert read(manifest)["restarts"] is restarts


@pytest.mark.parametrize(
    "own, whole, expected",
    [
        ({"memory": "1Gi"}, None, True),
        ({"memory": 1073741824}, None, True),
        ({}, {"memory": "1Gi"}, True),
        ({"cpu": "1"}, {"cpu": "1"}, False),
        ({"memory": "0"}, None, False),
        ({"memory": 0}, None, False),
        ({"memory": True}, None, False),
        ({"memory": None}, None, False),
        (None, None, False),
        ("1Gi", [], False),
    ],
)
def test_whether_the_memory_limit_is_its_own(own: object, whole: object, expected: bool) -> None:
    side = {"name": "side", "resources": {"limits": {"memory": "1Gi"}}}
    manifest = pod(
        spec__containers=[side, {"name": "base", "resources": {"limits": own}}],
        spec__resources={"limits": whole},
    )
    assert read(manifest)["container"]["own_memory_limit"] is expected


def ended(message: object, **terminated: Any) -> dict[str, Any]:
    state = {"terminated": {"exitCode": 0, "message": message, **terminated}}
    return pod(status__containerStatuses=[{"name": "base", "state": state}])


@pytest.mark.parametrize(
    "message, accepted",
    [
        (SUCCESS, True),
        ('{"v":1,"outcome":"success","attempt_id":"attempt-7"}', True),
        ('{"v":1,"outcome":"success","attempt_id":"attempt-8"}', False),
    ],
)
def test_a_record_is_tied_to_the_attempt(message: str, accepted: bool) -> None:
    """I8: a termination message speaks only for its own attempt."""
    facts = read(ended(message))
    assert (facts["record"] is not None) is accepted
    assert (facts["container"]["message"] is None) is accepted
    # A pod that is not known to be any attempt's lends its name to no record.
    airflow = read(ended(message), profile="airflow")
    assert (airflow["record"] is not None) is ("attempt_id" not in message)


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_only_an_end_carries_a_record(state: str) -> None:
    status = {
        "name": "base",
        "state": {state: {"message": SUCCESS}},
        "lastState": {"terminated": {"exitCode": 0, "message": SUCCESS}},
    }
    side = {"name": "side", "state": {"terminated": {"exitCode": 0, "message": SUCCESS}}}
    facts = read(pod(status__containerStatuses=[side, status]))
    assert facts["record"] is None
    assert facts["record_problem"] is None
    assert facts["container"]["message"] == SUCCESS


@pytest.mark.parametrize("message", [None, "", 7, [SUCCESS], {"v": 1}])
def test_no_message_is_no_problem(message: object) -> None:
    facts = read(ended(message))
    assert (facts["record"], facts["record_problem"]) == (None, None)


def test_a_record_in_full() -> None:
    message = json.dumps(
        {
            "v": 1,
            "outcome": "reschedule",
            "exit_code": 75,
            "failure_kind": "timeout",
            "reason": "\x00nul and \ud800",
            "reschedule_at": "2026-08-13T14:34:56.123456789+02:00",
        }
    )
    assert read(ended(message))["record"] == {
        "outcome": "reschedule",
        "exit_code": 75,
        "failure_kind": "timeout",
        "reason": "\ufffdnul and \ufffd",
        "reschedule_at": "2026-08-13T12:34:56.123456Z",
    }


# --- init containers ---------------------------------------------------------------------------


def init(name: str, state: dict[str, Any], *, sidecar: bool = False) -> dict[str, Any]:
    return {"name": name, "state": state, "sidecar": sidecar}


DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}
PULL = {"waiting": {"reason": "ImagePullBackOff"}}


@pytest.mark.parametrize(
    "inits, base, found",
    [
        ([], None, None),
        ([init("a", DONE)], None, None),
        ([init("a", {"terminated": {"exitCode": 2, "reason": "Error"}})], None, ("a", "Error")),
        (
            [init("a", {"terminated": {"exitCode": 0, "reason": "OOMKilled"}})],
            None,
            ("a", "OOMKilled"),
        ),
        ([init("a", PULL)], None, ("a", "ImagePullBackOff")),
        ([init("a", {"waiting": {"reason": "PodInitializing"}})], None, None),
        ([init("a", {"waiting": {}})], None, None),
        ([init("a", {"running": {}})], None, ("a", None)),
        ([init("a", DONE), init("b", {"running": {}})], None, ("b", None)),
        ([init("a", DONE), init("b", PULL), init("c", PULL)], None, ("b", "ImagePullBackOff")),
        # A native sidecar runs beside the task: its end says nothing.
        ([init("s", {"running": {}}, sidecar=True)], None, None),
        ([init("s", {"terminated": {"exitCode": 137}}, sidecar=True)], DONE, None),
        ([init("s", PULL, sidecar=True)], None, ("s", "ImagePullBackOff")),
        ([init("s", PULL, sidecar=True)], DONE, None),
        ([init("s", PULL, sidecar=True)], {"running": {}}, None),
        ([init("s", {"waiting": {"reason": "PodInitializing"}}, sidecar=True)], None, None),
        (
            [init("s", {"running": {}}, sidecar=True), init("a", {"terminated": {"exitCode": 1}})],
            None,
            ("a", None),
        ),
    ],
)
def test_the_init_container_that_holds_the_pod_up(
    inits: list[dict[str, Any]], base: dict[str, Any] | None, found: tuple[str, str | None] | None
) -> None:
    waiting = {"waiting": {"reason": "PodInitializing"}}
    facts = read(
        pod(
            spec__initContainers=[
                {"name": i["name"], **({"restartPolicy": "Always"} if i["sidecar"] else {})}
                for i in inits
            ],
            # The order of the statuses is not that of the spec.
            status__initContainerStatuses=[
                {"name": i["name"], "state": i["state"]} for i in reversed(inits)
            ],
            status__containerStatuses=[{"name": "base", "state": base or waiting}],
        )
    )["init"]
    assert (facts and (facts["name"], facts["reason"])) == found


# --- anything at all ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest, told, lost",
    [
        (None, "expected a pod, found null", True),
        ("pod", "found a string", True),
        ([], "found a list", True),
        (7, "found a number", True),
        (True, "found a boolean", True),
        ({}, "no metadata.name", True),
        ({"kind": "Pod", "metadata": {"name": ""}}, "no metadata.name", True),
        ({"kind": "Pod", "metadata": {"name": 7}}, "no metadata.name", True),
        ({"kind": "Pod", "metadata": []}, "no metadata.name", True),
        ({"kind": "Deploy\nment", "metadata": {"name": "x"}}, r"found 'Deploy\nment'", False),
        ({"kind": ["Pod"], "metadata": {"name": "x"}}, "found a list", False),
    ],
)
def test_what_is_no_pod(manifest: object, told: str, lost: bool) -> None:
    with pytest.raises(BadPod) as bad:
        PodFacts.from_manifest(manifest, profile=PODSETTLE)
    assert told in str(bad.value)
    assert bad.value.lost is lost


def test_a_pod_with_nothing_but_a_name() -> None:
    facts = read({"metadata": {"name": "x"}})
    assert facts["namespace"] == "default"
    assert facts["container"]["state"] == "absent"
    assert facts["conditions"] == facts["finalizers"] == []
    assert facts["restarts"] is True


def test_ten_megabytes_in_one_field() -> None:
    huge = "é" * 5_000_000
    manifest = ended(huge)
    manifest["status"].update(message=huge, reason=huge, phase=huge)
    manifest["metadata"].update(name=huge, finalizers=[huge] * 100)
    manifest["status"]["conditions"] = [{"type": huge, "status": huge, "reason": huge}] * 100
    facts = PodFacts.from_manifest(manifest, profile=PODSETTLE).as_json()
    assert len(json.dumps(facts, ensure_ascii=False)) < 60_000
    assert isinstance(facts["pod_message"], str)
    assert len(facts["pod_message"]) == 1024
    assert facts["pod_message"].endswith("é…")


@pytest.mark.parametrize(
    "value, expected",
    [
        ("2026-09-01T10:00:00Z", "2026-09-01T10:00:00Z"),
        ("2026-09-01T10:00:00.123456Z", "2026-09-01T10:00:00.123456Z"),
        ("2026-09-01T12:00:00+02:00", "2026-09-01T10:00:00Z"),
        ("1970-01-01T00:00:00Z", None),
        ("1970-12-31T23:59:59Z", None),
        ("1971-01-01T00:00:00Z", "1971-01-01T00:00:00Z"),
        ("0001-01-01T00:00:00Z", None),
        ("yesterday", None),
        ("2026-09-01", None),
        (1788256800, None),
        (None, None),
        ("2026-09-01T10:00:00." + "1" * 100 + "Z", None),
    ],
)
def test_times_are_normal_or_null(value: object, expected: str | None) -> None:
    assert read(pod(metadata__deletionTimestamp=value))["deletion_at"] == expected


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(), max_size=30)
    | st.sampled_from(
        ["", "\x00", "\ud800", SUCCESS, "Pod", "base", "Never", "9" * 400, "x" * 3000]
    )
)
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_MANIFESTS = [json.loads(file.read_text("utf-8")) for file in corpus_files()] + [
    pod(),
    ended(SUCCESS),
    ended('{"v":1,"outcome":"success","attempt_id":"attempt-7"}'),
]


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += paths(inner, (*path, index))
    return found


@st.composite
def mangled(draw: st.DrawFn) -> object:
    """A real pod with some of its values replaced by anything."""
    manifest = copy.deepcopy(draw(st.sampled_from(_MANIFESTS)))
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths(manifest)))
        owner = manifest
        for step in path[:-1]:
            owner = owner[step]
        if isinstance(owner, dict) and draw(st.integers(0, 4)) == 0:
            owner[draw(st.text(max_size=10))] = owner.pop(path[-1])
        else:
            owner[path[-1]] = draw(_ANYTHING)
    return manifest


TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z")


def check(value: object, kinds: type | tuple[type, ...], *, limit: int = 253) -> None:
    if value is None:
        return
    assert isinstance(value, kinds)
    assert not (isinstance(value, bool) and kinds is int)
    if isinstance(value, str):
        assert len(value) <= limit
    if kinds is int:
        assert -(2**31) <= value < 2**31  # type: ignore[operator]


def check_shape(facts: dict[str, Any]) -> None:
    """The contract with the database, key by key."""
    reference = PodFacts.from_manifest(pod(), profile=PODSETTLE).as_json()
    assert list(facts) == list(reference)
    for part in ("identity", "container"):
        assert list(facts[part]) == list(reference[part])  # type: ignore[call-overload]
    assert isinstance(facts["pod"], str)
    assert isinstance(facts["namespace"], str)
    for key in ("pod", "namespace", "uid", "resource_version", "node", "phase", "pod_reason"):
        check(facts[key], str)
    check(facts["pod_message"], str, limit=1024)
    check(facts["container"]["message"], str, limit=1024)
    assert type(facts["restarts"]) is bool
    assert type(facts["container"]["own_memory_limit"]) is bool
    for key in ("deletion_grace_seconds", "termination_grace_seconds"):
        check(facts[key], int)
    for key in ("exit_code", "restart_count"):
        check(facts["container"][key], int)
    assert facts["container"]["state"] in {"terminated", "running", "waiting", "absent"}
    times = [facts["created_at"], facts["deletion_at"]]
    times += [facts["container"]["started_at"], facts["container"]["finished_at"]]
    assert len(facts["conditions"]) <= 32
    for condition in facts["conditions"]:
        assert list(condition) == ["type", "status", "reason", "at"]
        assert isinstance(condition["type"], str)
        check(condition["status"], str)
        check(condition["reason"], str)
        times.append(condition["at"])
    for moment in times:
        if moment is not None:
            assert TIME.fullmatch(moment)
            assert datetime.fromisoformat(moment).year >= 1971
    if facts["init"] is not None:
        assert list(facts["init"]) == ["name", "state", "reason", "exit_code"]
    if facts["record"] is not None:
        assert facts["record_problem"] is None
        assert facts["container"]["message"] is None
        assert facts["container"]["state"] == "terminated"
    identity = facts["identity"]
    if identity["problem"] is not None:
        assert identity["problem"].isprintable()
        assert not any(value for key, value in identity.items() if key != "problem")


def facts_or_none(
    manifest: object, profile: str = "podsettle", container: str | None = None
) -> PodFacts | None:
    try:
        return PodFacts.from_manifest(manifest, profile=PROFILES[profile], container=container)
    except BadPod as bad:
        told = str(bad)
    assert told.isprintable()
    return None


@settings(max_examples=600)
@given(
    manifest=mangled(),
    profile=st.sampled_from(list(PROFILES)),
    container=st.sampled_from([None, "base", "missing"]),
)
def test_a_mangled_pod_never_raises_and_keeps_its_shape(
    manifest: object, profile: str, container: str | None
) -> None:
    facts = facts_or_none(manifest, profile, container)
    if facts is None:
        return
    document = facts.as_json()
    check_shape(document)
    encoded = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")
    assert b"\x00" not in encoded
    assert b"\\u0000" not in encoded


@given(_ANYTHING)
def test_anything_at_all_is_a_pod_or_is_not(manifest: object) -> None:
    facts = facts_or_none(manifest)
    if facts is not None:
        check_shape(facts.as_json())
