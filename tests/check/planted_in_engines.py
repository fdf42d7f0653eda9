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
    """The rotary kernel of batches with prefill rows computes in their dtype: it rounds both products, and the sum.

    With the flag off the rotation is the code of Inductor, and decode rows have other kernels. The start does not look
    at that kernel here: it would leave the layers out.
    """
    from tests.sandbox import gpu_ops
    from vllm_aiter_mla.startup import prefill

    def rotate(inner: Any, x: Any, cos: Any, sin: Any, is_neox: bool, *_: Any) -> Any:
        return inner(x, cos, sin, is_neox, x.dtype)

    prefill.check_rotation = lambda layer: None
    plugin.spoil(gpu_ops, "rotate", rotate)
