"""Real pods that end in every way, settled by the real CronJob's Job in the cluster.

Kind, reason, refund and state are what DESIGN sections 7 and 8 say. Each test asserts first that what it is about did
happen to the pod.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from harness import Cluster, wait_for
from kube import FINALIZER, base_state, condition_of, outside_address
from world import shim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kube import PassResult
    from world import Attempt, World

FOREVER = "import time; time.sleep(3600)"
EVICTED = "EvictionByEvictionAPI"


def outcome(world: World, attempt: Attempt) -> dict[str, Any]:
    """Sum up what became of a task instance by its last settlement."""
    row, last = world.row(attempt), world.ledger(attempt)[-1]
    return {
        "state": row["state"],
        "try_number": row["try_number"],
        "max_tries": row["max_tries"],
        "kind": last["failure_kind"],
        "reason": last["reason"],
        "refund": last["refund"],
        "from_record": last["from_record"],
    }


def success(try_number: int = 1, max_tries: int = 1) -> dict[str, Any]:
    """What a recovered success looks like."""
    return {
        "state": "success",
        "try_number": try_number,
        "max_tries": max_tries,
        "kind": None,
        "reason": None,
        "refund": 0,
        "from_record": True,
    }


def failed(
    kind: str | None,
    reason: str,
    *,
    from_record: bool = False,
    refund: int = 0,
    state: str = "up_for_retry",
    max_tries: int = 1,
) -> dict[str, Any]:
    """What a failure of the first attempt of two looks like."""
    return {
        "state": state,
        "try_number": 1,
        "max_tries": max_tries + refund,
        "kind": kind,
        "reason": reason,
        "refund": refund,
        "from_record": from_record,
    }


class HangingServer:
    """A report server that takes a request and never answers."""

    def __init__(self) -> None:
        """Listen where pods can reach it."""
        self.reached, self.let_go = threading.Event(), threading.Event()
        hanging = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hanging.reached.set()
                hanging.let_go.wait()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((outside_address(), 0), Handler)
        self.url = f"http://{outside_address()}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Let the requests go unanswered and stop."""
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hanging() -> Iterator[HangingServer]:
    """A report server that hangs."""
    server = HangingServer()
    yield server
    server.close()


def test_killed_in_mid_report(world: World, hanging: HangingServer) -> None:
    """The report hangs and the container is killed: the success is recovered, the try is not used up."""
    world.deploy()
    attempt = world.launch(
        "reporter",
        shim("print('work done')", "--report-url", hanging.url),
        spec={"restartPolicy": "Never"},
    )
    assert hanging.reached.wait(120), "the report never reached the server"
    kill_container(world, "reporter")
    pod = world.keep(
        world.kube.wait_pod("reporter", "failed", lambda seen: seen["status"]["phase"] == "Failed")
    )
    assert base_state(pod)["terminated"]["exitCode"] == 137
    assert not hanging.let_go.is_set()
    assert world.row(attempt)["state"] == "queued"
    line = world.run_pass().about("reporter")
    assert (line["disposition"], line["verdict"], line["from_record"]) == (
        "settled",
        "success",
        True,
    )
    assert outcome(world, attempt) == success()
    assert world.run_pass().about("reporter")["disposition"] == "duplicate"
    assert len(world.ledger(attempt)) == 1


def kill_container(world: World, name: str) -> None:
    """Send SIGKILL to every process of a pod's task container, behind the kubelet's back."""
    cluster = world.kube.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("SIGKILL behind the kubelet's back needs a cluster of our own")
    pod = world.kube.wait_running(name)
    status = next(
        entry
        for entry in pod["status"]["containerStatuses"]
        if entry["name"] in ("base", "podsettle")
    )
    cluster.kill_container(
        pod["spec"]["nodeName"], status["containerID"].removeprefix("containerd://")
    )


def test_hardened_image_without_a_shell(world: World) -> None:
    """Non-root, read-only root, no capability, no shell: the record is written all the same."""
    world.deploy()
    code = (
        "import os, pathlib\n"
        "assert os.getuid() == 65532\n"
        "assert not [p for p in ('/bin/sh', '/usr/bin/sh', '/bin/bash', '/bin/busybox') if os.path.exists(p)]\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "assert 'CapEff:\\t0000000000000000' in status and 'CapBnd:\\t0000000000000000' in status, status\n"
        "try:\n    open('/written', 'w')\n"
        "except OSError as error:\n    assert error.errno == 30, error\n"
        "else:\n    raise SystemExit('the root file system is writable')\n"
    )
    attempt = world.launch("hardened", shim(code), image_name="task-noshell")
    pod = world.keep(world.kube.wait_ended("hardened"))
    assert base_state(pod)["terminated"]["exitCode"] == 0, world.kube.kubectl("logs", "hardened")
    world.run_pass()
    assert outcome(world, attempt) == success()


