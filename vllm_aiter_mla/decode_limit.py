"""Decode-limit arithmetic: which compile ranges hold decode steps. Pure, no torch, no vLLM.

The limit is about speed and memory only. A short prompt or a mixed batch runs the same compiled range as a decode step,
so nothing may rest its correctness on being inside or outside.
"""

from __future__ import annotations

SMALLEST_LIMIT = 2
"""vLLM's ``_set_compile_ranges`` drops endpoints below 2 (a range of the single size 1 would be a shape
specialisation). A limit of 1 would therefore never be the end of a range, and the passes would never apply: a server
with ``max_num_seqs=1`` gets a decode limit of two tokens instead."""


def decode_limit(max_num_seqs: int, num_speculative_tokens: int, override: int | None = None) -> int:
    """Largest number of tokens L that a decode step can hold; the decode limit is ``1..L``.

    ``L = max_num_seqs * (1 + num_speculative_tokens)`` is vLLM's own bound for decode-mode captures: each request
    brings its newly sampled token and its drafts. ``override`` replaces it.

    Raises:
        ValueError: when a count is out of range.
    """
    if override is not None:
        if override <= 0:
            raise ValueError(f"decode limit must be above 0, got {override}")
        return max(override, SMALLEST_LIMIT)
    if max_num_seqs <= 0:
        raise ValueError(f"max_num_seqs must be above 0, got {max_num_seqs}")
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens must not be negative, got {num_speculative_tokens}")
    return max(max_num_seqs * (1 + num_speculative_tokens), SMALLEST_LIMIT)


def within_limit(range_end: int, limit: int) -> bool:
    """Whether a compile range ending at ``range_end`` tokens lies within the decode limit ``1..limit``."""
    return range_end <= limit


def endpoints_with(endpoints: list[int] | None, limit: int) -> list[int]:
    """``endpoints`` of the compile ranges with ``limit`` among them, sorted, without repeats; the input is kept."""
    return sorted({*(endpoints or ()), limit})
