"""Held pods let go and settled ones collected, by the pass and by hand, and what `podsettle doctor` makes of a cluster.

The command of the checkout runs as a service account with the Roles of an overlay, by a token that the API server
issued for it. Pods that need not run are made for a scheduler that is not there.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness import ClusterError, wait_for
from kube import FINALIZER
from psycopg.conninfo import make_conninfo
from world import LOGIN, connect, shim

from reconciler import listing, pods
from reconciler.release import Gone, Releaser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kube import Kube, PassResult
    from world import World

FOREVER = "import time; time.sleep(3600)"
NOWHERE = {"schedulerName": "nobody"}
LET_GO = "released a pod of no known task"


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    exit_code: int
    output: str
    errors: str

    def line(self, part: str) -> str:
        """Return the one line that holds a text."""
        found = [line for line in self.output.splitlines() if part in line]
        assert len(found) == 1, f"{len(found)} lines with {part!r} in:\n{self.output}{self.errors}"
        return found[0]


def kubeconfig(kube: Kube, account: str = "podsettle", namespace: str | None = None) -> Path:
    """Write a kubeconfig for a service account of this namespace, by default to work in it."""
    admin = json.loads(kube.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o=json"))
    name = admin["clusters"][0]["name"]
    token = kube.kubectl("create", "token", account).strip()
    admin["users"] = [{"name": account, "user": {"token": token}}]
    admin["contexts"] = [
        {
            "name": "test",
            "context": {
                "cluster": name,
                "user": account,
                "namespace": namespace or kube.namespace,
            },
        }
    ]
    admin["current-context"] = "test"
    file = kube.scratch() / "kubeconfig"
    file.write_text(json.dumps(admin))
    return file


def podsettle(config: Path, *arguments: str, answer: str = "") -> Said:
    """Run the command of this checkout; `answer` is what is typed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PODSETTLE_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("podsettle"), *arguments],
        input=answer,
        capture_output=True,
        text=True,
        check=False,
        env=env | {"KUBECONFIG": str(config)},
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


def pass_dsn(world: World) -> str:
    """Give the DSN of the pass: a login with role settle_reconciler, no more."""
    return make_conninfo(world.dsn, user=LOGIN, password="pass")


def held(world: World, name: str) -> bool:
    """Say whether a pod is there and held."""
    pod = world.kube.pod(name)
    return pod is not None and FINALIZER in pod["metadata"].get("finalizers", [])


def delete_settled_after(world: World, seconds: int) -> None:
    """Configure the pass, by its ConfigMap."""
    data = json.dumps({"data": {"PODSETTLE_DELETE_AFTER": str(seconds)}})
    world.kube.kubectl("patch", "configmap", "podsettle", "--type=merge", "-p", data)


def stranger(world: World, name: str, command: list[str], **how: Any) -> None:
    """Make a task pod whose task instance no database knows."""
    world.kube.create(world.kube.task_pod(name, command, task_instance_id=str(uuid.uuid4()), **how))


def let_go(errors: str) -> list[dict[str, Any]]:
    """Find the events about pods of no known task."""
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    return [line["evidence"] for line in lines if line.get("event") == LET_GO]


# The pass collects what is settled.


def test_delete_after(world: World) -> None:
    """A settled pod is released by one pass and deleted by the next; one that is not settled stays."""
    world.deploy("hold")
    delete_settled_after(world, 0)
    done = world.launch("done", shim("pass"))
    world.launch("runs", shim(FOREVER))
    stranger(world, "unknown", shim("pass"))
    world.kube.wait_running("runs")
    world.kube.wait_ended("done")
    world.kube.wait_ended("unknown")
    assert held(world, "done")
    assert world.run_pass().about("done")["disposition"] == "settled"
    released = world.kube.pod("done")
    assert released is not None
    assert "finalizers" not in released["metadata"]
    assert "deletionTimestamp" not in released["metadata"]
    assert counts(world.run_pass())["deleted"] == 1
    world.kube.wait_gone("done")
    assert world.row(done)["state"] == "success"
    for name in ("runs", "unknown"):
        kept = world.kube.pod(name)
        assert kept is not None
        assert "deletionTimestamp" not in kept["metadata"]
        assert kept["metadata"]["finalizers"] == [FINALIZER]