# name, command, more of the pod, what shows that it happened, what must become of it
ENDS: dict[str, tuple[list[str], dict[str, Any], Any, dict[str, Any]]] = {
    "crash": (
        shim("raise SystemExit(3)"),
        {},
        lambda pod: base_state(pod)["terminated"]["exitCode"] == 3,
        failed("application", "Error", from_record=True),
    ),
    "crash-without-shim": (
        ["python3", "-c", "raise SystemExit(3)"],
        {},
        lambda pod: base_state(pod)["terminated"]["exitCode"] == 3,
        failed("application", "Error"),
    ),
    "own-memory-limit": (
        ["python3", "-c", "x = bytearray(1 << 30); print(len(x))"],
        {"container": {"resources": {"limits": {"memory": "48Mi"}}}},
        lambda pod: base_state(pod)["terminated"]["reason"] == "OOMKilled",
        failed("application", "OOMKilled"),
    ),
    "execution-timeout": (
        shim(FOREVER, "--timeout", "1"),
        {},
        lambda pod: "ExecutionTimeout" in base_state(pod)["terminated"]["message"],
        failed("timeout", "ExecutionTimeout", from_record=True),
    ),
    "active-deadline": (
        shim(FOREVER),
        {"spec": {"activeDeadlineSeconds": 3}},
        lambda pod: pod["status"]["reason"] == "DeadlineExceeded",
        failed("timeout", "DeadlineExceeded"),
    ),
    "emptydir-limit": (
        [
            "python3",
            "-c",
            "import time; open('/data/x', 'wb').write(bytes(40 << 20)); time.sleep(3600)",
        ],
        {
            "container": {"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
            "spec": {
                "volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1Mi"}}],
                "securityContext": {"fsGroup": 65532},
            },
        },
        lambda pod: "EmptyDir" in pod["status"]["message"],
        failed("application", "Evicted"),
    ),
    "no-such-command": (
        ["/no/such/program"],
        {},
        lambda pod: base_state(pod)["terminated"]["reason"] in ("StartError", "ContainerCannotRun"),
        failed("application", "StartError"),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_end(world: World, name: str) -> None:
    """What the task or its own limits did is the task's failure: it is charged, never refunded."""
    command, more, happened, expected = ENDS[name]
    world.deploy()
    attempt = world.launch(name, command, **more)
    pod = world.keep(
        world.kube.wait_pod(
            name,
            "ended",
            lambda seen: "terminated" in base_state(seen) or seen["status"]["phase"] == "Failed",
        )
    )
    assert happened(pod), pod["status"]
    world.run_pass()
    assert outcome(world, attempt) == expected


def test_init_container_fails(world: World) -> None:
    """The task never ran: no kind is guessed, the ordinary retry is used."""
    world.deploy()
    model = world.kube.task_pod("model", ["python3", "-c", "raise SystemExit(9)"])["spec"][
        "containers"
    ][0]
    attempt = world.launch(
        "init", shim("pass"), spec={"initContainers": [{**model, "name": "prepare"}]}
    )
    pod = world.keep(
        world.kube.wait_pod("init", "failed", lambda seen: seen["status"]["phase"] == "Failed")
    )
    assert base_state(pod)["waiting"]["reason"] == "PodInitializing"
    world.run_pass()
    assert outcome(world, attempt) == failed(None, "InitContainerFailed")


def test_image_that_does_not_pull(world: World) -> None:
    """A pod that cannot start is a suspicion; once its grace is over it is driven again, uncharged."""
    world.deploy()
    attempt = world.launch(
        "unpulled", shim("pass"), container={"image": "localhost/podsettle/none:test"}
    )
    world.keep(
        world.kube.wait_pod(
            "unpulled",
            "not pulled",
            lambda seen: base_state(seen).get("waiting", {}).get("reason") == "ErrImageNeverPull",
        )
    )
    assert world.run_pass().about("unpulled")["final"] is False
    assert world.row(attempt)["state"] == "queued"
    world.run_passes_until_settled(attempt, "pending_after")
    assert outcome(world, attempt) == failed("infra", "ErrImageNeverPull", refund=1)
    assert world.ledger(attempt)[-1]["provisional"]


def test_manual_stop(world: World) -> None:
    """A person stops a running task: it has failed, is not retried, and its pod's end changes nothing."""
    world.deploy("hold")
    attempt = world.launch("stopped", shim(FOREVER), retries=3)
    world.kube.wait_running("stopped")
    world.call("call settle.mark_failed(%s, 'wrong data')", attempt.task)
    world.kube.delete("stopped")
    world.keep(world.kube.wait_ended("stopped"))
    assert world.run_pass().about("stopped")["disposition"] == "duplicate"
    row, ledger = world.row(attempt), world.ledger(attempt)
    assert (row["state"], row["try_number"], row["max_tries"]) == ("failed", 1, 3)
    assert [(entry["failure_kind"], entry["refund"]) for entry in ledger] == [("manual", 0)]


# Disruptions: the platform ends a pod that runs.


def evict(world: World, name: str) -> str:
    """Evict through the API."""
    world.kube.evict(name)
    return EVICTED


def taint(world: World, name: str) -> str:
    """Put a NoExecute taint on the pod's node."""
    pod = world.kube.pod(name)
    assert pod is not None
    node = pod["spec"]["nodeName"]
    world.kube.taint(node)
    try:
        world.kube.wait_pod(
            name, "being deleted", lambda seen: "deletionTimestamp" in seen["metadata"]
        )
    finally:
        world.kube.untaint(node)
    return "DeletionByTaintManager"


def preempt(world: World, name: str) -> str:
    """Let a pod of higher priority need the only slot there is."""
    importance = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "podsettle-test-important"},
        "value": 1000,
    }
    world.kube.apply(json.dumps(importance))
    rival = world.kube.task_pod(
        "rival", ["sleep", "3600"], container={"resources": {"limits": SLOT}}
    )
    rival["metadata"]["labels"].pop("podsettle.io/managed")
    rival["spec"]["priorityClassName"] = "podsettle-test-important"
    world.kube.create(rival)
    return "PreemptionByScheduler"


