"""The options of `agent-shim run`: from the command line, else from PODSETTLE_* variables.

Parsed by hand: argparse alone would double the time that the shim adds to a task.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Mapping
else:
    # The C module: `signal` builds its enums at import, which costs more than all of this file.
    import _signal

DEFAULT_RECORD = "/dev/termination-log"
LONGEST_WAIT = 10 * 365 * 86400.0

RUN_HELP = """\
usage: agent-shim run [options] -- COMMAND ARG...

  --timeout SECONDS            end the task after this long (default: never)
  --kill-grace SECONDS         from SIGTERM to SIGKILL, for a task past its timeout and for
                               processes that outlive it (default: 10)
  --trust-exit-after-sigterm   exit 0, or 75 with a time, counts even after a SIGTERM from outside
  --stop-signal NAME           one more signal that means "the platform ends this pod", beside
                               SIGTERM, SIGINT and SIGQUIT (an image's STOPSIGNAL)
  --record PATH                where the record goes, or "none" (default: /dev/termination-log)
  --work-dir DIR               where the task may leave PODSETTLE_RESCHEDULE_FILE and
                               PODSETTLE_PUSH_DIR (default: TMPDIR, /tmp, /var/tmp or /dev/shm)
  --attempt-id ID              the attempt that this pod executes
  --report-url URL             POST to URL/rpc/push and URL/rpc/report (default: no report)
  --report-token-file PATH     bearer token, read anew for each request
  --report-ca PATH             certificates to trust for https (PEM)
  --report-deadline SECONDS    how long pushes, and then the report, are retried (default: 300)

Each option is also a variable: --kill-grace is PODSETTLE_KILL_GRACE. The command line wins.
Exit code: the task's own, 128+N for signal N; 127 and 126 when it cannot be started; 124 for exit 0
after --timeout; 64 wrong options, 69 a push was not delivered, 70 the shim failed.
"""


class UsageError(Exception):
    """An option that cannot be used; the text names it and says what would do."""


class Options:
    """What `agent-shim run` was asked for; times in seconds, None where an option was not given."""

    command: list[str]
    timeout: float | None = None
    kill_grace: float = 10.0
    trust_exit_after_sigterm: bool = False
    stop_signals: frozenset[int] = frozenset((_signal.SIGTERM, _signal.SIGINT, _signal.SIGQUIT))
    record: str | None = None
    work_dir: str | None = None
    attempt_id: str | None = None
    report_url: str | None = None
    report_token_file: str | None = None
    report_ca: str | None = None
    report_deadline: float = 300.0

    def __init__(self) -> None:
        self.command = []


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= LONGEST_WAIT:
        raise ValueError
    return value


def _grace(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


def _truth(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
        text.lower()
    ]


def _signals(text: str) -> frozenset[int]:
    name = text.upper()
    if name.isdigit():
        number = int(name)
    else:
        base, plus, more = name.removeprefix("SIG").partition("+")
        number = getattr(_signal, "SIG" + base) + (int(more) if plus else 0)
    if number not in _signal.valid_signals() or number in (_signal.SIGKILL, _signal.SIGSTOP):
        raise ValueError
    return Options.stop_signals | {int(number)}


def _attempt(text: str) -> str:
    # Within the record's 900 bytes, and nothing that JSON or a log line has to escape.
    if len(text) > 200 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError
    return text


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or "@" in text or "?" in text:
        raise ValueError
    return text.rstrip("/")


# option -> (attribute, how to read it, what would do)
_TABLE: dict[str, tuple[str, Callable[[str], object], str]] = {
    "timeout": ("timeout", _seconds, "seconds above 0"),
    "kill-grace": ("kill_grace", _grace, "seconds, 0 or above"),
    "trust-exit-after-sigterm": ("trust_exit_after_sigterm", _truth, "true or false"),
    "stop-signal": ("stop_signals", _signals, "a signal's name or number, such as SIGUSR1"),
    "record": ("record", str, "a path"),
    "work-dir": ("work_dir", str, "a folder"),
    "attempt-id": ("attempt_id", _attempt, "at most 200 printable ASCII characters, no blanks"),
    "report-url": ("report_url", _url, "http://HOST/PATH or https://, no user and no query"),
    "report-token-file": ("report_token_file", str, "a path"),
    "report-ca": ("report_ca", str, "a path"),
    "report-deadline": ("report_deadline", _seconds, "seconds above 0"),
}
_FLAG = "trust-exit-after-sigterm"


def _set(options: Options, name: str, shown: str, text: str) -> None:
    attribute, read, wanted = _TABLE[name]
    try:
        value = read(text)
    except (ValueError, KeyError, AttributeError, OverflowError):
        raise UsageError(f"{shown}: {text[:80]!r} is not usable; give {wanted}") from None
    setattr(options, attribute, value)


def parse(arguments: list[str], environment: Mapping[bytes, bytes], options: Options) -> None:
    """Fill `options` from the words after `run` and from the environment.

    Args:
        arguments: the words after `run`, the task's command included.
        environment: the process environment, as bytes (`posix.environ`).
        options: filled in place, so that a record path that was read before an error is known.

    Raises:
        UsageError: an unknown option, a value that cannot be used, or no command.
    """
    for name in _TABLE:
        variable = "PODSETTLE_" + name.upper().replace("-", "_")
        if value := environment.get(variable.encode()):
            _set(options, name, variable, value.decode("utf-8", "surrogateescape"))
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        word = arguments[at]
        at += 1
        if word == "--":
            break
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in _TABLE:
            raise UsageError(f"unknown option {word[:80]!r}; see agent-shim run --help")
        if not equals:
            if name == _FLAG:
                text = "true"
            elif at < len(arguments):
                text = arguments[at]
                at += 1
            else:
                raise UsageError(f"--{name} needs a value: {_TABLE[name][2]}")
        _set(options, name, "--" + name, text)
    options.command = arguments[at:]
    if not options.command:
        raise UsageError("no command; give one after --, as in: agent-shim run -- python3 task.py")
    if options.report_url is not None and options.attempt_id is None:
        raise UsageError(
            "--report-url needs --attempt-id (or PODSETTLE_ATTEMPT_ID): whose report is it?"
        )
