"""I2, I3, I9, I11 between real sessions: who is first wins, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from reconciler.database import Connection
from tests.crash import actors
from tests.crash.actors import ACTORS, LISTENERS, SCENES, Scene, check_invariants, outcome
from tests.crash.conftest import everything
from tests.crash.sessions import Session, Watch, errors_of, sessions
from tests.sql import hosts
from tests.sql.hosts import Passes, Standalone


@pytest.fixture
def passes(connection: Connection) -> Passes:
    for listener in LISTENERS:
        connection.execute("select settle.register_listener(%s)", (listener,))
    return Passes(connection)


def in_turn(scene: Scene, first: str, second: str) -> tuple[Any, Any]:
    calls = [ACTORS[name](scene) for name in (first, second)]
    return outcome(calls[0], scene.passes.c), outcome(calls[1], scene.passes.c)


def at_once(
    scene: Scene, first: str, second: str, watch: Watch, pair: list[Session], *, commit: bool = True
) -> tuple[Any, Any, bool]:
    """The second acts while the first has acted and not committed.

    Returns: Both answers, and whether the second had to wait.
    """
    one, two = pair
    calls = [ACTORS[name](scene) for name in (first, second)]
    one.begin()
    answer = outcome(calls[0], one.connection)
    coming: Future[Any] = two.start(lambda connection: outcome(calls[1], connection))
    waited = watch.until_blocked_or_done(two.pid, by=one.pid, future=coming)
    if commit and one.connection.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
        one.commit()
    else:
        one.rollback()
    return answer, coming.result(timeout=60), waited


# From running at try 1 with one retry: state, max_tries.
SETTLES = {
    "pass: success": ("success", 1),
    "pass: crash": ("up_for_retry", 1),
    "pass: evicted": ("up_for_retry", 2),
    "pass: poke": ("up_for_reschedule", 1),
    "report: success": ("success", 1),
    "report: failed": ("up_for_retry", 1),
    "report: reschedule": ("up_for_reschedule", 1),
    "person: succeed": ("success", 1),
    "person: fail infra": ("up_for_retry", 2),
    "person: mark_failed": ("failed", 1),
}


@pytest.mark.parametrize("first", [*SETTLES, "clear"])
def test_i3_of_two_that_settle_at_once_the_first_wins_and_the_other_is_told(
    database: str, passes: Passes, first: str
) -> None:
    with sessions(database, "first", "second") as (watch, pair):
        for second in (*SETTLES, "clear"):
            scene = actors.running(passes)
            answers = at_once(scene, first, second, watch, pair)
            state = scene.state()
            found = (state["state"], state["max_tries"], len(state["ledger"]))
            if "clear" in (first, second):
                # Whichever came first: the life after the clear is the one that counts.
                moved = 1 if first == "clear" else 2
                assert found == ("none", 2, moved), (second, answers)
                told = "duplicate" if first == "clear" else "settled"
                assert answers == ("settled", told, True), second
            else:
                assert answers == ("settled", "duplicate", True), second
                assert found == (*SETTLES[first], 1), (second, answers)
            check_invariants(scene)


@pytest.mark.parametrize("second", list(SETTLES))
def test_i9_what_is_rolled_back_never_was(database: str, passes: Passes, second: str) -> None:
    with sessions(database, "first", "second") as (watch, pair):
        for first in ("pass: evicted", "report: success", "clear"):
            scene = actors.running(passes)
            answers = at_once(scene, first, second, watch, pair, commit=False)
            assert answers == ("settled", "settled", True)
            state = scene.state()
            assert (state["state"], state["max_tries"]) == SETTLES[second]
            assert len(state["ledger"]) == 1
            check_invariants(scene)


@pytest.mark.parametrize("start", list(SCENES))
def test_i9_two_at_once_come_to_the_end_that_they_come_to_in_turn(
    database: str, passes: Passes, start: str
) -> None:
    """Every pair of actors, each as the first: answers and all that is kept are those of a queue."""
    pairs = [(first, second) for first in ACTORS for second in ACTORS]
    if not everything():
        pairs = pairs[list(SCENES).index(start) :: 13]
    wrong = []
    waits = 0
    with sessions(database, "first", "second") as (watch, session_pair):
        for first, second in pairs:
            queue, race = SCENES[start](passes), SCENES[start](passes)
            expected = (*in_turn(queue, first, second), queue.state())
            *answers, waited = at_once(race, first, second, watch, session_pair)
            waits += waited
            found = (*answers, race.state())
            if found != expected and not waited:
                # Who did not wait may as well have come first: it saw nothing of the other.
                queue = SCENES[start](passes)
                expected = (*reversed(in_turn(queue, second, first)), queue.state())
            if found != expected:
                wrong.append((first, second, _difference(expected, found)))
            check_invariants(race)
        assert watch.deadlocks() == 0
    assert waits > 0
    assert wrong == []


def _difference(expected: tuple[Any, Any, Any], found: tuple[Any, Any, Any]) -> Any:
    states = {
        key: (expected[2][key], found[2][key])
        for key in found[2]
        if found[2][key] != expected[2][key]
    }
    return (expected[:2], found[:2], states)


# --- the cases that have a name -------------------------------------------------------------------


@pytest.mark.parametrize("who", ["pass: success", "report: success"])
def test_i2_a_late_success_and_the_next_dispatch_exclude_each_other(
    database: str, passes: Passes, who: str
) -> None:
    with sessions(database, "first", "second") as (watch, pair):
        scene = actors.provisional(passes)
        assert at_once(scene, who, "dispatch", watch, pair) == ("overrode", "ST003", True)
        state = scene.state()
        assert (state["state"], state["max_tries"], state["try_number"]) == ("success", 1, 1)
        assert [entry["refund"] for entry in state["ledger"]] == [1, -1]

        scene = actors.provisional(passes)
        assert at_once(scene, "dispatch", who, watch, pair) == ("try 2", "stale", True)
        state = scene.state()
        assert (state["state"], state["max_tries"], state["try_number"]) == ("queued", 2, 2)
        check_invariants(scene)


@pytest.mark.parametrize("who", ["pass: success", "report: success", "report: failed", "push"])
def test_i2_a_poked_attempt_that_speaks_while_its_successor_is_dispatched_does_not_touch_it(
    database: str, passes: Passes, who: str
) -> None:
    with sessions(database, "first", "second") as (watch, pair):
        scene = actors.poked(passes)
        first, second, _ = at_once(scene, "dispatch", who, watch, pair)
        # Settled already, or another one's by now; no write in either case.
        assert (first, second) in (("try 1", "stale"), ("try 1", "duplicate"))
        state = scene.state()
        assert (state["state"], state["try_number"], state["same attempt"]) == ("queued", 1, False)
        assert (len(state["ledger"]), state["pushed"]) == (1, [])


def test_i3_a_ripe_suspicion_and_a_report_at_once(database: str, passes: Passes) -> None:
    with sessions(database, "first", "second") as (watch, pair):
        scene = actors.ripe(passes)
        answers = at_once(scene, "report: success", "close_pass", watch, pair)
        assert answers == ("settled", [], True)
        state = scene.state()
        assert (state["state"], state["max_tries"], len(state["ledger"])) == ("success", 1, 1)
        assert not state["ledger"][0]["provisional"]
        assert state["suspicions"] == []

        scene = actors.ripe(passes)
        answers = at_once(scene, "close_pass", "report: success", watch, pair)
        assert answers == (["settled"], "overrode", True)
        state = scene.state()
        assert (state["state"], state["max_tries"]) == ("success", 1)
        assert [entry["refund"] for entry in state["ledger"]] == [1, -1]

        scene = actors.ripe(passes)
        answers = at_once(scene, "close_pass", "report: failed", watch, pair)
        assert answers == (["settled"], "duplicate", True)
        state = scene.state()
        assert (state["state"], state["max_tries"], len(state["ledger"])) == ("up_for_retry", 2, 1)


def test_i3_a_person_does_not_overwrite_an_attempt_that_began_while_the_person_spoke(
    database: str, passes: Passes
) -> None:
    """The mark is under way when the next attempt is dispatched and reported."""
    pause_where(passes.c, "clock")
    scene = actors.poked(passes)
    with sessions(database, "person", "report", "gate") as (watch, [person, report, gate]):
        gate.connection.execute("select pg_advisory_lock(7)")
        person.connection.execute("set podsettle_test.pause = 'on'")
        marked = person.start(lambda c: outcome(ACTORS["person: mark_failed"](scene), c))
        watch.until_blocked(person.pid, by=gate.pid)
        # If the person's call holds the row, the dispatch waits for it; else it goes through.
        dispatched = report.start(lambda c: outcome(ACTORS["dispatch"](scene), c))
        waits = watch.until_blocked_or_done(report.pid, by=person.pid, future=dispatched)
        if not waits:
            attempt = Standalone(passes.c).row(scene.attempt.id)["attempt_id"]
            report.begin()
            report.connection.execute("select settle.report(%s, 'success')", (attempt,))
        gate.connection.execute("select pg_advisory_unlock(7)")
        if not waits:
            watch.until_blocked_or_done(person.pid, by=report.pid, future=marked)
            report.commit()
        assert errors_of(marked, dispatched) == []
        assert (marked.result(), dispatched.result()) == ("duplicate", "try 1")
    check_invariants(scene)


def pause_where(connection: Connection, where: str) -> None:
    """Let sessions with podsettle_test.pause wait for advisory lock 7 in the middle of a settle."""
    wait = (
        "if current_setting('podsettle_test.pause', true) = 'on' then"
        " perform pg_advisory_xact_lock(7); end if;"
    )
    if where == "clock":
        connection.execute(
            "create or replace function settle.clock() returns timestamptz language plpgsql"
            f" volatile security definer set search_path = pg_catalog, pg_temp as $$ begin {wait}"
            " return clock_timestamp() + (select c.ahead from public.test_clock as c); end $$"
        )
    else:
        connection.execute(
            "create or replace function settle.after_transition(p_settlement_ids bigint[])"
            " returns void language plpgsql volatile set search_path = pg_catalog, pg_temp"
            f" as $$ begin {wait} end $$"
        )


# --- deadlocks ------------------------------------------------------------------------------------


def two_in_id_order(host: Standalone) -> list[hosts.Attempt]:
    return sorted((hosts.running(host, retries=1) for _ in range(2)), key=lambda a: a.id)


def pending_pods(*attempts: hosts.Attempt) -> list[dict[str, Any]]:
    return [hosts.pending(a) | {"pod": f"pod-{a.id}"} for a in attempts]


@pytest.mark.parametrize("moved_by", ["settle_pods", "close_pass"])
def test_i9_no_deadlock_between_two_passes_over_the_same_doubted_pods(
    database: str, passes: Passes, moved_by: str
) -> None:
    """One moved the higher task instance and comes to the lower; the other doubts both, in order."""
    pause_where(passes.c, "after_transition")
    low, high = two_in_id_order(Standalone(passes.c))
    low_pod, high_pod = pending_pods(low, high)
    passes.later(5)
    passes.run(high_pod, hosts.pod(low))
    if moved_by == "close_pass":
        passes.every(61, 9, high_pod, hosts.pod(low))
        passes.later(61)  # Now the higher one is ripe.

    with sessions(database, "one", "two", "gate") as (watch, [one, two, gate]):
        before = watch.deadlocks()
        gate.connection.execute("select pg_advisory_lock(7)")
        one.connection.execute("set podsettle_test.pause = 'on'")
        first, second = open_pass(passes.c), open_pass(passes.c)
        if moved_by == "close_pass":
            settle_pods(first, low_pod, high_pod)(passes.c)
            moving = one.start(close_pass(first, low.id, high.id))
        else:
            moving = one.start(settle_pods(first, hosts.success(high), low_pod))
        watch.until_blocked(one.pid, by=gate.pid)
        doubting = two.start(settle_pods(second, low_pod, high_pod))
        watch.until_blocked(two.pid, by=one.pid)
        gate.connection.execute("select pg_advisory_unlock(7)")
        assert errors_of(moving, doubting) == []
        assert deadlocks_after(watch, one, two) == before
    states = [Standalone(passes.c).row(a.id)["state"] for a in (low, high)]
    assert states == ["running", "up_for_retry" if moved_by == "close_pass" else "success"]


def test_i9_no_deadlock_between_passes_that_doubt_the_same_pods_for_different_causes(
    database: str, passes: Passes
) -> None:
    """A suspicion of another cause makes room for the new one: that too in the order of ids."""
    low, high = two_in_id_order(Standalone(passes.c))
    low_pod, high_pod = pending_pods(low, high)
    ending = [hosts.terminating(a) | {"pod": f"pod-{a.id}"} for a in (low, high)]
    passes.later(5)
    with sessions(database, "one", "two") as (watch, [one, two]):
        before = watch.deadlocks()
        for _ in range(100 if everything() else 30):
            passes.run(low_pod, high_pod, complete=False)
            first, second = open_pass(passes.c), open_pass(passes.c)
            barrier = threading.Barrier(2)
            futures = [
                one.start(together(barrier, settle_pods(first, low_pod, ending[1]))),
                two.start(together(barrier, settle_pods(second, *ending))),
            ]
            assert errors_of(*futures) == []
        assert deadlocks_after(watch, one, two) == before


def open_pass(connection: Connection) -> int:
    row = connection.execute("select settle.open_pass(null, 'podsettle', 'files') as id").fetchone()
    assert row
    return int(row["id"])


def settle_pods(opened: int, *pods: dict[str, Any]) -> Callable[[Connection], Any]:
    return lambda c: c.execute(
        "select * from settle.settle_pods(%s, %s)", (opened, Jsonb(list(pods)))
    ).fetchall()


def close_pass(opened: int, *seen: str) -> Callable[[Connection], Any]:
    return lambda c: c.execute(
        "select * from settle.close_pass(%s, true, %s::uuid[])", (opened, list(seen))
    ).fetchall()


def together(
    barrier: threading.Barrier, call: Callable[[Connection], Any]
) -> Callable[[Connection], Any]:
    def run(connection: Connection) -> Any:
        barrier.wait(60)
        return call(connection)

    return run


def deadlocks_after(watch: Watch, *ended: Session) -> int:
    """The server's own count, once the sessions are gone and their counts are in."""
    for session in ended:
        session.connection.close()
    watch.until(
        "select where not exists (select from pg_stat_activity where pid = any(%s))",
        ([session.pid for session in ended],),
        what="a session does not end",
    )
    return watch.deadlocks()


