from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")

CORPUS = Path(__file__).parent.parent / "corpus"


def corpus_files() -> list[Path]:
    return sorted([*CORPUS.glob("reports/*.json"), *CORPUS.glob("cluster/*.json")])


@pytest.fixture(scope="session")
def corpus() -> dict[str, dict[str, Any]]:
    """The manifests by name, without the number that some names begin with."""
    return {
        file.stem.lstrip("0123456789").removeprefix("-"): json.loads(file.read_text("utf-8"))
        for file in corpus_files()
    }
