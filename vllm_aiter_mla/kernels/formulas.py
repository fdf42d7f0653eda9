# SPDX-License-Identifier: Apache-2.0
"""Bytes and launches of one layer's query preparation and KV write, by the formulas of docs/configuration.md.

Every tensor a launch reads or writes counts once per launch; caches, padding and the tables' reuse between layers are
left out. These are formulas, not measurements; tests/tools/test_ledger.py counts the same over vLLM's own layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

ACT = 2  # bytes of a bfloat16 or float16 value
ROPE, WRITE, FUSED = "RoPE of q_pe and k_pe", "KV-cache write", "RoPE + KV-cache write"
ABSORB, CONCAT, QUANTISE = "absorb BMM", "concat", "concat + quantisation"
AITER, TRITON = "AITER: RoPE, KV write, query", "Triton: absorb BMM, RoPE, KV write, query"


class StepSize(NamedTuple):
    """One layer in one decode step."""

    tokens: int  # T, rows of the batch
    heads: int  # N, query heads of the rank
    nope: int  # P, R and L
    rope: int
    latent: int
    stored: int  # e, bytes of a value in the KV cache and in the prepared query; 1 for fp8, 2 for bfloat16
    weight: float = ACT  # w, bytes of a value of the absorbed weight, ``absorb.FORMATS`` has them by format


VLLM = "vLLM"
"""How the names of vLLM's own paths begin."""


@dataclass(frozen=True)
class Launch:
    """One kernel: what it does, bytes read and bytes written."""

    name: str
    read: int
    written: int


def paths(size: StepSize, eager: bool = False) -> dict[str, tuple[Launch, ...]]:
    """Return the launches of each path, by its name.

    In eager mode vLLM's own fusion, a compiler pass, does not run, and concat and quantisation are two launches.
    Otherwise vLLM compiles these into one function (``_DecodeConcatQuantFP8`` in its mla_attention.py), and with its
    own RoPE + KV pass on it is the strongest baseline. Slots and positions have 8 bytes.
    """
    t, n, p, r, l, e, w = size  # noqa: E741  the letters of the page
    query, row, rotated, tables = t * n * (l + r), t * (l + r), 2 * t * (n + 1) * r, t * (2 * r + 16)
    weight = int(w * n * p * l)
    rope = Launch(ROPE, rotated + t * (2 * r + 8), rotated)
    write = Launch(WRITE, 2 * row + 8 * t, e * row)
    fused = Launch(FUSED, 2 * t * n * r + 2 * row + tables, rotated + e * row)
    absorb = Launch(ABSORB, weight + 2 * t * n * p, 2 * t * n * l)
    concat = Launch(QUANTISE if e == 1 else CONCAT, 2 * query, e * query)
    aiter = Launch(AITER, 2 * query + 2 * row + tables, e * (query + row))
    triton = Launch(TRITON, weight + 2 * t * n * (p + r) + 2 * row + tables, e * (query + row))
    if eager and e == 1:
        concat = Launch(CONCAT, 2 * query, 2 * query)
    quantise = (Launch(QUANTISE, 2 * query, query),) * (eager and e == 1)
    fusions = {} if eager else {f"{VLLM}, fused": (fused, absorb, concat)}
    return {
        f"{VLLM}, unfused": (rope, write, absorb, concat, *quantise),
        **fusions,
        "aiter": (absorb, aiter),
        "triton": (triton,),
    }


def moved(launches: tuple[Launch, ...]) -> int:
    """Return the bytes read and written by all launches."""
    return sum(launch.read + launch.written for launch in launches)
