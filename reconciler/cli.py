"""The command line: options, exit codes, and which words a failure is told in.

Exit codes: 0 done; 2 usage; 3 the list was incomplete; 4 database unreachable, refused or of
another contract; 5 Kubernetes unreachable or forbidden; 1 a bug.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from reconciler import __version__, database, delivery, listeners, passes, pods, render
from reconciler import listing as source
from reconciler.install import UnknownHost, script_for_psql
from reconciler.install import install as install_sql
from reconciler.release import FINALIZER, Releaser

INCOMPLETE: Final = 3
DATABASE: Final = 4
KUBERNETES: Final = 5


class Refusal(click.ClickException):
    """A sentence on standard error and an exit code of our own."""

    def __init__(self, message: object, exit_code: int) -> None:
        super().__init__(str(message))
        self.exit_code = exit_code  # type: ignore[misc] # click reads it from the instance


class Commands(click.Group):
    """Turns what can go wrong outside of us into exit codes; anything else is a bug and shows."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except database.DatabaseRefused as refused:
            raise Refusal(refused, DATABASE) from refused
        except (source.KubernetesRefused, source.KubernetesUnreachable) as refused:
            raise Refusal(refused, KUBERNETES) from refused
        except passes.PassBusy as busy:
            raise Refusal(f"{busy}; --wait says how long to wait", INCOMPLETE) from busy
        except source.NoSuchPods as missing:
            raise click.UsageError(f"--pods: {missing}", ctx) from missing
        except UnknownHost as unknown:
            raise click.UsageError(str(unknown), ctx) from unknown


def option(*names: str, env: str, **how: Any) -> Callable[..., Any]:
    """Declare an option that an environment variable can set too."""
    return click.option(*names, envvar=f"PODSETTLE_{env}", show_envvar=True, **how)


dsn_option = option(
    "--dsn",
    env="DSN",
    metavar="DSN",
    help="Postgres: a URI, a libpq string, or embedded: for one of its own in your data folder.",
)
output_option = option(
    "--output",
    "-o",
    env="OUTPUT",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="json: one object a pod and line; status: one object.",
)


_CLUSTER_OPTIONS = (
    option("--namespace", "-n", env="NAMESPACE", help="Default: the context's or pod's own."),
    option("--all-namespaces", "-A", env="ALL_NAMESPACES", is_flag=True, help="All of them."),
    option("--context", env="CONTEXT", help="The kubeconfig context."),
    option(
        "--profile",
        env="PROFILE",
        type=click.Choice(sorted(pods.PROFILES)),
        default="podsettle",
        show_default=True,
        help="How the orchestrator marks its pods.",
    ),
    option("--selector", "-l", env="SELECTOR", help="Label selector, instead of the profile's."),
    option(
        "--container",
        "-c",
        env="CONTAINER",
        help="The task container [default: base, else task, else the only one].",
    ),
    option(
        "--page-size",
        env="PAGE_SIZE",
        type=click.IntRange(1, 5000),
        default=source.PAGE_SIZE,
        show_default=True,
        help="Pods a page, settled in one transaction.",
    ),
)
_PODS_OPTION = option(
    "--pods",
    "pods_path",
    env="PODS",
    metavar="FILE|DIR|-",
    help="Read pods as kubectl -o json writes them.",
)


