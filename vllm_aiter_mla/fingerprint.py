"""Identity of the plugin's code, for cache keys: a changed plugin must never run a stale compiled artifact.

vLLM's and Inductor's caches know the graph and the config, not the code of an out-of-tree pass. The fingerprint is
the plugin's version plus a SHA-256 over those of its sources that decide graphs and numbers. Commands, ``verify`` and
the status file are left out: a change there must not make a server compile again. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from vllm_aiter_mla import __version__

IRRELEVANT = frozenset({"status", "commands", "verify"})
"""Sub-packages that neither change a graph nor a number."""


@functools.cache
def fingerprint() -> str:
    """``<version>-<64 hex digits>`` of the installed plugin; computed once per process, a few milliseconds."""
    return fingerprint_of(Path(__file__).parent, __version__)


def fingerprint_of(root: Path, version: str) -> str:
    """Fingerprint of the package at ``root``: depends on relative paths and bytes, not on place, time or mode."""
    digest = hashlib.sha256(version.encode())
    for path in sources(root):
        name = path.relative_to(root).as_posix().encode()
        content = path.read_bytes()
        # Lengths keep "ab" + "c" and "a" + "bc" apart.
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(content), content))
    return f"{version}-{digest.hexdigest()}"


def sources(root: Path) -> list[Path]:
    """The ``.py`` files that count, in a fixed order."""
    found = (path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in IRRELEVANT)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
