"""What one patch of vLLM says about itself, and whom the patches call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Calls:
    """Functions that the patches call. plugin.py passes them in, because compat/ must not import gate or worker.

    Attributes:
        gate: takes each ``VllmConfig`` that is built.
        attach: takes each worker that is built.
    """

    gate: Callable[[Any], None]
    attach: Callable[[Any], None]


@dataclass(frozen=True)
class Patch:
    """One change to vLLM; docs/development.md has the table made of these.

    Attributes:
        name: short, for logs.
        what: the thing changed.
        why: the symptom without it.
        how: the technique.
        link: upstream's code, documentation or issue.
        probe: what is checked before the patch counts as applied.
        remove_when: the condition under which it can be deleted.
        apply: does it; idempotent; raises on failure with vLLM as it was.
        required: without it the fast path cannot be switched on safely, and the gate declines.
    """

    name: str
    what: str
    why: str
    how: str
    link: str
    probe: str
    remove_when: str
    apply: Callable[[Calls], None]
    required: bool
