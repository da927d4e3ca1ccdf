"""An orchestrator, a database and a CronJob for one test: task instances here, their pods in the cluster.

The database is installed by the real install Job, each test works on a copy of it, and the pass connects as a login of
role settle_reconciler with no other right.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from harness import wait_for
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

if TYPE_CHECKING:
    from kube import Kube, PassResult

TEMPLATE = "podsettle_installed"
LOGIN = "podsettle_pass"


@dataclass(frozen=True)
class Attempt:
    """One dispatch of a task instance, and the name of its pod."""

    task: str
    try_number: int
    attempt_id: str
    pod: str


def shim(code: str, *options: str) -> list[str]:
    """Return the command of a task that runs Python code under the agent shim."""
    return ["python3", "-S", "-m", "agent_shim", "run", *options, "--", "python3", "-c", code]


def connect(dsn: str) -> psycopg.Connection[dict[str, Any]]:
    """Connect as the tests do."""
    return psycopg.connect(dsn, autocommit=True, row_factory=dict_row)


def install(kube: Kube, admin_dsn: str) -> None:
    """Run the install Job against an empty database, which then serves as template."""
    with connect(admin_dsn) as admin:
        admin.execute(f"drop database if exists {TEMPLATE}")
        admin.execute(f"create database {TEMPLATE}")
        if not admin.execute(
            "select 1 as found from pg_roles where rolname = %s", [LOGIN]
        ).fetchone():
            admin.execute(f"create role {LOGIN} login password 'pass'")
    dsn = make_conninfo(admin_dsn, dbname=TEMPLATE)
    kube.kubectl("create", "secret", "generic", "podsettle-install", f"--from-literal=dsn={dsn}")
    kube.apply(kube.overlay("install"))
    result = kube.wait_pass("podsettle-install")
    assert result.exit_code == 0, result.output
    assert "applied" in result.output, result.output
    with connect(admin_dsn) as admin:
        admin.execute(f"grant settle_reconciler to {LOGIN}")


class World:
    """One test's database, its orchestrator and its passes."""

    def __init__(self, kube: Kube, admin_dsn: str) -> None:
        """Copy the installed database, and give the namespace the DSN of the pass."""
        self.kube = kube
        self._admin_dsn = admin_dsn
        self.name = f"podsettle_{secrets.token_hex(4)}"
        with connect(admin_dsn) as admin:
            admin.execute(f"create database {self.name} template {TEMPLATE}")
        self.dsn = make_conninfo(admin_dsn, dbname=self.name)
        self.db = connect(self.dsn)
        pass_dsn = make_conninfo(admin_dsn, dbname=self.name, user=LOGIN, password="pass")
        kube.kubectl("create", "secret", "generic", "podsettle", f"--from-literal=dsn={pass_dsn}")
        self._passes = 0

    def close(self) -> None:
        """Drop the database."""
        self.db.close()
        with connect(self._admin_dsn) as admin:
            admin.execute(f"drop database {self.name} with (force)")

    def deploy(self, overlay: str = "cronjob", *, scheduled: bool = False, **template: Any) -> None:
        """Apply an overlay; its schedule is suspended unless a test is about the schedule."""
        spec: dict[str, Any] = {"suspend": not scheduled}
        if template:
            spec["jobTemplate"] = {"spec": {"template": {"spec": template}}}
        self.kube.apply(
            self.kube.overlay(overlay, CronJob={"apiVersion": "batch/v1", "spec": spec})
        )
        if overlay == "hold":
            self.kube.hold()
            pod = self.kube.task_pod("probe", ["true"])

            def held() -> bool:
                made = self.kube.core.create_namespaced_pod(self.kube.namespace, pod, dry_run="All")
                return bool(made.metadata.finalizers)

            wait_for("mutating policy in force", held)

    # The orchestrator.

    def task(self, name: str = "task", retries: int = 1) -> str:
        """Make a task instance that may be retried."""
        row = self.db.execute(
            "select settle.create_task('dag', %s, %s, p_retries => %s, p_retry_delay => '0',"
            " p_namespace => %s)::text as id",
            [self.kube.namespace, name, retries, self.kube.namespace],
        ).fetchone()
        return str(row["id"])

    def dispatch(self, task: str, pod: str) -> Attempt:
        """Begin an attempt; its pod is still to be made."""
        row = self.db.execute("select * from settle.dispatch(%s)", [task]).fetchone()
        return Attempt(task, row["try_number"], row["attempt_id"], pod)

    def launch(
        self, pod: str, command: list[str], *, task: str | None = None, **how: Any
    ) -> Attempt:
        """Dispatch a task and make the pod of the attempt."""
        retries = how.pop("retries", 1)
        attempt = self.dispatch(task or self.task(pod, retries), pod)
        self.kube.create(self.pod_of(attempt, command, **how))
        return attempt

    def pod_of(self, attempt: Attempt, command: list[str], **how: Any) -> dict[str, Any]:
        """Describe the pod of an attempt."""
        return self.kube.task_pod(
            attempt.pod,
            command,
            task_instance_id=attempt.task,
            try_number=attempt.try_number,
            attempt_id=attempt.attempt_id,
            **how,
        )

    def started(self, attempt: Attempt) -> None:
        """Wait until the pod of an attempt runs, and say so, as the task's own start does."""
        self.kube.wait_running(attempt.pod)
        self.db.execute("select settle.started(%s)", [attempt.attempt_id])

    def call(self, statement: str, *values: Any) -> dict[str, Any]:
        """Call a routine as a person does in psql."""
        return self.db.execute(statement, values).fetchone()

    def set(self, name: str, value: str) -> None:
        """Change a setting."""
        done = self.db.execute(
            "update settle.setting set value = %s where name = %s", [value, name]
        )
        assert done.rowcount == 1

    # What is known.

    def row(self, attempt: Attempt | str) -> dict[str, Any]:
        """Read a task instance."""
        task = attempt if isinstance(attempt, str) else attempt.task
        return self.call("select * from settle.task_instance where id = %s", task)

    def ledger(self, attempt: Attempt | str) -> list[dict[str, Any]]:
        """Read what was settled about a task instance, oldest first."""
        task = attempt if isinstance(attempt, str) else attempt.task
        return self.db.execute(
            "select * from settle.settlement where task_instance_id = %s order by id", [task]
        ).fetchall()

    def active(self, attempt: Attempt) -> bool:
        """Say whether an attempt is still unsettled."""
        return self.row(attempt)["state"] in ("queued", "running")

    # The pass.

    def run_passes_until_settled(self, attempt: Attempt, grace: str) -> None:
        """Shorten the grace of one kind of silence, and run passes until it is judged."""
        self.set(grace, "1 s")
        wait_for(
            f"{attempt.pod} settled after {grace}",
            lambda: self.run_pass() and not self.active(attempt),
        )

    def start_pass(self) -> str:
        """Start one Job of the CronJob."""
        self._passes += 1
        name = f"pass-{self._passes}"
        self.kube.start_pass(name)
        return name

    def run_pass(self) -> PassResult:
        """Run one pass, which must end well."""
        result = self.kube.wait_pass(self.start_pass())
        assert result.exit_code == 0, f"{result.state}\n{result.output}"
        return result

    def keep(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Write a pod as the kubelet left it into the folder E2E_RECORD, for new samples; return it as it is."""
        folder = os.environ.get("E2E_RECORD")
        if folder:
            kept = json.loads(json.dumps(pod))
            kept["metadata"].pop("managedFields", None)
            name = f"{self.kube.namespace.rsplit('-', 1)[0]}.{pod['metadata']['name']}.json"
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(json.dumps(kept, indent=1) + "\n")
        return pod
