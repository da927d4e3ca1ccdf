"""The manifests of k8s/ are what a real API server accepts, and give the pass no more than they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from kube import CHECKOUT
from kubernetes import client

if TYPE_CHECKING:
    from kube import Kube

OVERLAYS = sorted(
    path.parent.name for path in (CHECKOUT / "k8s/overlays").glob("*/kustomization.yaml")
)
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")


def may(kube: Kube, verb: str, resource: str, *, namespace: str | None = None) -> bool:
    """Ask the API server's authorizer what the reconciler's service account may do."""
    review = client.V1SubjectAccessReview(
        spec=client.V1SubjectAccessReviewSpec(
            user=f"system:serviceaccount:{kube.namespace}:podsettle",
            groups=["system:serviceaccounts", "system:authenticated"],
            resource_attributes=client.V1ResourceAttributes(
                namespace=namespace or kube.namespace, verb=verb, resource=resource
            ),
        )
    )
    answer = client.AuthorizationV1Api(kube.api_client).create_subject_access_review(review)
    return bool(answer.status.allowed)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_accepted(kube: Kube, overlay: str) -> None:
    """Every overlay applies, strictly validated, and a second time without a change."""
    text = kube.overlay(overlay)
    wanted = [document for document in yaml.safe_load_all(text) if document]
    strict = ("--server-side", "--validate=strict", "-f", "-")
    applied = kube.cluster.kubectl("apply", *strict, "-o=name", data=text).split()
    assert len(applied) == len(wanted)
    differences = kube.cluster.kubectl("diff", "--server-side", "-f", "-", data=text, check=False)
    assert differences == ""


def test_base_only_reads_pods(kube: Kube) -> None:
    """The base's RBAC is list on pods of its own namespace, and nothing else."""
    kube.apply(kube.overlay("cronjob"))
    assert {verb for verb in VERBS if may(kube, verb, "pods")} == {"list"}
    for resource in ("secrets", "configmaps", "nodes", "events", "jobs", "pods/log", "pods/status"):
        assert [verb for verb in VERBS if may(kube, verb, resource)] == [], resource
    assert not may(kube, "list", "pods", namespace="kube-system")


def test_base_forbids_patch(kube: Kube) -> None:
    """A patch by the service account of the base is refused by RBAC, with its own token."""
    kube.apply(kube.overlay("cronjob"))
    kube.create(kube.task_pod("held", ["sleep", "600"], held=True))
    reconciler = kube.as_service_account("podsettle")
    core = client.CoreV1Api(reconciler)
    assert [pod.metadata.name for pod in core.list_namespaced_pod(kube.namespace).items] == ["held"]
    with pytest.raises(client.ApiException) as refused:
        core.patch_namespaced_pod("held", kube.namespace, {"metadata": {"finalizers": None}})
    assert refused.value.status == 403
    assert 'cannot patch resource "pods"' in json.loads(refused.value.body)["message"]
    reconciler.close()


def test_hold_adds_patch_and_delete(kube: Kube) -> None:
    """The overlay for held pods adds what releasing takes, for pods only."""
    kube.apply(kube.overlay("hold"))
    assert {verb for verb in VERBS if may(kube, verb, "pods")} == {"list", "patch", "delete"}
    assert not may(kube, "patch", "pods/status")
    assert not may(kube, "patch", "pods", namespace="kube-system")
    assert not may(kube, "create", "pods/eviction")


def test_pass_is_hardened(kube: Kube) -> None:
    """The CronJob's pods meet the restricted Pod Security Standard, as the API server judges it."""
    kube.cluster.kubectl(
        "label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    for overlay, kind, path in (
        ("cronjob", "CronJob", ("spec", "jobTemplate", "spec", "template")),
        ("install", "Job", ("spec", "template")),
    ):
        documents = yaml.safe_load_all(kube.overlay(overlay))
        template = next(document for document in documents if document["kind"] == kind)
        for key in path:
            template = template[key]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": overlay}, **template}
        pod["metadata"] |= {"name": overlay}
        pod["spec"].pop("serviceAccountName", None)
        kube.create(pod)
    # The same namespace refuses what is not hardened, so the check above is one.
    bare = kube.task_pod("bare", ["sleep", "1"], container={"securityContext": {}})
    with pytest.raises(client.ApiException) as refused:
        kube.create(bare)
    assert "violates PodSecurity" in refused.value.body
