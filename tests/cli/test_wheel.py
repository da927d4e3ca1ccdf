"""The wheel carries the SQL and the recorded pods, and reads them from inside itself."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import reconciler

CHECKOUT = Path(reconciler.__file__).parent.parent


def test_the_wheel_holds_what_the_command_needs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("podsettle-*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for packed, checkout in (("sql", "sql"), ("recorded", "k8s/samples/recorded")):
        inside = unpacked / "reconciler" / "data" / packed
        names = {p.relative_to(inside) for p in inside.rglob("*") if p.is_file()}
        folder = CHECKOUT / checkout
        assert names == {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
        assert names
    printed = subprocess.run(
        [sys.executable, "-c", "from reconciler.cli import main; main(['install', '--print'])"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(unpacked), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "create schema settle" in printed.stdout
    found = subprocess.run(
        [sys.executable, "-c", "from reconciler import resources; print(resources.sql_folder())"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(unpacked), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip().startswith(str(unpacked))
