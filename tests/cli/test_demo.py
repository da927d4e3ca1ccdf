"""The demo, as a newcomer runs it: its own Postgres in its own home."""

from __future__ import annotations

import re
from collections.abc import Callable

import psycopg

from tests.cli.conftest import Run


def test_the_demo_shows_what_was_saved_and_leaves_a_database_to_look_at(
    podsettle: Callable[..., Run],
) -> None:
    try:
        runs = [podsettle("demo") for _ in range(2)]
        for run in runs:
            assert run.code == 0, run.err
        out = runs[1].out
        rows = {m[1]: line for line in out.splitlines() if (m := re.search(r"│ (\w+) +│", line))}
        assert "running │ success" in rows["load_orders"]
        assert "1 -> 2" in rows["train_model"]
        assert "running (untouched)" in rows["poke_sensor"]
        assert "1  success recovered from a Failed pod" in out
        assert "1  infra failure refunded" in out
        dsn = re.search(r"psql '([^']+)'", out)
        assert dsn
        with psycopg.connect(dsn[1]) as connection:
            kinds = connection.execute(
                "select task_id, failure_kind, reason from settle.failures order by task_id"
            ).fetchall()
        assert kinds == [
            ("call_partner", "timeout", "DeadlineExceeded"),
            ("check_schema", "application", "Error"),
            ("join_tables", "application", "OOMKilled"),
            ("train_model", "infra", "EvictionByEvictionAPI"),
        ]
        explained = podsettle("explain", "--dsn", "embedded:", "--pods", "-", stdin="{}")
        assert explained.code == 3
        with psycopg.connect(dsn[1]) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
    finally:
        stopped = podsettle("demo", "--stop")
    assert stopped.out == "stopped\n"