def delete(world: World, name: str) -> str:
    """Delete the pod as a person or a controller does."""
    world.kube.delete(name)
    return "PodDeleted"


SLOT = {"podsettle.io/slot": "1"}
DISRUPTIONS = [evict, taint, preempt, delete]


def launch_disruptable(world: World, name: str, command: list[str], how: Any) -> Attempt:
    """Launch a task where the disruption will find it."""
    more: dict[str, Any] = {}
    if how is preempt:
        node = world.kube.cluster.nodes()[0]
        world.kube.set_capacity(node, "podsettle.io/slot", 1)
        more = {"container": {"resources": {"limits": SLOT}}}
    attempt = world.launch(name, command, **more)
    world.started(attempt)
    return attempt


@pytest.mark.parametrize("how", DISRUPTIONS, ids=lambda how: how.__name__)
def test_disruption_with_finalizer(world: World, how: Any) -> None:
    """Held, the pod still says what happened to it: infra, with its reason, refunded; then it is let go."""
    world.deploy("hold")
    attempt = launch_disruptable(world, "victim", shim(FOREVER), how)
    reason = how(world, "victim")
    pod = world.keep(world.kube.wait_ended("victim"))
    assert "deletionTimestamp" in pod["metadata"]
    if how is not delete:
        condition = condition_of(pod, "DisruptionTarget")
        assert condition is not None
        assert (condition["status"], condition["reason"]) == ("True", reason)
    result = world.run_pass()
    line = result.about("victim")
    assert (line["disposition"], line["failure_kind"], line["reason"]) == (
        "settled",
        "infra",
        reason,
    )
    assert outcome(world, attempt) == failed("infra", reason, refund=1)
    assert "refunded attempt 1" in world.ledger(attempt)[-1]["why"]
    world.kube.wait_gone("victim")


@pytest.mark.parametrize("how", DISRUPTIONS, ids=lambda how: how.__name__)
def test_disruption_without_finalizer(world: World, how: Any) -> None:
    """Not held, the pod and its reason are gone: the absence is a suspicion, then infra PodDeleted."""
    world.deploy("cronjob")
    attempt = launch_disruptable(world, "victim", shim(FOREVER), how)
    how(world, "victim")
    world.kube.wait_gone("victim")
    first = world.run_pass()
    assert world.active(attempt), first.output
    world.run_passes_until_settled(attempt, "absent_after")
    assert outcome(world, attempt) == failed("infra", "PodDeleted", refund=1)
    assert world.ledger(attempt)[-1]["provisional"]


