"""`podsettle release` against an API that answers as one that is changed, emptied or forbidden meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.unit.fake_api import FakeApi, Fault, hang_up, status

FINALIZER = "podsettle.io/outcome"


def held(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"p-{number}",
            "namespace": "tasks",
            "uid": f"uid-{number}",
            "resourceVersion": str(number),
            "labels": {"podsettle.io/managed": "true"},
            # The second is not ours to touch.
            "finalizers": ["example.org/other", FINALIZER] if number != 1 else ["example.org/x"],
        },
    }


@pytest.fixture
def release(podsettle: Callable[..., Run], tmp_path: Path) -> Callable[..., tuple[FakeApi, Run]]:
    """Free everything without a database, while some pods meet a fault."""

    def run(faults: dict[str, Fault], **how: Any) -> tuple[FakeApi, Run]:
        with FakeApi(held, 4) as api:
            api.write_faults = faults
            config = str(api.kubeconfig(tmp_path))
            done = podsettle(
                "release", "--all", *how.pop("options", ["--yes"]), **how, KUBECONFIG=config
            )
        return api, done

    return run


def test_each_held_pod_is_patched_as_it_was_read(
    release: Callable[..., tuple[FakeApi, Run]],
) -> None:
    api, run = release({})
    assert run.code == 0, run.err
    assert run.out.splitlines()[-3:] == [f"tasks/p-{n}: released" for n in (0, 2, 3)]
    assert api.writes == [
        (
            "PATCH",
            f"/api/v1/namespaces/tasks/pods/p-{n}",
            [
                {"op": "test", "path": "/metadata/uid", "value": f"uid-{n}"},
                {"op": "test", "path": "/metadata/resourceVersion", "value": str(n)},
                {"op": "test", "path": "/metadata/finalizers/1", "value": FINALIZER},
                {"op": "remove", "path": "/metadata/finalizers/1"},
            ],
        )
        for n in (0, 2, 3)
    ]


def test_one_that_changed_or_is_gone_does_not_keep_the_others(
    release: Callable[..., tuple[FakeApi, Run]],
) -> None:
    _, run = release({"p-0": status(404, "not found"), "p-2": status(422, "a test failed")})
    assert run.code == 0, run.err
    assert run.out.splitlines()[-3:] == [
        "tasks/p-0: gone already",
        "tasks/p-2: changed meanwhile, the next pass tries again",
        "tasks/p-3: released",
    ]
    _, run = release({"p-0": status(409, "conflict")})
    assert run.out.splitlines()[-3].startswith("tasks/p-0: changed meanwhile")


@pytest.mark.parametrize(
    ("fault", "told", "not_told"),
    [
        (status(403, "no"), "does not allow to patch pods in namespace 'tasks'", "answered"),
        (status(500, "etcd is gone"), "answered 500", "k8s/overlays/hold"),
        (hang_up, "no answer from Kubernetes to patch pod", "k8s/overlays/hold"),
    ],
    ids=["forbidden", "broken", "silent"],
)
def test_a_refusal_is_told_and_ends_it(
    release: Callable[..., tuple[FakeApi, Run]], fault: Fault, told: str, not_told: str
) -> None:
    api, run = release({"p-2": fault})
    assert run.code == 5
    assert told in run.err
    assert not_told not in run.err
    assert run.out.splitlines()[-1] == "tasks/p-0: released"
    assert {path.rpartition("/")[2] for _, path, _ in api.writes} == {"p-0", "p-2"}


def test_no_means_no(release: Callable[..., tuple[FakeApi, Run]]) -> None:
    api, run = release({}, options=[], stdin="n\n")
    assert run.code == 1
    assert "Free 3 pods?" in run.out
    assert api.writes == []