def test_i9_many_passes_reports_and_clears_at_once_do_not_deadlock_and_end_right(
    database: str, passes: Passes
) -> None:
    c = passes.c
    # The second complete pass that sees a doubt settles it.
    c.execute("update settle.setting set value = '0' where name like '%_after'")
    host = Standalone(c)
    chance = random.Random(7)
    for _ in range(25 if everything() else 4):
        attempts = [hosts.running(host, retries=1) for _ in range(12)]
        cleared = {a.id for a in attempts[:3]}
        passes.later(5)
        passes.run(*pending_pods(*attempts[::2]))

        def one_pass(seed: int, attempts: list[hosts.Attempt] = attempts) -> Any:
            def run(connection: Connection) -> None:
                random_ = random.Random(seed)
                shuffled = random_.sample(attempts, len(attempts))
                opened, seen = open_pass(connection), []
                for start in range(0, len(shuffled), 5):
                    page = [
                        random_.choice(
                            [
                                hosts.pending,
                                hosts.terminating,
                                hosts.silent,
                                hosts.success,
                                hosts.pod,
                            ]
                        )(a)
                        | {"pod": f"pod-{a.id}"}
                        for a in shuffled[start : start + 5]
                    ]
                    settle_pods(opened, *page)(connection)
                    seen += [a.id for a in shuffled[start : start + 5] if random_.random() < 0.7]
                close_pass(opened, *seen)(connection)

            return run

        def reports(connection: Connection, attempts: list[hosts.Attempt] = attempts) -> None:
            for attempt in reversed(attempts[:8]):
                hosts.report(connection, attempt, "success")

        def clears(connection: Connection, cleared: set[str] = cleared) -> None:
            for ti in cleared:
                connection.execute("call settle.clear(%s)", (ti,))

        names = [f"pass-{n}" for n in range(4)] + ["reports", "clears"]
        with sessions(database, *names) as (watch, opened):
            before = watch.deadlocks()
            barrier = threading.Barrier(len(names))
            calls = [one_pass(chance.randrange(1 << 30)) for _ in range(4)] + [reports, clears]
            futures = [
                session.start(together(barrier, call))
                for session, call in zip(opened, calls, strict=True)
            ]
            assert errors_of(*futures) == []
            assert deadlocks_after(watch, *opened) == before
        # One clean pass in which each task's record is found.
        passes.later(5)
        passes.run(*(hosts.success(a) for a in attempts))
        for attempt in attempts:
            check_invariants(Scene(passes, attempt, "tasks"))
            row = host.row(attempt.id)
            if attempt.id in cleared:
                assert row["state"] == "none"
            else:
                assert (row["state"], row["max_tries"]) == ("success", 1)
    assert c.execute("select * from settle.suspicions").fetchall() == []