def with_options(
    command: Callable[..., Any], options: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Add options to a command, shown in their order."""
    for add in reversed(options):
        command = add(command)
    return command


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose pods of a cluster."""
    return with_options(command, _CLUSTER_OPTIONS)


def pod_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose pods of a cluster or of files."""
    return cluster_options(_PODS_OPTION(command))


_LISTENER_OPTIONS = (
    option(
        "--listeners",
        "listener_names",
        env="LISTENERS",
        metavar="NAME,…",
        help="Who is told; registered if need be [default: all that are registered].",
    ),
    option(
        "--deliver-within",
        env="DELIVER_WITHIN",
        type=click.FloatRange(min=0),
        default=15.0,
        show_default=True,
        metavar="SECONDS",
        help="Begin no further event after this long; 0 leaves delivery to others.",
    ),
    option(
        "--event-timeout",
        env="EVENT_TIMEOUT",
        type=click.FloatRange(min=0.1),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a listener may take for one event before its process is killed.",
    ),
)


_METRICS_OPTIONS = (
    option(
        "--metrics-file",
        env="METRICS_FILE",
        metavar="FILE",
        help="Write the metrics there, for node_exporter's textfile collector (name.prom).",
    ),
    option(
        "--pushgateway",
        env="PUSHGATEWAY",
        metavar="URL",
        help="Push the metrics to this Pushgateway.",
    ),
)


def metrics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add where metrics go."""
    return with_options(command, _METRICS_OPTIONS)


def send_metrics(
    settle: database.Settle, metrics_file: str | None, pushgateway: str | None
) -> bool:
    """Write and push the metrics; what goes wrong is logged. Returns whether all went well."""
    if not metrics_file and not pushgateway:
        return True
    from reconciler import metrics

    well = True

    def attempt(what: str, send: Callable[[], None]) -> None:
        nonlocal well
        try:
            send()
        except metrics.MetricsNotWritten as failed:
            render.log().error(what, problem=str(failed))
            well = False

    try:
        rows = settle.metrics()
    except database.DatabaseRefused as refused:
        render.log().error("metrics not read", problem=str(refused))
        return False
    if metrics_file:
        attempt("metrics not written", lambda: metrics.write_textfile(rows, Path(metrics_file)))
    if pushgateway:
        attempt("metrics not pushed", lambda: metrics.push(rows, pushgateway))
    return well


def listener_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of delivery to listeners."""
    return with_options(command, _LISTENER_OPTIONS)


class Courier:
    """Delivers events around a pass; what goes wrong is logged and changes nothing else.

    Args:
        settle: The database.
        dsn: The same one, for the processes of the listeners.
        names: What --listeners says.
        limits: How long it may take.
    """

    def __init__(
        self, settle: database.Settle, dsn: str, names: str | None, limits: delivery.Limits
    ) -> None:
        self._settle, self._dsn, self._limits = settle, dsn, limits
        self._names = None if names is None else names.replace(",", " ").split()

    @property
    def unknown(self) -> list[str]:
        """The named listeners that are not installed here."""
        return sorted(set(self._names or ()) - listeners.installed())

    def register(self) -> None:
        """Register the named listeners, so that what is settled from now on is kept for them."""
        for name in self._names or ():
            try:
                on = self._settle.ensure_listeners([name])
            except database.DatabaseRefused as refused:
                render.log().error("listener not registered", problem=str(refused))
                continue
            if not on:
                render.log().warning("listener is off", listener=name, meaning="unregistered")

    def prepare(self) -> None:
        """Register before a pass, and say what will not be delivered."""
        for name in self.unknown:
            render.log().error("listener not installed", listener=name)
        self.register()

    def deliver(self) -> list[delivery.Delivered]:
        """Deliver what is due, and log it.

        Raises:
            DatabaseRefused: The database failed.
        """
        done = delivery.deliver(self._settle, self._dsn, self._limits, self._names)
        logger = render.log()
        for one in done:
            for problem in one.problems:
                logger.warning("delivery problem", listener=one.listener, problem=problem)
            logger.info(
                "delivery finished",
                listener=one.listener,
                delivered=one.delivered,
                failed=one.failed,
                set_aside=one.set_aside,
            )
        return done

    def try_to_deliver(self) -> None:
        """Deliver after a pass."""
        if self._limits.within > 0:
            try:
                self.deliver()
            except (database.DatabaseRefused, OSError) as failed:
                render.log().error("not delivered", problem=str(failed))


def connected(dsn: str | None) -> database.Connection:
    """Connect and check the contract; the embedded Postgres is brought up to date first."""
    if not dsn:
        raise click.UsageError(
            "--dsn (or PODSETTLE_DSN) is missing; embedded: is a Postgres of its own"
        )
    connection = database.connect(dsn)
    if dsn == database.EMBEDDED:
        install_sql(connection)
    database.check_contract(connection)
    return connection


def listing_of_cluster(
    *,
    namespace: str | None,
    all_namespaces: bool,
    context: str | None,
    profile: str,
    selector: str | None,
    container: str | None,
    page_size: int,
    name: str | None = None,
) -> tuple[source.Listing, str | None, source.Cluster]:
    """Return the pods of a cluster, their namespace (None: all) and the cluster."""
    if namespace and all_namespaces:
        raise click.UsageError("--namespace and --all-namespaces exclude each other")
    cluster = source.connect(context)
    listing = source.read_api(
        cluster,
        profile=pods.PROFILES[profile],
        namespace=namespace,
        all_namespaces=all_namespaces,
        selector=selector,
        name=name,
        container=container,
        page_size=page_size,
    )
    where = None if all_namespaces else (namespace or cluster.namespace)
    return listing, where, cluster


def listing_of(
    pods_path: str | None, *, name: str | None = None, **choice: Any
) -> tuple[source.Listing, str | None, source.Cluster | None]:
    """Return the pods of a cluster or of files, their namespace (None: all), and the cluster."""
    if pods_path is None:
        return listing_of_cluster(name=name, **choice)
    if choice["selector"] is not None:
        raise click.UsageError("--selector is for the API; with --pods let kubectl -l select")
    files = source.read_files(
        pods_path,
        profile=pods.PROFILES[choice["profile"]],
        container=choice["container"],
        page_size=choice["page_size"],
    )
    return files, choice["namespace"], None


def seconds_or_none(seconds: int | None) -> timedelta | None:
    """Return an optional number of seconds as a time span."""
    return None if seconds is None else timedelta(seconds=seconds)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int], None]]:
    """Show how many pods were done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        done = 0

        def advance(n: int) -> None:
            nonlocal done
            done += n
            bar.update(task, description=f"{label}: {done} pods")

        yield advance


def finish(incomplete_because: str | None, problems: list[str]) -> None:
    """Tell what could not be read, and exit 3 if pods may be missing."""
    logger = render.log()
    for problem in problems:
        logger.warning("not read", problem=problem)
    if incomplete_because is not None:
        raise Refusal(
            f"the list is incomplete: {incomplete_because}; what was read is done, "
            "nothing was concluded from what is missing",
            INCOMPLETE,
        )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="podsettle")
