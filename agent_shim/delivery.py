"""Pushes and the report over HTTP. Imported only when a task has ended: it is slow to load."""

from __future__ import annotations

import http.client
import json
import posix
import signal
import time
import urllib.parse

from agent_shim.output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from types import FrameType

_ATTEMPT_SECONDS = 10.0
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 15.0


class UndeliveredError(Exception):
    """Refused, or not accepted before the deadline; the text says why."""


class _LateError(BaseException):
    """The clock of one attempt ran out; no `except Exception` on the way may swallow it."""


class _AgainError(Exception):
    """This attempt failed in a way that may pass."""


class Receiver:
    """A control plane: POST of named JSON arguments to URL/rpc/NAME, as PostgREST takes them."""

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None,
        ca_file: str | None,
        deadline: float,
        pause: Callable[[float], bool],
    ) -> None:
        """Take down where to deliver; nothing is connected yet.

        Args:
            url: http or https, with the path above /rpc.
            token_file: holds the bearer token, or None.
            ca_file: PEM certificates to trust, or None for those of the system.
            deadline: seconds after which the retries of one `post_all` end.
            pause: waits so many seconds; True when a stop signal cut it short.
        """
        self._url = url
        self._token_file = token_file
        self._ca_file = ca_file
        self._deadline = deadline
        self._pause = pause

    def post_all(
        self, name: str, arguments: list[dict[str, object]], *, stop_ends_it: bool
    ) -> None:
        """Deliver each of `arguments` to /rpc/`name`, in order, with one deadline for all of them.

        Args:
            name: the routine, `push` or `report`.
            arguments: the named arguments of each call.
            stop_ends_it: a stop signal allows one more attempt, not all of them.

        Raises:
            UndeliveredError: one was refused (4xx other than 429), or the deadline passed.
        """
        until = time.monotonic() + self._deadline
        for one in arguments:
            try:
                self._post_until(name, json.dumps(one).encode(), until, stop_ends_it)
            except UndeliveredError as error:
                what = f"{one['key']}: " if name == "push" else ""
                raise UndeliveredError(f"{what}{error}") from None

    def _post_until(self, name: str, body: bytes, until: float, stop_ends_it: bool) -> None:
        delay = _FIRST_DELAY
        said = ""
        last = False
        while True:
            left = until - time.monotonic()
            try:
                return self._post(name, body, max(1.0, min(_ATTEMPT_SECONDS, left)))
            except _AgainError as error:
                text = str(error)
            # Half of each delay is random: after an outage not all pods return in one moment.
            wait = delay * (0.5 + posix.urandom(1)[0] / 510)
            delay = min(_LONGEST_DELAY, delay * 2)
            if last or time.monotonic() + wait > until:
                raise UndeliveredError(text)
            if text != said:
                say(f"{name} not delivered yet: {text}; trying again")
                said = text
            last = self._pause(wait) and stop_ends_it

    def _post(self, name: str, body: bytes, seconds: float) -> None:
        """Make one attempt within `seconds`, a server that drips its answer included."""
        before = signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        try:
            try:
                self._exchange(name, body, seconds)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
                signal.signal(signal.SIGALRM, before)
        except (_LateError, TimeoutError):
            raise _AgainError(f"no answer within {seconds:.0f} s") from None
        except http.client.HTTPException as error:
            raise _AgainError(f"no valid answer: {type(error).__name__}") from None
        except OSError as error:
            raise _AgainError(str(error)) from None
        except ValueError as error:
            raise UndeliveredError(f"cannot be sent: {error}") from None

    def _exchange(self, name: str, body: bytes, seconds: float) -> None:
        url = urllib.parse.urlsplit(self._url)
        connection: http.client.HTTPConnection
        if url.hostname is None:
            raise ValueError(f"{self._url} names no host")
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=seconds, context=self._trust()
            )
        else:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=seconds)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._token_file is not None:
            # Anew each time: the kubelet replaces projected tokens before they expire.
            with open(self._token_file, encoding="ascii") as file:
                headers["Authorization"] = f"Bearer {file.read().strip()}"
        try:
            connection.request("POST", f"{url.path}/rpc/{name}", body, headers)
            answer = connection.getresponse()
            if 200 <= answer.status < 300:
                return
            text = f"HTTP {answer.status} {answer.reason}"
            if answer.status == 429 or answer.status >= 500:
                raise _AgainError(text)
            said = answer.read(300).decode("utf-8", "replace").strip()
            raise UndeliveredError(f"{text}: {said}" if said else text)
        finally:
            connection.close()

    def _trust(self) -> ssl.SSLContext:
        import ssl

        return ssl.create_default_context(cafile=self._ca_file)


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise _LateError


def push_arguments(attempt_id: str | None, name: str, content: bytes) -> dict[str, object]:
    """Return the named arguments of /rpc/push for one file.

    Args:
        attempt_id: whose value it is.
        name: the file's name: the key; with `.json` at its end, which is cut off, the content is
            JSON and sent as that value, else it is text and sent as a JSON string.
        content: the file's bytes, UTF-8.

    Raises:
        UndeliveredError: the content is not UTF-8, or not JSON where the name says so.
    """
    value: object
    try:
        value = content.decode("utf-8")
        if name.endswith(".json"):
            value = json.loads(content)
            # NaN and Infinity, which Python reads and writes, are no JSON to anybody else.
            json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UndeliveredError(f"{name}: {error}") from None
    return {"attempt_id": attempt_id, "key": name.removesuffix(".json"), "value": value}
