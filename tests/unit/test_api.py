from __future__ import annotations

import gc
import json
import os
import socket
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import urllib3

from reconciler.listing import (
    Cluster,
    KubernetesRefused,
    KubernetesUnreachable,
    Listing,
    _patience,
    connect,
    read_api,
)
from reconciler.pods import PROFILES, PodFacts
from tests.unit import fake_api
from tests.unit.fake_api import FakeApi, Fault, Pod, expired, status

PODSETTLE = PROFILES["podsettle"]
MANAGED = {"podsettle.io/managed": "true"}


def make_pod(number: int) -> Pod:
    return {
        "metadata": {
            "name": f"pod-{number:05}",
            "namespace": "tasks",
            "uid": f"uid-{number}",
            "labels": dict(MANAGED),
        },
        "spec": {"containers": [{"name": "base"}], "restartPolicy": "Never"},
        "status": {"phase": "Running"},
    }


Reader = Callable[..., tuple[FakeApi, Listing]]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Reader]:
    """Start a server and list from it through a kubeconfig and the official client."""
    opened: list[tuple[FakeApi, Cluster]] = []

    def start(
        count: int = 25,
        *,
        make: Callable[[int], Pod] = make_pod,
        faults: dict[int, Fault] | None = None,
        date: str | None = None,
        kube_namespace: str | None = "tasks",
        **options: Any,
    ) -> tuple[FakeApi, Listing]:
        api = FakeApi(make, count, faults=faults, date=date)
        api.__enter__()
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path, namespace=kube_namespace)))
        cluster = connect()
        opened.append((api, cluster))
        options.setdefault("page_size", 10)
        options.setdefault("profile", PODSETTLE)
        return api, read_api(cluster, **options)

    yield start
    for api, cluster in opened:
        cluster.api.rest_client.pool_manager.clear()
        api.__exit__(None, None, None)


def names(listing: Listing) -> list[str]:
    return [pod.pod for page in listing.pages for pod in page.pods]


def numbered(*numbers: int) -> list[str]:
    return [f"pod-{number:05}" for number in numbers]


def test_pages_follow_the_tokens(read: Reader) -> None:
    api, listing = read(25)
    assert not listing.complete, "nothing was read yet"
    assert api.requests == [], "nothing is read before a page is asked for"
    assert [len(page.pods) for page in listing.pages] == [10, 10, 5]
    assert listing.complete
    assert listing.problems == []
    assert [path for path, _ in api.requests] == ["/api/v1/namespaces/tasks/pods"] * 3
    first, second, third = (query for _, query in api.requests)
    assert first == {"limit": "10", "labelSelector": "podsettle.io/managed=true"}
    assert second == {**first, "continue": fake_api.token(10)}
    assert third == {**first, "continue": fake_api.token(20)}
    assert api.connections == 1, "the connection is used again"


def test_no_pods_at_all(read: Reader) -> None:
    _, listing = read(0)
    assert names(listing) == []
    assert listing.complete


def test_items_may_be_null(read: Reader) -> None:
    _, listing = read(faults={0: fake_api.body(b'{"kind":"PodList","metadata":{},"items":null}')})
    assert names(listing) == []
    assert listing.complete


def test_where_and_what_is_chosen(read: Reader) -> None:
    api, listing = read(3, namespace="other")
    assert names(listing) == []
    assert listing.complete
    assert api.requests[0][0] == "/api/v1/namespaces/other/pods"
    api, listing = read(3, all_namespaces=True, selector="")
    assert len(names(listing)) == 3
    assert api.requests == [("/api/v1/pods", {"limit": "10"})]
    api, listing = read(3, kube_namespace=None)
    assert names(listing) == []
    assert api.requests[0][0] == "/api/v1/namespaces/default/pods"
    for profile in PROFILES.values():
        api, listing = read(3, profile=profile)
        names(listing)
        assert api.requests[0][1]["labelSelector"] == profile.selector