def main() -> None:
    """Settle Kubernetes task pods into Postgres."""
    render.start_logs()


@main.command()
@dsn_option
@option(
    "--host",
    env="HOST",
    default="standalone",
    show_default=True,
    help="Where task instances live: a name, or a path to a .sql of your own.",
)
@click.option("--print", "print_only", is_flag=True, help="Write the SQL for psql instead.")
def install(dsn: str | None, host: str, print_only: bool) -> None:
    """Put schema settle into a database, or bring it to this version."""
    if print_only:
        for piece in script_for_psql(host):
            click.echo(piece, nl=False)
        return
    if not dsn:
        raise click.UsageError("--dsn (or PODSETTLE_DSN) is missing")
    with database.connect(dsn) as connection:
        applied = install_sql(connection, host)
    for name in applied:
        click.echo(f"applied {name}")
    if not applied:
        click.echo("up to date, nothing was changed")


@main.command()
@dsn_option
@pod_options
@option(
    "--complete",
    env="COMPLETE",
    is_flag=True,
    help="With --pods: this is the whole list, judge who is absent.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    envvar="PODSETTLE_DRY_RUN",
    show_envvar=True,
    help="Run the real procedures and roll back.",
)
@option(
    "--delete-after",
    env="DELETE_AFTER",
    type=click.IntRange(min=0),
    metavar="SECONDS",
    help="Delete pods whose task was settled this long ago; the default deletes none.",
)
@option(
    "--wait",
    env="WAIT",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another pass of the same scope.",
)
@listener_options
@metrics_options
@output_option
def reconcile(
    dsn: str | None,
    complete: bool,
    dry_run: bool,
    wait: float,
    delete_after: int | None,
    listener_names: str | None,
    deliver_within: float,
    event_timeout: float,
    metrics_file: str | None,
    pushgateway: str | None,
    output: str,
    **choice: Any,
) -> None:
    """Run one pass: list pods, settle what they say, tell the listeners."""
    from_api = choice["pods_path"] is None
    if complete and from_api:
        raise click.UsageError("--complete is for --pods; a list from the API says so itself")
    if delete_after is not None and not from_api:
        raise click.UsageError("--delete-after is for pods of the API, not for --pods")
    table = render.PassTable(dry_run=dry_run)
    with contextlib.ExitStack() as around:
        settle = database.Settle(around.enter_context(connected(dsn)))
        if not dry_run:
            limits = delivery.Limits(within=deliver_within, each=event_timeout)
            courier = Courier(settle, str(dsn), listener_names, limits)
            courier.prepare()
            # Also after a pass that failed: what others settled is to be told.
            around.callback(send_metrics, settle, metrics_file, pushgateway)
            around.callback(courier.try_to_deliver)
        with progress("settling") as advance:
            listing, namespace, cluster = listing_of(**choice)
            releaser = None if cluster is None else Releaser(cluster, seconds_or_none(delete_after))
            scope = passes.Scope(
                namespace=namespace,
                profile=choice["profile"],
                source="api" if from_api else "files",
                # Pods that a selector of one's own leaves out are not absent.
                judges_absence=complete or (from_api and choice["selector"] is None),
            )

            def show(rows: list[database.Row]) -> None:
                advance(len(rows))
                if output == "json":
                    for row in rows:
                        click.echo(render.json_line(row))
                else:
                    table.add(rows)

            if dry_run:
                done = passes.dry_run(settle, listing, scope, show)
            else:
                done = passes.run(
                    settle,
                    listing,
                    scope,
                    show,
                    lease_wait=wait,
                    after_commit=None if releaser is None else letting_go(releaser),
                )
        if output == "table":
            table.show(render.console(), done.counts)
        tell(done, scope, releaser)
        if releaser is not None and releaser.done.refused is not None:
            raise Refusal(
                f"{releaser.done.refused}; everything is settled all the same", KUBERNETES
            )
        finish(done.incomplete_because, done.problems)


