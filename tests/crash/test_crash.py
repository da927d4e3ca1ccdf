"""I9: whatever ends a pass, and wherever, one clean pass later all is as if it had not happened."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from reconciler import database as db
from reconciler import passes
from tests.cli.conftest import Run
from tests.crash import command, world
from tests.crash.conftest import Template, everything
from tests.crash.proxy import ENDS_A_STATEMENT, Proxy, Strike
from tests.crash.sessions import Watch, sessions
from tests.unit.fake_api import FakeApi

Ends = list[dict[str, Any]]
When = Literal["before", "after", "mid-answer"]
RECONCILE = ("reconcile", "--page-size", "2", "--output", "json")


def test_the_night_is_what_the_other_tests_take_it_for(template: Template, ends: Ends) -> None:
    for number, end in enumerate(ends, 1):
        assert world.summary(end) == world.EXPECTED
        names = {attempt.id: name for name, attempt in template.night.tasks.items()}
        suspected = {names[str(s["task_instance_id"])]: s for s in end["suspicions"]}
        assert {name: s["cause"] for name, s in suspected.items()} == world.SUSPECTED
        assert {s["passes"] for s in suspected.values()} == {number}
        assert len(end["outbox"]) == len(end["ledger"]) * len(world.LISTENERS)
        assert end["leases"] == []
        # More passes change nothing but the count of doubt.
        assert {**end, "suspicions": 0} == {**ends[0], "suspicions": 0}


class Source:
    """Where the passes of a test read their pods."""

    def __init__(self, name: str, template: Template, api: FakeApi | None, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.environment: dict[str, str] = {}
        if api is None:
            self.arguments = (*RECONCILE, "--pods", str(template.file), "--complete")
        else:
            self.arguments = (*RECONCILE, "--all-namespaces")
            self.environment = {"KUBECONFIG": str(api.kubeconfig(folder))}

    def start(self, dsn: str, *more: str) -> subprocess.Popen[bytes]:
        return command.start(
            *self.arguments, "--dsn", dsn, *more, home=self.folder, **self.environment
        )


@pytest.fixture(params=["files", "api"])
def source(request: pytest.FixtureRequest, template: Template, tmp_path: Path) -> Any:
    with ExitStack() as open_:
        api = None
        if request.param == "api":
            pods = template.night.pods
            api = open_.enter_context(FakeApi(lambda n: pods[n], len(pods)))
        yield Source(request.param, template, api, tmp_path)


def strike(
    source: Source, dsn: str, at: int, when: When, *, kill: bool
) -> tuple[Run | None, Strike, list[str]]:
    """Run a pass and strike it; None: it was killed and so has nothing to say."""
    victim: list[subprocess.Popen[bytes]] = []

    def blow() -> None:
        os.kill(victim[0].pid, signal.SIGKILL)
        victim[0].wait()

    struck = Strike(at, when, blow if kill else None)
    with Proxy(dsn, struck) as proxy:
        # The proxy listens already; the process takes longer to connect than this list to be filled.
        victim.append(source.start(proxy.dsn))
        process = victim[0]
        with process:
            out, err = process.communicate(timeout=120)
    if process.returncode == -signal.SIGKILL:
        return None, struck, proxy.messages
    done = Run(
        subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())
    )
    return done, struck, proxy.messages


def recover(template: Template, dsn: str, ends: Ends, before: int) -> None:
    """One clean pass later the end is that of as many undisturbed passes as were closed."""
    with db.connect(dsn) as connection:
        lease = connection.execute("select 1 from settle.lease").fetchone()
        if lease:
            # The dead pass keeps the next one waiting until its lease is over, and no longer.
            with pytest.raises(passes.PassBusy):
                world.clean_pass(connection, template.night.pods, scope=world.API_SCOPE)
            world.later(connection, 16)
        world.later(connection, 1)
        world.clean_pass(connection, template.night.pods, scope=world.API_SCOPE)
        closed = world.complete_passes(connection) - before
        end, undisturbed = world.end(connection), ends[closed - 1]
        assert {part: end[part] for part in end if end[part] != undisturbed[part]} == {}


def boundaries(messages: list[str], when: When, source: Source) -> list[int]:
    """The numbers of the messages to strike at, the whole of them in CI."""
    numbers = range(1, len(messages) + 1)
    statements = [n for n in numbers if messages[n - 1] in ENDS_A_STATEMENT]
    if everything():
        # A message within a statement has no answer to break off.
        return list(numbers) if when != "mid-answer" and source.name == "files" else statements
    step = {"after": 9, "before": 19, "mid-answer": 19}[when] * (1 if source.name == "files" else 2)
    return statements[(step // 2) :: step]


def strike_at_each(
    source: Source, template: Template, ends: Ends, when: When, check: Callable[[Run | None], None]
) -> None:
    with template.copy() as dsn:
        unharmed, struck, messages = strike(source, dsn, 10_000, when, kill=True)
        assert unharmed is not None
        assert (unharmed.code, struck.struck.is_set()) == (0, False), unharmed.err
        with db.connect(dsn) as connection:
            before = world.complete_passes(connection) - 1
            assert world.end(connection) == ends[0]
    assert messages.count("Q") > 10

    def one(at: int) -> None:
        with template.copy() as dsn:
            done, struck, seen = strike(source, dsn, at, when, kill=when != "mid-answer")
            assert struck.struck.is_set(), f"nothing was struck at message {at}: {seen}"
            assert seen[:at] == messages[:at]
            check(done)
            recover(template, dsn, ends, before)

    chosen = boundaries(messages, when, source)
    assert chosen
    with ThreadPoolExecutor(2) as pool:
        wrong = [
            (at, messages[at - 1], failed)
            for at, failed in zip(chosen, pool.map(_outcome(one), chosen), strict=True)
            if failed is not None
        ]
    assert not wrong, wrong


def _outcome(call: Callable[[int], None]) -> Callable[[int], BaseException | None]:
    def outcome(at: int) -> BaseException | None:
        try:
            call(at)
        except BaseException as failed:
            return failed
        return None

    return outcome


@pytest.mark.parametrize("when", ["after", "before"])
def test_i9_a_pass_killed_at_any_message_leaves_what_a_clean_pass_completes(
    source: Source, template: Template, ends: Ends, when: When
) -> None:
    def was_killed(done: Run | None) -> None:
        assert done is None, done and done.err

    strike_at_each(source, template, ends, when, was_killed)


def test_i9_a_connection_cut_in_the_middle_of_any_answer_is_one_sentence(
    source: Source, template: Template, ends: Ends
) -> None:
    def told(done: Run | None) -> None:
        assert done is not None
        if done.code == 0:
            # After the pass only events were still to be delivered: they wait for the next one.
            assert [e["event"] for e in done.events].count("not delivered") == 1, done.err
            assert len(done.events) == len(done.err.splitlines())
        else:
            command.refused_in_one_sentence(done)

    strike_at_each(source, template, ends, "mid-answer", told)


def test_i9_the_next_command_waits_for_the_lease_of_a_dead_pass_and_no_longer(
    template: Template, ends: Ends, tmp_path: Path
) -> None:
    pods = template.night.pods
    with template.copy() as dsn, FakeApi(lambda n: pods[n], len(pods)) as api:
        source = Source("api", template, api, tmp_path)
        with db.connect(dsn) as connection:
            before = world.complete_passes(connection)
            done, struck, _ = strike(source, dsn, 40, "after", kill=True)
            assert (done, struck.struck.is_set()) == (None, True)
            (lease,) = connection.execute("select * from settle.lease").fetchall()
            refused = command.finish(source.start(dsn, "--wait", "0"))
            assert refused.code == 3, refused.err
            assert "another pass over all namespaces is at work" in refused.err
            assert connection.execute("select * from settle.lease").fetchall() == [lease]

            with Watch(dsn) as watch, command_of(source.start(dsn, "--wait", "600")) as waiting:
                # It came, was told to wait, and waits between two questions.
                watch.until(
                    "select from pg_stat_activity where application_name = 'podsettle'"
                    " and datname = current_database() and state = 'idle' and query = 'COMMIT'",
                    what="no pass waits for the lease",
                )
                world.later(connection, 16)
                completed = command.finish(waiting)
            assert completed.code == 0, completed.err
            assert world.complete_passes(connection) - before == 1
            assert world.end(connection) == ends[0]


@contextmanager
def command_of(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive a test that fails."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def lock(holder: db.Connection, template: Template, task: str) -> None:
    """Lock a task instance, as a report does that has not committed yet."""
    holder.execute("begin")
    holder.execute(
        "select from settle.task_instance where id = %s for update",
        (template.night.tasks[task].id,),
    )


@pytest.mark.parametrize("task", ["recovered", "late"])
def test_i9_a_server_that_ends_the_session_in_the_middle_of_a_page_is_one_sentence(
    source: Source, template: Template, ends: Ends, task: str
) -> None:
    with template.copy() as dsn, sessions(dsn, "holder") as (watch, [holder]):
        before = world.complete_passes(watch.connection)
        lock(holder.connection, template, task)
        with command_of(source.start(dsn)) as process:
            pid = watch.until_a_pass_waits()
            watch.connection.execute("select pg_terminate_backend(%s)", (pid,))
            sentence = command.refused_in_one_sentence(command.finish(process))
        assert sentence == (
            "Error: a page of pods cannot be settled: "
            "terminating connection due to administrator command"
        )
        holder.rollback()
        recover(template, dsn, ends, before)


LIMITS = {"lock": (60_000, 300), "statement": (3_000, 60_000)}


@pytest.mark.parametrize("limit", list(LIMITS))
def test_i9_a_pass_that_waits_too_long_is_one_sentence(
    template: Template, ends: Ends, tmp_path: Path, limit: str
) -> None:
    with template.copy() as dsn, sessions(dsn, "holder") as (watch, [holder]):
        before = world.complete_passes(watch.connection)
        lock(holder.connection, template, "evicted")
        arguments = (*RECONCILE, "--pods", str(template.file), "--complete", "--dsn", dsn)
        with command_of(
            command.start_impatient(*LIMITS[limit], *arguments, home=tmp_path)
        ) as process:
            sentence = command.refused_in_one_sentence(command.finish(process))
        assert sentence == (
            f"Error: a page of pods cannot be settled: canceling statement due to {limit} timeout"
        )
        # It gave up its pass in good order, and what it had settled stays settled.
        (closed,) = watch.connection.execute(
            "select closed_at is not null as closed, complete from settle.pass"
            " order by id desc limit 1"
        ).fetchall()
        assert closed == {"closed": True, "complete": False}
        holder.rollback()
        recover(template, dsn, ends, before)


def test_a_pass_leaves_the_time_limits_of_its_session_alone(template: Template) -> None:
    with template.copy() as dsn, db.connect(dsn) as connection:
        world.clean_pass(connection, template.night.pods)
        for name in ("statement_timeout", "lock_timeout"):
            row = connection.execute(f"show {name}").fetchone()
            assert row == {name: "0"}
