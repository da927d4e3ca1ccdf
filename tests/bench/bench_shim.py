"""What the shim adds to `/bin/true` and holds while a task runs, beside tini and dumb-init.

Part of `make bench`; by itself: `python tests/bench/bench_shim.py [ROUNDS] [PYTHON]`. Each
round starts every candidate once, so that what else the machine does falls on all of them; the
ratios of one run are comparable, its milliseconds are not. tini and dumb-init: from Debian.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
AIM_RATIO = 1.25
AIM_MB = 9.0


@dataclasses.dataclass
class Candidate:
    name: str
    prefix: list[str]
    # The command that is measured for time; the one for memory sleeps.
    command: list[str]
    times: list[float] = dataclasses.field(default_factory=list)
    rss: float = 0.0
    pss: float = 0.0


def candidates(folder: Path, python: str) -> list[Candidate]:
    bundle = folder / "bundle"
    subprocess.run([python, "-m", "agent_shim.packing", str(bundle)], cwd=TOP, check=True)
    record = folder / "termination-log"
    record.touch()
    run = ["run", "--record", str(record), "--work-dir", str(folder), "--"]
    true = ["/bin/true"]
    found = [
        Candidate("bare exec", [], true),
        Candidate("python3 -I -S -c pass", [python, "-I", "-S", "-c"], ["pass"]),
        Candidate("agent-shim (bundle)", [str(bundle / "agent-shim"), *run], true),
        Candidate(
            "python3 -I -S agent-shim.pyz",
            [python, "-I", "-S", str(bundle / "agent-shim.pyz"), *run],
            true,
        ),
    ]
    for name, more in (("tini", ["-s", "--"]), ("dumb-init", ["--"])):
        if (path := shutil.which(name)) is None:
            raise SystemExit(f"{name} is not installed; on Debian: apt-get install {name}")
        found.append(Candidate(name, [path, *more], true))
    return found


def measure_time(candidate: Candidate) -> None:
    start = time.perf_counter()
    subprocess.run([*candidate.prefix, *candidate.command], check=True)
    candidate.times.append((time.perf_counter() - start) * 1000)


def measure_memory(candidate: Candidate) -> None:
    """Take resident and proportional set size of the waiting parent, while its task sleeps."""
    if candidate.name == "bare exec":
        return
    if candidate.command == ["pass"]:
        sleeping = ["import time; print(flush=True); time.sleep(600)"]
    else:
        sleeping = ["/bin/sh", "-c", "echo; exec sleep 600"]
    words = [*candidate.prefix, *sleeping]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                candidate.rss = int(line.split()[1]) * 1024 / 1e6
            if line.startswith("Pss:"):
                candidate.pss = int(line.split()[1]) * 1024 / 1e6
        # The shim says that it was stopped; that is no news here.
        process.terminate()


def compare(rounds: int = 101, python: str = "/usr/bin/python3") -> dict[str, float]:
    """Measure, print the table, and return what each adds, in units of the bare interpreter."""
    if shutil.which(python) is None:
        python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        all_of_them = candidates(Path(name), python)
        for _ in range(rounds):
            for candidate in all_of_them:
                measure_time(candidate)
        for candidate in all_of_them:
            measure_memory(candidate)
    bare, interpreter, *_ = all_of_them
    whole = statistics.median(interpreter.times)
    print(f"{rounds} rounds, medians, {python}")
    print(f"{'':30}{'ms':>8}{'added ms':>10}{'added / pass':>14}{'RSS MB':>8}{'PSS MB':>8}")
    ratios = {}
    for candidate in all_of_them:
        added = statistics.median(
            one - true for one, true in zip(candidate.times, bare.times, strict=True)
        )
        # For the interpreter itself the whole is the yardstick; it starts no second program.
        shown = whole if candidate is interpreter else added
        ratios[candidate.name] = shown / whole
        print(
            f"{candidate.name:30}{statistics.median(candidate.times):8.2f}{shown:10.2f}"
            f"{shown / whole:14.2f}{candidate.rss:8.1f}{candidate.pss:8.1f}"
        )
    print(f"aim for agent-shim: added / pass at most {AIM_RATIO}, RSS under {AIM_MB:g} MB")
    return ratios


def test_the_shim_adds_little_more_than_its_interpreter() -> None:
    ratios = compare()
    # Far above the aim: this catches a heavy import on the start path, not a busy machine.
    assert ratios["agent-shim (bundle)"] < 2
    assert ratios["python3 -I -S agent-shim.pyz"] < 2


if __name__ == "__main__":
    compare(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))
