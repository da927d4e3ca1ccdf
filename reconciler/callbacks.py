"""The shipped listener `callbacks`: the author's on_failure_callback and on_retry_callback.

They are named in a TOML file (PODSETTLE_CALLBACKS), for all tasks, a DAG or a task; the closest
one wins. They are called for what a pass settled exactly as for what an agent or a person did.
"""

from __future__ import annotations

import importlib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from reconciler.events import Event, TaskInstance, hookimpl

VARIABLE: Final = "PODSETTLE_CALLBACKS"
NAMES: Final = ("on_failure_callback", "on_retry_callback")


class CallbacksMisconfigured(ValueError):  # noqa: N818 -- what is so, in the words of the log
    """The file of callbacks is missing, or holds what cannot be."""


class TaskFailed(Exception):  # noqa: N818 -- the author reads it as context["exception"]
    """Why a task instance failed, for an author's callback.

    Attributes:
        failure_kind: infra, application, timeout, manual; None where nothing proves one.
        reason: A short token.
    """

    def __init__(self, why: str, failure_kind: str | None, reason: str | None) -> None:
        super().__init__(why)
        self.failure_kind, self.reason = failure_kind, reason


class Configuration:
    """Which callbacks a task has.

    Args:
        document: The TOML document.
        where: Its path, for errors.

    Raises:
        CallbacksMisconfigured: A key or value is not what docs/listeners.md describes.
    """

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._levels: dict[tuple[str, ...], dict[str, list[str]]] = {}
        self._check(document, "the file", ("defaults", "dags"))
        self._read((), document.get("defaults", {}), "[defaults]")
        for dag_id, dag in self._table(document.get("dags", {}), "[dags]").items():
            self._read((dag_id,), dag, f"[dags.{dag_id}]", more="tasks")
            tasks = self._table(dag.get("tasks", {}), f"[dags.{dag_id}.tasks]")
            for task_id, task in tasks.items():
                self._read((dag_id, task_id), task, f"[dags.{dag_id}.tasks.{task_id}]")

    @classmethod
    def from_file(cls, path: Path) -> Configuration:
        """Read a file.

        Raises:
            CallbacksMisconfigured: It cannot be read, is no TOML, or holds what cannot be.
        """
        try:
            with path.open("rb") as file:
                return cls(tomllib.load(file), str(path))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
            raise CallbacksMisconfigured(f"{VARIABLE}={path}: {failed}") from failed

    def of(self, name: str, dag_id: str, task_id: str) -> list[str]:
        """Return the callbacks of one name for a task: its own, else its DAG's, else for all."""
        for level in ((dag_id, task_id), (dag_id,), ()):
            found = self._levels.get(level, {}).get(name)
            if found is not None:
                return found
        return []

    def _table(self, value: object, what: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise CallbacksMisconfigured(f"{self._where}: {what} must be a table")
        return value

    def _check(self, table: Mapping[str, Any], what: str, known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                raise CallbacksMisconfigured(
                    f"{self._where}: {what} has {key!r}; known: {', '.join(known)}"
                )

    def _read(self, level: tuple[str, ...], value: object, what: str, more: str = "") -> None:
        table = self._table(value, what)
        self._check(table, what, (*NAMES, more) if more else NAMES)
        self._levels[level] = {
            name: self._callables(table[name], f"{name} of {what}")
            for name in NAMES
            if name in table
        }

    def _callables(self, value: object, what: str) -> list[str]:
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not all(
            isinstance(one, str) and all(one.partition(":")) for one in named
        ):
            raise CallbacksMisconfigured(
                f"{self._where}: {what} must be 'module:function' or a list of them"
            )
        return list(named)


def resolve(named: str) -> Callable[[dict[str, Any]], object]:
    """Import `module:function`.

    Raises:
        CallbacksMisconfigured: The module has nothing callable of that name.
        Exception: Whatever the import of the module raises.
    """
    module, _, path = named.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CallbacksMisconfigured(f"{named} is nothing that can be called")
    return found  # type: ignore[no-any-return] # checked by the line above


def context_of(event: Event) -> dict[str, Any]:
    """Return what a callback is called with."""
    ti = event.task_instance
    return {
        "task_instance": ti,
        "ti": ti,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": ti.map_index,
        "try_number": ti.try_number,
        "max_tries": ti.max_tries,
        "state": ti.state,
        "previous_state": event.previous_state,
        "failure_kind": event.failure_kind,
        "reason": event.reason,
        "exit_code": event.exit_code,
        "exception": TaskFailed(event.why, event.failure_kind, event.reason),
        "refund": event.refund,
        "provisional": event.provisional,
        "event_id": event.id,
        "event": event.payload,
    }


class Callbacks:
    """Calls the author's callbacks: on_failure for the terminal failure only, on_retry on a retry.

    Raises:
        CallbacksMisconfigured: PODSETTLE_CALLBACKS names no good file.
    """

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        if not path:
            raise CallbacksMisconfigured(f"{VARIABLE} is not set; it names the TOML file")
        self._configuration = Configuration.from_file(Path(path))

    @hookimpl
    def on_task_instance_failed(self, task_instance: TaskInstance, event: Event) -> None:
        """Call on_failure_callback, or on_retry_callback where the task is run again."""
        name = "on_failure_callback" if event.kind == "failed" else "on_retry_callback"
        for named in self._configuration.of(name, task_instance.dag_id, task_instance.task_id):
            resolve(named)(context_of(event))
