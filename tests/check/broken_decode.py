"""A planted bug, in every process of an engine: decode attention is wrong whether the flag is off or on."""

from __future__ import annotations

from typing import Any


def decode_reads_another_channel() -> None:
    """Each value of the result of decode attention comes from its neighbour's channel."""
    from tests.sandbox.attention import SandboxMLAImpl

    inner = SandboxMLAImpl.forward_mqa

    def forward_mqa(*args: Any) -> Any:
        attended, *rest = inner(*args)
        return attended.roll(1, dims=-1), *rest

    SandboxMLAImpl.forward_mqa = forward_mqa