def letting_go(releaser: Releaser) -> Callable[[list[pods.PodFacts], list[database.Row]], None]:
    """Return what lets pods go after a commit, and logs evidence that nobody will use."""

    def let_go(page: list[pods.PodFacts], rows: list[database.Row]) -> None:
        for facts in releaser.page(page, rows):
            render.log().warning("released a pod of no known task", evidence=facts.as_json())

    return let_go


def tell(done: passes.Pass, scope: passes.Scope, releaser: Releaser | None) -> None:
    """Log what a pass did, and a clock that is off."""
    logger = render.log()
    skew = None if done.clock_offset is None else done.clock_offset.total_seconds()
    if skew is not None and abs(skew) > passes.CLOCK_SKEW_WARN:
        logger.warning(
            "clock skew",
            seconds=round(skew, 1),
            meaning="the API server's clock minus the database's; check NTP on both",
        )
    logger.info(
        "pass finished",
        pass_id=done.id or None,
        dry_run=done.id == 0,
        namespace=scope.namespace,
        profile=scope.profile,
        complete=done.incomplete_because is None,
        clock_offset=skew,
        seconds=round(done.seconds, 3),
        **done.counts,
        **({} if releaser is None else releaser.done.counts),
    )


@main.command()
@click.argument("pod", required=False)
@click.option(
    "--task",
    metavar="ID|DAG/RUN/TASK",
    help="Show the whole history of a task instance instead; [index] for a mapped one.",
)
@dsn_option
@pod_options
@output_option
def explain(pod: str | None, task: str | None, dsn: str | None, output: str, **choice: Any) -> None:
    """Show which rule gives which verdict for POD (or --pods), and why; no task is needed.

    With --task: what became of each attempt of a task instance, with the evidence.
    """
    if [pod, task, choice["pods_path"]].count(None) != 2:
        raise click.UsageError("name one POD of the cluster, or give --pods or --task")
    if task is not None:
        task_instance_id, names = task_named(task)
        with connected(dsn) as connection:
            rows = database.Settle(connection).task_history(task_instance_id, names)
        if not rows:
            raise click.UsageError(f"--task {task}: nothing was ever settled of such a task")
        if output == "json":
            for row in rows:
                click.echo(render.json_document(row))
        else:
            render.print_history(render.console(), rows)
        return
    with connected(dsn) as connection:
        listing, _, _ = listing_of(name=pod, **choice)
        found = 0
        console = render.console()
        with progress("explaining") as advance:
            for rows in passes.classify(database.Settle(connection), listing):
                advance(len(rows))
                found += len(rows)
                if output == "table":
                    render.print_explanations(console, rows)
                    continue
                for row in rows:
                    who = row["facts"]["identity"]
                    named = {
                        **row,
                        "pod": row["facts"]["pod"],
                        "namespace": row["facts"]["namespace"],
                        "task_instance_id": who["task_instance_id"],
                        "try_number": who["try_number"],
                    }
                    click.echo(
                        render.json_line(
                            named, ("silence", "overdue_kind", "overdue_reason", "facts")
                        )
                    )
    if pod is not None and not found and listing.complete:
        raise click.UsageError(f"there is no pod {pod!r} in that namespace")
    finish(listing.incomplete_because, listing.problems)


