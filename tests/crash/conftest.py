from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler import database as db
from reconciler.install import install
from tests.crash import world
from tests.crash.manifests import pod_list

_numbers = itertools.count(1)


def everything() -> bool:
    """In CI each boundary is tried; a run on somebody's desk takes a part of them."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


class Template:
    """A database with one night of pods, of which each run gets a copy."""

    def __init__(self, server: str, folder: Path) -> None:
        self._server = server
        self._name = f"night_{next(_numbers)}"
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(f"create database {self._name}")
        with db.connect(psycopg.conninfo.make_conninfo(server, dbname=self._name)) as connection:
            install(connection)
            self.night = world.build(connection)
        self.file = folder / "pods.json"
        self.file.write_text(pod_list(*self.night.pods))

    @contextmanager
    def copy(self) -> Iterator[str]:
        name = f"{self._name}_{next(_numbers)}"
        with psycopg.connect(self._server, autocommit=True) as admin:
            admin.execute(f"create database {name} template {self._name}")
        try:
            yield psycopg.conninfo.make_conninfo(self._server, dbname=name)
        finally:
            with psycopg.connect(self._server, autocommit=True) as admin:
                admin.execute(f"drop database if exists {name} with (force)")


@pytest.fixture(scope="session")
def template(embedded_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(embedded_dsn, tmp_path_factory.mktemp("night"))


@pytest.fixture(scope="session")
def ends(template: Template) -> list[dict[str, Any]]:
    """The end after one undisturbed pass, and after two and three: they differ in what doubt counts."""
    found = []
    with template.copy() as dsn, db.connect(dsn) as connection:
        for _ in range(3):
            world.later(connection, 1)
            world.clean_pass(connection, template.night.pods)
            found.append(world.end(connection))
    return found
