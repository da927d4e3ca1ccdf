"""Delivers the outbox: a process for each listener, watched by the one that started it.

A listener is somebody else's code. It may raise, hang, or take its process with it; none of that
reaches the pass or another listener. The child claims events, calls the listener and says so line
by line; the parent kills a child that is silent for too long and gives its events back. If the
parent dies too, the claims expire. When and how often a delivery is tried again is decided in SQL.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any, Final

from reconciler import listeners, render, text
from reconciler.database import DatabaseRefused, Row, Settle, connect
from reconciler.events import Event

_BATCH: Final = 20
_START_SECONDS: Final = 30.0
"""How long a child may take before its first word: Python, the listener's imports, a connection."""

_MAX_ERROR: Final = 500


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a delivery may take.

    Attributes:
        within: No new event is begun after this many seconds.
        each: How long one event may take with one listener, in seconds.
    """

    within: float
    each: float


@dataclass
class Delivered:
    """What became of one listener's events.

    Attributes:
        listener: Its name.
        delivered: Events that it took.
        failed: Deliveries that failed, to be tried again.
        set_aside: Events that were given up.
        problems: One sentence for each thing that went wrong.
    """

    listener: str
    delivered: int = 0
    failed: int = 0
    set_aside: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Keep a problem; the first ones tell enough."""
        if len(self.problems) < 10:
            self.problems.append(problem)


def deliver(
    settle: Settle, dsn: str, limits: Limits, only: Iterable[str] | None = None
) -> list[Delivered]:
    """Deliver what is due, to all listeners at once.

    Args:
        settle: The database, for what a child can no longer say itself.
        dsn: The same database, for the children; `embedded:` is fine.
        limits: Returns after `within` plus `each` seconds at most, or `within` plus the 30 s that
            a child may take to start.
        only: Names of listeners; None for all that are on. One that is on and not installed here
            is left to whoever has it.

    Returns:
        One item for each listener with something due.

    Raises:
        DatabaseRefused: The database failed; whatever was not delivered stays due.
    """
    wanted = None if only is None else frozenset(only)
    here = listeners.installed()
    results = []
    children = []
    deadline = time.monotonic() + limits.within
    for row in settle.listeners():
        name = row["name"]
        if not row["enabled"] or not row["due"] or (wanted is not None and name not in wanted):
            continue
        result = Delivered(name)
        results.append(result)
        if name in here:
            children.append(_Child(result, dsn, limits))
        else:
            result.note(f"listener {name!r} is not installed here; {row['due']} events wait")
    _watch(settle, children, deadline)
    return results


