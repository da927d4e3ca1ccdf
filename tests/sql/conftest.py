from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from reconciler import database as db
from tests.conftest import JOBS_HOST
from tests.sql.hosts import Host, Jobs, Passes, Standalone


@pytest.fixture(params=[Standalone, Jobs], ids=lambda host: host.name)
def host(request: pytest.FixtureRequest, new_database: Callable[..., str]) -> Iterator[Host]:
    """Each host in turn, on a fresh database: the settle rules hold for both."""
    dsn = new_database(JOBS_HOST if request.param is Jobs else "standalone")
    with db.connect(dsn) as connection:
        yield request.param(connection)


@pytest.fixture
def passes_standalone(connection: db.Connection) -> Passes:
    """Passes on a movable clock, on the standalone host only."""
    return Passes(connection)
