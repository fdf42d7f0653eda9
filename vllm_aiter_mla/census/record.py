"""The census of one rank as plain containers, and the verdict that it comes to, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_aiter_mla.census import state

NOT_RUN = ("not_run", "its fused op has not run")
"""Code and reason of a layer that nobody has refused and that is not engaged."""


def as_record(total: Sequence[str], limit: int, kv_cache_dtype: str, rank: int) -> dict[str, Any]:
    """What this process has counted; a layer that is not engaged counts as refused, with the reason that is known.

    Args:
        total: names of the model's MLA layers.
        limit: L of the decode bucket.
        kv_cache_dtype: of the engine, as vLLM spells it.
        rank: of this worker.
    """
    now = state.current()
    why = {name: now.refused.get(name) or now.partial.get(name) or NOT_RUN for name in total}
    return {
        "rank": rank,
        "total": len(total),
        "engaged": {name: now.engaged[name] for name in total if name in now.engaged},
        "refused": {name: list(reason) for name, reason in why.items() if name not in now.engaged},
        "partial": {name: list(reason) for name, reason in now.partial.items()},
        "compiled": now.compiled,
        "decode_bucket": [1, limit],
        "capture_sizes": [],
        "kv_cache_dtype": kv_cache_dtype,
    }


def of_declined(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> dict[str, Any]:
    """As ``as_record`` for an engine that was declined as a whole: nothing of ours runs in its workers.

    Args:
        code: the refusal's code.
        message: its line.
        layers: indices of the model's MLA layers; their names are known to the workers alone.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    return {
        "rank": 0,
        "total": len(layers),
        "engaged": {},
        "refused": {f"layer {index}": [code, message] for index in layers},
        "partial": {},
        "compiled": {},
        "decode_bucket": [],
        "capture_sizes": [],
        "kv_cache_dtype": kv_cache_dtype,
    }


def line(record: dict[str, Any]) -> str:
    """The verdict in one line."""
    engaged, total = record["engaged"], record["total"]
    if not engaged:
        return f"0/{total}: {first_reason(record)} (run: vllm-aiter-mla doctor)"
    kernels = "+".join(sorted(set(engaged.values())))
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record["kv_cache_dtype"], "fp8")
    low, high = record["decode_bucket"]
    text = f"{len(engaged)}/{total} MLA layers engaged ({kernels}, {cache} KV, decode bucket {low}..{high})"
    return text if len(engaged) == total else f"{text}; {total - len(engaged)} refused: {first_reason(record)}"


def first_reason(record: dict[str, Any]) -> str:
    """Code and reason of one layer that is not engaged; a layer that stopped half way tells more than others."""
    reasons = record["partial"] or record["refused"]
    if not reasons:
        return "the model has no MLA layer"
    text = ": ".join(next(iter(reasons.values())))
    # It may come from a file: one line, without what would drive a terminal.
    return "".join(letter if letter.isprintable() else " " for letter in text)
