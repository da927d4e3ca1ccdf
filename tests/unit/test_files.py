from __future__ import annotations

import gc
import io
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.listing import Listing, NoSuchPods, read_files
from reconciler.pods import PROFILES, PodFacts
from tests.unit.conftest import CORPUS

PODSETTLE = PROFILES["podsettle"]


def pod(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {}, "status": {}, **more}


def listing_of(path: Path | str, **options: Any) -> Listing:
    return read_files(str(path), profile=PODSETTLE, **options)


def names(listing: Listing) -> list[str]:
    return [pod.pod for page in listing.pages for pod in page.pods]


def write(folder: Path, content: object, name: str = "pods.json") -> Path:
    file = folder / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return file


@pytest.mark.parametrize(
    "document, found",
    [
        (pod("a"), ["a"]),
        ({"metadata": {"name": "a"}}, ["a"]),
        ({"kind": "List", "items": [pod("a"), pod("b")]}, ["a", "b"]),
        # kubectl sorts the keys, so the kind comes after the items.
        ({"apiVersion": "v1", "items": [pod("a")], "kind": "List", "metadata": {}}, ["a"]),
        ({"kind": "PodList", "items": [{"metadata": {"name": "a"}}]}, ["a"]),
        ({"items": [pod("a")]}, ["a"]),
        ({"kind": "PodList", "items": []}, []),
        ({"kind": "PodList", "items": None}, []),
        # Pods have arrays called items inside, and lists have other members.
        (pod("a", spec={"volumes": [{"configMap": {"items": [{"metadata": {}}]}}]}), ["a"]),
        ({"x": {"items": [1]}, "y": [[2], "items"], "items": [pod("a")], "z": [3]}, ["a"]),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_what_a_file_may_hold(
    tmp_path: Path, document: object, found: list[str], indent: int | None
) -> None:
    listing = listing_of(write(tmp_path, json.dumps(document, indent=indent)))
    assert not listing.complete
    assert names(listing) == found
    assert listing.problems == []
    assert listing.complete
    assert listing.api_date is None


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    listing = listing_of(write(tmp_path, b"\xef\xbb\xbf\n " + json.dumps(pod("a")).encode()))
    assert names(listing) == ["a"]
    assert listing.complete


@pytest.mark.parametrize(
    "content, found, problem",
    [
        (b"", [], "pods.json: is empty"),
        (b" \n\t", [], "pods.json: is empty"),
        ("kubectl: command not found", [], "pods.json: is not JSON"),
        ("apiVersion: v1\nkind: Pod\n", [], "is YAML, not JSON; kubectl writes JSON with -o json"),
        ("---\nkind: Pod\n", [], "is YAML"),
        (json.dumps(pod("a")).encode("utf-16"), [], "is UTF-16"),
        ([pod("a")], [], "is a JSON array"),
        ("7", [], "is not JSON"),
        ("{}", [], "the pod has no metadata.name"),
        ({"kind": "Deployment", "metadata": {"name": "d"}}, [], "found kind 'Deployment'"),
        ({"kind": ["x"], "metadata": {"name": "d"}}, [], "found kind a list"),
        ({"kind": "ServiceList", "items": [{"metadata": {"name": "s"}}]}, [], "'ServiceList'"),
        ({"kind": "ServiceList", "items": None}, [], "'ServiceList'"),
        ({"kind": "List"}, [], "is a list with no items"),
        ({"kind": "List", "items": {}}, [], "is a list whose items are an object"),
        ({"items": [], "kind": "ServiceList"}, [], "'ServiceList'"),
        ({"kind": "Pod", "items": [{"metadata": {"name": "s"}}]}, [], "found kind 'Pod'"),
        ('{"kind":"List","items":[' + json.dumps(pod("a")), ["a"], "is cut off in the middle"),
        ('{"kind":"List","items":[' + json.dumps(pod("a")) + ',{"kind"', ["a"], "is cut off"),
        ('{"kind":"List","items":[' + json.dumps(pod("a")) + ",NaN]}", ["a"], "is broken JSON"),
        ('{"kind":"List","items":[' + json.dumps(pod("a")) + "}", ["a"], "is broken JSON"),
        ('{"kind":"Pod","metadata":{"name":"a"}', [], "is cut off in the middle"),
        (json.dumps(pod("a")) + json.dumps(pod("b")), ["a"], "goes on after the end"),
        (b'{"kind":"List","items":[{"metadata":{"name":"a"}},"\xff"]}', ["a"], "is broken JSON"),
        ('{"items":[' + "[" * 100_000, [], "is nested too deeply"),
        ('{"a":' * 100_000, [], "is nested too deeply"),
        (
            {"kind": "PodList", "metadata": {"continue": "t"}, "items": [pod("a")]},
            ["a"],
            "is one page of a longer list",
        ),
        ({"items": [7, pod("a")]}, ["a"], "pods.json: item 1: expected a pod, found a number"),
        ({"items": [{}, pod("a")]}, ["a"], "pods.json: item 1: the pod has no metadata.name"),
    ],
)
def test_a_fault_is_one_clear_line_and_the_rest_goes_on(
    tmp_path: Path, content: object, found: list[str], problem: str
) -> None:
    write(tmp_path, content)
    write(tmp_path, pod("z"), "z.json")
    listing = listing_of(tmp_path)
    assert names(listing) == [*found, "z"]
    (told,) = listing.problems
    assert problem in told
    assert told.startswith("pods.json: ")
    assert told.isprintable()
    assert len(told) < 300
    assert not listing.complete
    assert listing.incomplete_because == told


def test_things_of_another_kind_in_a_list_are_named_and_cost_nothing(tmp_path: Path) -> None:
    items = [pod("a"), {"kind": "Service", "metadata": {"name": "s"}}, pod("b")]
    listing = listing_of(write(tmp_path, {"kind": "List", "items": items}))
    assert names(listing) == ["a", "b"]
    assert listing.problems == ["pods.json: item 2: expected kind Pod, found 'Service'"]
    assert listing.complete, "no pod can be missing because of a service"


def test_a_folder_is_read_in_order_and_not_below(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path, pod(name), f"{name}.json")
    write(tmp_path, pod("x"), "x.txt")
    (tmp_path / "below.json").mkdir()
    write(tmp_path / "below.json", pod("y"), "y.json")
    listing = listing_of(tmp_path, page_size=2)
    assert [[pod.pod for pod in page.pods] for page in listing.pages] == [["a", "b"], ["c"]]
    assert listing.complete


def test_an_empty_folder(tmp_path: Path) -> None:
    listing = listing_of(tmp_path)
    assert names(listing) == []
    assert not listing.complete
    assert "no *.json file" in listing.problems[0]


def test_a_file_name_cannot_forge_a_line(tmp_path: Path) -> None:
    write(tmp_path, "{}", "evil\n\x1b[2J.json")
    listing = listing_of(tmp_path)
    names(listing)
    assert listing.problems[0].startswith(r"evil\n\x1b[2J.json: ")


def test_the_corpus_as_folders() -> None:
    for folder, count in (("reports", 64), ("cluster", 31)):
        listing = listing_of(CORPUS / folder)
        assert len(names(listing)) == count
        assert listing.complete


@pytest.mark.parametrize("path", ["missing.json", "missing/", "nul\x00", "x" * 5000])
def test_a_missing_path_is_an_error_of_usage(tmp_path: Path, path: str) -> None:
    with pytest.raises(NoSuchPods) as error:
        listing_of(tmp_path / path)
    assert str(error.value).isprintable()


def test_a_file_that_vanishes_is_a_problem(tmp_path: Path) -> None:
    file = write(tmp_path, pod("a"))
    write(tmp_path, pod("b"), "z.json")
    listing = listing_of(tmp_path)
    file.unlink()
    assert names(listing) == ["b"]
    assert listing.problems == ["pods.json: cannot be read: No such file or directory"]
    assert not listing.complete


def feed_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize(
    "content, found, problem",
    [
        (json.dumps(pod("a")), ["a"], None),
        (json.dumps({"kind": "List", "items": [pod("a"), pod("b")]}), ["a", "b"], None),
        ("", [], "standard input: is empty"),
        ('{"kind":"List","items":[' + json.dumps(pod("a")), ["a"], "standard input: is cut off"),
    ],
)
def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, content: str, found: list[str], problem: str | None
) -> None:
    feed_stdin(monkeypatch, content.encode())
    listing = listing_of("-")
    assert names(listing) == found
    assert listing.complete is (problem is None)
    assert problem is None or problem in listing.problems[0]


def test_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(pod("a")),))
    writer.start()
    assert names(listing_of(pipe)) == ["a"]
    writer.join()