class _Child:
    """A process that delivers to one listener, seen from outside."""

    def __init__(self, result: Delivered, dsn: str, limits: Limits) -> None:
        self.result, self.limits = result, limits
        self.claim = str(uuid.uuid4())
        self.in_hand: int | None = None
        self.heard = time.monotonic()
        self.patience = _START_SECONDS
        self.killed = False
        self._dsn = dsn
        self._rest = b""
        self.process = subprocess.Popen(
            # -P: nothing is imported from the folder that the pass happens to run in.
            [
                sys.executable,
                "-P",
                "-m",
                __name__,
                result.listener,
                self.claim,
                str(limits.each),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PODSETTLE_DSN": dsn},
            start_new_session=True,
        )

    @property
    def words(self) -> IO[bytes]:
        """What it says."""
        assert self.process.stdout is not None  # noqa: S101 -- for the type: it is a pipe
        return self.process.stdout

    def again(self) -> _Child:
        """Start another one for the same listener."""
        return _Child(self.result, self._dsn, self.limits)

    def ask_to_stop(self) -> None:
        """Let it finish the event that it has in hand, and no more."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """End it and whatever it started, and take in what it said before."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # Not until the end of its words: a process that left its group may hold the pipe open.
        os.set_blocking(self.words.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass

    def read(self) -> bool:
        """Take in what it said; False once it has ended."""
        said = os.read(self.words.fileno(), 65536)
        self.heard = time.monotonic()
        self.patience = self.limits.each
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(said)

    def _take(self, said: dict[str, Any]) -> None:
        match said["said"]:
            case "began":
                self.in_hand = said["id"]
            case "delivered":
                self.in_hand = None
                self.result.delivered += 1
            case "failed":
                self.in_hand = None
                self.failed(said["became"], said["id"], said["error"])
            case "problem":
                self.result.note(said["problem"])

    def failed(self, became: str, event_id: int, error: str) -> None:
        """Count a delivery that failed."""
        self.result.failed += became == "again"
        self.result.set_aside += became == "set_aside"
        self.result.note(f"event {event_id}: {error}")

    def silent_for(self, now: float) -> bool:
        """Whether it has said nothing for too long."""
        return now - self.heard > self.patience

    def close(self) -> int:
        """Reap it; returns its exit code, negative for a signal."""
        self.ask_to_stop()
        self.words.close()
        return self.process.wait()


def _watch(settle: Settle, children: list[_Child], deadline: float) -> None:
    with selectors.DefaultSelector() as selector:

        def ended(child: _Child) -> None:
            selector.unregister(child.words)
            following = _ended(settle, child, deadline)
            if following is not None:
                selector.register(following.words, selectors.EVENT_READ, following)

        for child in children:
            selector.register(child.words, selectors.EVENT_READ, child)
        try:
            while selector.get_map():
                for key, _ in selector.select(0.1):
                    if not key.data.read():
                        ended(key.data)
                now = time.monotonic()
                for key in list(selector.get_map().values()):
                    if now > deadline:
                        key.data.ask_to_stop()
                    if key.data.silent_for(now):
                        key.data.kill()
                        ended(key.data)
        finally:
            for key in list(selector.get_map().values()):
                key.data.kill()
                key.data.close()


def _ended(settle: Settle, child: _Child, deadline: float) -> _Child | None:
    """Settle what a child left, and start another one if there may be more to do."""
    code = child.close()
    if child.in_hand is not None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = (
            f"no answer within {child.limits.each:g} s; its process was killed"
            if child.killed
            else f"its process ended with {how}"
        )
        child.failed(settle.event_failed(child.claim, child.in_hand, error), child.in_hand, error)
    elif child.killed:
        child.result.note("the deliverer said nothing and was killed")
    elif code:
        child.result.note(f"the deliverer ended with exit code {code}")
    settle.release_events(child.claim)
    # Each new start has cost an event a try, and that event now waits: this ends.
    if child.in_hand is not None and time.monotonic() < deadline:
        return child.again()
    return None


# --- the child ----------------------------------------------------------------------------------


def _own_words() -> Callable[[dict[str, Any]], None]:
    """Keep standard output for our own lines; what the listener prints goes to standard error."""
    own = os.fdopen(os.dup(1), "wb", buffering=0)
    os.set_inheritable(own.fileno(), False)
    os.dup2(2, 1)

    def say(words: dict[str, Any]) -> None:
        own.write(json.dumps(words).encode() + b"\n")

    return say


def _until_told(each: float) -> threading.Event:
    """Return what is set once the parent wants no more, or is gone.

    A listener that hangs does not outlive its parent by more than one event's time.
    """
    stop = threading.Event()
    # Whatever the listener starts must not hold, or read, what the parent says.
    channel = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(channel, 1024):
            pass
        stop.set()
        time.sleep(each)
        os._exit(70)

    threading.Thread(target=wait, daemon=True).start()
    return stop


def error_text(error: BaseException) -> str:
    """Return what a listener raised, as one clipped line."""
    return text.escape(text.clip(f"{type(error).__name__}: {error}", _MAX_ERROR))


def serve(name: str, claim: str, each: float) -> int:
    """Deliver what is due to one listener, event by event; the parent reads what is said.

    Returns:
        An exit code: 0 when nothing is due any more, 1 if the listener cannot be loaded.
    """
    say = _own_words()
    stop = _until_told(each)
    render.start_logs()
    try:
        manager = listeners.load(name)
    except listeners.ListenerUnusable as unusable:
        say({"said": "problem", "problem": text.escape(text.clip(str(unusable), _MAX_ERROR))})
        return 0
    try:
        with connect(os.environ["PODSETTLE_DSN"], application=f"podsettle {name}") as connection:
            settle = Settle(connection)
            while not stop.is_set():
                events = settle.claim_events(name, claim, _BATCH)
                if not events:
                    break
                for row in events:
                    if stop.is_set() or not _one(settle, say, manager, claim, row):
                        break
                else:
                    continue
                settle.release_events(claim)
    except DatabaseRefused as refused:
        say({"said": "problem", "problem": str(refused)})
    return 0


def _one(
    settle: Settle, say: Callable[[dict[str, Any]], None], manager: Any, claim: str, row: Row
) -> bool:
    """Deliver one event; False if the claim expired, so that the rest of it is not ours either."""
    event_id = row["id"]
    say({"said": "began", "id": event_id})
    try:
        listeners.tell(manager, Event.from_payload(row["event"]))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- somebody else's code
        told = error_text(error)
        became = settle.event_failed(claim, event_id, told)
        say({"said": "failed", "id": event_id, "became": became, "error": told})
        return became != "lost"
    ours = settle.event_delivered(claim, event_id)
    say({"said": "delivered", "id": event_id})
    return ours


if __name__ == "__main__":
    _code = serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    sys.stderr.flush()
    # Threads that a listener left behind must not keep the process.
    os._exit(_code)
