"""The admission policies of k8s/overlays/hold, as a real API server evaluates them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from harness import wait_for
from kube import FINALIZER
from kubernetes import client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kube import Kube

SLEEP = ["sleep", "600"]


@pytest.fixture
def held(kube: Kube) -> Kube:
    """A namespace with the overlay, whose policies the API server has taken up."""
    kube.hold()
    kube.apply(kube.overlay("hold"))
    wait_for("mutating policy in force", lambda: FINALIZER in finalizers(probe(kube)))
    return kube


@pytest.fixture
def reconciler(held: Kube) -> Iterator[client.CoreV1Api]:
    """The API as the reconciler's service account, once the validating policy is in force."""
    held.create(held.task_pod("probe", SLEEP))
    api_client = held.as_service_account("podsettle")
    core = client.CoreV1Api(api_client)

    def refuses() -> bool:
        body = {"metadata": {"labels": {"probe": "yes"}}}
        try:
            core.patch_namespaced_pod("probe", held.namespace, body, dry_run="All")
        except client.ApiException as error:
            return error.status == 422
        return False

    wait_for("validating policy in force", refuses)
    yield core
    api_client.close()


def probe(kube: Kube) -> dict[str, Any]:
    """Ask what a task pod would become, without creating it."""
    pod = kube.task_pod("probe", SLEEP)
    return kube.plain(kube.core.create_namespaced_pod(kube.namespace, pod, dry_run="All"))


def finalizers(pod: dict[str, Any]) -> list[str]:
    """List a pod's finalizers."""
    return pod["metadata"].get("finalizers") or []


def test_adds_the_finalizer_and_keeps_others(held: Kube) -> None:
    """A task pod gets our finalizer beside those that it has, once."""
    assert finalizers(held.create(held.task_pod("plain", SLEEP))) == [FINALIZER]
    assert finalizers(held.create(held.task_pod("by-hand", SLEEP, held=True))) == [FINALIZER]
    other = held.task_pod("other", SLEEP)
    other["metadata"]["finalizers"] = ["example.org/other"]
    created = held.create(other)
    assert sorted(finalizers(created)) == ["example.org/other", FINALIZER]
    held.core.patch_namespaced_pod("other", held.namespace, {"metadata": {"finalizers": None}})


@pytest.mark.parametrize(
    "names", [("base",), ("sidecar", "base", "task"), ("proxy", "task"), ("only",)]
)
def test_pins_the_termination_message_of_the_task_container(
    held: Kube, names: tuple[str, ...]
) -> None:
    """The task container, and no other, writes its record where the kubelet reads it."""
    pod = held.task_pod("pinned", SLEEP)
    model = pod["spec"]["containers"][0]
    odd = {
        "terminationMessagePath": "/tmp/elsewhere",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod["spec"]["containers"] = [{**model, **odd, "name": name} for name in names]
    created = held.create(pod)
    task = next(name for name in ("base", "task", *names) if name in names)
    for container in created["spec"]["containers"]:
        got = {key: container[key] for key in odd}
        if container["name"] == task:
            assert got == {
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "File",
            }
        else:
            assert got == odd
        assert container["command"] == SLEEP
    assert [container["name"] for container in created["spec"]["containers"]] == list(names)


def test_leaves_other_pods_alone(held: Kube) -> None:
    """A pod without the label, and a task pod in a namespace with no pass, are not held."""
    stranger = held.task_pod("stranger", SLEEP)
    del stranger["metadata"]["labels"]["podsettle.io/managed"]
    assert finalizers(held.create(stranger)) == []
    held.hold(wanted=False)
    wait_for("namespace no longer held", lambda: not finalizers(probe(held)))
    assert finalizers(held.create(held.task_pod("elsewhere", SLEEP))) == []


def test_reconciler_may_remove_its_finalizer(held: Kube, reconciler: client.CoreV1Api) -> None:
    """The patch of a release, which tests uid and resourceVersion, is admitted; a held pod then goes."""
    pod = held.wait_running("probe")
    held.delete("probe")
    pod = held.wait_ended("probe")
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": pod["metadata"]["uid"]},
        {
            "op": "test",
            "path": "/metadata/resourceVersion",
            "value": pod["metadata"]["resourceVersion"],
        },
        {"op": "remove", "path": "/metadata/finalizers/0"},
    ]
    reconciler.patch_namespaced_pod("probe", held.namespace, patch)
    held.wait_gone("probe")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"metadata": {"labels": {"podsettle.io/try-number": "9"}}}, "labels"),
        ({"metadata": {"labels": {"podsettle.io/managed": None}}}, "labels"),
        ({"metadata": {"annotations": {"podsettle.io/attempt-id": "stolen"}}}, "annotations"),
        ({"metadata": {"finalizers": [FINALIZER, "example.org/new"]}}, "finalizers"),
        ({"metadata": {"finalizers": ["example.org/new"]}}, "finalizers"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "spec"),
        ({"spec": {"containers": [{"name": "base", "image": "elsewhere/other:1"}]}}, "spec"),
        (
            {
                "metadata": {
                    "ownerReferences": [
                        {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "0"}
                    ]
                }
            },
            "owners",
        ),
    ],
    ids=[
        "label",
        "unlabel",
        "annotation",
        "add-finalizer",
        "swap-finalizer",
        "deadline",
        "image",
        "owner",
    ],
)
def test_reconciler_may_change_nothing_else(
    held: Kube, reconciler: client.CoreV1Api, body: dict[str, Any], says: str
) -> None:
    """Whatever else a patch would change is refused, and the pod stays as it was."""
    before = held.wait_running("probe")
    with pytest.raises(client.ApiException) as refused:
        reconciler.patch_namespaced_pod("probe", held.namespace, body)
    assert refused.value.status == 422
    message = json.loads(refused.value.body)["message"]
    assert "ValidatingAdmissionPolicy 'podsettle-hold'" in message
    assert says in message
    after = held.pod("probe")
    assert after is not None
    assert (after["spec"], finalizers(after)) == (before["spec"], finalizers(before))
    for key in ("labels", "annotations"):
        assert after["metadata"][key] == before["metadata"][key]
    # The same patch by somebody else is none of this policy's business: only the change itself is judged.
    held.core.patch_namespaced_pod(
        "probe", held.namespace, {"metadata": {"labels": {"by": "admin"}}}
    )


def test_reconciler_may_not_take_off_a_foreign_finalizer(
    held: Kube, reconciler: client.CoreV1Api
) -> None:
    """A finalizer that somebody else put there is not ours to remove."""
    pod = held.task_pod("foreign", SLEEP)
    pod["metadata"]["finalizers"] = ["example.org/other"]
    held.create(pod)
    with pytest.raises(client.ApiException) as refused:
        reconciler.patch_namespaced_pod(
            "foreign", held.namespace, {"metadata": {"finalizers": None}}
        )
    assert refused.value.status == 422
    held.core.patch_namespaced_pod("foreign", held.namespace, {"metadata": {"finalizers": None}})
