"""Signals: to the shim, to the task, to the group; what counts as a stop from outside."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.shim.harness import FORWARDED, alive, child, children

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


def test_every_signal_to_the_shim_reaches_the_task(shim) -> None:
    running = shim.start(*child("echo", str(len(FORWARDED))))
    assert running.line() == "ready"
    seen = []
    for number in FORWARDED:
        running.signal(number)
        seen.append(int(running.line()))
    assert seen == FORWARDED
    # Stop signals were among them, and no record says what the task's exit 0 meant.
    ended = running.end()
    assert (ended.code, ended.record) == (0, None)


def test_a_signal_reaches_every_process_of_the_group(shim) -> None:
    # The shell starts a second process and waits for both, each of which says what it received.
    echo = " ".join(child("echo", "1"))
    running = shim.start("/bin/sh", "-c", f"trap '' USR1; {echo} & {echo} & wait; wait; exit 4")
    assert [running.line(), running.line()] == ["ready", "ready"]
    running.signal(signal.SIGUSR1)
    assert [running.line(), running.line()] == [str(int(signal.SIGUSR1))] * 2
    ended = running.end()
    assert ended.code == 4


@pytest.mark.parametrize("number", [1, 2, 3, 6, 9, 10, 11, 12, 13, 14, 15, 34, 64])
def test_a_signal_that_ends_the_task_is_its_exit_code(shim, number: int) -> None:
    running = shim.start("/bin/sh", "-c", "echo $$; exec sleep 600")
    os.kill(int(running.line()), number)
    ended = running.end()
    assert ended.code == 128 + number
    assert ended.record == {"v": 1, "outcome": "failed", "exit_code": 128 + number}


def test_a_signal_to_the_group_of_the_task_is_no_stop_from_outside(shim) -> None:
    running = shim.start("/bin/sh", "-c", "echo $$; exec sleep 600")
    os.killpg(int(running.line()), signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.record) == (143, {"v": 1, "outcome": "failed", "exit_code": 143})


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("code", [0, 1, 75, 143])
def test_no_record_when_the_task_ends_after_a_stop_from_outside(shim, number, code) -> None:
    deed = "finish" if number == signal.SIGTERM else "echo"
    if deed == "echo":
        running = shim.start(
            "/bin/sh", "-c", f"trap 'exit {code}' INT QUIT; echo ready; while :; do sleep 0.1; done"
        )
    else:
        running = shim.start(*child("finish", str(code)))
    assert running.line() == "ready"
    running.signal(number)
    ended = running.end()
    assert (ended.code, ended.message) == (code, "")
    assert "no record, no report" in ended.err


def test_no_record_when_the_task_dies_of_the_stop(shim) -> None:
    running = shim.start(*child("default"))
    assert running.line() == "ready"
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.message) == (143, "")


def test_what_the_task_wrote_itself_stays_after_a_stop(shim) -> None:
    running = shim.start(
        "/bin/sh",
        "-c",
        f"trap 'echo aborted > {shim.record_path}; exit 1' TERM; echo ready;"
        " while :; do sleep 0.1; done",
    )
    assert running.line() == "ready"
    running.signal(signal.SIGTERM)
    assert running.end().message == "aborted\n"


@pytest.mark.parametrize(
    ("code", "record"),
    [
        (0, {"v": 1, "outcome": "success"}),
        # A failure after the stop would bill the task for the end of its node.
        (1, None),
        (75, None),
    ],
)
def test_exit_0_after_a_stop_counts_where_that_is_trusted(shim, code, record) -> None:
    for how in (
        {"options": ("--trust-exit-after-sigterm",)},
        {"env": {"PODSETTLE_TRUST_EXIT_AFTER_SIGTERM": "true"}},
    ):
        running = shim.start(*child("finish", str(code)), **how)
        assert running.line() == "ready"
        running.signal(signal.SIGTERM)
        ended = running.end()
        assert (ended.code, ended.record) == (code, record)


def test_another_signal_can_be_the_stop_of_an_image(shim) -> None:
    task = ("/bin/sh", "-c", "trap 'exit 0' USR2; echo ready; while :; do sleep 0.1; done")
    for options, record in (
        ((), {"v": 1, "outcome": "success"}),
        (("--stop-signal", "SIGUSR2"), None),
        (("--stop-signal=usr2",), None),
        (("--stop-signal", str(int(signal.SIGUSR2))), None),
    ):
        running = shim.start(*task, options=options)
        assert running.line() == "ready"
        running.signal(signal.SIGUSR2)
        ended = running.end()
        assert (ended.code, ended.record) == (0, record)


def test_a_stop_that_comes_when_the_task_has_ended_does_not_lose_its_outcome(shim) -> None:
    # The shim is stopped while the task ends, so that both signals wait for it when it continues.
    running = shim.start("/bin/sh", "-c", "echo $$; read line; exit 3", stdin=-1)
    task = int(running.line())
    running.signal(signal.SIGSTOP)
    running.process.stdin.write("go\n")
    running.process.stdin.flush()
    while alive(task):
        time.sleep(0.01)
    running.signal(signal.SIGTERM)
    running.signal(signal.SIGCONT)
    ended = running.end()
    assert (ended.code, ended.record) == (3, {"v": 1, "outcome": "failed", "exit_code": 3})


def test_sigterm_to_shim_and_task_at_once_is_a_stop(shim) -> None:
    # Both are signalled before the shim looks: the task's death by SIGTERM is not its own doing.
    running = shim.start("/bin/sh", "-c", "echo $$; exec sleep 600")
    task = int(running.line())
    running.signal(signal.SIGSTOP)
    os.kill(task, signal.SIGTERM)
    while alive(task):
        time.sleep(0.01)
    running.signal(signal.SIGTERM)
    running.signal(signal.SIGCONT)
    ended = running.end()
    assert (ended.code, ended.message) == (143, "")


def test_stops_while_leftovers_are_ended_change_nothing(shim) -> None:
    running = shim.start(*child("leave", "stubborn", "0"), options=("--kill-grace", "3"))
    running.line()
    task = children(running.pid)
    while any(alive(pid) for pid in task):
        time.sleep(0.01)
    for number in STOPS:
        running.signal(number)
    ended = running.end()
    assert (ended.code, ended.record) == (0, {"v": 1, "outcome": "success"})


def test_the_task_starts_with_default_signals_and_none_blocked(shim) -> None:
    ignored = ("/bin/sh", "-c", "trap '' HUP PIPE CHLD USR1 TERM; exec \"$@\"", "sh")
    ended = shim.run("/bin/cat", "/proc/self/status", wrap=ignored)
    masks = dict(line.split(":\t") for line in ended.out.splitlines() if line.startswith("Sig"))
    # 32 and 33 belong to the C library, whose posix_spawn leaves them ignored in every child.
    own = ~(1 << 31 | 1 << 32)
    assert {name: int(masks[name], 16) & own for name in ("SigBlk", "SigIgn", "SigCgt")} == {
        "SigBlk": 0,
        "SigIgn": 0,
        "SigCgt": 0,
    }
    assert ended.record == {"v": 1, "outcome": "success"}


def test_the_task_leads_its_own_group_in_the_same_session(shim) -> None:
    code = "import os; print(os.getpid() == os.getpgrp(), os.getsid(0))"
    ended = shim.run(sys.executable, "-I", "-S", "-c", code)
    assert ended.out.split() == ["True", str(os.getsid(0))]


def test_standard_streams_are_inherited(shim, tmp_path) -> None:
    code = "import os; print([os.fstat(n).st_ino for n in range(3)])"
    running = shim.start(sys.executable, "-I", "-S", "-c", code)
    nodes = [Path(f"/proc/{running.pid}/fd/{n}").stat().st_ino for n in range(3)]
    assert running.line() == str(nodes)
    running.end()


def test_a_task_with_a_terminal_can_read_it(shim) -> None:
    master, slave = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.login_tty(slave)
        words = [*shim.prefix, "run", "--record", str(shim.record_path), "--"]
        os.execv(words[0], [*words, *child("read_terminal")])
    os.close(slave)
    out = b""
    while b"ready" not in out:
        out += os.read(master, 1000)
    os.write(master, b"hello\n")
    while b"typed hello" not in out:
        out += os.read(master, 1000)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(master)
    assert shim.record_path.read_text() == '{"v":1,"outcome":"success"}'


def test_a_timeout_ends_with_sigterm_and_then_sigkill(shim) -> None:
    running = shim.start(*child("stubborn"), options=("--timeout", "2", "--kill-grace", "0.2"))
    ended = running.end()
    assert ended.code == 137
    assert ended.record == {
        "v": 1,
        "outcome": "failed",
        "exit_code": 137,
        "failure_kind": "timeout",
        "reason": "ExecutionTimeout",
    }


def test_exit_0_after_the_timeout_is_no_success(shim) -> None:
    ended = shim.run(
        "/bin/sh",
        "-c",
        "trap 'exit 0' TERM; while :; do sleep 0.1; done",
        options=("--timeout", "2"),
    )
    assert ended.code == 124
    assert ended.record is not None
    assert (ended.record["outcome"], ended.record["exit_code"]) == ("failed", 124)


def test_a_timeout_reaches_a_stopped_task(shim) -> None:
    running = shim.start("/bin/sh", "-c", "kill -STOP $$; exit 0", options=("--timeout", "0.3"))
    ended = running.end()
    assert ended.code == 143
    assert ended.record is not None
    assert ended.record["failure_kind"] == "timeout"


def test_a_stop_after_the_timeout_does_not_hide_the_timeout(shim) -> None:
    task = "trap 'echo term' TERM; while :; do sleep 0.1; done"
    running = shim.start("/bin/sh", "-c", task, options=("--timeout", "2", "--kill-grace", "2"))
    assert running.line() == "term"
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 137
    assert ended.record is not None
    assert ended.record["failure_kind"] == "timeout"


def test_a_timeout_after_a_stop_still_ends_the_task_but_records_nothing(shim) -> None:
    running = shim.start(*child("stubborn"), options=("--timeout", "4", "--kill-grace", "0.1"))
    running.line()
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.message) == (137, "")
