"""Metrics for Prometheus: as text, in a textfile, or pushed to a Pushgateway.

The numbers are rows of the view settle.metrics; nothing is counted here, so a pass that was
killed, or ran elsewhere, is in them too. A pass is over before anybody could scrape it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest, push_to_gateway, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

JOB: Final = "podsettle"
_PUSH_SECONDS: Final = 10.0


class MetricsNotWritten(Exception):  # noqa: N818 -- what happened, in the words of the log
    """The textfile cannot be written, or the Pushgateway does not take the metrics."""


class _Rows(Collector):
    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = sorted(rows, key=itemgetter("name"))

    def collect(self) -> Iterable[Metric]:
        return list(self._families())

    def _families(self) -> Iterator[Metric]:
        for name, found in groupby(self._rows, key=itemgetter("name")):
            rows = list(found)
            labels = sorted(rows[0]["labels"])
            make = CounterMetricFamily if rows[0]["kind"] == "counter" else GaugeMetricFamily
            family = make(name, rows[0]["help"], labels=labels)
            for row in rows:
                family.add_metric([row["labels"][label] for label in labels], row["value"])
            yield family


def registry_of(rows: Sequence[Mapping[str, Any]]) -> CollectorRegistry:
    """Return a registry with the metrics of settle.metrics.

    Args:
        rows: name, kind (counter, gauge), help, labels (a mapping) and value of each.
    """
    registry = CollectorRegistry()
    registry.register(_Rows(rows))
    return registry


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the metrics in Prometheus's text format."""
    return generate_latest(registry_of(rows)).decode()


def write_textfile(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Replace a file of node_exporter's textfile collector, all at once.

    Raises:
        MetricsNotWritten: It cannot be written.
    """
    try:
        write_to_textfile(str(path), registry_of(rows))
    except OSError as failed:
        raise MetricsNotWritten(f"{path}: {failed.strerror or failed}") from failed


def push(rows: Sequence[Mapping[str, Any]], gateway: str) -> None:
    """Replace the group job="podsettle" of a Pushgateway.

    Args:
        rows: The metrics.
        gateway: host:port, or a URL.

    Raises:
        MetricsNotWritten: It does not answer, or refuses.
    """
    try:
        push_to_gateway(gateway, job=JOB, registry=registry_of(rows), timeout=_PUSH_SECONDS)
    except (OSError, ValueError) as failed:
        # A URL may hold a password; what failed does not.
        reason = getattr(failed, "reason", None) or failed
        raise MetricsNotWritten(f"the Pushgateway did not take the metrics: {reason}") from failed
