"""The pass itself, in the cluster, when something happens to it: killed, doubled, forbidden, cut off, or given much.

The pods here have ended without ever having run: their status is written through the API, since what is tested is the
pass. Where a pass must be caught in the middle, the test holds the row of a task instance that the pass needs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from harness import Cluster, wait_for
from world import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from world import World

MANY = 5000


def make_ended_pods(world: World, count: int) -> list[str]:
    """Dispatch so many tasks, and make a pod for each that says it succeeded; return the task instances."""
    rows = world.db.execute(
        "with made as materialized (select n, settle.create_task('dag', 'many', 'task-' || n, p_namespace => %s) as id"
        " from generate_series(1, %s) as n)"
        " select n, id::text as id, d.* from made cross join lateral settle.dispatch(id) as d order by n",
        [world.kube.namespace, count],
    ).fetchall()
    status = {
        "status": {
            "phase": "Succeeded",
            "containerStatuses": [
                {
                    "name": "base",
                    "image": "none",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {
                        "terminated": {
                            "exitCode": 0,
                            "reason": "Completed",
                            "startedAt": "2026-01-01T00:00:00Z",
                            "finishedAt": "2026-01-01T00:00:01Z",
                            "message": '{"v":1,"outcome":"success"}',
                        }
                    },
                }
            ],
        }
    }

    def make(row: dict[str, Any]) -> None:
        pod = world.kube.task_pod(
            f"p-{row['n']:05}",
            ["none"],
            task_instance_id=row["id"],
            try_number=row["try_number"],
            attempt_id=row["attempt_id"],
            spec={"schedulerName": "nobody"},
        )
        name, namespace = pod["metadata"]["name"], world.kube.namespace
        world.kube.core.create_namespaced_pod(namespace, pod, _preload_content=False).read()
        world.kube.core.patch_namespaced_pod_status(
            name, namespace, status, _preload_content=False
        ).read()

    with ThreadPoolExecutor(8) as workers:
        for _ in workers.map(make, rows):
            pass
    return [row["id"] for row in rows]


@contextlib.contextmanager
def holding(world: World, task: str) -> Iterator[None]:
    """Keep the row of a task instance locked, so that a pass comes no further than to it."""
    with connect(world.dsn) as holder, holder.transaction():
        holder.execute("select 1 from settle.task_instance where id = %s for update", [task])
        yield


def wait_blocked(world: World, count: int = 1) -> None:
    """Wait until so many passes wait for the row."""

    def blocked() -> bool:
        row = world.call(
            "select count(*) as n from pg_stat_activity where datname = %s and wait_event_type = 'Lock'",
            world.name,
        )
        return bool(row["n"] >= count)

    wait_for("a pass waits for the row", blocked)


def states(world: World, tasks: list[str]) -> dict[str, int]:
    """Count task instances by state."""
    rows = world.db.execute(
        "select state, count(*) as n from settle.task_instance where id = any(%s::uuid[]) group by 1",
        [tasks],
    ).fetchall()
    return {row["state"]: row["n"] for row in rows}


def assert_settled_once(world: World, tasks: list[str]) -> None:
    """Every task succeeded, by exactly one settlement, and nothing is suspected."""
    assert states(world, tasks) == {"success": len(tasks)}
    row = world.call(
        "select count(*) as n, count(distinct task_instance_id) as tasks from settle.settlement"
    )
    assert (row["n"], row["tasks"]) == (len(tasks), len(tasks))
    assert world.call("select count(*) as n from settle.suspicion")["n"] == 0


def set_page_size(world: World, size: int) -> None:
    """Configure the pass, by its ConfigMap."""
    data = json.dumps({"data": {"PODSETTLE_PAGE_SIZE": str(size)}})
    world.kube.kubectl("patch", "configmap", "podsettle", "--type=merge", "-p", data)


def pass_pod(world: World, job: str) -> dict[str, Any]:
    """Wait until the pod of a pass runs."""

    def running() -> dict[str, Any] | None:
        for pod in world.kube.core.list_namespaced_pod(
            world.kube.namespace, label_selector=f"job-name={job}"
        ).items:
            if pod.status.phase == "Running":
                return world.kube.plain(pod)
        return None

    return wait_for(f"{job} runs", running)


def test_killed_in_the_middle(world: World) -> None:
    """SIGKILL between two pages: what was committed stays, and the next pass reaches the same end."""
    cluster = world.kube.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("SIGKILL behind the kubelet's back needs a cluster of our own")
    world.deploy()
    set_page_size(world, 2)
    tasks = make_ended_pods(world, 6)
    with holding(world, tasks[3]):
        job = world.start_pass()
        wait_blocked(world)
        pod = pass_pod(world, job)
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix(
            "containerd://"
        )
        cluster.kill_container(pod["spec"]["nodeName"], container)
        killed = world.kube.wait_pass(job)
        assert killed.exit_code == 137
        assert states(world, tasks) == {"success": 2, "queued": 4}
    world.run_pass()
    assert_settled_once(world, tasks)


def test_two_at_once(world: World) -> None:
    """Two passes over the same pods at the same time: each outcome is settled once."""
    world.deploy()
    set_page_size(world, 2)
    tasks = make_ended_pods(world, 6)
    with holding(world, tasks[3]):
        jobs = [world.start_pass(), world.start_pass()]
        for job in jobs:
            pass_pod(world, job)
        wait_blocked(world)
    results = [world.kube.wait_pass(job) for job in jobs]
    assert [result.exit_code for result in results] == [0, 0], [result.output for result in results]
    dispositions = sorted(line["disposition"] for result in results for line in result.lines)
    assert dispositions == ["duplicate"] * 6 + ["settled"] * 6
    assert_settled_once(world, tasks)


def test_rbac_too_small(world: World) -> None:
    """Without the Role the pass says which right is missing, exits 5, and judges nobody absent."""
    world.deploy()
    tasks = make_ended_pods(world, 1)
    world.kube.kubectl("delete", "rolebinding", "podsettle")
    result = world.kube.wait_pass(world.start_pass())
    assert result.exit_code == 5
    last = result.output.strip().splitlines()[-1]
    assert "list pods" in last, result.output
    assert world.kube.namespace in last
    assert "Traceback" not in result.output
    assert states(world, tasks) == {"queued": 1}
    assert world.call("select count(*) as n from settle.suspicion")["n"] == 0


def test_no_secret(world: World) -> None:
    """A pass without its DSN never starts, and the pod says which secret is missing."""
    world.deploy()
    world.kube.kubectl("delete", "secret", "podsettle")
    job = world.start_pass()

    def reason() -> str:
        path = "-o=jsonpath={.items[0].status.containerStatuses[0].state.waiting}"
        return world.kube.kubectl("get", "pods", "-l", f"job-name={job}", path, check=False)

    wait_for("secret named", lambda: 'secret \\"podsettle\\" not found' in reason())


def test_api_restarted_during_a_list(world: World) -> None:
    """The API goes away between two pages: what was read is settled, and nobody is taken for absent."""
    cluster = world.kube.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("restarting the API server needs a cluster of our own")
    world.deploy()
    world.set("absent_after", "0 s")
    set_page_size(world, 5)
    tasks = make_ended_pods(world, 30)
    with holding(world, tasks[7]):
        job = world.start_pass()
        wait_blocked(world)
        assert cluster.stop("kube-apiserver", signal.SIGKILL) == -signal.SIGKILL
    try:
        # The page that was read is settled while there is no API; the next one is then asked for in vain.
        wait_for("second page settled", lambda: states(world, tasks).get("success", 0) >= 10)
        time.sleep(1)
    finally:
        cluster.start_again("kube-apiserver")
    result = world.kube.wait_pass(job)
    assert result.exit_code in (0, 3), result.output
    if result.exit_code == 3:
        assert "incomplete" in result.output
        assert states(world, tasks)["success"] < 30
    assert world.call("select count(*) as n from settle.suspicion")["n"] == 0
    world.run_pass()
    assert_settled_once(world, tasks)


def test_five_thousand_pods(world: World) -> None:
    """Many pages in little memory, within the CronJob's own deadline, and no pod is missed."""
    limits = {"limits": {"memory": "128Mi"}}
    world.deploy(containers=[{"name": "podsettle", "resources": limits}])
    tasks = make_ended_pods(world, MANY)
    result = world.run_pass()
    assert len(result.lines) == len({line["pod"] for line in result.lines}) == MANY
    assert {line["disposition"] for line in result.lines} == {"settled"}
    assert_settled_once(world, tasks)
    again = world.run_pass()
    assert {line["disposition"] for line in again.lines} == {"duplicate"}
    world.kube.kubectl("delete", "pods", "--all", "--wait=false", "--grace-period=0")