def test_an_empty_page_with_a_token_goes_on(read: Reader) -> None:
    def make(number: int) -> Pod:
        pod = make_pod(number)
        if number < 20:
            pod["metadata"]["labels"] = {}
        return pod

    api, listing = read(25, make=make)
    assert names(listing) == numbered(*range(20, 25))
    assert listing.complete
    assert len(api.requests) == 3


def test_the_list_that_expires_once_is_begun_anew(read: Reader) -> None:
    api, listing = read(25, faults={2: expired(20)})
    assert names(listing) == numbered(*range(20), *range(25))
    assert listing.complete, "the second list is a consistent one"
    assert "continue" not in api.requests[3][1]


def test_the_list_that_expires_twice_goes_on_but_is_incomplete(read: Reader) -> None:
    api, listing = read(25, faults={1: expired(10), 3: expired(10)})
    assert names(listing) == numbered(*range(10), *range(25))
    assert not listing.complete
    assert listing.incomplete_because == "the list expired twice while it was read"
    assert api.requests[4][1]["continue"] == fake_api.token(10)


def test_expired_with_no_fresh_token_ends_incomplete(read: Reader) -> None:
    _, listing = read(25, faults={1: expired(None), 3: expired(None)})
    assert names(listing) == numbered(*range(10), *range(10))
    assert not listing.complete
    assert listing.incomplete_because is not None


def test_a_list_that_expires_for_ever_ends(read: Reader) -> None:
    faults = {number: expired(10) for number in range(1, 100) if number != 2}
    api, listing = read(25, faults=faults)
    assert len(names(listing)) == 20
    assert not listing.complete
    assert len(api.requests) < 50


def test_a_token_that_repeats_ends(read: Reader) -> None:
    page = {"kind": "PodList", "metadata": {"continue": "again"}, "items": [make_pod(1)]}
    raw = fake_api.body(json.dumps(page).encode())
    api, listing = read(faults=dict.fromkeys(range(50), raw))
    assert len(names(listing)) == 2
    assert len(api.requests) == 2
    assert listing.incomplete_because is not None


def test_a_busy_server_is_waited_for(read: Reader) -> None:
    busy = status(429, "too many requests", Retry_After="1")
    api, listing = read(25, faults={1: busy, 3: status(503, "starting"), 4: busy})
    begun = time.monotonic()
    assert names(listing) == numbered(*range(25))
    assert listing.complete
    assert time.monotonic() - begun >= 2, "Retry-After was honoured, twice"
    assert len(api.requests) == 6


def test_a_server_may_not_ask_for_any_wait() -> None:
    answer = urllib3.HTTPResponse(headers={"Retry-After": "86400"})
    assert _patience().get_retry_after(answer) == 30


@pytest.mark.slow
def test_busy_for_ever_at_the_first_page(read: Reader) -> None:
    busy = status(429, "too many requests", Retry_After="1")
    api, listing = read(faults=dict.fromkeys(range(100), busy))
    with pytest.raises(KubernetesUnreachable, match=r"429 .* namespace 'tasks'.*too many requests"):
        names(listing)
    assert 2 < len(api.requests) < 10
    assert not listing.complete


@pytest.mark.slow
def test_busy_for_ever_later(read: Reader) -> None:
    busy = status(429, "too many requests", Retry_After="1")
    _, listing = read(faults=dict.fromkeys(range(1, 100), busy))
    assert names(listing) == numbered(*range(10))
    assert listing.incomplete_because is not None
    assert "page 2" in listing.incomplete_because
    assert "429" in listing.incomplete_because
    assert not listing.complete


