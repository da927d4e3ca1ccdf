"""What the cluster tests do to Kubernetes, in the words of the tests.

Everything here goes through the API as an operator's or a controller's request would; nothing is faked. Waits are waits
for a condition, by watch, with a limit that only says that the cluster is broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from harness import OUTSIDE, External, image, wait_for
from kubernetes import client, config, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Cluster

CHECKOUT = Path(__file__).parent.parent.parent
FINALIZER = "podsettle.io/outcome"
# The strictest container security context that "restricted" namespaces ask for.
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass
class PassResult:
    """What one run of the CronJob's Job left behind."""

    state: dict[str, Any]
    output: str
    pod: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return int(self.state["exitCode"])

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects on standard output, one for each pod."""
        found = []
        for line in self.output.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(line)
                if isinstance(value, dict) and "disposition" in value:
                    found.append(value)
        return found

    def about(self, pod: str) -> dict[str, Any]:
        """The one object about a pod."""
        found = [line for line in self.lines if line["pod"] == pod]
        assert len(found) == 1, f"{len(found)} lines about {pod} in:\n{self.output}"
        return found[0]


@dataclass
class Kube:
    """A cluster as a test sees it: one namespace of it, as administrator."""

    cluster: Cluster | External
    namespace: str
    _made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Open the administrator's client."""
        self.api_client = config.new_client_from_config(str(self.cluster.kubeconfig))
        self.core = client.CoreV1Api(self.api_client)
        self.batch = client.BatchV1Api(self.api_client)

    def close(self) -> None:
        """Close the client's connections."""
        self.api_client.close()

    def kubectl(self, *arguments: str, data: str | None = None, check: bool = True) -> str:
        """Run kubectl in this namespace."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, data=data, check=check)

    # Manifests of the project.

    def overlay(self, name: str, **patches: Any) -> str:
        """Render k8s/overlays/NAME for this namespace and the images of the tests, as an operator's overlay would.

        Keyword arguments are merged into the pod template of the CronJob or Job.
        """
        folder = self.scratch()
        document: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": self.namespace,
            "resources": [os.path.relpath(CHECKOUT / "k8s/overlays" / name, folder.resolve())],
            "images": [
                {
                    "name": "podsettle",
                    "newName": image("reconciler").rsplit(":", 1)[0],
                    "newTag": "test",
                }
            ],
        }
        if patches:
            document["patches"] = [
                {
                    "target": {"kind": kind},
                    "patch": yaml.safe_dump({"kind": kind, "metadata": {"name": "any"}} | body),
                }
                for kind, body in patches.items()
            ]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
        return self.cluster.kubectl("kustomize", str(folder))

    def scratch(self) -> Path:
        """Make a folder that the fixture removes."""
        made = subprocess.run(
            ["mktemp", "-d"], check=True, capture_output=True, text=True
        ).stdout.strip()
        self._made.append(made)
        return Path(made)

    def apply(self, text: str) -> None:
        """Apply manifests server-side."""
        self.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", data=text)

    def hold(self, *, wanted: bool = True) -> None:
        """Say by the namespace's label whether its task pods are held."""
        label = "podsettle.io/hold=true" if wanted else "podsettle.io/hold-"
        self.cluster.kubectl("label", "namespace", self.namespace, label)

    # Identities.

    def as_service_account(self, name: str) -> client.ApiClient:
        """Give a client that is a service account, by a token that the API server issued for it."""
        token = self.kubectl("create", "token", name).strip()
        settings = client.Configuration()
        admin = self.api_client.configuration
        settings.host, settings.ssl_ca_cert = admin.host, admin.ssl_ca_cert
        settings.api_key = {"authorization": f"Bearer {token}"}
        return client.ApiClient(settings)

    # Task pods.

    def task_pod(
        self,
        name: str,
        command: list[str],
        *,
        task_instance_id: int | str = 1,
        try_number: int = 1,
        attempt_id: str = "",
        image_name: str = "task",
        held: bool = False,
        container: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Describe a task pod as an orchestrator makes it; `held` puts the finalizer on by hand."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {
                    "podsettle.io/managed": "true",
                    "podsettle.io/try-number": str(try_number),
                    **(labels or {}),
                },
                "annotations": {
                    "podsettle.io/task-instance-id": str(task_instance_id),
                    "podsettle.io/attempt-id": attempt_id,
                },
                **({"finalizers": [FINALIZER]} if held else {}),
            },
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 2,
                "containers": [
                    {
                        "name": "base",
                        "image": image(image_name),
                        "imagePullPolicy": "Never"
                        if not isinstance(self.cluster, External)
                        else "IfNotPresent",
                        "command": command,
                        "securityContext": HARDENED,
                        "env": [
                            {
                                "name": "PODSETTLE_ATTEMPT_ID",
                                "valueFrom": {
                                    "fieldRef": {
                                        "fieldPath": "metadata.annotations['podsettle.io/attempt-id']"
                                    }
                                },
                            }
                        ],
                        **(container or {}),
                    }
                ],
                **(spec or {}),
            },
        }

    def create(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Create a pod and return it as the API server admitted it."""
        return self.plain(self.core.create_namespaced_pod(self.namespace, pod))

    def pod(self, name: str) -> dict[str, Any] | None:
        """Read a pod; None if it is gone."""
        try:
            return self.plain(self.core.read_namespaced_pod(name, self.namespace))
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def plain(self, thing: Any) -> dict[str, Any]:
        """Turn a typed object into what the API sends."""
        return self.api_client.sanitize_for_serialization(thing)

    def wait_pod(
        self,
        name: str,
        what: str,
        condition: Callable[[dict[str, Any]], Any],
        *,
        timeout: int = 180,
    ) -> dict[str, Any]:
        """Wait by watch until a pod meets a condition; return the pod as it was then."""
        end = time.monotonic() + timeout
        last: dict[str, Any] | None = None
        while (left := end - time.monotonic()) > 0:
            last = self.pod(name)
            if last is not None and condition(last):
                return last
            stream = watch.Watch()
            for event in stream.stream(
                self.core.list_namespaced_pod,
                self.namespace,
                field_selector=f"metadata.name={name}",
                resource_version=None if last is None else last["metadata"]["resourceVersion"],
                timeout_seconds=max(1, min(20, int(left))),
            ):
                if event["type"] == "ERROR":
                    break
                last = self.plain(event["object"])
                if event["type"] != "DELETED" and condition(last):
                    stream.stop()
                    return last
        text = json.dumps(
            last and {"metadata": last["metadata"], "status": last["status"]}, indent=1
        )
        raise AssertionError(f"pod {name} never: {what}; last seen:\n{text}")

    def wait_running(self, name: str) -> dict[str, Any]:
        """Wait until the task container runs."""
        return self.wait_pod(name, "running", lambda pod: "running" in base_state(pod))

    def wait_ended(self, name: str) -> dict[str, Any]:
        """Wait until the kubelet reported how the task container ended."""
        return self.wait_pod(name, "task ended", lambda pod: "terminated" in base_state(pod))

    def wait_gone(self, name: str) -> None:
        """Wait until the API no longer knows a pod."""
        wait_for(f"pod {name} gone", lambda: self.pod(name) is None, timeout=180)

    # What happens to pods.

    def delete(self, name: str, **options: Any) -> None:
        """Delete a pod as a person does."""
        self.core.delete_namespaced_pod(name, self.namespace, **options)

    def evict(self, name: str) -> None:
        """Evict a pod through the API, as a drain does."""
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=self.namespace))
        self.core.create_namespaced_pod_eviction(name, self.namespace, body)

    def taint(self, node: str, key: str = "podsettle.io/test", effect: str = "NoExecute") -> None:
        """Put a taint on a node."""
        self.cluster.kubectl("taint", "node", node, f"{key}=yes:{effect}", "--overwrite")

    def untaint(self, node: str, key: str = "podsettle.io/test") -> None:
        """Take a taint off a node; no error if it is not there."""
        self.cluster.kubectl("taint", "node", node, f"{key}-", check=False)

    def set_capacity(self, node: str, resource: str, amount: int) -> None:
        """Let a node offer so much of an extended resource, which makes a preemption certain."""
        body = {"status": {"capacity": {resource: str(amount)}}}
        self.core.patch_node_status(node, body)
        wait_for(
            f"{resource} allocatable on {node}",
            lambda: (
                (self.core.read_node(node).status.allocatable or {}).get(resource) == str(amount)
            ),
        )

    def release(self) -> None:
        """Take our finalizer off every pod here, so that the namespace can go."""
        for pod in self.core.list_namespaced_pod(self.namespace).items:
            if FINALIZER in (pod.metadata.finalizers or []):
                with contextlib.suppress(client.ApiException):
                    kept = [name for name in pod.metadata.finalizers if name != FINALIZER]
                    self.core.patch_namespaced_pod(
                        pod.metadata.name,
                        self.namespace,
                        {"metadata": {"finalizers": kept or None}},
                    )

    # The pass.

    def start_pass(self, name: str, cronjob: str = "podsettle") -> None:
        """Start the Job of the real CronJob, as its schedule does."""
        self.kubectl("create", "job", name, f"--from=cronjob/{cronjob}")

    def wait_pass(self, name: str) -> PassResult:
        """Wait until a started pass ended."""

        def ended() -> dict[str, Any] | None:
            for item in self.core.list_namespaced_pod(
                self.namespace, label_selector=f"job-name={name}"
            ).items:
                pod = self.plain(item)
                if pod["status"].get("phase") in ("Succeeded", "Failed"):
                    return pod
            return None

        pod = wait_for(f"pass {name} ended in {self.namespace}", ended, timeout=120)
        state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        output = self.kubectl("logs", pod["metadata"]["name"], check=False)
        return PassResult(state=state, output=output, pod=pod)

    def run_pass(self, name: str, cronjob: str = "podsettle") -> PassResult:
        """Run the real CronJob's Job once."""
        self.start_pass(name, cronjob)
        return self.wait_pass(name)


def base_state(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the task container, by name."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status["name"] == "base":
            return status["state"]
    return {}


def condition_of(pod: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a pod's condition of a type."""
    for found in pod["status"].get("conditions") or []:
        if found["type"] == kind:
            return found
    return None


def outside_address() -> str:
    """Name the address at which pods reach this machine."""
    return os.environ.get("E2E_OUTSIDE_ADDRESS", OUTSIDE)
