"""The command line: options, exit codes, and which words a failure is told in.

Exit codes: 0 done; 2 usage; 3 the list was incomplete; 4 database unreachable, refused or of
another contract; 5 Kubernetes unreachable or forbidden; 1 a bug.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from reconciler import __version__, database, passes, pods, render
from reconciler import listing as source
from reconciler.install import UnknownHost, script_for_psql
from reconciler.install import install as install_sql
from reconciler.release import FINALIZER, Releaser

INCOMPLETE: Final = 3
DATABASE: Final = 4
KUBERNETES: Final = 5

CLOCK_SKEW_WARN: Final = 5.0
"""Seconds between API server and database that are worth a word."""


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


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose pods of a cluster."""
    for add in reversed(_CLUSTER_OPTIONS):
        command = add(command)
    return command


def pod_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose pods of a cluster or of files."""
    return cluster_options(_PODS_OPTION(command))


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
@output_option
def reconcile(
    dsn: str | None,
    complete: bool,
    dry_run: bool,
    wait: float,
    delete_after: int | None,
    output: str,
    **choice: Any,
) -> None:
    """Run one pass: list pods, settle what they say."""
    from_api = choice["pods_path"] is None
    if complete and from_api:
        raise click.UsageError("--complete is for --pods; a list from the API says so itself")
    if delete_after is not None and not from_api:
        raise click.UsageError("--delete-after is for pods of the API, not for --pods")
    table = render.PassTable(dry_run=dry_run)
    with connected(dsn) as connection, progress("settling") as advance:
        settle = database.Settle(connection)
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
        raise Refusal(f"{releaser.done.refused}; everything is settled all the same", KUBERNETES)
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
    if skew is not None and abs(skew) > CLOCK_SKEW_WARN:
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
@dsn_option
@pod_options
@output_option
def explain(pod: str | None, dsn: str | None, output: str, **choice: Any) -> None:
    """Show which rule gives which verdict for POD (or --pods), and why; no task is needed."""
    if (pod is None) == (choice["pods_path"] is None):
        raise click.UsageError("name one POD of the cluster, or give --pods")
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
