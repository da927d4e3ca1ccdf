"""Lists of pods, page by page, from files and from the Kubernetes API.

Memory holds one page, however long the list is. What goes wrong while reading is kept beside the
pods: a listing says whether any pod can be missing from it, and why.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import ijson
import urllib3
from pydantic_core import from_json

from reconciler import text
from reconciler.fields import (
    MAX_NAME,
    MAX_WORD,
    NOTHING,
    Json,
    Malformed,
    json_type,
    mapping,
    string,
)
from reconciler.pods import BadPod, PodFacts, Profile

PAGE_SIZE: Final = 250
"""Pods a page; larger pages are throttled on small control planes (a seat for each 100 kB)."""

_MAX_PROBLEMS: Final = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """Some pods of a listing, and what was wrong among them."""

    pods: list[PodFacts]
    problems: list[str]


class Listing:
    """Pods, page by page, and how far the list can be trusted once its pages are read.

    Attributes:
        pages: The pages, once; nothing is read before the first is asked for. No earlier page is
            kept alive.
        incomplete_because: Why pods may be missing from the pages; the first cause counts. None
            while there is none.
        problems: One sentence for each thing that could not be read, the first thousand of them.
        api_date: The API server's clock, from its answer with the first page; None from files.
        api_date_monotonic: `time.monotonic()`, in seconds, when that answer came.
    """

    def __init__(self, source: Callable[[Listing], Iterator[Page]]) -> None:
        self.pages: Final[Iterator[Page]] = self._read(source)
        self.incomplete_because: str | None = None
        self.problems: list[str] = []
        self.api_date: datetime | None = None
        self.api_date_monotonic: float | None = None
        self._finished = False

    @property
    def complete(self) -> bool:
        """Whether all pages were read and no pod can be missing from them."""
        return self._finished and self.incomplete_because is None

    def _read(self, source: Callable[[Listing], Iterator[Page]]) -> Iterator[Page]:
        yield from source(self)
        self._finished = True

    def mark_incomplete(self, because: str) -> None:
        """Say, while reading, why pods may be missing."""
        if self.incomplete_because is None:
            self.incomplete_because = because

    def note(self, problem: str) -> None:
        """Keep, while reading, what was wrong."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        elif len(self.problems) == _MAX_PROBLEMS:
            self.problems.append("there are more problems than are listed here")


@dataclass(slots=True)
class _Batch:
    """The page that is being filled."""

    listing: Listing
    profile: Profile
    container: str | None
    pods: list[PodFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, manifest: object, where: str) -> None:
        try:
            self.pods.append(
                PodFacts.from_manifest(manifest, profile=self.profile, container=self.container)
            )
        except BadPod as bad:
            if bad.lost:
                self.lose(f"{where}: {bad}")
            else:
                self.note(f"{where}: {bad}")

    def note(self, problem: str) -> None:
        self.problems.append(problem)
        self.listing.note(problem)

    def lose(self, problem: str) -> None:
        self.note(problem)
        self.listing.mark_incomplete(problem)

    def __len__(self) -> int:
        return len(self.pods) + len(self.problems)

    def take(self) -> Page:
        page = Page(self.pods, self.problems)
        self.pods, self.problems = [], []
        return page


# --- from files --------------------------------------------------------------------------------

_CHUNK: Final = 1 << 16
_MAX_DEPTH: Final = 200
_LIST_KINDS: Final = ("PodList", "List")


class NoSuchPods(ValueError):  # noqa: N818 -- a wrong command line, not an error of the program
    """The path that should hold the pods is missing or cannot be opened."""


def read_files(
    path: str,
    *,
    profile: Profile,
    container: str | None = None,
    page_size: int = PAGE_SIZE,
) -> Listing:
    """Read pods from JSON as `kubectl get pods -o json` writes it.

    Args:
        path: A file with a Pod, a PodList or a List; a folder of such files (`*.json`, in order of
            name, not the folders below it); `-` for standard input.
        profile: How the host marks its pods.
        container: The name of the task container, see `PodFacts.from_manifest`.
        page_size: The greatest number of pods in a page.

    Returns:
        The listing. Whatever is wrong with a file is one of its problems: what could be read
        before the fault is in the pages, the other files are read on, and the listing is
        incomplete. Files are streamed: memory holds a page, not a file.

    Raises:
        NoSuchPods: There is no such path, or it may not be read.
    """
    sources: list[tuple[str, Path | None]]
    if path == "-":
        sources = [("standard input", None)]
    else:
        sources = [(file.name, file) for file in _files(Path(path))]

    def pages(listing: Listing) -> Iterator[Page]:
        batch = _Batch(listing, profile, container)
        if not sources:
            batch.lose(f"{text.escape(path)}: the folder holds no *.json file")
        for name, file in sources:
            shown = text.escape(text.clip(name, MAX_NAME))
            for manifest, where in _manifests(shown, file, batch):
                batch.add(manifest, where)
                if len(batch) >= page_size:
                    yield batch.take()
        if len(batch):
            yield batch.take()

    return Listing(pages)


