"""A page costs index lookups, whatever the statistics of the ledger say.

Counted by the server itself: sequential scans of the ledger, and index entries read from it.
"""

from __future__ import annotations

import pytest

from reconciler.database import Connection
from tests.sql.hosts import Standalone, evicted, running, settle

ROWS = 20_000
PAGE = 50


def fill(connection: Connection, rows: int) -> None:
    connection.execute(
        """
        insert into settle.settlement (
            disposition, task_key, task_instance_id, dag_id, run_id, task_id, map_index, try_number,
            previous_state, state, verdict, refunds_used, refund_cap, previous_max_tries, max_tries, source, why)
        select 'settled', gen_random_uuid(), gen_random_uuid(), 'd', 'r', 't', -1, 1,
            'running', 'success', 'success', 0, 3, 0, 0, 'pass', ''
        from generate_series(1, %s)
        """,
        (rows,),
    )


def counters(connection: Connection) -> dict[str, int]:
    connection.execute("select pg_stat_force_next_flush()")
    connection.execute("select pg_stat_clear_snapshot()")
    row = connection.execute(
        "select s.seq_scan, s.idx_scan, i.idx_tup_read"
        " from pg_stat_user_tables as s, pg_stat_user_indexes as i"
        " where s.relid = 'settle.settlement'::regclass"
        " and i.indexrelid = 'settle.settlement_task_key_idx'::regclass"
    ).fetchone()
    assert row
    return row


@pytest.mark.parametrize(
    "statistics",
    [
        "empty",
        "truncated and analysed, then filled",
        "never analysed",
        "analysed",
        "ten million rows",
    ],
)
def test_a_page_reads_the_ledger_by_index_only(connection: Connection, statistics: str) -> None:
    connection.execute("alter table settle.settlement set (autovacuum_enabled = false)")
    if statistics == "truncated and analysed, then filled":
        connection.execute("analyze settle.settlement")
        row = connection.execute(
            "select reltuples from pg_class where oid = 'settle.settlement'::regclass"
        ).fetchone()
        assert row == {"reltuples": 0}
    if statistics != "empty":
        fill(connection, ROWS)
    if statistics == "analysed":
        connection.execute("analyze settle.settlement")
    if statistics == "ten million rows":
        # What the planner would see; the sizes decide, not the rows.
        connection.execute("analyze settle.settlement")
        connection.execute(
            "update pg_class set reltuples = 1e7, relpages = 500000"
            " where oid in ('settle.settlement'::regclass)"
        )
    host = Standalone(connection)
    attempts = [running(host) for _ in range(PAGE)]
    before = counters(connection)
    # Seven pages in one session: also the plans that a session caches after the fifth.
    for _ in range(7):
        settle(connection, *map(evicted, attempts))
    after = counters(connection)
    used = {name: after[name] - before[name] for name in after}
    assert used["seq_scan"] == 0
    assert 0 < used["idx_scan"] <= 3 * 7 * PAGE
    assert used["idx_tup_read"] <= 3 * 7 * PAGE


def test_the_task_instances_of_a_page_are_read_by_index_only(connection: Connection) -> None:
    host = Standalone(connection)
    connection.execute(
        "insert into settle.task_instance (dag_id, run_id, task_id)"
        " select 'd', 'r', n::text from generate_series(1, 5000) as n"
    )
    attempts = [running(host) for _ in range(PAGE)]

    def scans() -> dict[str, int]:
        connection.execute("select pg_stat_force_next_flush()")
        connection.execute("select pg_stat_clear_snapshot()")
        row = connection.execute(
            "select seq_scan, seq_tup_read from pg_stat_user_tables"
            " where relid = 'settle.task_instance'::regclass"
        ).fetchone()
        assert row
        return row

    before = scans()
    settle(connection, *map(evicted, attempts))
    assert scans() == before
