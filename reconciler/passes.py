"""One run of the reconciler: pages in, settlements out, in an order that loses nothing.

Each page is settled before the next one is asked for, so memory stays flat, and what was read is
settled even if the list breaks off later. The task instances that were active before the list began
are judged last. Nothing here decides what a pod means.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

from reconciler.database import DatabaseRefused, Row, Settle
from reconciler.listing import Listing, Page
from reconciler.pods import PodFacts

_OF_OTHERS: Final = frozenset({"stale", "unmatched"})
_LEASE_POLL_SECONDS: Final = 0.5

CLOCK_SKEW_WARN: Final = 5.0
"""Seconds between API server and database that are worth a word."""


class PassBusy(Exception):  # noqa: N818 -- what happened, in the words of the exit code
    """Another pass of the same scope is at work and did not end in time."""


@dataclass
class Pass:
    """What a pass did.

    Attributes:
        id: settle.pass.id; 0 of a dry run, which leaves none.
        counts: Pods by disposition; `pods` and `refunded` beside them.
        clock_offset: The API server's clock minus the database's; None if it was not measured.
        incomplete_because: Why pods may be missing from the list; None if none can be.
        problems: One sentence for each thing that was no pod.
        seconds: How long it took, in seconds.
    """

    id: int
    counts: Counter[str] = field(default_factory=Counter)
    clock_offset: timedelta | None = None
    incomplete_because: str | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a pass looks at.

    Attributes:
        namespace: None for all namespaces.
        profile: The name of the identity profile.
        source: `api` or `files`.
        judges_absence: The list, if nothing is missing from it, holds every pod of the scope.
    """

    namespace: str | None
    profile: str
    source: str
    judges_absence: bool


def run(
    settle: Settle,
    listing: Listing,
    scope: Scope,
    on_rows: Callable[[list[Row]], None],
    *,
    lease_wait: float = 0.0,
    after_commit: Callable[[list[PodFacts], list[Row]], None] | None = None,
) -> Pass:
    """Settle every page of a listing, then judge silence.

    Args:
        settle: The database.
        listing: The pods, from `read_api` or `read_files`; nothing of it may have been read.
        scope: What the listing covers.
        on_rows: Called with the rows of each page, in order, and with those of what ripened.
        lease_wait: How long to wait for another pass of the scope, in seconds.
        after_commit: Called with the pods and rows of each page once it is committed (I5).

    Returns:
        What was done.

    Raises:
        PassBusy: Another pass is at work.
        DatabaseRefused: The database failed; pages settled before that stay settled.
        KubernetesRefused: The first page was refused.
        KubernetesUnreachable: The first page was not answered.
    """
    begun = time.monotonic()
    # Opened before the list: what is dispatched in between is not missed.
    done = Pass(_open(settle, scope, begun + lease_wait))
    seen: set[str] = set()
    try:
        for page in listing.pages:
            if done.clock_offset is None:
                done.clock_offset = _compare_clocks(settle, listing, done.id)
            rows = _settle_page(settle, done, done.id, page)
            seen.update(
                str(row["task_instance_id"]) for row in rows if row["disposition"] not in _OF_OTHERS
            )
            on_rows(rows)
            if after_commit is not None:
                after_commit(page.pods, rows)
    except Exception:
        # The list never came, or broke off with an error: it must not keep other passes waiting.
        with suppress(DatabaseRefused):
            settle.close_pass(done.id, complete=False, seen=[])
        raise
    ripened = settle.close_pass(
        done.id, complete=scope.judges_absence and listing.complete, seen=sorted(seen)
    )
    _count(done, ripened)
    on_rows(ripened)
    return _finished(done, listing, begun)


def dry_run(
    settle: Settle, listing: Listing, scope: Scope, on_rows: Callable[[list[Row]], None]
) -> Pass:
    """Run the real procedures on every page and roll each page back.

    A page's locks are held no longer than by a real pass. Nothing is concluded from silence, since
    that takes several passes.

    Args:
        settle: The database.
        listing: The pods.
        scope: What the listing covers.
        on_rows: Called with the rows of each page, in order.

    Returns:
        What would have been done.

    Raises:
        DatabaseRefused: The database failed.
        KubernetesRefused: The first page was refused.
        KubernetesUnreachable: The first page was not answered.
    """
    begun = time.monotonic()
    done = Pass(0)
    # As from files: a dry run takes no lease, and waits for none.
    without_lease = replace(scope, source="files")
    for page in listing.pages:
        with settle.connection.transaction(force_rollback=True):
            opened = _open(settle, without_lease, begun)
            done.clock_offset = _compare_clocks(settle, listing, opened)
            on_rows(_settle_page(settle, done, opened, page))
    return _finished(done, listing, begun)


def preview(settle: Settle | None, listing: Listing) -> Iterator[tuple[PodFacts, Row]]:
    """Yield each pod with what a pass would make of it now; each page is rolled back.

    Args:
        settle: The database; None if there is none, then nothing is known of any pod.
        listing: The pods.
    """
    for page in listing.pages:
        rows: list[Row] = [{"disposition": None, "verdict": None}] * len(page.pods)
        if settle is not None:
            with settle.connection.transaction(force_rollback=True):
                opened = settle.open_pass(namespace=None, profile="preview", source="files")
                rows = settle.settle_pods(opened or 0, [facts.as_json() for facts in page.pods])
        yield from zip(page.pods, rows, strict=True)


def classify(settle: Settle, listing: Listing) -> Iterator[list[dict[str, Any]]]:
    """Classify every page of a listing; no task instance is looked up.

    Yields:
        For each page, one dictionary a pod: the verdict's fields and, under `facts`, what was
        read off the pod.
    """
    for page in listing.pages:
        facts = [pod.as_json() for pod in page.pods]
        verdicts = settle.classify(facts) if facts else []
        yield [{**verdict, "facts": read} for verdict, read in zip(verdicts, facts, strict=True)]


def _open(settle: Settle, scope: Scope, deadline: float) -> int:
    while True:
        found = settle.open_pass(
            namespace=scope.namespace, profile=scope.profile, source=scope.source
        )
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            where = "all namespaces" if scope.namespace is None else f"namespace {scope.namespace}"
            raise PassBusy(f"another pass over {where} is at work; it does the same")
        time.sleep(_LEASE_POLL_SECONDS)


def _compare_clocks(settle: Settle, listing: Listing, pass_id: int) -> timedelta | None:
    if listing.api_date is None or listing.api_date_monotonic is None:
        return None
    return settle.note_clock(
        pass_id, listing.api_date, time.monotonic() - listing.api_date_monotonic
    )


def _settle_page(settle: Settle, done: Pass, pass_id: int, page: Page) -> list[Row]:
    rows = settle.settle_pods(pass_id, [facts.as_json() for facts in page.pods])
    done.counts["pods"] += len(rows)
    _count(done, rows)
    return rows


def _count(done: Pass, rows: list[Row]) -> None:
    for row in rows:
        done.counts[row["disposition"]] += 1
        done.counts["refunded"] += row["refund"] == 1


def _finished(done: Pass, listing: Listing, begun: float) -> Pass:
    done.incomplete_because = listing.incomplete_because
    done.problems = listing.problems
    done.seconds = time.monotonic() - begun
    return done
