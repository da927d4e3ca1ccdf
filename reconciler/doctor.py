"""`podsettle doctor`: what is missing, in plain words. It asks and reads, and writes nothing."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from reconciler import database
from reconciler.listing import Cluster, KubernetesRefused, KubernetesUnreachable, Listing
from reconciler.passes import CLOCK_SKEW_WARN
from reconciler.release import FINALIZER

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_FEW: Final = 3
_TERMINATION_LOG: Final = "/dev/termination-log"


class Health(enum.Enum):
    """How bad a finding is."""

    GOOD = "ok"
    ADVICE = "advice"
    BAD = "missing"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        health: How it stands.
        told: One sentence; what is not good says the way out.
    """

    health: Health
    told: str


def check_database(dsn: str) -> tuple[database.Connection | None, list[Finding]]:
    """Check the database: reachable, installed, of our contract, with the rights of a pass.

    Returns:
        The connection, if a pass could use it, and the findings.
    """
    try:
        connection = database.connect(dsn)
        database.check_contract(connection)
    except database.DatabaseRefused as refused:
        return None, [Finding(Health.BAD, str(refused))]
    found = [
        Finding(
            Health.GOOD,
            f"database {connection.info.dbname} speaks contract {database.CONTRACT}",
        )
    ]
    try:
        settle = database.Settle(connection)
        if not settle.may_run_passes():
            found.append(
                Finding(
                    Health.BAD,
                    f"user {connection.info.user} may not run passes; "
                    f"grant settle_reconciler to {connection.info.user}",
                )
            )
            return None, found
        found.append(_last_pass(settle))
    except database.DatabaseRefused as refused:
        found.append(Finding(Health.BAD, str(refused)))
        return None, found
    return connection, found


def _last_pass(settle: database.Settle) -> Finding:
    age = settle.last_complete_pass()
    if age is None:
        return Finding(
            Health.ADVICE, "no complete pass has run yet; apply k8s/overlays/cronjob, or run one"
        )
    minutes = age.total_seconds() / 60
    if minutes > 5:
        return Finding(
            Health.ADVICE,
            f"the last complete pass was closed {minutes:.0f} min ago; see the CronJob's Jobs, "
            "nothing silent is judged meanwhile",
        )
    return Finding(Health.GOOD, f"the last complete pass was closed {minutes * 60:.0f} s ago")


def check_permissions(cluster: Cluster, namespace: str | None) -> Iterator[Finding]:
    """Ask the API server what this account may do with pods.

    Raises:
        KubernetesUnreachable: There is no answer.
    """
    from kubernetes import client

    authorization: Any = client.AuthorizationV1Api(cluster.api)
    for verb, health, why in (
        ("list", Health.BAD, "no pass can run; bind k8s/base's Role"),
        ("patch", Health.ADVICE, "held pods cannot be let go; apply k8s/overlays/hold if pods are"),
        ("delete", Health.ADVICE, "--delete-after cannot work; apply k8s/overlays/hold if wanted"),
    ):
        attributes = {"verb": verb, "resource": "pods"}
        if namespace is not None:
            attributes["namespace"] = namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        try:
            answer = authorization.create_self_subject_access_review(
                review, _request_timeout=(10, 30)
            )
        except Exception as error:
            raise KubernetesUnreachable(
                f"no answer from Kubernetes at {cluster.address} about permissions: "
                f"{type(error).__name__}"
            ) from error
        where = "in all namespaces" if namespace is None else f"in namespace {namespace}"
        if answer.status.allowed:
            yield Finding(Health.GOOD, f"may {verb} pods {where}")
        else:
            yield Finding(health, f"may not {verb} pods {where}: {why}")


def check_pods(listing: Listing, connection: database.Connection | None) -> Iterator[Finding]:
    """Look at the pods that a pass would see.

    Args:
        listing: The pods, nothing of them read yet.
        connection: For the clock; None if there is no database.
    """
    seen = going = loose = 0
    problems: Counter[str] = Counter()
    example: dict[str, str] = {}
    pins: Counter[str] = Counter()
    try:
        for page in listing.pages:
            if seen == 0 and connection is not None:
                yield from _clock(listing, connection)
            for facts in page.pods:
                seen += 1
                if facts.container.state != "terminated" and facts.phase not in _ENDED:
                    going += 1
                    loose += FINALIZER not in facts.finalizers
                if facts.restarts:
                    pins["restartPolicy is not Never: a task may run twice in one pod"] += 1
                if facts.container.message_policy not in (None, "File"):
                    pins["terminationMessagePolicy is not File: a log may pass for a record"] += 1
                if facts.container.message_path not in (None, _TERMINATION_LOG):
                    pins[f"terminationMessagePath is not {_TERMINATION_LOG}"] += 1
                if facts.identity.problem is not None:
                    problems[facts.identity.problem] += 1
                    example.setdefault(facts.identity.problem, facts.pod)
    except (KubernetesRefused, KubernetesUnreachable) as refused:
        yield Finding(Health.BAD, str(refused))
        return
    if not seen:
        yield Finding(
            Health.ADVICE,
            "no pod carries the labels of this profile; see --profile and the README's labels",
        )
        return
    yield Finding(Health.GOOD, f"{seen} pods are of this profile")
    for problem, n in problems.most_common(_FEW):
        yield Finding(
            Health.BAD, f"{n} pods cannot be identified, {example[problem]} for one: {problem}"
        )
    for problem, n in pins.items():
        yield Finding(
            Health.ADVICE, f"{n} pods: {problem}; k8s/overlays/hold pins what can be pinned"
        )
    # One that has ended may have been let go: nothing of it is lost any more.
    if loose:
        yield Finding(
            Health.ADVICE,
            f"{loose} of {going} pods that have not ended have no finalizer {FINALIZER}: if they "
            "are deleted between two passes their records are lost; k8s/overlays/hold adds it",
        )
    if listing.incomplete_because is not None:
        yield Finding(Health.BAD, f"the list is incomplete: {listing.incomplete_because}")


def _clock(listing: Listing, connection: database.Connection) -> Iterator[Finding]:
    if listing.api_date is None or listing.api_date_monotonic is None:
        return
    row = connection.execute("select clock_timestamp() as now").fetchone()
    if row is None:
        raise psycopg.OperationalError("the database gave no time")
    age = time.monotonic() - listing.api_date_monotonic
    skew = (listing.api_date - row["now"]).total_seconds() + age + 0.5
    if abs(skew) > CLOCK_SKEW_WARN:
        yield Finding(
            Health.ADVICE,
            f"the API server's clock is {skew:+.0f} s against the database's; check NTP on both",
        )
    else:
        yield Finding(Health.GOOD, f"API server and database agree on the time ({skew:+.1f} s)")
