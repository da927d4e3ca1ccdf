"""One run of the reconciler: pages in, settlements out, in an order that loses nothing.

Each page is settled before the next one is asked for, so memory stays flat, and what was read is
settled even if the list breaks off later. Nothing here decides what a pod means.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from reconciler.database import Row, Settle
from reconciler.listing import Listing

_OTHERS: Final = frozenset({"stale", "unmatched"})


@dataclass
class Pass:
    """What a pass did.

    Attributes:
        id: settle.pass.id; of a dry run it was rolled back.
        counts: Pods by disposition; `pods` and `refunded` beside them.
        incomplete_because: Why pods may be missing from the list; None if none can be.
        problems: One sentence for each thing that was no pod.
        seconds: How long it took, in seconds.
    """

    id: int
    counts: Counter[str] = field(default_factory=Counter)
    incomplete_because: str | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def rolled_back(settle: Settle) -> Iterator[None]:
    """Run the real procedures, and leave nothing of it."""
    with settle.connection.transaction(force_rollback=True):
        yield


def run(
    settle: Settle,
    listing: Listing,
    *,
    namespace: str | None,
    profile: str,
    source: str,
    judges_absence: bool,
    on_rows: Callable[[list[Row]], None],
) -> Pass:
    """Settle every page of a listing.

    Args:
        settle: The database.
        listing: The pods, from `read_api` or `read_files`.
        namespace: The scope of the list; None for all namespaces.
        profile: The name of the identity profile.
        source: `api` or `files`.
        judges_absence: The list, if nothing is missing from it, is the whole of its scope.
        on_rows: Called with the rows of each page, in order.

    Returns:
        What was done.

    Raises:
        DatabaseRefused: The database failed; pages settled before that stay settled.
        KubernetesRefused: The first page was refused.
        KubernetesUnreachable: The first page was not answered.
    """
    begun = time.monotonic()
    done = Pass(settle.open_pass(namespace=namespace, profile=profile, source=source))
    seen: set[str] = set()
    for page in listing.pages:
        rows = settle.settle_pods(done.id, [facts.as_json() for facts in page.pods])
        for row in rows:
            done.counts["pods"] += 1
            done.counts[row["disposition"]] += 1
            done.counts["refunded"] += row["refund"] == 1
            if row["disposition"] not in _OTHERS:
                seen.add(str(row["task_instance_id"]))
        on_rows(rows)
    settle.close_pass(done.id, complete=judges_absence and listing.complete, seen=sorted(seen))
    done.incomplete_because = listing.incomplete_because
    done.problems = listing.problems
    done.seconds = time.monotonic() - begun
    return done


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
