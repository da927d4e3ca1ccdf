"""`agent-shim run`: the order of things. The task ends, pushes, the record, the report.

A SIGKILL between any two of these steps leaves no record, or a true one.
"""

from __future__ import annotations

import errno
import posix

from agent_shim import record
from agent_shim.options import DEFAULT_RECORD, RUN_HELP, Options, UsageError, parse
from agent_shim.output import say
from agent_shim.record import FAILED, RESCHEDULE, SUCCESS, Outcome
from agent_shim.task import Task, block_signals, pause
from agent_shim.workdir import NotUsableError, WorkDir, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_shim.delivery import Receiver

EXIT_USAGE = 64
EXIT_UNDELIVERED = 69
EXIT_INTERNAL = 70
EXIT_RESCHEDULE = 75
EXIT_TIMEOUT = 124
EXIT_NOT_RUNNABLE = 126
EXIT_NOT_FOUND = 127

# What the launcher of the bundle hides from the shim's own loader and the task is to have.
_KEPT = b"PODSETTLE_KEEP_"


def run(arguments: list[str]) -> int:
    """Run a task, record its outcome, report it.

    Args:
        arguments: the words after `run`.

    Returns:
        The exit code of the shim: the task's own, or one of those in `agent-shim run --help`.
    """
    if arguments[:1] in (["--help"], ["-h"]):
        posix.write(1, RUN_HELP.encode())
        return 0
    block_signals()
    options = Options()
    try:
        parse(arguments, posix.environ, options)
    except UsageError as error:
        say(str(error))
        outcome = Outcome(FAILED, exit_code=EXIT_USAGE, reason=f"ShimUsage: {error}")
        _record(outcome, options)
        return EXIT_USAGE
    if (path := _record_path(options)) is not None:
        record.clear(path)
    environment = task_environment()
    work = WorkDir(options.work_dir, environment, push=options.report_url is not None)
    environment.update(work.variables())
    task: Task | None = None
    ended: Outcome | None
    try:
        try:
            task = Task(
                options.command,
                environment,
                stop_signals=options.stop_signals,
                kill_grace=options.kill_grace,
            )
        except OSError as error:
            code, ended = _not_started(options.command[0], error)
        else:
            status = task.wait(options.timeout)
            task.end_leftovers()
            code = status if status >= 0 else 128 - status
            if task.timed_out and code == 0:
                # The task hides that it was cut short; nobody may take that for success.
                code = EXIT_TIMEOUT
            ended = _decide(task, code, options, work)
        if ended is not None and ended.outcome == SUCCESS:
            undelivered = _push(options, work)
            if undelivered is not None:
                ended, code = undelivered, EXIT_UNDELIVERED
        if ended is not None:
            _record(ended, options)
            if options.report_url is not None:
                _report(ended, options, options.report_url)
        return code
    finally:
        if task is not None and task.status is None:
            # Only an error of the shim leads here. Nobody would watch over the task any more.
            task.kill()
        work.remove()


def task_environment() -> dict[bytes, bytes]:
    """Return the environment that the shim was started with, for the task."""
    environment = dict(posix.environ)
    for name in [name for name in environment if name.startswith(_KEPT)]:
        environment[name.removeprefix(_KEPT)] = environment.pop(name)
    if b"LC_CTYPE" in environment and b"LC_ALL" not in environment:
        # Python sets it where no locale is chosen (PEP 538). /proc has what we were started with.
        try:
            file = posix.open("/proc/self/environ", posix.O_RDONLY | posix.O_CLOEXEC)
        except OSError:
            return environment
        first = b"\0"
        while part := posix.read(file, 1 << 16):
            first += part
        posix.close(file)
        if b"\0LC_CTYPE=" not in first:
            del environment[b"LC_CTYPE"]
    return environment


def _not_started(program: str, error: OSError) -> tuple[int, Outcome]:
    say(f"cannot run {program}: {error.strerror}")
    kind: str | None = "application"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        # Not the command's fault: no process or no memory was to be had.
        code, token, kind = EXIT_INTERNAL, "CannotStart", None
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        code, token = EXIT_NOT_FOUND, "CommandNotFound"
    else:
        code, token = EXIT_NOT_RUNNABLE, "CommandNotRunnable"
    reason = f"{token}: {program}: {error.strerror}"
    return code, Outcome(FAILED, exit_code=code, failure_kind=kind, reason=reason)


def _decide(task: Task, code: int, options: Options, work: WorkDir) -> Outcome | None:
    """Return what became of a task that has ended; None when only the platform can know."""
    if task.timed_out:
        return Outcome(FAILED, exit_code=code, failure_kind="timeout", reason="ExecutionTimeout")
    if code == 0:
        outcome = Outcome(SUCCESS)
    else:
        outcome = Outcome(FAILED, exit_code=code)
        if code == EXIT_RESCHEDULE:
            try:
                at = work.reschedule_time()
            except NotUsableError as error:
                say(f"exit 75, but PODSETTLE_RESCHEDULE_FILE is not usable: {error}")
                outcome = Outcome(FAILED, exit_code=code, reason=f"BadRescheduleTime: {error}")
            else:
                if at is not None:
                    outcome = Outcome(RESCHEDULE, reschedule_at=at)
    if task.stopped and (outcome.outcome == FAILED or not options.trust_exit_after_sigterm):
        # Exit 0 may be a clean abort; a failure would bill the task for the end of its node.
        say(f"the task ended ({code}) after a stop signal from outside: no record, no report")
        return None
    return outcome


def _record_path(options: Options) -> str | None:
    path = DEFAULT_RECORD if options.record is None else options.record
    return None if path == "none" else path


def _record(outcome: Outcome, options: Options) -> None:
    if (path := _record_path(options)) is not None:
        record.write(path, record.encode(outcome, options.attempt_id))


def _receiver(options: Options, url: str) -> Receiver:
    from agent_shim.delivery import Receiver

    return Receiver(
        url,
        token_file=options.report_token_file,
        ca_file=options.report_ca,
        deadline=options.report_deadline,
        pause=lambda seconds: pause(seconds, options.stop_signals),
    )


def _push(options: Options, work: WorkDir) -> Outcome | None:
    """Deliver what the task left in its push folder; return the failure, if there is one."""
    try:
        names = work.waiting_pushes()
        if not names or options.report_url is None:
            return None
        from agent_shim.delivery import UndeliveredError, push_arguments

        receiver = _receiver(options, options.report_url)
        try:
            pushes = [
                push_arguments(options.attempt_id, name, read(f"{work.pushes}/{name}"))
                for name in names
            ]
            # A stop signal does not end this: without the pushes there is no success to save.
            receiver.post_all("push", pushes, stop_ends_it=False)
        except UndeliveredError as error:
            raise NotUsableError(str(error)) from None
    except (NotUsableError, OSError) as error:
        say(f"push not delivered: {error}")
        return Outcome(FAILED, exit_code=EXIT_UNDELIVERED, reason=f"OutputUndelivered: {error}")
    return None


def _report(outcome: Outcome, options: Options, url: str) -> None:
    from agent_shim.delivery import UndeliveredError

    arguments: dict[str, object] = {"attempt_id": options.attempt_id, **outcome.fields()}
    try:
        # The record is written: a pod that is to go need not wait for the report's retries.
        _receiver(options, url).post_all("report", [arguments], stop_ends_it=True)
    except UndeliveredError as error:
        say(f"report not delivered: {error}")