def test_there_is_an_end_to_the_problems(tmp_path: Path) -> None:
    listing = listing_of(write(tmp_path, {"items": [7] * 5000 + [pod("a")]}), page_size=100)
    pages = list(listing.pages)
    assert max(len(page.problems) for page in pages) == 100
    assert [pod.pod for page in pages for pod in page.pods] == ["a"]
    assert len(listing.problems) == 1001
    assert listing.problems[-1] == "there are more problems than are listed here"


class Endless(io.RawIOBase):
    """A list of pods that is made while it is read."""

    def __init__(self, count: int) -> None:
        self.chunks = self.make(count)
        self.rest = b""

    def make(self, count: int) -> Iterator[bytes]:
        yield b'{"apiVersion":"v1","items":['
        for number in range(count):
            comma = b"," if number else b""
            yield comma + json.dumps(pod(f"pod-{number}", ballast="x" * 2000)).encode()
        yield b'],"kind":"List"}'

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.rest = self.rest or next(self.chunks, b"")
        size = min(len(buffer), len(self.rest))
        buffer[:size] = self.rest[:size]
        self.rest = self.rest[size:]
        return size


def test_only_a_page_of_pods_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(Endless(2000)))
    monkeypatch.setattr(sys, "stdin", stdin)
    listing = listing_of("-", page_size=100)
    alive: weakref.WeakSet[PodFacts] = weakref.WeakSet()
    seen = 0
    for page in listing.pages:
        for facts in page.pods:
            alive.add(facts)
            seen += 1
        assert len(alive) <= 100
        del page, facts
        gc.collect()
        assert len(alive) == 0
    assert seen == 2000
    assert listing.complete


_WHOLE = json.dumps({"kind": "List", "items": [pod("a"), pod("b"), pod("c")]}).encode()


@given(cut=st.integers(0, len(_WHOLE)), noise=st.binary(max_size=6), at=st.integers(0, len(_WHOLE)))
def test_damage_anywhere_never_raises(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes, at: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    damaged = (_WHOLE[:at] + noise + _WHOLE[at:])[: cut + len(noise)]
    listing = listing_of(write(folder, damaged, "damaged.json"))
    found = names(listing)
    assert len(found) <= 3
    assert all(problem.isprintable() for problem in listing.problems)
    if len(found) < 3 and damaged != _WHOLE:
        assert listing.problems