@main.command()
@dsn_option
@click.option(
    "--output",
    "-o",
    envvar="PODSETTLE_OUTPUT",
    type=click.Choice(["table", "json"]),
    default="table",
)
def status(dsn: str | None, output: str) -> None:
    """Show what is unsettled, what is suspected and for how long yet, and the last passes."""
    with connected(dsn) as connection:
        sections = database.Settle(connection).status()
    if output == "json":
        click.echo(render.json_document(sections))
    else:
        render.print_status(render.console(), sections)


def task_named(task: str) -> tuple[str | None, tuple[str, str, str, int] | None]:
    """Read what --task names: an id, or dag/run/task with an [index] if it is mapped.

    Raises:
        click.UsageError: It is neither.
    """
    with contextlib.suppress(ValueError):
        return str(UUID(task)), None
    found = re.fullmatch(r"([^/]+)/(.+)/([^/]+?)(?:\[(\d{1,9})\])?", task)
    if found is None:
        raise click.UsageError("--task is an id, or DAG/RUN/TASK, or DAG/RUN/TASK[INDEX]")
    dag_id, run_id, task_id, index = found.groups()
    return None, (dag_id, run_id, task_id, -1 if index is None else int(index))


@main.command()
@dsn_option
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The page to write: one file that needs nothing else.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3660),
    default=30,
    show_default=True,
    help="How far back.",
)
def report(dsn: str | None, html_path: Path, days: int) -> None:
    """Write a page of what failed, what it cost and what was saved."""
    from reconciler import report as pages

    with connected(dsn) as connection:
        figures = database.Settle(connection).report_figures(days)
    try:
        html_path.write_text(pages.page(figures), encoding="utf-8")
    except OSError as failed:
        raise click.UsageError(f"--html {html_path}: {failed.strerror}") from failed
    click.echo(f"wrote {html_path}")


@main.command()
@dsn_option
@metrics_options
def metrics(dsn: str | None, metrics_file: str | None, pushgateway: str | None) -> None:
    """Print the metrics for Prometheus, or write and push them."""
    with connected(dsn) as connection:
        settle = database.Settle(connection)
        if metrics_file or pushgateway:
            if not send_metrics(settle, metrics_file, pushgateway):
                raise click.exceptions.Exit(INCOMPLETE)
            return
        from reconciler import metrics as families

        click.echo(families.as_text(settle.metrics()), nl=False)


