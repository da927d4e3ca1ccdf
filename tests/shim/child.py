"""A task for the tests: `child.py DEED ARG...`. It says `ready` when it can be signalled.

Without pathlib and the like: it is started hundreds of times.
"""

# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import signal
import sys
import time


def say(text: object) -> None:
    os.write(1, f"{text}\n".encode())


def everything_but(*left_out: int) -> set[int]:
    return {int(s) for s in signal.valid_signals() if s not in (9, 19, *left_out)}


def echo() -> None:
    """Say the number of each signal that arrives; end after `count` of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, everything_but())
    say("ready")
    for _ in range(int(sys.argv[2])):
        say(int(signal.sigwaitinfo(everything_but()).si_signo))


def dispositions() -> None:
    """Say which signals are blocked or ignored, as the kernel has it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
                say(line.replace("\t", "").strip())


def finish() -> None:
    """End with the given code when SIGTERM arrives."""
    # Blocked and taken, not handled: a handler that ran just before a sleep would not end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    say("ready")
    signal.sigwait({signal.SIGTERM})
    os._exit(int(sys.argv[2]))


def stubborn() -> None:
    """Ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(os.getpid())
    while True:
        time.sleep(60)


def default() -> None:
    """Run with default signal behaviour."""
    say("ready")
    while True:
        time.sleep(60)


def leave() -> None:
    """End, leaving a grandchild: in the `group`, `stubborn` in it, or in another `session`."""
    kind, code = sys.argv[2], int(sys.argv[3])
    gate, opened = os.pipe()
    pid = os.fork()
    if pid == 0:
        if kind == "session":
            os.setsid()
        if kind == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(opened, b"x")
        time.sleep(600)
    os.read(gate, 1)
    say(pid)
    os._exit(code)


def scribble() -> None:
    """End with success, leaving a process that keeps writing garbage to the given file."""
    path = sys.argv[2]
    gate, opened = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(opened, b"x")
        while True:
            with open(path, "w") as file:
                file.write('{"v":1,"outcome":"failed","exit_code":1,"reason":"garbage"}')
    os.read(gate, 1)
    os._exit(0)


def orphans() -> None:
    """Make `count` orphans that end at once, then say which zombies of PID 1 are left."""
    for _ in range(int(sys.argv[2])):
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
    # An orphan's end reaches its new parent at once, reaping follows: look until it has.
    while left := zombies():
        time.sleep(0.01)
    say(f"zombies {len(left)}")


def zombies() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and parent == "1":
                found.append(name)
    return found


def read_terminal() -> None:
    """Say what was typed."""
    say("ready")
    say("typed " + sys.stdin.readline().strip())


def reschedule() -> None:
    """Exit 75 with the given text in the file that the shim names."""
    with open(os.environ["PODSETTLE_RESCHEDULE_FILE"], "w") as file:
        file.write(sys.argv[2])
    os._exit(75)


def push() -> None:
    """Leave files NAME=CONTENT in the push folder and end with success."""
    for word in sys.argv[2:]:
        name, _, content = word.partition("=")
        with open(os.environ["PODSETTLE_PUSH_DIR"] + "/" + name, "w") as file:
            file.write(content)


def environment() -> None:
    """Say each variable as the kernel has it, but for what the shim names to the task."""
    with open("/proc/self/environ", "rb") as file:
        entries = [os.fsdecode(entry) for entry in file.read().split(b"\0") if entry]
    for entry in sorted(ascii(entry) for entry in entries if "PODSETTLE_" not in entry):
        say(entry)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
