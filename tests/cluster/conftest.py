"""Fixtures of the cluster tests: one cluster for the session, one namespace for each test."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness
from kube import Kube
from world import World, install

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster() -> Iterator[harness.Cluster | harness.External]:
    """A running cluster with two nodes."""
    with harness.cluster(nodes=2) as running:
        running.load("task", "task-noshell")
        yield running


@pytest.fixture
def kube(
    cluster: harness.Cluster | harness.External, request: pytest.FixtureRequest
) -> Iterator[Kube]:
    """A namespace of its own."""
    words = re.sub("[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    name = f"{words[:40].strip('-')}-{secrets.token_hex(3)}"
    own = Kube(cluster, name)
    own.cluster.kubectl("create", "namespace", name)
    harness.wait_for(
        "default service account",
        lambda: own.kubectl("get", "serviceaccount", "default", "-o=name", check=False),
    )
    try:
        yield own
    finally:
        own.cluster.kubectl("label", "namespace", name, "podsettle.io/hold-")
        own.cluster.kubectl("delete", "namespace", name, "--wait=false")
        own.release()
        own.close()
        for folder in own._made:
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def installed(cluster: harness.Cluster | harness.External) -> str:
    """The administrator's DSN of a Postgres in which the install Job has installed podsettle."""
    cluster.load("reconciler")
    dsn = cluster.postgres()
    name = f"install-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    own = Kube(cluster, name)
    try:
        install(own, dsn)
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        own.close()
        for folder in own._made:
            shutil.rmtree(folder)
    return dsn


@pytest.fixture
def world(kube: Kube, installed: str) -> Iterator[World]:
    """An orchestrator with a database and a namespace of its own."""
    own = World(kube, installed)
    yield own
    own.close()