def test_delete_after_its_time_only(world: World) -> None:
    """A pod whose task was settled less long ago than that stays; the default deletes none."""
    world.deploy("hold")
    world.launch("done", shim("pass"))
    world.kube.wait_ended("done")
    world.run_pass()
    assert "deleted" not in counts(world.run_pass())
    delete_settled_after(world, 3600)
    assert "deleted" not in counts(world.run_pass())
    assert world.kube.pod("done") is not None
    world.db.execute(
        "create or replace function settle.clock() returns timestamptz language sql volatile security definer"
        " as $$ select clock_timestamp() + interval '1 hour' $$"
    )
    assert counts(world.run_pass())["deleted"] == 1
    world.kube.wait_gone("done")


def test_delete_without_the_verb(world: World) -> None:
    """Without overlays/hold the pass may delete nothing: it settles, says which verb is missing, and exits 5."""
    world.deploy()
    delete_settled_after(world, 0)
    attempt = world.launch("done", shim("pass"))
    world.kube.wait_ended("done")
    result = world.kube.wait_pass(world.start_pass())
    assert result.exit_code == 5, result.output
    assert "does not allow to delete pods" in result.output
    assert "k8s/overlays/hold" in result.output
    assert world.row(attempt)["state"] == "success"
    assert world.kube.pod("done") is not None


def counts(result: PassResult) -> dict[str, Any]:
    """Return the event that sums up a pass."""
    for line in result.output.splitlines():
        if line.startswith("{") and (event := json.loads(line)).get("event") == "pass finished":
            return event
    raise AssertionError(result.output)


@pytest.fixture
def reader(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[listing.Cluster]:
    """The API as the pass sees it, with all that overlays/hold grants."""
    world.deploy("hold")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(world.kube)))
    cluster = listing.connect()
    yield cluster
    cluster.api.close()


def read(cluster: listing.Cluster, name: str) -> pods.PodFacts:
    """Read one pod as a pass does."""
    pages = listing.read_api(cluster, profile=pods.PROFILES["podsettle"], name=name).pages
    (facts,) = [facts for page in pages for facts in page.pods]
    return facts


def test_only_the_pod_that_was_read(world: World, reader: listing.Cluster) -> None:
    """Changed, replaced or gone since it was read: a pod is neither released nor deleted by what was read."""
    releaser, kube = Releaser(reader), world.kube

    def make() -> None:
        kube.create(kube.task_pod("pod", ["true"], spec=NOWHERE))

    make()
    stale = read(reader, "pod")
    kube.kubectl("annotate", "pod", "pod", "example.org/changed=yes")
    assert releaser.release(stale) is Gone.CHANGED
    assert releaser.delete(stale) is Gone.CHANGED
    assert held(world, "pod")

    unchanged = read(reader, "pod")
    assert releaser.release(unchanged) is Gone.RELEASED
    # What was read still names the finalizer, which is gone.
    assert releaser.release(unchanged) is Gone.CHANGED
    old = read(reader, "pod")
    assert releaser.delete(old) is Gone.DELETED
    kube.wait_gone("pod")
    assert releaser.delete(old) is Gone.MISSING
    assert releaser.release(stale) is Gone.MISSING

    make()
    assert releaser.delete(old) is Gone.CHANGED
    assert releaser.release(stale) is Gone.CHANGED
    found = kube.pod("pod")
    assert found is not None
    assert found["metadata"]["uid"] != old.uid
    assert "deletionTimestamp" not in found["metadata"]
    assert held(world, "pod")


# Pods of no known task.


def test_a_pod_of_no_known_task_is_let_go_in_time(world: World) -> None:
    """Deleted, it is kept for unmatched_after, then let go, and its evidence is in the log of the pass."""
    world.deploy("hold")
    stranger(world, "unknown", shim("raise SystemExit(3)"))
    stranger(world, "alive", shim("pass"))
    world.kube.wait_ended("unknown")
    world.kube.wait_ended("alive")
    world.kube.delete("unknown")
    for _ in range(2):
        result = world.run_pass()
        assert result.about("unknown")["disposition"] == "unmatched"
        assert LET_GO not in result.output
        assert held(world, "unknown")
    world.set("unmatched_after", "1 s")
    logs: list[str] = []

    def gone() -> bool:
        logs.append(world.run_pass().output)
        return not held(world, "unknown")

    wait_for("let go", gone)
    world.kube.wait_gone("unknown")
    (evidence,) = let_go("\n".join(logs))
    assert (evidence["pod"], evidence["namespace"]) == ("unknown", world.kube.namespace)
    assert evidence["record"]["outcome"] == "failed"
    assert evidence["container"]["exit_code"] == 3
    # One that nobody deletes is no danger to a namespace.
    assert held(world, "alive")


