"""Listeners: finding them by name, loading one, and telling it an event.

A listener is a module, class or object with hooks (`reconciler.events.Hooks`), named by an entry
point of the group `podsettle.listeners`, or one of those that are shipped. One process holds one
listener (reconciler/delivery.py), so here nothing guards one against another.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, Final

import pluggy
import structlog

from reconciler.events import PROJECT, Event, Hooks, Refund, TaskInstance, hookimpl

__all__ = [
    "Event",
    "ListenerUnusable",
    "Log",
    "Refund",
    "TaskInstance",
    "hookimpl",
    "installed",
    "load",
    "tell",
]

GROUP: Final = "podsettle.listeners"

SHIPPED: Final = {
    "callbacks": "reconciler.callbacks:Callbacks",
    "log": "reconciler.listeners:Log",
    "webhook": "reconciler.webhook:Webhook",
}
"""The listeners that are part of podsettle; an entry point cannot take their names."""


class ListenerUnusable(Exception):  # noqa: N818 -- what is so, in the words of the log
    """A listener is not installed, or cannot be loaded."""


class Log:
    """The shipped listener `log`: one JSON event a transition on standard error."""

    @hookimpl
    def on_task_instance_event(self, event: Event) -> None:
        """Log the transition: `TaskInstance Finished`, or what else it was."""
        named = {"reschedule": "TaskInstance Rescheduled", "cleared": "TaskInstance Cleared"}
        ti = event.task_instance
        structlog.get_logger().info(
            named.get(event.kind, "TaskInstance Finished"),
            event_id=event.id,
            settled_at=event.settled_at.isoformat(),
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            task_id=ti.task_id,
            map_index=ti.map_index,
            task_instance_id=ti.id,
            try_number=ti.try_number,
            max_tries=ti.max_tries,
            previous_state=event.previous_state,
            state=ti.state,
            failure_kind=event.failure_kind,
            reason=event.reason,
            exit_code=event.exit_code,
            refunded=event.refund.given,
            refund=f"{event.refund.n}/{event.refund.cap}",
            provisional=event.provisional,
            source=event.payload["source"],
            pod=event.payload["pod"],
            node=event.payload["node"],
            why=event.why,
        )


def installed() -> frozenset[str]:
    """Return the names of the listeners that can be loaded here; none of them is imported."""
    return frozenset(SHIPPED) | {found.name for found in metadata.entry_points(group=GROUP)}


def load(name: str) -> pluggy.PluginManager:
    """Import one listener.

    Args:
        name: A shipped one, or the name of an entry point.

    Returns:
        A plugin manager that holds this listener alone.

    Raises:
        ListenerUnusable: There is none of that name, its code fails, or a hook of it takes an
            argument that there is not.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    try:
        plugin = _find(name)
        if isinstance(plugin, type):
            plugin = plugin()
        manager.register(plugin, name=name)
        manager.check_pending()
    except ListenerUnusable:
        raise
    except Exception as failed:  # whatever somebody's code raises while it is imported
        raise ListenerUnusable(
            f"listener {name!r} cannot be loaded: {type(failed).__name__}: {failed}"
        ) from failed
    if not manager.get_hookcallers(plugin):
        raise ListenerUnusable(
            f"listener {name!r} has no hook; mark one with reconciler.listeners.hookimpl"
        )
    return manager


def _find(name: str) -> Any:
    if name in SHIPPED:
        module, _, attribute = SHIPPED[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    found = tuple(metadata.entry_points(group=GROUP, name=name))
    if not found:
        raise ListenerUnusable(
            f"listener {name!r} is not installed here; known: {', '.join(sorted(installed()))}"
        )
    return found[0].load()


def tell(manager: pluggy.PluginManager, event: Event) -> None:
    """Call the hooks of a listener for one event.

    Raises:
        Exception: Whatever the listener raises; the rest of its hooks was then not called.
    """
    hook = manager.hook
    hook.on_task_instance_event(event=event)
    known = {
        "previous_state": event.previous_state,
        "task_instance": event.task_instance,
        "event": event,
    }
    failure = {"error": event.why, "failure_kind": event.failure_kind, "reason": event.reason}
    match event.kind:
        case "failed":
            hook.on_task_instance_failed(**known, **failure)
        case "retry":
            hook.on_task_instance_failed(**known, **failure)
            hook.on_task_instance_retry(**known, **failure)
        case "success":
            hook.on_task_instance_success(**known)
        case "reschedule":
            hook.on_task_instance_reschedule(**known)
        case "cleared":
            hook.on_task_instance_cleared(**known)
        case _:  # a newer database: on_task_instance_event has it
            pass
