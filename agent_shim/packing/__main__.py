"""`python -m agent_shim.packing DIR`: write the one file and the bundle into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from agent_shim.packing.bundle import BundleError, make_bundle


def main() -> int:
    """Make the bundle, which holds the one file as well, and say where it is."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.stderr.write("usage: python -m agent_shim.packing DIR\n")
        return 2
    target = Path(sys.argv[1])
    try:
        make_bundle(target)
    except (BundleError, OSError) as error:
        sys.stderr.write(f"agent-shim: no bundle: {error}\n")
        return 1
    files = [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    sys.stdout.write(f"{target}: {len(files)} files, {size:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