@pytest.fixture
def other(world: World) -> Iterator[str]:
    """A second namespace, held like the first, in which the pass of the first works too."""
    kube = world.kube
    name = f"{kube.namespace[:50]}-other"
    kube.cluster.kubectl("create", "namespace", name)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "podsettle"}
    subject = {"kind": "ServiceAccount", "name": "podsettle", "namespace": kube.namespace}
    for manifest in (
        {
            "kind": "Role",
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch", "delete"]}
            ],
        },
        {"kind": "RoleBinding", "roleRef": role, "subjects": [subject]},
    ):
        meta = {"name": "podsettle", "namespace": name}
        whole = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": meta, **manifest}
        kube.apply(json.dumps(whole))
    yield name
    kube.cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    for pod in kube.core.list_namespaced_pod(name).items:
        body = {"metadata": {"finalizers": None}}
        kube.core.patch_namespaced_pod(pod.metadata.name, name, body)


def delete_with_held_pod(world: World, other: str) -> None:
    """Delete the other namespace while a held pod of no known task is in it, and wait until it waits."""
    kube = world.kube
    pod = kube.task_pod("unknown", ["true"], task_instance_id=str(uuid.uuid4()), held=True)
    pod["metadata"]["namespace"] = other
    pod["spec"].update(NOWHERE)
    kube.core.create_namespaced_pod(other, pod)
    kube.cluster.kubectl("delete", "namespace", other, "--wait=false")

    def waits() -> bool:
        return kube.core.read_namespaced_pod("unknown", other).metadata.deletion_timestamp

    wait_for("pod deleted with its namespace", waits)


def there(world: World, namespace: str) -> bool:
    """Say whether a namespace is still there."""
    command = ("get", "namespace", namespace, "-o=name", "--ignore-not-found")
    return bool(world.kube.cluster.kubectl(*command))


def test_no_namespace_hangs(world: World, other: str) -> None:
    """A deleted namespace waits for its held pod of no known task; a pass from outside lets it go, and it ends."""
    world.deploy("hold")
    config, logs = kubeconfig(world.kube), []
    delete_with_held_pod(world, other)
    command = ("reconcile", "--dsn", pass_dsn(world), "-n", other)
    for _ in range(2):
        said = podsettle(config, *command)
        assert said.exit_code == 0, said.errors
        assert let_go(said.errors) == []
    assert there(world, other)
    world.set("unmatched_after", "1 s")

    def freed() -> bool:
        said = podsettle(config, *command)
        assert said.exit_code == 0, said.errors
        logs.extend(let_go(said.errors))
        return bool(logs)

    wait_for("let go", freed)
    wait_for("namespace gone", lambda: not there(world, other))
    assert [(evidence["pod"], evidence["namespace"]) for evidence in logs] == [("unknown", other)]


def test_a_deleted_namespace_is_freed_by_hand(world: World, other: str) -> None:
    """Nothing can be started in a deleted namespace, no pass of its own either: `podsettle release` ends it."""
    delete_with_held_pod(world, other)
    with pytest.raises(ClusterError, match="because it is being terminated"):
        world.kube.cluster.kubectl("-n", other, "create", "job", "pass", "--image=none")
    said = podsettle(world.kube.cluster.kubeconfig, "release", "--all", "--yes", "-n", other)
    assert said.exit_code == 0, said.errors
    assert f"{other}/unknown: released" in said.output
    wait_for("namespace gone", lambda: not there(world, other))


# By hand.


