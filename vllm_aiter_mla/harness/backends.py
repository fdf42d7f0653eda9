"""Which back ends can be verified here: each has a loader, or a reason why not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from vllm_aiter_mla.harness.subject import Subject, subject_of

# How a back end is run: in this process, or in one that interprets Triton.
HERE, INTERPRETED = "here", "interpreted"


@dataclass(frozen=True, slots=True)
class Available:
    """A back end of this machine.

    Attributes:
        name: as ``kernel=`` has it.
        where: ``HERE`` or ``INTERPRETED``; empty where it is missing.
        reason: why it is missing.
        load: builds the subject; only where ``where`` is ``HERE``.
    """

    name: str
    where: str = ""
    reason: str = ""
    load: Callable[[], Subject] | None = None


Finder = Callable[[], Available]
_FINDERS: dict[str, Finder] = {}


def register(name: str, finder: Finder) -> None:
    """Make a back end known to ``verify``; a later registration replaces an earlier one."""
    _FINDERS[name] = finder


def known() -> tuple[str, ...]:
    """Names in the order they are run."""
    return tuple(_FINDERS)


def find(name: str) -> Available:
    """The back end ``name``; one that breaks while it is looked for is missing, with what it said.

    Raises:
        KeyError: an unknown name.
    """
    finder = _FINDERS[name]
    try:
        return finder()
    except Exception as error:  # importing a vendor's package may do anything
        return Available(name, reason=f"{type(error).__name__}: {error}")


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def _reference() -> Available:
    from vllm_aiter_mla.kernels.reference_backend import ReferenceBackend

    return Available("reference", HERE, load=lambda: subject_of(ReferenceBackend()))


def _triton() -> Available:
    if find_spec("triton") is None:
        return Available("triton", reason="the package triton is not installed")
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    if has_gpu() or os.environ.get("TRITON_INTERPRET") == "1":
        return Available("triton", HERE, load=lambda: subject_of(TritonBackend()))
    return Available("triton", INTERPRETED)


def _aiter() -> Available:
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.kernels.select import aiter_factory

    platform = detect_platform()
    found = aiter_factory(platform)
    if isinstance(found, str):
        return Available("aiter", reason=found)

    def load() -> Subject:
        anew = aiter_factory(platform)
        if isinstance(anew, str):
            raise RuntimeError(anew)
        return subject_of(anew)

    return Available("aiter", HERE, load=load)


register("reference", _reference)
register("triton", _triton)
register("aiter", _aiter)
