"""Builds the Kubernetes programs of the test cluster from the Go module proxy, once for each version.

What is built, and from which modules, stands in kubernetes/go.mod beside this file. The programs are kept in a cache
outside the tree, so only the first run on a machine takes its ten to twenty minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = Path(__file__).parent / "kubernetes"


def cache() -> Path:
    """Name the folder, outside the tree, that keeps what takes long to make."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "podsettle"


def version() -> str:
    """Read the Kubernetes version out of go.mod, as in v1.36.3."""
    found = re.search(r"k8s\.io/kubernetes (v[0-9.]+)", (MODULE / "go.mod").read_text())
    if found is None:
        raise RuntimeError(f"{MODULE / 'go.mod'} does not require k8s.io/kubernetes")
    return found.group(1)


def programs() -> list[str]:
    """List the packages that go.mod names as tools."""
    return re.findall(
        r"^\s*(?:tool )?(k8s\.io/kubernetes/cmd/\S+)$",
        (MODULE / "go.mod").read_text(),
        re.MULTILINE,
    )


def kubernetes() -> Path:
    """Return the folder of the built programs; build them first if this version is not there yet."""
    text = (MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes()
    name = f"{version()}-{hashlib.sha256(text).hexdigest()[:12]}"
    folder = cache() / "kubernetes" / name
    wanted = {package.rsplit("/", 1)[1] for package in programs()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir() and wanted <= {path.name for path in folder.iterdir()}:
            return folder
        print(
            f"cluster: building Kubernetes {version()}; this is done once",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _build(Path(scratch))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(scratch, folder)
    return folder


def _build(folder: Path) -> None:
    major, minor = version().lstrip("v").split(".")[:2]
    stamps = [
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in (("gitVersion", version()), ("gitMajor", major), ("gitMinor", minor))
    ]
    subprocess.run(
        [
            *("go", "build", "-mod=readonly", "-trimpath", "-buildvcs=false"),
            *("-ldflags", " ".join(["-s -w", *stamps]), "-o", f"{folder}/"),
            *programs(),
        ],
        cwd=MODULE,
        env={"CGO_ENABLED": "0", **os.environ},
        check=True,
    )


if __name__ == "__main__":
    print(kubernetes())
