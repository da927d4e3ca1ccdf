"""The shipped listener `webhook`: CloudEvents 1.0 over HTTP, structured mode, signed.

Signed as Standard Webhooks describes: HMAC-SHA256 over `id.timestamp.body`, in `webhook-signature`
(https://github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md). The receiver
deduplicates by `webhook-id`, which is the CloudEvent's id.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import urllib3

from reconciler.events import Event, hookimpl

URL: Final = "PODSETTLE_WEBHOOK_URL"
SECRET: Final = "PODSETTLE_WEBHOOK_SECRET"  # noqa: S105 -- the name of a variable
SOURCE: Final = "PODSETTLE_WEBHOOK_SOURCE"
TIMEOUT: Final = "PODSETTLE_WEBHOOK_TIMEOUT"

SCHEMA: Final = "https://podsettle.io/schemas/task-instance-event/1"
"""dataschema of the events: the $id of docs/task-instance-event.schema.json."""


class WebhookMisconfigured(ValueError):  # noqa: N818 -- what is so, in the words of the log
    """An environment variable of the webhook is missing or cannot be."""


class WebhookRefused(Exception):  # noqa: N818 -- what happened, in the words of the log
    """The receiver was not reached, or did not answer with 2xx."""


def cloud_event(event: Event, source: str) -> dict[str, Any]:
    """Return an event as a CloudEvent, structured mode."""
    ti = event.task_instance
    return {
        "specversion": "1.0",
        "id": str(event.id),
        "source": source,
        "type": f"io.podsettle.task_instance.{event.kind}",
        "subject": quote(ti.name, safe="/[]:+"),
        "time": event.settled_at.isoformat(),
        "datacontenttype": "application/json",
        "dataschema": SCHEMA,
        "data": dict(event.payload),
    }


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of webhook-signature."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def key_of(secret: str) -> bytes:
    """Return the key in a secret: `whsec_` and Base64, or any other text as it is.

    Raises:
        WebhookMisconfigured: What follows whsec_ is no Base64, or the secret is too short.
    """
    key = secret.encode()
    if secret.startswith("whsec_"):
        try:
            key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error as wrong:
            raise WebhookMisconfigured(f"what follows whsec_ in {SECRET} is no Base64") from wrong
    if len(key) < 16:
        raise WebhookMisconfigured(f"{SECRET} has fewer than 16 bytes")
    return key


class Webhook:
    """Posts each event to PODSETTLE_WEBHOOK_URL.

    Raises:
        WebhookMisconfigured: The URL or the secret is missing or cannot be.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        settings = os.environ if environment is None else environment
        self._url = settings.get(URL, "")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WebhookMisconfigured(f"{URL} must be an http or https URL")
        self._host = parts.hostname
        self._key = key_of(_secret(settings))
        self._source = settings.get(SOURCE) or "/podsettle"
        try:
            seconds = float(settings.get(TIMEOUT) or 5.0)
        except ValueError as wrong:
            raise WebhookMisconfigured(f"{TIMEOUT} must be a number of seconds") from wrong
        self._http = urllib3.PoolManager(
            retries=False, timeout=urllib3.Timeout(total=seconds), maxsize=1
        )

    @hookimpl
    def on_task_instance_event(self, event: Event) -> None:
        """Post the event; anything but 2xx is a failed delivery, a redirect too.

        Raises:
            WebhookRefused: It is to be tried again. The text names no URL: it may hold a password.
        """
        body = json.dumps(cloud_event(event, self._source), separators=(",", ":")).encode()
        now = int(time.time())  # for the receiver's window against replays; decides nothing here
        try:
            answer = self._http.request(
                "POST",
                self._url,
                body=body,
                redirect=False,
                preload_content=False,
                headers={
                    "Content-Type": "application/cloudevents+json; charset=utf-8",
                    "User-Agent": "podsettle",
                    "webhook-id": str(event.id),
                    "webhook-timestamp": str(now),
                    "webhook-signature": signature(self._key, str(event.id), now, body),
                },
            )
        except (urllib3.exceptions.HTTPError, OSError) as failed:
            raise WebhookRefused(f"no answer of {self._host}: {type(failed).__name__}") from failed
        try:
            if not 200 <= answer.status < 300:
                raise WebhookRefused(f"{self._host} answered {answer.status}")
        finally:
            # What it says beside the status is not read: it may be endless.
            answer.close()


def _secret(settings: Mapping[str, str]) -> str:
    path = settings.get(f"{SECRET}_FILE")
    if path:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError as failed:
            raise WebhookMisconfigured(f"{SECRET}_FILE: {failed.strerror}") from failed
    secret = settings.get(SECRET, "")
    if not secret:
        raise WebhookMisconfigured(f"{SECRET} (or {SECRET}_FILE) is not set; events are signed")
    return secret
