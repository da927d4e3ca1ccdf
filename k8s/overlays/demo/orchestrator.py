# ruff: noqa: INP001
"""A small orchestrator for the demo: it starts a few tasks, and their pods never report to it.

What it must do for podsettle is all here: dispatch a task instance, and put what comes back on the
pod.
"""

from __future__ import annotations

import os

import psycopg
from kubernetes import client, config

TASKS = {
    "succeeds": "print('done')",
    "fails": "raise SystemExit(1)",
    "runs-out-of-memory": "bytearray(1 << 30)",
    # Delete its pod, or drain its node, and see that the attempt is refunded.
    "can-be-deleted": "import time; time.sleep(3600)",
}


def task_pod(name: str, code: str, image: str, labels: dict, annotations: dict) -> dict:
    """Describe a task pod: the agent shim runs the task and leaves the outcome record."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "base",
                    "image": image,
                    "command": ["agent-shim", "run", "--", "python3", "-c", code],
                    "env": [
                        {
                            "name": "PODSETTLE_ATTEMPT_ID",
                            "value": annotations["podsettle.io/attempt-id"],
                        }
                    ],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                        "limits": {"memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def main() -> None:
    """Start every task once."""
    config.load_incluster_config()
    core, namespace = client.CoreV1Api(), os.environ["NAMESPACE"]
    image = core.read_namespaced_pod(os.environ["POD"], namespace).spec.containers[0].image
    with psycopg.connect(os.environ["DSN"], autocommit=True) as database:
        for name, code in TASKS.items():
            (task,) = database.execute(
                "select settle.create_task('demo', 'first run', %s, p_retries => 1,"
                " p_namespace => %s)::text",
                [name, namespace],
            ).fetchone()
            try_number, attempt = database.execute(
                "select try_number, attempt_id from settle.dispatch(%s)", [task]
            ).fetchone()
            labels = {
                "podsettle.io/managed": "true",
                "podsettle.io/try-number": str(try_number),
            }
            annotations = {
                "podsettle.io/task-instance-id": task,
                "podsettle.io/attempt-id": attempt,
            }
            pod = f"{name}-{try_number}"
            core.create_namespaced_pod(namespace, task_pod(pod, code, image, labels, annotations))
            print(f"started {pod}")


if __name__ == "__main__":
    main()
