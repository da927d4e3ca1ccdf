"""Fixtures of the shim's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_shim.packing.onefile import one_file
from tests.shim.harness import Shim


@pytest.fixture(scope="session")
def one_file_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "agent-shim.pyz"
    path.write_bytes(one_file())
    path.chmod(0o755)
    return path


@pytest.fixture
def shim(one_file_path: Path, tmp_path: Path) -> Iterator[Shim]:
    """The shim as one file, as an image with Python runs it."""
    made = Shim([sys.executable, "-I", "-S", str(one_file_path)], tmp_path)
    yield made
    made.close()
