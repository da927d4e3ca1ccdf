"""Runs the shim and kills it with SIGKILL at a chosen line of its own code: `crash.py LINE WORDS`.

LINE is FILE:NUMBER, and the kill comes before that line's first execution; with LINE `-` nothing
is killed and each line that is executed is said on standard error. The shim knows nothing of it:
the hook is Python's own, in the process that the test starts.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent_shim.__main__ import main

chosen = sys.argv.pop(1)
seen: set[str] = set()


def trace(frame: FrameType, event: str, arg: Any) -> Any:
    path, _, name = frame.f_code.co_filename.rpartition("/")
    if not path.endswith("/agent_shim") or frame.f_code.co_name == "<module>":
        return None
    if event == "line":
        line = f"{name}:{frame.f_lineno}"
        if line == chosen:
            os.kill(os.getpid(), signal.SIGKILL)
        if chosen == "-" and line not in seen:
            seen.add(line)
            os.write(2, f"line {line}\n".encode())
    return trace


sys.settrace(trace)
main()