def test_success_of_a_deleted_pod(world: World, hanging: HangingServer) -> None:
    """The task had finished when its pod was deleted: held, the success is recovered; not held, it is lost."""
    world.deploy("hold")
    command = shim("print('work done')", "--report-url", hanging.url)
    kept = world.launch("kept", command)
    assert hanging.reached.wait(120)
    world.kube.delete("kept")
    pod = world.keep(world.kube.wait_ended("kept"))
    assert "deletionTimestamp" in pod["metadata"]
    world.run_pass()
    assert outcome(world, kept) == success()
    world.kube.wait_gone("kept")

    world.kube.hold(wanted=False)
    hanging.reached.clear()
    lost = world.dispatch(world.task("lost"), "lost")
    wait_for("namespace not held", lambda: not probe(world).metadata.finalizers)
    world.kube.create(world.pod_of(lost, command))
    assert hanging.reached.wait(120)
    world.started(lost)
    world.kube.delete("lost")
    world.kube.wait_gone("lost")
    world.run_passes_until_settled(lost, "absent_after")
    assert outcome(world, lost) == failed("infra", "PodDeleted", refund=1)


def probe(world: World) -> Any:
    """Ask what a task pod would become."""
    pod = world.kube.task_pod("probe", ["true"])
    return world.kube.core.create_namespaced_pod(world.kube.namespace, pod, dry_run="All")


def test_evictions_are_refunded_up_to_the_cap(world: World) -> None:
    """No retries of its own: three evictions are refunded, the fourth fails the task."""
    world.deploy("hold")
    task = world.task("unlucky", retries=0)
    for number in (1, 2, 3, 4):
        name = f"unlucky-{number}"
        attempt = world.launch(name, shim(FOREVER), task=task)
        assert attempt.try_number == number
        world.kube.wait_running(name)
        world.kube.evict(name)
        pod = world.kube.wait_ended(name)
        assert condition_of(pod, "DisruptionTarget")["reason"] == EVICTED
        world.run_pass()
        row, last = world.row(task), world.ledger(task)[-1]
        assert (last["failure_kind"], last["reason"]) == ("infra", EVICTED)
        if number < 4:
            assert (row["state"], row["max_tries"], last["refund"]) == ("up_for_retry", number, 1)
            assert f"refund {number}/3" in last["why"]
        else:
            assert (row["state"], row["max_tries"], last["refund"]) == ("failed", 3, 0)
        world.kube.wait_gone(name)
    assert [entry["refunds_used"] for entry in world.ledger(task)] == [1, 2, 3, 3]


def test_node_is_lost(world: World) -> None:
    """A node dies and its object is deleted: held, pod GC's reason is read; the task is not charged."""
    cluster = world.kube.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("taking a node away needs a cluster of our own")
    world.deploy("hold", nodeName=cluster.nodes()[0])
    node = cluster.nodes()[1]
    attempt = world.launch("stranded", shim(FOREVER), spec={"nodeName": node})
    world.kube.wait_running("stranded")
    cluster.lose_node(node)
    try:
        cluster.kubectl("delete", "node", node)
        pod = world.keep(
            world.kube.wait_pod(
                "stranded",
                "collected",
                lambda seen: condition_of(seen, "DisruptionTarget") is not None,
                timeout=240,
            )
        )
        assert condition_of(pod, "DisruptionTarget")["reason"] == "DeletionByPodGC"
        assert "running" in base_state(pod)
        world.run_pass()
        assert outcome(world, attempt) == failed("infra", "DeletionByPodGC", refund=1)
        world.kube.wait_gone("stranded")
    finally:
        cluster.bring_back_node(node)


# Pods that are more than their task container, and attempts that are not the current one.


def test_classic_sidecar(world: World) -> None:
    """A sidecar that goes on keeps the pod Running: the task is settled from its own container."""
    world.deploy()
    attempt = world.dispatch(world.task(), "beside")
    pod = world.pod_of(attempt, shim("pass"))
    model = pod["spec"]["containers"][0]
    pod["spec"]["containers"].insert(0, {**model, "name": "proxy", "command": ["sleep", "3600"]})
    world.kube.create(pod)
    ended = world.keep(world.kube.wait_ended("beside"))
    assert ended["status"]["phase"] == "Running"
    world.run_pass()
    assert outcome(world, attempt) == success()