@pytest.mark.parametrize(
    "code, said, way_out",
    [
        (403, 'pods is forbidden: User "x" cannot list', "bind a Role with the verb list"),
        (401, "Unauthorized", "log in again"),
        (400, "unable to parse requirement", "check the selector"),
        (404, "page not found", "server's address"),
    ],
)
def test_refused(read: Reader, code: int, said: str, way_out: str) -> None:
    api, listing = read(faults={0: status(code, said + "\x1b[31m\n")})
    with pytest.raises(KubernetesRefused) as refused:
        names(listing)
    told = str(refused.value)
    assert "list pods in namespace 'tasks'" in told
    assert said in told
    assert way_out in told
    assert told.isprintable()
    assert len(api.requests) == 1, "asking again would not help"
    assert not listing.complete

    _, listing = read(faults={1: status(code, said)})
    assert names(listing) == numbered(*range(10))
    assert listing.incomplete_because is not None
    assert said in listing.incomplete_because


def test_refused_everywhere(read: Reader) -> None:
    _, listing = read(all_namespaces=True, faults={0: status(403, "forbidden")})
    with pytest.raises(KubernetesRefused, match=r"in all namespaces.*ClusterRole"):
        names(listing)


def test_refused_with_no_status_body(read: Reader) -> None:
    _, listing = read(faults={0: lambda handler: handler.raw(403, b"<html>\xff")})
    with pytest.raises(KubernetesRefused, match="Forbidden"):
        names(listing)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        api = FakeApi(make_pod, 0)
        api._server.server_close()
        api.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        listing = read_api(connect(), profile=PODSETTLE)
        with pytest.raises(KubernetesUnreachable, match=r"127\.0\.0\.1.*list pods.*KUBECONFIG"):
            names(listing)


@pytest.mark.parametrize("fault", [fake_api.silence, fake_api.hang_up, fake_api.cut])
def test_no_answer(read: Reader, fault: Fault) -> None:
    _, listing = read(faults=dict.fromkeys(range(100), fault), read_timeout=0.2)
    with pytest.raises(KubernetesUnreachable, match="list pods in namespace 'tasks'"):
        names(listing)
    _, listing = read(faults=dict.fromkeys(range(1, 100), fault), read_timeout=0.2)
    assert names(listing) == numbered(*range(10))
    assert listing.incomplete_because is not None
    assert "page 2" in listing.incomplete_because


@pytest.mark.parametrize(
    "fault", [fake_api.hang_up, fake_api.cut, fake_api.cut_length, fake_api.silence]
)
def test_an_answer_that_breaks_off_once_is_asked_for_again(read: Reader, fault: Fault) -> None:
    _, listing = read(25, faults={0: fault, 2: fault}, read_timeout=0.3)
    assert names(listing) == numbered(*range(25))
    assert listing.complete


