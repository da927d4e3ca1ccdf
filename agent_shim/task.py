"""The task as a process: start it, pass signals on, reap, end what it leaves behind.

All signals are blocked and taken one at a time with sigwaitinfo: no handler runs between two lines,
nothing is lost, and as PID 1, where the kernel drops signals that have no handler, they arrive.
"""

from __future__ import annotations

import posix
import time

from agent_shim.output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterator, Mapping
else:
    # The C module: `signal` builds its enums at import, which costs more than this whole package.
    import _signal

_SIGNALS = frozenset(
    int(number)
    for number in _signal.valid_signals()
    if number not in (_signal.SIGKILL, _signal.SIGSTOP)
)
# How long to wait for processes to disappear after SIGKILL; one that hangs in the kernel may not.
_AFTER_KILL = 5.0
_ME = posix.getpid()


def block_signals() -> None:
    """Block every signal that can be blocked; from here on they wait until they are taken."""
    # An ignored SIGCHLD, which is inherited, would make the kernel reap the task and lose its code.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _SIGNALS)


class Task:
    """One running task, the leader of its own process group.

    Attributes:
        pid: its process id, which is also its group's.
        status: its exit code, -N for signal N, None while it runs.
        timed_out: it was still running when its timeout passed.
        stopped: a stop signal came from outside while it was still running.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[bytes, bytes],
        *,
        stop_signals: frozenset[int],
        kill_grace: float,
    ) -> None:
        """Start `command`, found on PATH, by its argument vector; never through a shell.

        Args:
            command: the program and its arguments.
            environment: its whole environment.
            stop_signals: signals that mean that the platform ends this pod.
            kill_grace: seconds between SIGTERM and SIGKILL.

        Raises:
            OSError: it cannot be started; errno is that of execve or fork.
        """
        self._stop_signals = stop_signals
        self._kill_grace = kill_grace
        self._terminal = posix.isatty(0) and posix.tcgetpgrp(0) == posix.getpgrp()
        self.status: int | None = None
        self.timed_out = False
        self.stopped = False
        self.pid = posix.posix_spawnp(
            command[0],
            command,
            environment,
            setpgroup=0,
            setsigmask=(),
            setsigdef=_SIGNALS,
        )
        if self._terminal:
            # A group in the background is stopped when it reads; it may have tried already.
            posix.tcsetpgrp(0, self.pid)
            self._send(_signal.SIGCONT)

    def wait(self, timeout: float | None) -> int:
        """Wait until the task has ended, passing on every signal that arrives.

        Args:
            timeout: seconds until its group gets SIGTERM and, after the grace, SIGKILL; or None.

        Returns:
            Its exit code, or -N when signal N ended it.
        """
        next_step = None if timeout is None else time.monotonic() + timeout
        overdue = False
        while True:
            number = _take(next_step)
            # First look whether it has ended: a signal that comes after that changes nothing.
            self._reap()
            if self.status is not None:
                self._after_end(number)
                return self.status
            if number is not None:
                # What was decided by the timeout stays decided.
                if number in self._stop_signals and not self.timed_out:
                    self.stopped = True
                if number != _signal.SIGCHLD:
                    self._send(number)
            elif not overdue:
                overdue = True
                self.timed_out = not self.stopped
                say(f"timeout of {timeout:g} s reached, SIGTERM to the task")
                self._send(_signal.SIGTERM)
                self._send(_signal.SIGCONT)
                next_step = time.monotonic() + self._kill_grace
            else:
                say(f"still running {self._kill_grace:g} s after SIGTERM, SIGKILL to the task")
                self._send(_signal.SIGKILL)
                next_step = None

    def end_leftovers(self) -> None:
        """End what outlives the task in its group, and orphans that became children of the shim.

        SIGTERM, then SIGKILL after the grace. Afterwards nobody else writes the task's files. Costs
        two system calls when there is nothing, which is the rule.
        """
        if not self._leftovers():
            return
        told: set[int] = set()
        until = time.monotonic() + self._kill_grace
        while (pids := self._leftovers()) and time.monotonic() < until:
            for pid in pids - told:
                _kill(pid, _signal.SIGTERM)
                _kill(pid, _signal.SIGCONT)
            told |= pids
            pause(0.02, frozenset())
        until = time.monotonic() + _AFTER_KILL
        while (pids := self._leftovers()) and time.monotonic() < until:
            for pid in pids:
                _kill(pid, _signal.SIGKILL)
            pause(0.02, frozenset())
        if pids:
            say(f"processes {sorted(pids)} of the task do not end, not even by SIGKILL")

    def kill(self) -> None:
        """End the whole group at once."""
        self._send(_signal.SIGKILL)

    def _reap(self) -> bool:
        """Collect every ended child, the task included; return whether living ones remain."""
        for pid, status in _ended_children():
            if pid == self.pid:
                self.status = posix.waitstatus_to_exitcode(status)
            if pid == 0:
                return True
        return False

    def _after_end(self, number: int | None) -> None:
        if self._terminal:
            posix.tcsetpgrp(0, posix.getpgrp())
        if self.status in (-_signal.SIGTERM, 128 + _signal.SIGTERM) and not self.timed_out:
            # SIGTERM ended it. If one came to us as well, somebody sent it to every process here.
            if number not in self._stop_signals:
                number = _waiting(self._stop_signals)
            self.stopped = self.stopped or number in self._stop_signals

    def _send(self, number: int) -> None:
        try:
            posix.killpg(self.pid, number)
        except OSError:
            # The task moved itself to another group, or only it may be signalled.
            _kill(self.pid, number)

    def _leftovers(self) -> set[int]:
        children = self._reap()
        try:
            posix.killpg(self.pid, 0)
        except ProcessLookupError:
            if not children:
                return set()
        except OSError:
            pass
        found = set()
        for name in _listing("/proc"):
            if name.isdigit():
                state, parent, group = _stat(name)
                if (group == self.pid or parent == _ME) and state not in "ZX":
                    found.add(int(name))
        return found


def pause(seconds: float, stop_signals: frozenset[int]) -> bool:
    """Wait, reaping orphans, once the task has ended and signals are no longer passed on.

    Args:
        seconds: how long.
        stop_signals: what cuts it short.

    Returns:
        True, at once, when one of `stop_signals` came.
    """
    until = time.monotonic() + seconds
    while (number := _take(until)) is not None:
        for _ in _ended_children():
            pass
        if number in stop_signals:
            return True
    return False


def _take(until: float | None) -> int | None:
    """Return the next signal; None at the monotonic time `until`."""
    while True:
        if until is None:
            found = _signal.sigwaitinfo(_SIGNALS)
        else:
            maybe = _signal.sigtimedwait(_SIGNALS, max(0.0, until - time.monotonic()))
            if maybe is None:
                return None
            found = maybe
        # The kernel sends SIGPIPE and SIGXFSZ for writes of our own: not for the task.
        if found.si_signo == _signal.SIGCHLD or found.si_pid != _ME:
            return found.si_signo


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield process id and wait status of each child that ended; id 0 when living ones remain."""
    while True:
        try:
            pid, status = posix.waitpid(-1, posix.WNOHANG)
        except ChildProcessError:
            return
        yield pid, status
        if pid == 0:
            return


def _waiting(signals: frozenset[int]) -> int | None:
    found = _signal.sigtimedwait(signals, 0)
    return None if found is None else found.si_signo


def _kill(pid: int, number: int) -> None:
    try:
        posix.kill(pid, number)
    except ProcessLookupError:
        pass
    except OSError as error:
        say(f"cannot send signal {number} to process {pid}: {error.strerror}")


def _listing(path: str) -> list[str]:
    try:
        return posix.listdir(path)
    except OSError:
        return []


def _stat(pid: str) -> tuple[str, int, int]:
    """Return state, parent and group of a process; state X when it is gone (proc(5))."""
    try:
        file = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return "X", 0, 0
    try:
        # The name, in brackets, can hold anything, brackets included.
        state, parent, group = posix.read(file, 4096).rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return "X", 0, 0
    finally:
        posix.close(file)
    return state.decode(), int(parent), int(group)
