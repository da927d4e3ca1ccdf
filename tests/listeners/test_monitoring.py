"""The files in k8s/monitoring: that they parse, and name only metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from reconciler import database as db
from tests.listeners.test_figures import history
from tests.needs import needs
from tests.sql.hosts import Standalone

__all__ = ["history"]

MONITORING = Path(__file__).parent.parent.parent / "k8s" / "monitoring"
NAME = re.compile(r"\bpodsettle_\w+")


def known(connection: db.Connection) -> dict[str, set[str]]:
    """Return the labels of each metric."""
    return {
        row["name"]: set(row["labels"])
        for row in connection.execute("select name, labels from settle.metrics").fetchall()
    }


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [
        *(t["expr"] for panel in dashboard["panels"] for t in panel["targets"]),
        *(rule["expr"] for group in rules["groups"] for rule in group["rules"]),
    ]


def test_dashboard_and_alerts_name_metrics_and_labels_that_there_are(
    connection: db.Connection, history: Standalone
) -> None:
    metrics = known(connection)
    found = expressions()
    assert len(found) > 15
    for expression in found:
        names = set(NAME.findall(expression))
        assert names
        assert names <= set(metrics), expression
        labels = set().union(*(metrics[name] for name in names))
        used = {
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in group.split(",")
        } | set(re.findall(r"[{,](\w+)=", expression))
        assert used <= labels, expression
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(label in target["expr"] for label in shown)


def test_every_metric_is_on_the_dashboard(connection: db.Connection, history: Standalone) -> None:
    dashboard = (MONITORING / "dashboard.json").read_text()
    alerts = (MONITORING / "alerts.yaml").read_text()
    seen = set(NAME.findall(dashboard + alerts))
    assert set(known(connection)) - seen == {"podsettle_refunds_taken_back_total"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= set(dashboard)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def exported(connection: db.Connection) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what postgres_exporter makes of postgres_exporter.yaml: key_column{labels} value."""
    document = yaml.safe_load((MONITORING / "postgres_exporter.yaml").read_text())
    found = {}
    for key, entry in document.items():
        columns: dict[str, dict[str, Any]] = {
            name: how for column in entry["metrics"] for name, how in column.items()
        }
        for row in connection.execute(entry["query"]).fetchall():
            assert set(row) == set(columns)
            labels = {name: row[name] for name, how in columns.items() if how["usage"] == "LABEL"}
            for name, how in columns.items():
                if how["usage"] != "LABEL":
                    found[f"{key}_{name}", tuple(sorted(labels.items()))] = row[name]
    return found


def test_the_queries_for_postgres_exporter_give_the_same_metrics(
    connection: db.Connection, history: Standalone
) -> None:
    connection.execute("grant select on public.test_clock to settle_reader")
    connection.execute("set role settle_reader")
    ours = {
        (row["name"], tuple(sorted(row["labels"].items()))): row["value"]
        for row in connection.execute("select * from settle.metrics").fetchall()
    }
    theirs = exported(connection)
    # An age is another one at each look.
    aging = {key for key in ours if key[0] == "podsettle_outbox_oldest_seconds"}
    assert set(theirs) == set(ours)
    assert {k: v for k, v in theirs.items() if k not in aging} == {
        k: v for k, v in ours.items() if k not in aging
    }


@needs("promtool")
def test_promtool_takes_the_rules_and_runs_their_tests() -> None:
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do_and_is_tested() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    tested = (MONITORING / "alerts_test.yaml").read_text()
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert {"PodsettleNoCompletePass", "PodsettleOutboxStuck", "PodsettleRefundsAtCap"} <= {
        alert["alert"] for alert in alerts
    }
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert f"alertname: {alert['alert']}\n" in tested