def _files(path: Path) -> list[Path]:
    shown = text.quote(str(path), 200)
    try:
        if path.is_dir():
            return sorted(file for file in path.glob("*.json") if file.is_file())
        # Not opened to find out: of a named pipe that would take the writer away.
        if path.exists():
            if os.access(path, os.R_OK):
                return [path]
            raise NoSuchPods(f"{shown} may not be read")
    except OSError as error:
        raise NoSuchPods(f"{shown} cannot be read: {_why(error)}") from None
    raise NoSuchPods(f"there is no file or folder {shown}")


def _manifests(name: str, file: Path | None, batch: _Batch) -> Iterator[tuple[object, str]]:
    """Yield the pods of one file; what is wrong with the file goes to the batch."""
    try:
        if file is None:
            yield from _stream(name, sys.stdin.buffer, batch)
        else:
            with file.open("rb") as opened:
                yield from _stream(name, opened, batch)
    except OSError as error:
        batch.lose(f"{name}: cannot be read: {_why(error)}")


def _stream(name: str, opened: IO[bytes], batch: _Batch) -> Iterator[tuple[object, str]]:
    chunk = opened.read(_CHUNK)
    fault = _not_json(chunk)
    if fault is not None:
        batch.lose(f"{name}: {fault}")
        return
    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
    document = _Document()
    # The parser's own generators lose what they read before a fault; a list that is fed does not.
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events)
    items = 0
    while fault is None:
        broken = False
        try:
            if chunk:
                parser.send(chunk)
            else:
                parser.close()
        except ijson.JSONError:
            broken = True
        try:
            for manifest in document.feed(events):
                items += 1
                yield manifest, f"{name}: item {items}"
        except Malformed as malformed:
            fault = str(malformed)
        else:
            if broken:
                fault = _fault(chunk, document)
        events.clear()
        if not chunk:
            break
        chunk = opened.read(_CHUNK)
    if fault is None:
        fault = document.fault()
    if document.closed and not document.is_list and document.is_pod:
        yield document.top, name
    if fault is not None:
        batch.lose(f"{name}: {fault}")


