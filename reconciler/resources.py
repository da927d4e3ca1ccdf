"""The files that travel with the code: the SQL and the recorded pods of the demo."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def _folder(packed: str, checkout: str) -> Path:
    """Find a folder inside an installed package, or at the top level of a checkout."""
    inside = _PACKAGE / "data" / packed
    return inside if inside.is_dir() else _PACKAGE.parent / checkout


def sql_folder() -> Path:
    """Return the folder with migrations, routines, hosts, views and grants."""
    return _folder("sql", "sql")


def recorded_folder() -> Path:
    """Return the folder with the recorded pods of the demo."""
    return _folder("recorded", "k8s/samples/recorded")
