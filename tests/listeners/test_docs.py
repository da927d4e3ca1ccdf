"""What docs/listeners.md and docs/metrics.md tell a reader to write, written and run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reconciler import database as db
from reconciler.callbacks import Configuration
from tests.cli.conftest import Run
from tests.listeners.conftest import Probe
from tests.listeners.receiver import Received
from tests.listeners.test_consumers import SECRET
from tests.listeners.test_figures import history
from tests.sql.hosts import Standalone, crashed, evicted, running, settle

__all__ = ["history"]

DOCS = Path(__file__).parent.parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )


def test_the_listener_of_the_first_example_pages_for_application_failures_only(
    connection: db.Connection, host: Standalone, probe: Probe, deliver: Callable[..., Run]
) -> None:
    code = blocks("listeners.md", "python")[0]
    project = tomllib.loads(blocks("listeners.md", "toml")[0])["project"]
    (probe.folder / f"{project['name']}.py").write_text(code)
    info = probe.folder / f"{project['name']}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items())
            for group, named in project["entry-points"].items()
        )
    )
    assert deliver(PODSETTLE_LISTENERS="pager,log").code == 0
    settle(
        connection,
        evicted(running(host, task="evicted")),
        crashed(running(host, task="retried", retries=1)),
        crashed(running(host, task="broke")),
    )
    run = deliver(PODSETTLE_LISTENERS="pager,log")
    assert "pager: 3 delivered" in run.out
    pages = [line for line in run.err.splitlines() if line.startswith("PAGE")]
    assert len(pages) == 1
    assert pages[0].endswith("d/r/broke failed by itself (Error)")
    # And the log line that the page shows has these keys.
    example = (DOCS / "listeners.md").read_text().partition('{"event": "TaskInstance Finished"')[2]
    keys = set(re.findall(r'"(\w+)": ', example.partition("\n")[0]))
    assert len(keys) > 5
    logged = [e for e in run.events if e["event"] == "TaskInstance Finished"]
    assert len(logged) == 3
    assert keys <= set(logged[0])


def test_the_check_of_a_signature_works_as_it_stands_there() -> None:
    from reconciler.webhook import key_of, signature

    (code,) = [block for block in blocks("listeners.md", "python") if "def genuine" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    body = b'{"a": "\xc3\xa4"}'
    received = Received(
        "POST",
        "/",
        {
            "webhook-id": "7",
            "webhook-timestamp": "1700000000",
            "webhook-signature": signature(key_of(SECRET), "7", 1700000000, body),
        },
        body,
    )
    assert names["genuine"](SECRET, received.headers, body)
    assert not names["genuine"](SECRET, received.headers, body + b" ")
    assert not names["genuine"](SECRET, received.headers | {"webhook-id": "8"}, body)


def test_the_callbacks_file_means_what_its_comments_say() -> None:
    (text,) = [block for block in blocks("listeners.md", "toml") if "[defaults]" in block]
    configuration = Configuration(tomllib.loads(text), "docs")
    found = {
        (dag, task): (
            configuration.of("on_failure_callback", dag, task),
            configuration.of("on_retry_callback", dag, task),
        )
        for dag, task in (("other", "x"), ("sales", "x"), ("sales", "load_orders"))
    }
    assert found == {
        ("other", "x"): (["mycompany.alerts:failed"], []),
        ("sales", "x"): (["mycompany.alerts:failed"], ["mycompany.alerts:retried"]),
        ("sales", "load_orders"): ([], ["mycompany.alerts:retried"]),
    }


def test_the_page_of_metrics_names_all_and_no_other(
    connection: db.Connection, history: Standalone
) -> None:
    text = (DOCS / "metrics.md").read_text()
    rows = connection.execute("select distinct name, labels from settle.metrics").fetchall()
    assert set(re.findall(r"`(podsettle_[a-z_]+)`", text)) == {row["name"] for row in rows}
    for row in rows:
        (line,) = [part for part in text.splitlines() if f"`{row['name']}`" in part and "|" in part]
        assert set(row["labels"]) <= set(re.findall(r"\w+", line.rpartition(" | ")[2]))
