"""Pods as a real kubelet wrote them, claiming to be of an attempt."""

from __future__ import annotations

import json
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from reconciler.pods import PROFILES, PodFacts
from tests.sql.hosts import Attempt

CORPUS = Path(__file__).parent.parent / "corpus" / "cluster"
Manifest = dict[str, Any]


@cache
def _text(case: str) -> str:
    return (CORPUS / f"{case}.json").read_text("utf-8")


def manifest(case: str, attempt: Attempt, name: str, message: str | None = None) -> Manifest:
    """A corpus pod of an attempt; `message` replaces what its task wrote."""
    pod: Manifest = json.loads(_text(case))
    pod["metadata"] |= {
        "name": name,
        "uid": str(uuid.uuid5(uuid.NAMESPACE_OID, name)),
        "labels": {
            "podsettle.io/managed": "true",
            "podsettle.io/try-number": str(attempt.try_number),
        },
        "annotations": {
            "podsettle.io/task-instance-id": attempt.id,
            "podsettle.io/attempt-id": attempt.attempt_id,
        },
    }
    # None of them is held: what becomes of held pods is not asked here.
    pod["metadata"].pop("finalizers", None)
    if message is not None:
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    return pod


def alive(attempt: Attempt, name: str) -> Manifest:
    """A pod whose task runs."""
    pod = manifest("okrec", attempt, name)
    pod["status"]["phase"] = "Running"
    pod["status"]["containerStatuses"][0]["state"] = {
        "running": {"startedAt": "2026-11-30T17:43:54Z"}
    }
    return pod


def facts(pod: Manifest) -> dict[str, object]:
    """What the pass reads off it."""
    return PodFacts.from_manifest(pod, profile=PROFILES["podsettle"], container=None).as_json()


def pod_list(*pods: Manifest) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": list(pods)})
