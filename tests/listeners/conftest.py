"""Listeners that behave and that do not, installed by path, and the real command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reconciler import database as db
from tests.cli.conftest import Run, podsettle
from tests.sql.hosts import Standalone

__all__ = ["podsettle"]

# What an author would write; each hook appends a line, so that a killed process keeps its lines.
PLUGIN = '''
import json
import os
import signal
import sys
import time
from pathlib import Path

from reconciler.listeners import hookimpl

FOLDER = Path(os.environ["PROBE_FOLDER"])


def write(name, **what):
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(what) + "\\n")


class Recorder:
    @hookimpl
    def on_task_instance_failed(self, previous_state, task_instance, error, failure_kind, reason, event):
        write("recorder", hook="failed", id=event.id, task=task_instance.task_id, previous_state=previous_state,
              state=task_instance.state, try_number=task_instance.try_number, max_tries=task_instance.max_tries,
              error=error, kind=failure_kind, reason=reason, refund=[event.refund.given, event.refund.n, event.refund.cap])

    @hookimpl
    def on_task_instance_retry(self, task_instance, failure_kind, reason, event):
        write("recorder", hook="retry", id=event.id, task=task_instance.task_id, kind=failure_kind, reason=reason)

    @hookimpl
    def on_task_instance_success(self, task_instance, event):
        write("recorder", hook="success", id=event.id, task=task_instance.task_id)

    @hookimpl
    def on_task_instance_reschedule(self, task_instance, event):
        write("recorder", hook="reschedule", id=event.id, task=task_instance.task_id)

    @hookimpl
    def on_task_instance_cleared(self, task_instance, event):
        write("recorder", hook="cleared", id=event.id, task=task_instance.task_id)


class Old:
    """As written before there were kinds: three arguments."""

    @hookimpl
    def on_task_instance_failed(self, previous_state, task_instance, error):
        print("printed by a listener")
        write("old", previous_state=previous_state, task=task_instance.task_id, error=error)


class Troubled:
    """Does what the file trouble/TASK says, then records."""

    @hookimpl
    def on_task_instance_event(self, event):
        task = event.task_instance.task_id
        write("begun", id=event.id, task=task)
        trouble = FOLDER / "trouble" / task
        if trouble.exists():
            how = trouble.read_text()
            if how.endswith(" once"):
                trouble.unlink()
            if how.startswith("raise"):
                raise RuntimeError("no\\nway")
            if how.startswith("exit"):
                sys.exit("bye")
            if how.startswith("hang"):
                time.sleep(600)
            if how.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how.startswith("leave"):
                # A grandchild in a session of its own, holding whatever is open here.
                if os.fork() == 0:
                    os.setsid()
                    os.close(1)
                    os.close(2)
                    time.sleep(20)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
        write("troubled", id=event.id, task=task, event=event.kind, node=event.payload["node"])


class Misspelt:
    @hookimpl
    def on_task_instance_failed(self, task_instance, no_such_argument):
        pass


class Hookless:
    pass
'''

ENTRY_POINTS = """[podsettle.listeners]
recorder = probe_listeners:Recorder
old = probe_listeners:Old
troubled = probe_listeners:Troubled
misspelt = probe_listeners:Misspelt
hookless = probe_listeners:Hookless
broken = probe_listeners_missing:Nothing
log = probe_listeners:Recorder
"""


class Probe:
    """The installed plugin and what its listeners wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trouble").mkdir()
        (folder / "probe_listeners.py").write_text(PLUGIN)
        info = folder / "probe_listeners-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: probe-listeners\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        self.environment = {"PYTHONPATH": str(folder), "PROBE_FOLDER": str(folder)}

    def trouble(self, task: str, how: str) -> None:
        (self.folder / "trouble" / task).write_text(how)

    def no_more_trouble(self) -> None:
        for file in (self.folder / "trouble").iterdir():
            file.unlink()

    def told(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def tasks(self, name: str) -> list[str]:
        return [line["task"] for line in self.told(name)]


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    folder = tmp_path / "probe"
    folder.mkdir()
    return Probe(folder)


@pytest.fixture
def host(connection: db.Connection) -> Standalone:
    return Standalone(connection)


@pytest.fixture
def deliver(
    database: str,
    probe: Probe,
    podsettle: Callable[..., Run],
) -> Callable[..., Run]:
    """Run podsettle deliver with the plugin installed."""

    def run(*arguments: str, **environment: str) -> Run:
        return podsettle(
            "deliver", "--dsn", database, *arguments, **probe.environment, **environment
        )

    return run


def setting(connection: db.Connection, name: str, value: str) -> None:
    connection.execute("update settle.setting set value = %s where name = %s", (value, name))


def register(connection: db.Connection, *names: str) -> None:
    for name in names:
        connection.execute("select settle.register_listener(%s)", (name,))


def outbox(connection: db.Connection, listener: str) -> list[dict[str, Any]]:
    """Return the outbox rows of a listener, in order."""
    return connection.execute(
        "select o.*, s.task_id from settle.outbox as o"
        " join settle.settlement as s on s.id = o.settlement_id where o.listener = %s order by o.id",
        (listener,),
    ).fetchall()
