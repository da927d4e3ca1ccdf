"""Speed of settling, as ratios in one run: pages against single rows, and ledgers of every kind.

make bench                          # a ledger of one million rows
LEDGER_ROWS=10000000 make bench     # ten million; takes some minutes and 6 GB
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from reconciler import database as db
from reconciler.install import install
from tests.sql.hosts import Standalone, evicted, settle

ROWS = int(os.environ.get("LEDGER_ROWS", "1000000"))
PAGE = 250
REPEATS = 7


@pytest.fixture(scope="module")
def connection():
    folder = Path(tempfile.mkdtemp(prefix="podsettle-bench-"))
    dsn = db.start_embedded(folder / "pg")
    with db.connect(dsn) as connection:
        connection.execute("alter system set fsync = off")
        connection.execute("alter system set max_wal_size = '8GB'")
        connection.execute("select pg_reload_conf()")
        install(connection)
        connection.execute("alter table settle.settlement set (autovacuum_enabled = false)")
        yield connection


def dispatched(host: Standalone, count: int) -> list:
    ids = host.c.execute(
        "select settle.create_task('d', 'r', gen_random_uuid()::text) as id"
        " from generate_series(1, %s)",
        (count,),
    ).fetchall()
    return [host.dispatch(str(row["id"])) for row in ids]


def per_pod(host: Standalone, how: Callable[[list], None]) -> float:
    """Return microseconds a pod, the median of several pages."""
    times = []
    for _ in range(REPEATS):
        pods = [evicted(attempt) for attempt in dispatched(host, PAGE)]
        begun = time.perf_counter()
        how(pods)
        times.append((time.perf_counter() - begun) / PAGE * 1e6)
    return statistics.median(times)


def test_bench_settle(connection: db.Connection) -> None:
    host = Standalone(connection)
    results: dict[str, float] = {}

    def page(pods: list) -> None:
        rows = settle(connection, *pods)
        assert {row["disposition"] for row in rows} == {"settled"}

    def single(pods: list) -> None:
        for pod in pods:
            settle(connection, pod)

    results["page, empty ledger, never analysed"] = per_pod(host, page)
    results["one pod a call, same ledger"] = per_pod(host, single)
    connection.execute("alter table settle.settlement disable trigger settlement_append_only")
    connection.execute("truncate settle.settlement cascade")
    connection.execute("analyze settle.settlement")
    results["page, after TRUNCATE and ANALYZE"] = per_pod(host, page)
    connection.execute(
        """
        insert into settle.settlement (
            disposition, task_key, task_instance_id, dag_id, run_id, task_id, map_index, try_number,
            previous_state, state, verdict, refunds_used, refund_cap, previous_max_tries, max_tries,
            source, why)
        select 'settled', gen_random_uuid(), gen_random_uuid(), 'd', 'r', 't', -1, 1, 'running',
            'success', 'success', 0, 3, 0, 0, 'pass', ''
        from generate_series(1, %s)
        """,
        (ROWS,),
    )
    # The statistics still say that it is empty.
    results[f"page, {ROWS:,} rows, statistics of an empty table"] = per_pod(host, page)
    connection.execute("analyze settle.settlement")
    results[f"page, {ROWS:,} rows, analysed"] = per_pod(host, page)
    base = results["page, empty ledger, never analysed"]
    print(f"\n{'settling an evicted pod (classify, refund, ledger)':60} {'us/pod':>8} {'ratio':>6}")
    for name, value in results.items():
        print(f"{name:60} {value:8.0f} {value / base:6.2f}")


def test_bench_the_wire_is_not_the_cost(connection: db.Connection) -> None:
    """An already settled page: what every later pass pays for pods that linger."""
    host = Standalone(connection)
    pods = [evicted(attempt) for attempt in dispatched(host, PAGE)]
    settle(connection, *pods)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        rows = settle(connection, *pods)
    again = (time.perf_counter() - begun) / REPEATS / PAGE * 1e6
    assert {row["disposition"] for row in rows} == {"duplicate"}
    classify = time.perf_counter()
    for _ in range(REPEATS):
        connection.execute(
            "select count(settle.classify(p)) from jsonb_array_elements(%s) as p",
            (psycopg.types.json.Jsonb(pods),),
        ).fetchone()
    only = (time.perf_counter() - classify) / REPEATS / PAGE * 1e6
    print(f"\n{'the same page again (all duplicates)':60} {again:8.0f} {1.0:6.2f}")
    print(f"{'of which classification':60} {only:8.0f} {only / again:6.2f}")
