"""The sample pod: what it runs works, and it names what the reconciler looks for."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.shim.test_bundle import Image, bundle, image, program

__all__ = ["bundle", "image", "program"]  # fixtures

SAMPLE = Path(__file__).resolve().parents[2] / "k8s" / "samples" / "task-pod.yaml"


def test_the_sample_pod_runs_its_task_through_the_shim(image: Image) -> None:
    pod = yaml.safe_load(SAMPLE.read_text())
    attempt = pod["metadata"]["annotations"]["podsettle.io/attempt-id"]
    (init,) = pod["spec"]["initContainers"]
    (task,) = pod["spec"]["containers"]
    # The fixture has installed the bundle with just this call.
    assert init["command"] == ["/agent-shim", "install", "/podsettle"]

    env = {entry["name"]: entry.get("value", attempt) for entry in task["env"]}
    (image.root / "tmp").mkdir()
    ended = image.start_words(
        [*image.prefix[:-1], *task["command"], "/program", "exit", "3"], env=env
    ).end()
    assert (ended.code, ended.err) == (3, "")
    assert ended.record == {"v": 1, "outcome": "failed", "exit_code": 3, "attempt_id": attempt}


def test_the_sample_pod_is_selected_identified_kept_and_hardened() -> None:
    pod = yaml.safe_load(SAMPLE.read_text())
    meta, spec = pod["metadata"], pod["spec"]
    assert meta["labels"] == {"podsettle.io/managed": "true", "podsettle.io/try-number": "1"}
    assert set(meta["annotations"]) == {
        "podsettle.io/task-instance-id",
        "podsettle.io/attempt-id",
    }
    assert meta["finalizers"] == ["podsettle.io/outcome"]
    assert spec["restartPolicy"] == "Never"
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    (task,) = spec["containers"]
    assert task["terminationMessagePath"] == "/dev/termination-log"
    assert task["terminationMessagePolicy"] == "File"
    env = {entry["name"]: entry.get("value") for entry in task["env"]}
    assert spec["activeDeadlineSeconds"] > float(env["PODSETTLE_TIMEOUT"])
    assert spec["terminationGracePeriodSeconds"] > float(env["PODSETTLE_KILL_GRACE"])
