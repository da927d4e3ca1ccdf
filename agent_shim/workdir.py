"""The folder in which the task may leave a reschedule time and pushes for the shim."""

from __future__ import annotations

import posix

from agent_shim.output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# A time is 35 bytes long at most; a push is a value, not a data set.
_LONGEST_TIME = 200


class NotUsableError(Exception):
    """A file that the task left is not what it must be; the text says what it is."""


class WorkDir:
    """Where the task leaves files: the path `reschedule`, the folder `pushes`; None: nowhere."""

    __slots__ = ("path", "pushes", "reschedule")

    def __init__(
        self, chosen: str | None, environment: Mapping[bytes, bytes], *, push: bool
    ) -> None:
        """Make a new folder under `chosen`, else under the first place that can be written.

        Args:
            chosen: the folder that the operator named, or None.
            environment: for TMPDIR.
            push: whether pushes have somewhere to go.
        """
        self.path: str | None = None
        self.reschedule: str | None = None
        self.pushes: str | None = None
        temporary = environment.get(b"TMPDIR", b"").decode("utf-8", "surrogateescape")
        # /dev/shm is writable in a pod even where the root file system is read-only.
        places = [chosen] if chosen else [temporary, "/tmp", "/var/tmp", "/dev/shm"]  # noqa: S108
        for place in places:
            if place.startswith("/") or (chosen and place):
                path = f"{place}/podsettle-{posix.urandom(8).hex()}"
                try:
                    _make(path)
                    if push:
                        _make(path + "/push")
                except OSError:
                    continue
                self.path = path
                self.reschedule = path + "/reschedule"
                self.pushes = path + "/push" if push else None
                return
        say(
            f"no folder for PODSETTLE_RESCHEDULE_FILE: cannot write in"
            f" {', '.join(filter(None, places))}; name one with --work-dir"
        )

    def variables(self) -> dict[bytes, bytes]:
        """Return what the task's environment gets."""
        named = {
            b"PODSETTLE_RESCHEDULE_FILE": self.reschedule,
            b"PODSETTLE_PUSH_DIR": self.pushes,
        }
        return {
            name: value.encode("utf-8", "surrogateescape")
            for name, value in named.items()
            if value is not None
        }

    def reschedule_time(self) -> str | None:
        """Return the time that the task asked for as RFC 3339 in UTC, None when it left no file.

        Raises:
            NotUsableError: the file holds no time with a zone, or is no plain file.
        """
        if self.reschedule is None:
            return None
        try:
            text = read(self.reschedule, _LONGEST_TIME).decode("ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise NotUsableError(str(error)) from None
        import datetime as dt

        try:
            moment = dt.datetime.fromisoformat(text)
            if moment.tzinfo is None:
                raise NotUsableError(f"{text!r} has no zone")
            moment = moment.astimezone(dt.UTC)
        except (ValueError, OverflowError):
            raise NotUsableError(f"{text!r} is no RFC 3339 time") from None
        return moment.replace(tzinfo=None).isoformat() + "Z"

    def waiting_pushes(self) -> list[str]:
        """Return the names in the push folder, sorted; those that begin with a dot are drafts."""
        if self.pushes is None:
            return []
        try:
            return sorted(name for name in posix.listdir(self.pushes) if not name.startswith("."))
        except OSError as error:
            raise NotUsableError(f"push folder: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder and the files that were read from it."""
        if self.path is None:
            return
        try:
            if self.pushes is None:
                posix.rmdir(self.path)
                return
        except OSError:
            pass
        for folder in (self.pushes, self.path):
            if folder is not None:
                _empty(folder)


def read(path: str, limit: int | None = None) -> bytes:
    """Return the content of a plain file that the task left.

    Args:
        path: the file; a link is not followed and a FIFO not waited for.
        limit: read at most this many bytes.

    Raises:
        OSError: it cannot be read.
        NotUsableError: it is no plain file, or longer than `limit`.
    """
    flags = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    file = posix.open(path, flags)
    try:
        found = posix.fstat(file)
        if found.st_mode & 0o170000 != 0o100000:
            raise NotUsableError("not a plain file")
        if limit is not None and found.st_size > limit:
            raise NotUsableError(f"{found.st_size} bytes long")
        parts = []
        while part := posix.read(file, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        posix.close(file)


def _make(path: str) -> None:
    posix.mkdir(path, 0o700)
    if posix.geteuid() == 0:
        # An entrypoint that starts as root may hand the task to another user.
        posix.chmod(path, 0o777)


def _empty(folder: str) -> None:
    try:
        for name in posix.listdir(folder):
            try:  # noqa: SIM105 - contextlib is slow to load
                posix.unlink(f"{folder}/{name}")
            except OSError:
                pass
        posix.rmdir(folder)
    except OSError:
        pass
