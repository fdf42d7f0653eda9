"""Which back ends can be verified here: each is found as a subject, or as the reason why not."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from vllm_aiter_mla.verify.subject import Subject, subject_of

Found = Subject | str | None
"""A back end made anew, why there is none, or None: it runs in a process that interprets Triton."""


def find(name: str) -> Found:
    """The back end ``name``; one that breaks while it is looked for is missing, with what it said. Raises KeyError."""
    finder = FINDERS[name]
    try:
        return finder()
    except Exception as error:  # importing a vendor's package may do anything
        return f"{type(error).__name__}: {error}"


def load(name: str) -> Subject:
    """The back end ``name``, which was found before. Raises RuntimeError where it is not there any more."""
    found = find(name)
    if not isinstance(found, Subject):
        raise RuntimeError(f"{name}: {found or 'not in this process'}")
    return found


def _reference() -> Found:
    from vllm_aiter_mla.kernels.reference import ReferenceBackend

    return subject_of(ReferenceBackend())


def _triton() -> Found:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    return subject_of(TritonBackend())


def _aiter() -> Found:
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.kernels.select import aiter_factory

    found = aiter_factory(detect_platform())
    return found if isinstance(found, str) else subject_of(found)


FINDERS: dict[str, Callable[[], Found]] = {"reference": _reference, "triton": _triton, "aiter": _aiter}
"""How each back end is looked for, in the order in which they run; add your own."""
