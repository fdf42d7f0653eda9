"""The vLLM releases this plugin was written against."""

from __future__ import annotations

import re

WINDOW: tuple[tuple[int, int], tuple[int, int]] = ((0, 30), (0, 34))
"""First supported release and first unsupported one: 0.30 <= vLLM < 0.34. The one place that says so."""


def release_of(version: str) -> tuple[int, int] | None:
    """(major, minor) of ``0.32.0+cpu``, ``0.33.1rc1.dev3+gabc`` and the like; ``None`` for "dev" and friends."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def in_window(version: str) -> bool:
    """Whether ``version`` is supported; a version that cannot be read is not, nor is a pre-release of the bound.

    Builds from a shallow checkout call themselves ``0.1.dev1+g...``. They are outside too: for them the user
    must set ``debug.untested_vllm``.
    """
    release = release_of(version)
    return release is not None and WINDOW[0] <= release < WINDOW[1]


def installed() -> str:
    """vLLM's version as it prints it, e.g. ``0.32.0+cpu``."""
    import vllm

    return str(vllm.__version__)
