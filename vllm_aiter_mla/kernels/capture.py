"""Whether a graph is being recorded: the back ends and the ops ask on every eager call."""

from __future__ import annotations

import functools

import torch


class KernelCaptureError(RuntimeError):
    """Work that must happen outside a graph capture was asked for inside one; the message says what to do."""


@functools.cache
def _has_gpu() -> bool:
    # Asked once: torch reads the environment and calls the driver every time.
    return torch.cuda.is_available()


def is_capturing() -> bool:
    """Whether the current stream is capturing a graph; False where there is no GPU."""
    return _has_gpu() and torch.cuda.is_current_stream_capturing()