def test_release_by_hand(world: World) -> None:
    """`podsettle release` says of each held pod what is lost with it, asks, and frees what was asked for."""
    world.deploy()
    settled = world.launch("settled", shim("pass"), held=True)
    world.kube.wait_ended("settled")
    # The plain overlay may not let pods go: settled, and still held.
    result = world.kube.wait_pass(world.start_pass())
    assert result.exit_code == 5, result.output
    assert "does not allow to patch pods" in result.output
    assert "everything is settled all the same" in result.output
    assert world.row(settled)["state"] == "success"
    world.deploy("hold")
    world.launch("unsettled", shim("raise SystemExit(3)"))
    world.launch("runs", shim(FOREVER))
    stranger(world, "unknown", shim("pass"))
    world.kube.wait_running("runs")
    world.kube.wait_ended("unsettled")
    world.kube.wait_ended("unknown")
    everyone = ("settled", "unsettled", "runs", "unknown")
    before = world.call("select count(*) as n from settle.settlement")
    config, dsn = kubeconfig(world.kube), pass_dsn(world)

    refused = podsettle(config, "release", "--yes")
    assert refused.exit_code == 2
    assert "give --dsn, or --all" in refused.errors

    for options in (["--dsn", dsn], ["--dsn", dsn, "--all"], ["--all"]):
        declined = podsettle(config, "release", *options, answer="n\n")
        assert declined.exit_code == 1
        assert "Aborted" in declined.errors
        assert all(held(world, name) for name in everyone)

    said = podsettle(config, "release", "--dsn", dsn, "--all", answer="n\n")
    assert "Free 4 pods?" in said.output
    assert said.line("/settled:").endswith("settled already, nothing is lost")
    assert "NOT SETTLED YET, failed" in said.line("/unsettled:")
    assert "run podsettle reconcile first" in said.line("/unsettled:")
    assert "it has not ended" in said.line("/runs:")
    assert "of no known task" in said.line("/unknown:")
    assert "the record 'success' is lost" in said.line("/unknown:")

    said = podsettle(config, "release", "--dsn", dsn, answer="y\n")
    assert said.exit_code == 0, said.errors
    assert "Free 1 pods?" in said.output
    assert said.output.strip().splitlines()[-1].endswith("/unknown: released")
    assert [name for name in everyone if held(world, name)] == ["settled", "unsettled", "runs"]
    nothing = podsettle(config, "release", "--dsn", dsn)
    assert (nothing.exit_code, nothing.output) == (0, "no such pod is held\n")

    said = podsettle(config, "release", "--all", answer="n\n")
    assert "the record 'success' is lost, unless it was settled" in said.line("/settled:")
    assert "the record 'failed' is lost, unless it was settled" in said.line("/unsettled:")
    assert "its end is lost" in said.line("/runs:")
    said = podsettle(config, "release", "--dsn", dsn, "--all", "--yes")
    assert said.exit_code == 0, said.errors
    for name in ("settled", "unsettled", "runs"):
        assert f"/{name}: released" in said.output
    assert not any(held(world, name) for name in everyone)
    # To look is not to settle.
    assert world.call("select count(*) as n from settle.settlement") == before
    assert world.run_pass().about("unsettled")["disposition"] == "settled"


def test_release_without_a_database(world: World) -> None:
    """As for an uninstall: --all alone frees every held pod, and says what it cannot know."""
    world.deploy("hold")
    stranger(world, "ended", shim("pass"))
    stranger(world, "waits", ["true"], spec=NOWHERE)
    world.kube.wait_ended("ended")
    said = podsettle(kubeconfig(world.kube), "release", "--all", "--yes")
    assert said.exit_code == 0, said.errors
    assert "the record 'success' is lost, unless it was settled" in said.output
    assert "/waits: released" in said.output
    assert not held(world, "ended")
    assert not held(world, "waits")


def test_release_without_the_verb(world: World) -> None:
    """An account that may not patch pods is told so, with exit 5, and what would help."""
    world.deploy()
    stranger(world, "ended", ["true"], held=True, spec=NOWHERE)
    said = podsettle(kubeconfig(world.kube), "release", "--all", "--yes")
    assert said.exit_code == 5
    assert "does not allow to patch pods" in said.errors
    assert "k8s/overlays/hold" in said.errors
    assert held(world, "ended")


# The doctor.


def findings(said: Said) -> list[tuple[str, str]]:
    """Split what the doctor said into health and sentence."""
    return [(line[:8].strip(), line[8:]) for line in said.output.splitlines()]


def test_doctor_all_is_well(world: World) -> None:
    """With overlays/hold, a pass, a running and a settled task there is nothing to say but ok."""
    world.deploy("hold")
    world.launch("done", shim("pass"))
    world.launch("runs", shim(FOREVER))
    world.kube.wait_running("runs")
    world.kube.wait_ended("done")
    world.run_pass()
    said = podsettle(kubeconfig(world.kube), "doctor", "--dsn", pass_dsn(world))
    assert {health for health, _ in findings(said)} == {"ok"}, said.output
    assert said.exit_code == 0
    for part in (
        "speaks contract",
        "the last complete pass was closed",
        "may list pods",
        "may patch pods",
        "may delete pods",
        "2 pods are of this profile",
        "agree on the time",
    ):
        said.line(part)