@main.command()
@dsn_option
@listener_options
@click.option(
    "--again",
    metavar="NAME",
    help="First take up again what was set aside for this listener.",
)
def deliver(
    dsn: str | None,
    listener_names: str | None,
    deliver_within: float,
    event_timeout: float,
    again: str | None,
) -> None:
    """Tell the listeners what is due, by hand; a pass does it by itself."""
    with connected(dsn) as connection:
        settle = database.Settle(connection)
        limits = delivery.Limits(within=deliver_within, each=event_timeout)
        courier = Courier(settle, str(dsn), listener_names, limits)
        if courier.unknown:
            raise click.UsageError(
                f"--listeners: {', '.join(courier.unknown)} is not installed here; "
                f"known: {', '.join(sorted(listeners.installed()))}"
            )
        courier.register()
        if again is not None:
            click.echo(f"{again}: {settle.retry_events(again)} events taken up again")
        done = courier.deliver()
    for one in done:
        click.echo(
            f"{one.listener}: {one.delivered} delivered, {one.failed} failed, "
            f"{one.set_aside} set aside"
        )
    if not done:
        click.echo("nothing is due")


@main.command()
@dsn_option
@cluster_options
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also pods of known tasks; the default frees those of unknown tasks.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def release(dsn: str | None, everything: bool, yes: bool, **choice: Any) -> None:
    """Free held pods by hand, and say what evidence is lost with them.

    Without --dsn nothing is known of any task: only --all works then, as for an uninstall.
    """
    if not dsn and not everything:
        raise click.UsageError("without --dsn no task is known; give --dsn, or --all")
    with contextlib.ExitStack() as around:
        settle = database.Settle(around.enter_context(connected(dsn))) if dsn is not None else None
        listing, _, cluster = listing_of_cluster(**choice)
        chosen = []
        for facts, row in passes.preview(settle, listing):
            if FINALIZER in facts.finalizers and (everything or row["disposition"] == "unmatched"):
                chosen.append(facts)
                click.echo(f"{facts.namespace}/{facts.pod}: {render.loss(facts, row)}")
    if listing.incomplete_because is not None:
        raise Refusal(f"the list is incomplete: {listing.incomplete_because}", INCOMPLETE)
    if not chosen:
        click.echo("no such pod is held")
        return
    if not yes:
        click.confirm(f"Free {len(chosen)} pods?", abort=True)
    releaser = Releaser(cluster)
    for facts in chosen:
        click.echo(f"{facts.namespace}/{facts.pod}: {releaser.release(facts).value}")


@main.command()
@dsn_option
@cluster_options
def doctor(dsn: str | None, **choice: Any) -> None:
    """Say in plain words what is missing: permissions, pins, finalizers, clocks, versions."""
    from reconciler import doctor as clinic

    if not dsn:
        raise click.UsageError("--dsn (or PODSETTLE_DSN) is missing")
    code = 0

    def tell_all(findings: Iterable[clinic.Finding], bad: int) -> None:
        nonlocal code
        for finding in findings:
            click.echo(f"{finding.health.value:8}{finding.told}")
            if finding.health is clinic.Health.BAD and code == 0:
                code = bad

    connection, findings = clinic.check_database(dsn)
    tell_all(findings, DATABASE)
    listing, namespace, cluster = listing_of_cluster(**choice)
    tell_all(clinic.check_permissions(cluster, namespace), KUBERNETES)
    tell_all(clinic.check_pods(listing, connection), KUBERNETES)
    if connection is not None:
        connection.close()
    if code:
        raise click.exceptions.Exit(code)


@main.command()
@click.option("--stop", is_flag=True, help="Stop the embedded Postgres that the demo left up.")
def demo(stop: bool) -> None:
    """Show the main job on an embedded Postgres, with pods that a real kubelet wrote."""
    from reconciler import demo as demonstration

    if stop:
        click.echo("stopped" if demonstration.stop() else "there is no embedded Postgres")
        return
    demonstration.run(render.console())


if __name__ == "__main__":
    sys.exit(main())
