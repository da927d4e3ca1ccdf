"""Letting held pods go: what the pass does once their evidence is used, and never before.

A pod with the finalizer stays in the API after its end, its record with it, until the finalizer is
removed here. The database says which pod may go; it is asked in the transaction that settles, and
acted on after its commit.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import urllib3

from reconciler import text
from reconciler.database import Row
from reconciler.fields import MAX_WORD
from reconciler.listing import Cluster, KubernetesRefused
from reconciler.pods import PodFacts

FINALIZER: Final = "podsettle.io/outcome"
_TIMEOUT: Final = (10.0, 30.0)


class Gone(enum.Enum):
    """What became of an attempt to let a pod go."""

    RELEASED = "released"
    DELETED = "deleted"
    CHANGED = "changed meanwhile, the next pass tries again"
    MISSING = "gone already"


@dataclass
class Releases:
    """What a pass let go.

    Attributes:
        counts: Pods by what became of them.
        refused: The first refusal of the API server, a sentence; None if there was none.
    """

    counts: dict[str, int] = field(default_factory=dict)
    refused: str | None = None


class Releaser:
    """Removes the finalizer from pods, and deletes those that are old enough.

    Args:
        cluster: Where the pods are.
        delete_after: Delete settled pods whose task was settled this long ago; None for never.
    """

    def __init__(self, cluster: Cluster, delete_after: timedelta | None = None) -> None:
        from kubernetes import client

        self._core: Any = client.CoreV1Api(cluster.api)
        self._refused: type[Any] = client.ApiException
        self._delete_after = delete_after
        self.done = Releases()

    def page(self, pods: Iterable[PodFacts], rows: Iterable[Row]) -> list[PodFacts]:
        """Let go what the database says may go.

        A refusal is kept and ends the attempts of this pass: the settlements are not undone, and
        the pods stay held.

        Args:
            pods: The pods of a page that was committed.
            rows: What became of them, in the same order.

        Returns:
            The pods of no known task that were let go: their evidence is lost and worth a line.
        """
        lost: list[PodFacts] = []
        for facts, row in zip(pods, rows, strict=True):
            if self.done.refused is not None or not row["release"]:
                continue
            try:
                if FINALIZER in facts.finalizers:
                    gone = self.release(facts)
                    self._count(gone)
                    if gone is Gone.RELEASED and row["disposition"] == "unmatched":
                        lost.append(facts)
                elif self._is_old(facts, row):
                    self._count(self.delete(facts))
            except KubernetesRefused as refused:
                self.done.refused = str(refused)
        return lost

    def _is_old(self, facts: PodFacts, row: Row) -> bool:
        age: timedelta | None = row["settled_age"]
        return (
            self._delete_after is not None
            and row["final"]
            and row["disposition"] != "unmatched"
            and facts.deletion_at is None
            and age is not None
            and age >= self._delete_after
        )

    def _count(self, gone: Gone) -> None:
        self.done.counts[gone.name.lower()] = self.done.counts.get(gone.name.lower(), 0) + 1

    def release(self, facts: PodFacts) -> Gone:
        """Remove the finalizer from one pod, if it is still the one that was read.

        Raises:
            KubernetesRefused: The account may not patch pods, or there is no good answer.
        """
        index = facts.finalizers.index(FINALIZER)
        path = f"/metadata/finalizers/{index}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": facts.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": facts.resource_version},
            {"op": "test", "path": path, "value": FINALIZER},
            {"op": "remove", "path": path},
        ]
        return self._do(facts, "patch", Gone.RELEASED, self._core.patch_namespaced_pod, body=patch)

    def delete(self, facts: PodFacts) -> Gone:
        """Delete one pod, if it is still the one that was read.

        Raises:
            KubernetesRefused: The account may not delete pods, or there is no good answer.
        """
        body = {
            "preconditions": {"uid": facts.uid, "resourceVersion": facts.resource_version},
            "propagationPolicy": "Background",
        }
        return self._do(facts, "delete", Gone.DELETED, self._core.delete_namespaced_pod, body=body)

    def _do(self, facts: PodFacts, verb: str, done: Gone, call: Any, **how: Any) -> Gone:
        try:
            call(
                facts.pod, facts.namespace, _preload_content=False, _request_timeout=_TIMEOUT, **how
            ).close()
        except urllib3.exceptions.HTTPError as error:
            raise KubernetesRefused(
                f"no answer from Kubernetes to {verb} pod {text.quote(facts.pod)}: "
                f"{text.escape(text.clip(str(error), MAX_WORD))}; the next pass tries again"
            ) from error
        except self._refused as error:
            if error.status == 404:
                return Gone.MISSING
            body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else ""
            body = body or str(error.body or "")
            # 422: a test of the patch failed, or somebody's admission policy; 409: a precondition.
            if error.status in (409, 422) and "admission" not in body.lower():
                return Gone.CHANGED
            said = text.escape(text.clip(str(error.reason or "no reason given"), MAX_WORD))
            if error.status not in (401, 403):
                raise KubernetesRefused(
                    f"Kubernetes answered {error.status} {said} to {verb} pod "
                    f"{text.quote(facts.pod)}; the next pass tries again"
                ) from error
            raise KubernetesRefused(
                f"Kubernetes does not allow to {verb} pods in namespace "
                f"{text.quote(facts.namespace)}: {error.status} {said}; apply k8s/overlays/hold, "
                f"whose Role has the verb {verb} on pods"
            ) from error
        return done
