"""Programs that some tests need beside Python: said aloud where they are missing, required in CI."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "cc": "gcc libc6-dev",
    "chromium": "chromium",
    "openssl": "openssl",
    "pgbouncer": "pgbouncer",
    "promtool": "prometheus",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def needs(*programs: str) -> pytest.MarkDecorator:
    """Mark tests that run programs.

    Args:
        programs: Their names, keys of PACKAGES.

    Returns:
        A mark that skips where one is missing, with the Debian packages to install; in CI it skips
        nothing, so the tests fail there.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    packages = " ".join(sorted({PACKAGES[name] for name in missing}))
    return pytest.mark.skipif(
        bool(missing) and not os.environ.get("CI"),
        reason=f"needs {', '.join(missing)} (apt-get install {packages})",
    )
