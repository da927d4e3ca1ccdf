"""What outlives the task, and the duties of PID 1."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.needs import needs
from tests.shim.harness import Shim, alive, child, children

SUCCESS = {"v": 1, "outcome": "success"}
# The shim as PID 1 of a process namespace of its own, as in a container.
pytestmark = needs("unshare")
AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
if os.geteuid() != 0:
    AS_PID_1 = (AS_PID_1[0], "--user", "--map-root-user", *AS_PID_1[1:])


@pytest.mark.parametrize("kind", ["group", "stubborn"])
def test_leftovers_of_the_group_are_ended_before_the_record(shim, kind) -> None:
    running = shim.start(*child("leave", kind, "0"), options=("--kill-grace", "0.3"))
    left = int(running.line())
    ended = running.end()
    assert not alive(left)
    assert (ended.code, ended.record) == (0, SUCCESS)


def test_nobody_writes_the_file_after_the_record(shim) -> None:
    task = child("scribble", str(shim.record_path))
    ended = shim.run(*task, options=("--kill-grace", "0.1"))
    assert (ended.code, ended.record) == (0, SUCCESS)
    time.sleep(0.2)
    assert ended.record == SUCCESS


def test_leftovers_do_not_change_the_outcome_of_a_failure(shim) -> None:
    running = shim.start(*child("leave", "group", "7"))
    left = int(running.line())
    ended = running.end()
    assert not alive(left)
    assert (ended.code, ended.record) == (7, {"v": 1, "outcome": "failed", "exit_code": 7})


def test_no_grace_means_sigkill_at_once(shim) -> None:
    running = shim.start(*child("leave", "stubborn", "0"), options=("--kill-grace", "0"))
    left = int(running.line())
    assert running.end().record == SUCCESS
    assert not alive(left)


@pytest.mark.parametrize("code", [0, 3])
def test_as_pid_1_the_outcome_is_the_same(shim, code) -> None:
    ended = shim.run("/bin/sh", "-c", f"echo $$; exit {code}", wrap=AS_PID_1)
    assert (ended.code, ended.out) == (code, "2\n")
    assert ended.record == (
        SUCCESS if code == 0 else {"v": 1, "outcome": "failed", "exit_code": code}
    )


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR1])
def test_under_pid_1_a_signal_has_its_default_effect_again(shim, number) -> None:
    # A task that is PID 1 itself survives this: the kernel drops signals that have no handler.
    ended = shim.run("/bin/sh", "-c", f"kill -{int(number)} $$; exit 0", wrap=AS_PID_1)
    assert ended.code == 128 + number
    assert ended.record == {"v": 1, "outcome": "failed", "exit_code": 128 + number}


def test_pid_1_reaps_a_storm_of_orphans(shim) -> None:
    ended = shim.run(*child("orphans", "1000"), wrap=AS_PID_1)
    assert (ended.out, ended.code, ended.record) == ("zombies 0\n", 0, SUCCESS)


def test_pid_1_ends_a_daemon_that_left_the_group(shim) -> None:
    # The daemon notes its end in a file; PID 1 waits for that before it writes the record.
    log = shim.folder / "daemon"
    script = (
        "import os, signal, time\n"
        "def end(*_):\n"
        f"    open({str(log)!r}, 'w').write('ended ' + open({str(shim.record_path)!r}).read())\n"
        "    os._exit(0)\n"
        "gate, opened = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, end)\n"
        "    os.write(opened, b'x')\n"
        "    time.sleep(600)\n"
        "os.read(gate, 1)\n"
    )
    ended = shim.run(sys.executable, "-I", "-S", "-c", script, wrap=AS_PID_1)
    assert (ended.code, ended.record) == (0, SUCCESS)
    assert log.read_text() == "ended "


def test_pid_1_passes_signals_on(shim) -> None:
    running = shim.start(*child("echo", "2"), wrap=AS_PID_1)
    assert running.line() == "ready"
    (pid_1,) = children(running.pid)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(pid_1, number)
        assert running.line() == str(int(number))
    ended = running.end()
    assert (ended.code, ended.message) == (0, "")


def test_the_task_is_ended_when_the_shim_itself_fails(shim: Shim, tmp_path) -> None:
    # A fault that only this test can put in: the shim's module for signals, replaced.
    driver = tmp_path / "driver.py"
    package = str(Path(__file__).resolve().parents[2])
    driver.write_text(
        f"import sys; sys.path.insert(0, {package!r})\n"
        "from agent_shim import task\n"
        "take = task._take\n"
        "def broken(until):\n"
        "    if take(until) != 10: return None\n"
        "    raise RuntimeError('on purpose')\n"
        "task._take = broken\n"
        "from agent_shim.__main__ import main\n"
        "main()\n"
    )
    shim.prefix = [sys.executable, "-I", "-S", str(driver)]
    running = shim.start("/bin/sh", "-c", "echo $$; exec sleep 600", options=("--timeout", "900"))
    task = int(running.line())
    running.signal(signal.SIGUSR1)
    ended = running.end()
    assert (ended.code, ended.message) == (70, "")
    assert ended.err == "agent-shim: failed, please report this: RuntimeError: on purpose\n"
    while alive(task):
        time.sleep(0.01)
