"""The process that wraps a task in its pod: it decides the outcome once, records it, reports it.

It knows nothing of the reconciler and nothing outside the standard library. What it writes is the
record of DESIGN section 5; what it must survive is a SIGKILL between any two steps.
"""

from __future__ import annotations

__version__ = "0.1.0"
