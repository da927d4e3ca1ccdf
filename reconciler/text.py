"""Untrusted text, made safe to keep and to show.

Pods and termination messages hold whatever somebody wrote there. Two things happen to such text,
here and nowhere else: it is made storable (PostgreSQL's jsonb takes neither NUL nor half a
surrogate pair, and nobody wants ten megabytes of it), and it is escaped where a person reads it,
so that it can neither forge lines nor steer a terminal.
"""

from __future__ import annotations

import re

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_ELLIPSIS = "…"


def storable(text: str) -> str:
    """Replace what PostgreSQL cannot hold.

    Args:
        text: Any string, also one that cannot be encoded as UTF-8.

    Returns:
        The same text with NUL and lone surrogates replaced by U+FFFD, one for one.
    """
    return _UNSTORABLE.sub(_REPLACEMENT, text)


def clip(text: str, limit: int) -> str:
    """Make text storable and no longer than a limit.

    Args:
        text: Any string.
        limit: The greatest length of the result, in characters (code points), at least 1.

    Returns:
        Storable text; where something was cut off, the last character is an ellipsis.
    """
    if len(text) > limit:
        # Cut before cleaning: the text may be megabytes long.
        text = text[: limit - 1] + _ELLIPSIS
    return _UNSTORABLE.sub(_REPLACEMENT, text)


def escape(text: str) -> str:
    r"""Show text on one line with nothing invisible in it.

    Args:
        text: Any string.

    Returns:
        The text with control characters, line ends, directional marks, odd spaces and lone
        surrogates written as escapes such as `\n`, `\x1b` or `\u202e`. Backslashes stay as they
        are: the result is for reading, not for decoding.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def quote(text: str, limit: int = 60) -> str:
    """Quote a value inside a sentence.

    Args:
        text: Any string.
        limit: The greatest number of characters of it that are shown.

    Returns:
        The clipped text as one printable, quoted word.
    """
    return repr(clip(text, limit))