def test_doctor_names_what_is_not_held_or_pinned(world: World) -> None:
    """Plain overlay, pods by hand: missing verbs, finalizer and pins are advice; exit 0."""
    world.deploy()
    world.launch("plain", ["true"], spec=NOWHERE)
    loose = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    world.launch("loose", ["true"], container=loose, spec=NOWHERE, held=True)
    moved = {"terminationMessagePath": "/tmp/record"}
    world.launch("moved", ["true"], container=moved, spec=NOWHERE, held=True)
    again = {**NOWHERE, "restartPolicy": "OnFailure"}
    world.launch("again", ["true"], spec=again, held=True)
    said = podsettle(kubeconfig(world.kube), "doctor", "--dsn", pass_dsn(world))
    assert said.exit_code == 0, said.output
    assert "missing" not in {health for health, _ in findings(said)}
    for part in (
        "no complete pass has run yet",
        "may not patch pods",
        "may not delete pods",
        "1 pods: terminationMessagePolicy is not File",
        "1 pods: terminationMessagePath is not /dev/termination-log",
        "1 pods: restartPolicy is not Never",
        f"1 of 4 pods that have not ended have no finalizer {FINALIZER}",
    ):
        assert said.line(part).startswith("advice")
    said.line("ok      may list pods")


def test_doctor_names_pods_that_cannot_be_identified(world: World) -> None:
    """A pod with the label and no task instance is of no use: it is named, and so is what it lacks."""
    world.deploy()
    nobody = world.kube.task_pod("nobody", ["true"], spec=NOWHERE)
    del nobody["metadata"]["annotations"]
    world.kube.create(nobody)
    said = podsettle(kubeconfig(world.kube), "doctor", "--dsn", pass_dsn(world))
    assert said.exit_code == 5, said.output
    line = said.line("cannot be identified")
    assert line.startswith("missing 1 pods")
    assert "nobody" in line
    assert "podsettle.io/task-instance-id" in line


def test_doctor_names_a_missing_list(world: World) -> None:
    """Without the Role no pass can run: said in words, exit 5."""
    world.deploy()
    world.kube.kubectl("delete", "rolebinding", "podsettle")
    said = podsettle(kubeconfig(world.kube), "doctor", "--dsn", pass_dsn(world))
    assert said.exit_code == 5, said.output
    line = said.line("may not list pods")
    assert line.startswith("missing")
    assert world.kube.namespace in line
    assert "k8s/base" in line
    said.line("ok      database")


@pytest.fixture
def login(world: World) -> Iterator[str]:
    """A login that was granted nothing."""
    name = f"nobody_{secrets.token_hex(4)}"
    world.db.execute(f"create role {name} login password 'pass'")
    yield name
    with connect(world.dsn) as admin:
        admin.execute(f"drop owned by {name}")
        admin.execute(f"drop role {name}")


def test_doctor_names_a_user_without_a_role(world: World, login: str) -> None:
    """A user with no role, and one who may only read, cannot run passes: exit 4 and the grant that helps."""
    world.deploy()
    config = kubeconfig(world.kube)
    dsn = make_conninfo(world.dsn, user=login, password="pass")
    for granted in (None, "settle_reader"):
        if granted is not None:
            world.db.execute(f"grant {granted} to {login}")
        said = podsettle(config, "doctor", "--dsn", dsn)
        assert said.exit_code == 4, said.output
        assert said.line("settle_reconciler").startswith("missing")
        said.line("ok      may list pods")


def test_doctor_names_a_database_without_podsettle(world: World) -> None:
    """A database in which nothing is installed, and one that does not answer: exit 4, and the cluster is still looked at."""
    world.deploy()
    config = kubeconfig(world.kube)
    said = podsettle(config, "doctor", "--dsn", make_conninfo(world.dsn, dbname="postgres"))
    assert said.exit_code == 4, said.output
    assert said.line("podsettle install").startswith("missing")
    said.line("ok      may list pods")
    said = podsettle(config, "doctor", "--dsn", make_conninfo(world.dsn, port=1))
    assert said.exit_code == 4, said.output
    assert said.line("no connection to Postgres").startswith("missing")
    said.line("ok      may list pods")