def _not_json(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; write it as UTF-8"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:200]
    if not start:
        return "is empty"
    if start.startswith(b"{"):
        return None
    if start.startswith(b"["):
        return "is a JSON array, not a Pod, a PodList or a List"
    if re.match(rb"(?:---|%YAML|#|apiVersion:|kind:|metadata:|items:)", start):
        return "is YAML, not JSON; kubectl writes JSON with -o json"
    return "is not JSON"


def _fault(chunk: bytes, document: _Document) -> str:
    if not chunk:
        return "is cut off in the middle"
    if document.closed:
        return "goes on after the end of its JSON"
    return "is broken JSON"


class _Document:
    """One JSON object that is being parsed: the items of a list one by one, all else as a whole.

    Attributes:
        top: The object, without its `items` where they are an array.
        is_list: It has, or should have, `items`.
        closed: Its end was reached.
    """

    def __init__(self) -> None:
        self.is_list = False
        self.closed = False
        self._depth = 0
        self._key: object = None
        self._in_items = False
        self._whole = ijson.ObjectBuilder()
        self._item: Any = None

    @property
    def top(self) -> dict[str, object]:
        value: dict[str, object] = self._whole.value
        return value

    def feed(self, events: Iterable[tuple[str, object]]) -> Iterator[object]:
        """Take parser events; yield each item of the list that they complete."""
        for event, value in events:
            if event in ("start_map", "start_array"):
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise Malformed("is nested too deeply to be pods")
            elif event in ("end_map", "end_array"):
                self._depth -= 1
            if self._in_items:
                if self._depth == 1:
                    self._in_items = False
                    continue
                if self._item is None:
                    self._item = ijson.ObjectBuilder()
                self._item.event(event, value)
                if self._depth == 2:
                    item, self._item = self._item.value, None
                    self._check_kind()
                    yield item
                continue
            if self._depth == 1 and event == "map_key":
                self._key = value
            elif self._depth == 2 and event == "start_array" and self._key == "items":
                self.is_list = self._in_items = True
                self._whole.event("null", None)
                continue
            self._whole.event(event, value)
            if self._depth == 0:
                self.closed = True
                self.is_list = self.is_list or self.top.get("kind") in _LIST_KINDS

    @property
    def is_pod(self) -> bool:
        """Whether nothing says that the object as a whole is anything but a pod."""
        return self.top.get("kind") in (None, "Pod")

    def fault(self) -> str | None:
        """Return what is wrong with the object as a whole, once it was read."""
        try:
            self._check_kind()
        except Malformed as malformed:
            return str(malformed)
        if self.is_list and "items" not in self.top:
            return "is a list with no items"
        if self.is_list and self.top["items"] is not None:
            return f"is a list whose items are {json_type(self.top['items'])}"
        if self.is_list and string(mapping(self.top, "metadata"), "continue", MAX_WORD):
            return "is one page of a longer list (metadata.continue is set)"
        return None

    def _check_kind(self) -> None:
        kind = self.top.get("kind")
        # The items of a typed list do not say their kind, so a list of something else would pass.
        if kind is not None and kind not in (_LIST_KINDS if self.is_list else ("Pod",)):
            shown = text.quote(kind) if isinstance(kind, str) else json_type(kind)
            raise Malformed(f"expected a Pod, a PodList or a List, found kind {shown}")


def _why(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.escape(text.clip(told or type(error).__name__, MAX_WORD))


# --- from the API ------------------------------------------------------------------------------

_CONNECT_SECONDS: Final = 10.0
_PAGE_SECONDS: Final = 180.0
_RETRIES: Final = 5
_MAX_WAIT_SECONDS: Final = 30.0
_BODY_TRIES: Final = 3
_MAX_EXPIRIES: Final = 20
_POD_NAME: Final = re.compile("[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SERVICE_ACCOUNT_NAMESPACE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubernetesRefused(Exception):  # noqa: N818 -- the name that the callers agreed on
    """The API server answered that it will not do this; the message says what would help."""


class KubernetesUnreachable(Exception):  # noqa: N818 -- the name that the callers agreed on
    """There is no API server to talk to; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A configured connection to an API server.

    Attributes:
        api: The official client's ApiClient.
        address: The server's URL.
        namespace: The namespace of the kubeconfig's context, or of the pod that this runs in.
    """

    api: Any
    address: str
    namespace: str


def connect(context: str | None = None) -> Cluster:
    """Configure the official client as kubectl would be; no request is made.

    The files named by KUBECONFIG count, else the default file; where none exists, the service
    account of the pod that this runs in.

    Args:
        context: The kubeconfig's context; None for its current one.

    Returns:
        The connection. Its requests wait for a busy server (429, 5xx, Retry-After), a few times
        and never longer than half a minute.

    Raises:
        KubernetesUnreachable: There is no configuration, or it is broken.
    """
    from kubernetes import client

    configuration = client.Configuration()
    configuration.retries = _patience()
    try:
        namespace = _configure(configuration, context)
        return Cluster(client.ApiClient(configuration), configuration.host, namespace or "default")
    # A broken kubeconfig surfaces as whatever the parsers under the client happen to raise.
    except Exception as error:
        raise KubernetesUnreachable(
            f"no usable Kubernetes configuration: {_why(error).rstrip('.')}; set KUBECONFIG, or "
            "run in a pod with a service account"
        ) from error


def _configure(configuration: Any, context: str | None) -> str:
    """Fill the client's configuration; return the namespace that goes with it."""
    from kubernetes import config

    loaders: Any = config
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    parts = [Path(part).expanduser() for part in files.split(os.pathsep) if part]
    # An unknown context is an error of the kubeconfig, never a reason to try something else.
    if context is not None or any(part.is_file() for part in parts):
        joined = os.pathsep.join(map(str, parts))
        loaders.load_kube_config(joined, context=context, client_configuration=configuration)
        return _context_namespace(loaders, joined, context)
    loaders.load_incluster_config(client_configuration=configuration)
    return Path(_SERVICE_ACCOUNT_NAMESPACE).read_text("utf-8").strip()


def _context_namespace(loaders: Any, files: str, context: str | None) -> str:
    contexts, current = loaders.list_kube_config_contexts(files)
    chosen = next((c for c in contexts if c.get("name") == context), current)
    return string(mapping(chosen or {}, "context"), "namespace", MAX_NAME) or "default"


class _Patience(urllib3.Retry):
    """The library's retries, with a bound on what a server may ask for."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        wait = super().get_retry_after(response)
        return None if wait is None else min(wait, _MAX_WAIT_SECONDS)


def _patience() -> urllib3.Retry:
    return _Patience(
        total=_RETRIES,
        connect=2,
        read=2,
        redirect=0,
        status=_RETRIES,
        allowed_methods={"GET"},
        status_forcelist={429, 500, 502, 503, 504},
        backoff_factor=0.5,
        backoff_max=10,
        raise_on_status=False,
        raise_on_redirect=False,
    )


def read_api(
    cluster: Cluster,
    *,
    profile: Profile,
    namespace: str | None = None,
    all_namespaces: bool = False,
    selector: str | None = None,
    name: str | None = None,
    container: str | None = None,
    page_size: int = PAGE_SIZE,
    read_timeout: float = 60.0,
) -> Listing:
    """List pods from the API server.

    The list is a consistent one (no resourceVersion is sent, so nothing comes from a stale cache).
    If its token expires between pages, it is begun anew once, and pods of earlier pages come
    again; if that happens a second time it goes on from the newer state that the server offers,
    and counts as incomplete.

    Args:
        cluster: Where to list, from `connect`.
        profile: How the host marks its pods.
        namespace: The namespace; None for the cluster's own.
        all_namespaces: List every namespace instead.
        selector: A label selector; None for the profile's, empty for all pods.
        name: List only the pod of this name, whatever its labels.
        container: The name of the task container, see `PodFacts.from_manifest`.
        page_size: Pods a page (`limit`).
        read_timeout: The longest silence of the server, in seconds.

    Returns:
        The listing. Reading its first page raises KubernetesRefused where the server says no, and
        KubernetesUnreachable where it does not answer or only with errors; what fails later, or
        is no pod list, makes the listing incomplete.

    Raises:
        NoSuchPods: No pod can have that name.
    """
    if name is not None and _POD_NAME.fullmatch(name) is None:
        raise NoSuchPods(f"{text.quote(name)} is no pod name")
    where = None if all_namespaces else (namespace or cluster.namespace)
    labels = profile.selector if selector is None and name is None else selector
    reader = _ApiReader(cluster, where, labels, name, page_size, read_timeout)

    def pages(listing: Listing) -> Iterator[Page]:
        batch = _Batch(listing, profile, container)
        token: str | None = None
        number = expiries = 0
        while True:
            try:
                answer = reader.page(token)
            except _Expired as expired:
                expiries += 1
                if expiries == 1:
                    token = None
                    continue
                listing.mark_incomplete("the list expired twice while it was read")
                if expired.token is None or expiries > _MAX_EXPIRIES:
                    return
                token = expired.token
                continue
            except _NoPage as failed:
                if number == 0:
                    failed.raise_public()
                listing.mark_incomplete(f"page {number + 1}: {failed}")
                return
            number += 1
            if number == 1:
                listing.api_date = reader.date
                listing.api_date_monotonic = reader.date_monotonic
            following = _read_page(answer, f"page {number}", batch)
            del answer
            yield batch.take()
            if following is None:
                return
            if following == token:
                listing.mark_incomplete("the API server offers the same page again and again")
                return
            token = following

    return Listing(pages)


class _Expired(Exception):  # noqa: N818 -- a turn in the protocol
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self.token = token


class _NoPage(Exception):  # noqa: N818 -- becomes a public error or a reason
    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused

    def raise_public(self) -> NoReturn:
        raise (KubernetesRefused if self.refused else KubernetesUnreachable)(str(self)) from self


class _ApiReader:
    """Gets raw pages; keeps the server's clock as its last answer showed it."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str | None,
        selector: str | None,
        name: str | None,
        page_size: int,
        read_timeout: float,
    ) -> None:
        from kubernetes import client

        self._core: Any = client.CoreV1Api(cluster.api)
        self._api_exception: type[Exception] = client.ApiException
        self._address = text.escape(text.clip(cluster.address, MAX_WORD))
        self._namespace = namespace
        self._where = (
            "in all namespaces" if namespace is None else f"in namespace {text.quote(namespace)}"
        )
        self._query: dict[str, Any] = {
            "limit": page_size,
            "_preload_content": False,
            "_request_timeout": (_CONNECT_SECONDS, read_timeout),
        }
        if selector:
            self._query["label_selector"] = selector
        if name:
            self._query["field_selector"] = f"metadata.name={name}"
        self.date: datetime | None = None
        self.date_monotonic: float | None = None

    def page(self, token: str | None) -> bytes:
        """Return the body of one page.

        Raises:
            _Expired: The token is too old.
            _NoPage: There will be no page.
        """
        for attempt in range(1, _BODY_TRIES + 1):
            try:
                return self._get(token)
            except self._api_exception as error:
                self._refuse(error, token)
            except (
                urllib3.exceptions.MaxRetryError,
                urllib3.exceptions.LocationValueError,
            ) as error:
                raise self._unreachable(error) from error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                # The answer began and broke off: the same page may be asked for again.
                if attempt == _BODY_TRIES:
                    raise self._unreachable(error) from error
        raise AssertionError

    def _get(self, token: str | None) -> bytes:
        query = dict(self._query)
        if token is not None:
            query["_continue"] = token
        if self._namespace is None:
            response = self._core.list_pod_for_all_namespaces(**query)
        else:
            response = self._core.list_namespaced_pod(self._namespace, **query)
        self.date_monotonic = time.monotonic()
        self.date = _http_date(response.headers.get("Date"))
        deadline = self.date_monotonic + _PAGE_SECONDS
        body = bytearray()
        with closing(response):
            for chunk in response.stream(_CHUNK):
                body += chunk
                if time.monotonic() > deadline:
                    raise _NoPage(
                        f"the answer took longer than {_PAGE_SECONDS:.0f} s", refused=False
                    )
        return bytes(body)

    def _refuse(self, error: Any, token: str | None) -> NoReturn:
        status = error.status if isinstance(error.status, int) else 0
        said = _status_body(error.body)
        if status == 410 and token is not None:
            raise _Expired(string(mapping(said, "metadata"), "continue", 1 << 16)) from error
        reason = string(said, "message", MAX_WORD) or str(error.reason or "no reason given")
        told = text.escape(text.clip(reason, MAX_WORD))
        what = f"list pods {self._where}"
        if status == 403:
            role = "ClusterRole" if self._namespace is None else "Role"
            raise _NoPage(
                f"Kubernetes does not allow to {what}: {told}; bind a {role} with the verb list on "
                "pods to this account, or choose another --namespace",
                refused=True,
            ) from error
        if status == 401:
            raise _NoPage(
                f"Kubernetes does not accept the credentials to {what}: {told}; log in again, or "
                "check the service account's token",
                refused=True,
            ) from error
        if status == 0:
            raise self._unreachable(error) from error
        busy = status == 429 or status >= 500
        advice = "try again later" if busy else "check the selector and the server's address"
        raise _NoPage(
            f"Kubernetes answered {status} to {what}: {told}; {advice}", refused=not busy
        ) from error

    def _unreachable(self, error: Exception) -> _NoPage:
        return _NoPage(
            f"no answer from Kubernetes at {self._address} to list pods {self._where}: "
            f"{_transport_cause(error)}; check the network and KUBECONFIG",
            refused=False,
        )


def _transport_cause(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    # Protocol errors repeat themselves in their arguments; the others name a connection object.
    told = cause.args[0] if isinstance(cause, urllib3.exceptions.ProtocolError) else cause
    plain = re.sub(r"^<?HTTPS?Connection(?:Pool)?\b.*?[)>]: ", "", str(told)).rstrip(".")
    return text.escape(text.clip(plain or type(error).__name__, MAX_WORD))


def _read_page(body: bytes, where: str, batch: _Batch) -> str | None:
    """Put the pods of one page into the batch; return the token of the next page, if any."""
    try:
        page = _parse(body)
    except (ValueError, RecursionError):
        batch.lose(f"{where}: the API server's answer is no valid JSON")
        return None
    if not isinstance(page, dict) or page.get("kind") != "PodList":
        batch.lose(f"{where}: the API server's answer is no PodList")
        return None
    items = page.get("items")
    if isinstance(items, list):
        for number, item in enumerate(items, start=1):
            batch.add(item, f"{where}, item {number}")
    elif items is not None or "items" not in page:
        # Null is Go's empty list; anything else must not pass for one.
        batch.lose(f"{where}: the API server's answer holds no list of items")
    return string(mapping(page, "metadata"), "continue", 1 << 16)


def _parse(body: bytes) -> object:
    try:
        return from_json(body)
    except ValueError:
        # The strict parser refuses a whole page for one lone surrogate or one broken byte.
        return json.loads(body.decode("utf-8", "replace"))


def _status_body(body: object) -> Json:
    # Bytes or text, depending on the client's version.
    if isinstance(body, str):
        body = body.encode("utf-8", "replace")
    if isinstance(body, bytes):
        try:
            status = _parse(body)
        except (ValueError, RecursionError):
            return NOTHING
        if isinstance(status, dict):
            return status
    return NOTHING


def _http_date(value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else None
