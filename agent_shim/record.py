"""The outcome of a task and the record that says it (DESIGN section 5)."""

from __future__ import annotations

import posix

from agent_shim.options import DEFAULT_RECORD
from agent_shim.output import plain, say

MAX_REASON = 240
MAX_RECORD = 899
SUCCESS = "success"
FAILED = "failed"
RESCHEDULE = "reschedule"


class Outcome:
    """What became of a task: the fields of the record, None where it has nothing to say."""

    __slots__ = ("exit_code", "failure_kind", "outcome", "reason", "reschedule_at")

    def __init__(
        self,
        outcome: str,
        *,
        exit_code: int | None = None,
        failure_kind: str | None = None,
        reason: str | None = None,
        reschedule_at: str | None = None,
    ) -> None:
        self.outcome = outcome
        self.exit_code = exit_code
        self.failure_kind = failure_kind
        self.reason = None if reason is None else clip(reason)
        self.reschedule_at = reschedule_at

    def fields(self) -> dict[str, str | int]:
        """Return the fields that have a value, by their names in the record and in a report."""
        named = {
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "failure_kind": self.failure_kind,
            "reason": self.reason,
            "reschedule_at": self.reschedule_at,
        }
        return {name: value for name, value in named.items() if value is not None}


def clip(text: str) -> str:
    """Return `text` on one line, at most 240 characters; what no UTF-8 can hold becomes `?`."""
    # Bytes of an argument that were no UTF-8 arrive as lone surrogates, which strict JSON refuses.
    return plain(text.encode("utf-8", "replace").decode())[:MAX_REASON]


def _quote(text: str) -> str:
    # `json` costs more to import than the whole shim; the record needs this much of it.
    parts = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            parts.append("\\" + char)
        elif 32 <= code < 127:
            parts.append(char)
        elif code < 0x10000:
            parts.append(f"\\u{code:04x}")
        else:
            code -= 0x10000
            parts.append(f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}")
    return '"' + "".join(parts) + '"'


def encode(outcome: Outcome, attempt_id: str | None) -> bytes:
    """Return the record: ASCII JSON on one line, under 900 bytes.

    The kubelet keeps 4096 bytes of a container's message and the pod's containers share 12 KiB
    (facts/kubernetes.md section F); a record that is cut is no record. So the reason gives way.
    """
    fields = outcome.fields()
    if attempt_id is not None:
        fields["attempt_id"] = attempt_id
    while True:
        body = "".join(
            f',"{name}":{value if isinstance(value, int) else _quote(value)}'
            for name, value in fields.items()
        )
        data = f'{{"v":1{body}}}'.encode("ascii")
        reason = fields.get("reason")
        if len(data) <= MAX_RECORD or not isinstance(reason, str):
            return data
        fields["reason"] = reason[: len(reason) * 3 // 4]


def _open(path: str) -> int:
    # The kubelet makes the default file before the container starts: where it is missing there is
    # no kubelet, and a file of ours in /dev would help nobody. O_NONBLOCK: a FIFO must not hold us.
    flags = posix.O_WRONLY | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
    if path != DEFAULT_RECORD:
        flags |= posix.O_CREAT
    return posix.open(path, flags, 0o666)


def clear(path: str) -> None:
    """Empty the file before the task starts: a record of an earlier run there would be a lie."""
    try:  # noqa: SIM105 - contextlib is slow to load
        posix.close(_open(path))
    except OSError:
        pass  # said once, by write()


def write(path: str, data: bytes) -> None:
    """Write the record in one write to the truncated file; what prevents it is only said.

    In place, since the file is a bind mount and a rename over it fails with EBUSY. A kill between
    the truncation and the write leaves an empty file, which is "no record".
    """
    try:
        file = _open(path)
    except OSError as error:
        say(f"no record: cannot open {path}: {error.strerror}")
        return
    try:
        if posix.write(file, data) != len(data):
            posix.ftruncate(file, 0)
            say(f"no record: {path} took only a part of it (disk full?)")
    except OSError as error:
        say(f"no record: cannot write {path}: {error.strerror}")
    finally:
        posix.close(file)