def test_native_sidecar(world: World) -> None:
    """A native sidecar ends with 137 or 143 after the task: that is nobody's failure."""
    world.deploy()
    attempt = world.dispatch(world.task(), "native")
    pod = world.pod_of(attempt, shim("pass"))
    model = pod["spec"]["containers"][0]
    pod["spec"]["initContainers"] = [
        {**model, "name": "proxy", "command": ["sleep", "3600"], "restartPolicy": "Always"}
    ]
    world.kube.create(pod)
    ended = world.keep(
        world.kube.wait_pod(
            "native", "ended", lambda seen: seen["status"]["phase"] in ("Succeeded", "Failed")
        )
    )
    assert ended["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] != 0
    world.run_pass()
    assert outcome(world, attempt) == success()


RESCHEDULE = (
    "import os, pathlib, datetime as d\n"
    "at = d.datetime.now(d.timezone.utc) + d.timedelta(minutes=5)\n"
    "pathlib.Path(os.environ['PODSETTLE_RESCHEDULE_FILE']).write_text(at.strftime('%Y-%m-%dT%H:%M:%SZ'))\n"
    "raise SystemExit(75)\n"
)


def test_reschedule_pokes_with_lingering_pods(world: World) -> None:
    """Two pokes and an end on one try_number, all three pods still there: each settles its own attempt once."""
    world.deploy()
    task = world.task("sensor")
    attempts = []
    for number, code in enumerate((RESCHEDULE, RESCHEDULE, "pass")):
        name = f"poke-{number}"
        attempts.append(world.launch(name, shim(code), task=task))
        world.keep(world.kube.wait_ended(name))
        result = world.run_pass()
        assert result.about(name)["disposition"] == "settled"
        for earlier in range(number):
            assert result.about(f"poke-{earlier}")["disposition"] in ("stale", "duplicate")
        expected = "success" if number == 2 else "up_for_reschedule"
        assert world.row(task)["state"] == expected
    assert [attempt.try_number for attempt in attempts] == [1, 1, 1]
    assert len({attempt.attempt_id for attempt in attempts}) == 3
    assert [entry["verdict"] for entry in world.ledger(task)] == [
        "reschedule",
        "reschedule",
        "success",
    ]


def test_stale_attempt(world: World) -> None:
    """The pod of an earlier attempt ends with a success after the task was dispatched anew: no write."""
    world.deploy()
    task = world.task("again")
    first = world.launch("first", shim("pass"), task=task)
    world.kube.wait_ended("first")
    world.call("call settle.fail(%s, 1, 'infra', 'Lost')", task)
    second = world.launch("second", shim(FOREVER), task=task)
    world.kube.wait_running("second")
    before = world.row(task)
    result = world.run_pass()
    assert result.about("first")["disposition"] == "stale"
    assert world.row(task) == before
    assert (first.try_number, second.try_number) == (1, 2)


def test_the_schedule_settles(world: World) -> None:
    """Nobody starts anything: the CronJob's own schedule finds the lost outcome."""
    world.deploy(scheduled=True)
    attempt = world.launch("lost", shim("pass"))
    wait_for(
        "settled by the schedule", lambda: world.row(attempt)["state"] == "success", timeout=180
    )
    jobs = world.kube.batch.list_namespaced_job(world.kube.namespace).items
    owners = {owner.kind for job in jobs for owner in job.metadata.owner_references}
    assert owners == {"CronJob"}


def outcome_lines(result: PassResult) -> dict[str, str]:
    """Map pods to dispositions."""
    return {line["pod"]: line["disposition"] for line in result.lines}


def test_released_only_after_it_is_settled(world: World) -> None:
    """A held pod that has not ended keeps the finalizer, whatever passes run; a settled one loses it."""
    world.deploy("hold")
    world.launch("runs", shim(FOREVER))
    world.launch("ends", shim("pass"))
    world.kube.wait_running("runs")
    world.kube.wait_ended("ends")
    lines = outcome_lines(world.run_pass())
    assert lines["ends"] == "settled"
    running, ended = world.kube.pod("runs"), world.kube.pod("ends")
    assert running is not None
    assert ended is not None
    assert running["metadata"]["finalizers"] == [FINALIZER]
    assert "finalizers" not in ended["metadata"]
