"""Text from files, for a page or a terminal: a name must not move the cursor, recolour the line or turn it round."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The text with control, format and unassigned characters written out (``\\x1b``); line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c)[0] == "C" and c not in "\n\t" else c
        for c in text
    )


def line(text: str) -> str:
    """As ``printable``, on one line."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")