def test_a_slow_answer_is_read(read: Reader) -> None:
    _, listing = read(5, faults={0: fake_api.drip}, read_timeout=0.3)
    assert names(listing) == numbered(*range(5))
    assert listing.complete


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"kind":"PodList","items":[',
        b"<html>please log in</html>",
        b"[]",
        b"null",
        b'{"kind":"Status"}',
        b'{"kind":"PodList","items":{}}',
        b'{"kind":"PodList"}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_broken_page_ends_incomplete(read: Reader, raw: bytes, number: int) -> None:
    _, listing = read(25, faults={number: fake_api.body(raw)})
    assert names(listing) == numbered(*range(10 * number))
    assert not listing.complete
    assert listing.incomplete_because is not None
    assert f"page {number + 1}" in listing.incomplete_because
    assert len(listing.problems) == 1


def test_one_broken_character_costs_nothing(read: Reader) -> None:
    pod = make_pod(1)
    pod["status"]["message"] = "half: \ud800"
    page = json.dumps({"kind": "PodList", "items": [pod, make_pod(2)]}).encode()
    page = page.replace(b"half", b"\xff\xfe")
    _, listing = read(faults={0: fake_api.body(page)})
    pods = [pod for page in listing.pages for pod in page.pods]
    assert [pod.pod for pod in pods] == numbered(1, 2)
    assert pods[0].pod_message == "\ufffd\ufffd: \ufffd"
    assert listing.complete


def test_a_broken_item_leaves_the_others(read: Reader) -> None:
    items = [make_pod(0), "pod", {"metadata": {}}, make_pod(1), {"kind": "Service"}]
    raw = json.dumps({"kind": "PodList", "items": items}).encode()
    _, listing = read(faults={0: fake_api.body(raw)})
    (page,) = listing.pages
    assert [pod.pod for pod in page.pods] == numbered(0, 1)
    assert page.problems == listing.problems
    assert page.problems == [
        "page 1, item 2: expected a pod, found a string",
        "page 1, item 3: the pod has no metadata.name",
        "page 1, item 5: expected kind Pod, found 'Service'",
    ]
    assert listing.incomplete_because == page.problems[0], "a pod that cannot be named was lost"


def test_the_servers_clock(read: Reader) -> None:
    _, listing = read(25, date="Sun, 06 Nov 1994 08:49:37 GMT")
    assert listing.api_date is None
    before = time.monotonic()
    next(listing.pages)
    assert listing.api_date == datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert listing.api_date_monotonic is not None
    assert before <= listing.api_date_monotonic <= time.monotonic()
    seen = listing.api_date_monotonic
    names(listing)
    assert listing.api_date_monotonic == seen, "it belongs to the first page"
    _, listing = read(5, date="yesterday")
    names(listing)
    assert listing.api_date is None


# --- configuration -----------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither a kubeconfig nor a cluster around the process."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_no_configuration(bare: Path) -> None:
    with pytest.raises(KubernetesUnreachable, match="set KUBECONFIG, or run in a pod"):
        connect()


@pytest.mark.parametrize("content", ["", "a: [", "apiVersion: v1\n", "\x00", '"text"'])
def test_a_broken_kubeconfig(bare: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    file = bare / "broken"
    file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(KubernetesUnreachable, match="no usable Kubernetes configuration"):
        connect()


def test_the_default_file_and_the_list_of_files(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi(make_pod, 0)
    api._server.server_close()
    (bare / ".kube").mkdir()
    file = api.kubeconfig(bare, namespace="mine").rename(bare / ".kube" / "config")
    cluster = connect()
    assert (cluster.address, cluster.namespace) == (api.url, "mine")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(bare / "missing"), str(file)]))
    assert connect().address == api.url
    assert connect("fake").namespace == "mine"
    with pytest.raises(KubernetesUnreachable, match="elsewhere"):
        connect("elsewhere")


# --- memory ------------------------------------------------------------------------------------


def fat_pod(number: int) -> Pod:
    pod = make_pod(number)
    pod["status"]["message"] = f"{number} " + "m" * 1000
    pod["metadata"]["annotations"] = {"ballast": f"{number}" * 100}
    return pod


def test_only_a_page_of_pods_is_alive(read: Reader) -> None:
    _, listing = read(3000, page_size=100)
    alive: weakref.WeakSet[PodFacts] = weakref.WeakSet()
    most = seen = 0
    for page in listing.pages:
        for pod in page.pods:
            alive.add(pod)
            seen += 1
        most = max(most, len(alive))
        del page, pod
        gc.collect()
        assert len(alive) == 0, "the reader keeps no page"
    assert seen == 3000
    assert most == 100


@pytest.mark.slow
def test_memory_stays_flat(read: Reader) -> None:
    """Ten times the pods in the same memory (the server builds its pods one page at a time)."""

    def peak(count: int) -> int:
        _, listing = read(count, make=fat_pod, page_size=250)
        gc.collect()
        tracemalloc.start()
        try:
            assert sum(len(page.pods) for page in listing.pages) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(500)
    small, large = peak(2000), peak(20_000)
    # Holding the pods would cost ten times as much; the server's log of requests grows a little.
    assert large < small * 2
