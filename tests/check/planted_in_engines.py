"""Planted bugs, in every process of an engine: see the variable ``MUTATION`` of the sandbox's plugin."""

from __future__ import annotations

from typing import Any

from tests.sandbox import plugin


def decode_reads_another_channel() -> None:
    """Each value of the result of decode attention comes from its neighbour's channel, on every side."""
    from tests.sandbox.attention import SandboxMLAImpl

    def forward_mqa(inner: Any, *args: Any) -> Any:
        attended, *rest = inner(*args)
        return attended.roll(1, dims=-1), *rest

    plugin.spoil(SandboxMLAImpl, "forward_mqa", forward_mqa)


def prefill_rows_are_rotated_with_three_roundings() -> None:
    """With the flag on, vLLM's rotation of a batch with prefill rows rounds both products too, as in bf16 arithmetic.

    The graph of the flag off has its own rotation, and the kernels of decode rows theirs.
    """
    import torch

    from tests.sandbox import gpu_ops

    def rotate(inner: Any, x: Any, cos: Any, sin: Any, is_neox: bool) -> Any:
        pairs = x.unflatten(-1, (2, -1) if is_neox else (-1, 2))
        at = -2 if is_neox else -1
        one, two = pairs.unbind(at)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.stack((one * cos - two * sin, two * cos + one * sin), at).reshape(x.shape)

    plugin.spoil(gpu_ops, "rotate", rotate)
