"""Bytes and launches of one layer's query preparation and KV write, by formula. docs/configuration.md shows them.

Every tensor a launch reads or writes counts once per launch; caches, padding and the tables' reuse between layers are
left out. These are formulas, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

ACT = 2  # bytes of a bfloat16 or float16 value
INDEX = 8  # bytes of an int64 slot or position
WEIGHT = {"plain": ACT, "fp8": 1, "mxfp4": 17 / 32}
"""Bytes of a value of the absorbed weight by its format; 32 values of mxfp4 have 16 bytes and one of scale."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer in one decode step.

    Attributes:
        tokens: T, rows of the batch.
        heads: N, query heads of the rank.
        nope, rope, latent: P, R and L.
        stored: e, bytes of a value in the KV cache and in the prepared query; 1 for fp8, 2 for bfloat16.
        weight: w, bytes of a value of the absorbed weight, one of ``WEIGHT``.
    """

    tokens: int
    heads: int
    nope: int
    rope: int
    latent: int
    stored: int
    weight: float = ACT

    @property
    def query(self) -> int:
        """Count the elements of the prepared query [T, N, L+R]."""
        return self.tokens * self.heads * (self.latent + self.rope)

    @property
    def row(self) -> int:
        """Count the elements of the KV rows [T, L+R]."""
        return self.tokens * (self.latent + self.rope)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: what it does, bytes read and bytes written."""

    name: str
    read: int
    written: int


def vllm_own(step: Step) -> tuple[Launch, ...]:
    """vLLM by default: RoPE and KV write apart. Concat and quantisation are one function that vLLM compiles.

    Source: ``_DecodeConcatQuantFP8`` in vllm/model_executor/layers/attention/mla_attention.py.
    """
    t, r, n = step.tokens, step.rope, step.heads
    rotated = ACT * t * (n + 1) * r
    return (
        Launch("RoPE of q_pe and k_pe", rotated + t * (ACT * r + INDEX), rotated),
        Launch("KV-cache write", ACT * step.row + INDEX * t, step.stored * step.row),
        _absorb(step),
        _assemble(step),
    )


def vllm_fused(step: Step) -> tuple[Launch, ...]:
    """vLLM with its own RoPE + KV pass on: the strongest baseline.

    Over fp8 weights the GEMM quantises q_nope as it reads it, which moves no byte more.
    """
    t, r, n = step.tokens, step.rope, step.heads
    return (
        Launch(
            "RoPE + KV-cache write",
            ACT * t * n * r + ACT * step.row + t * (ACT * r + 2 * INDEX),
            ACT * t * (n + 1) * r + step.stored * step.row,
        ),
        _absorb(step),
        _assemble(step),
    )


def aiter(step: Step) -> tuple[Launch, ...]:
    """The absorb BMM, then AITER's one launch."""
    read = ACT * step.query + ACT * step.row + step.tokens * (ACT * step.rope + 2 * INDEX)
    return (_absorb(step), Launch("AITER: RoPE, KV write, query", read, step.stored * (step.query + step.row)))


def triton(step: Step) -> tuple[Launch, ...]:
    """One launch with the absorb BMM inside: each value moves once."""
    t, n = step.tokens, step.heads
    read = int(step.weight * n * step.nope * step.latent) + ACT * t * n * (step.nope + step.rope) + ACT * step.row
    read += t * (ACT * step.rope + 2 * INDEX)
    return (Launch("Triton: absorb BMM, RoPE, KV write, query", read, step.stored * (step.query + step.row)),)


PATHS = {"vllm": vllm_own, "unmodified vLLM, its fusions on": vllm_fused, "aiter": aiter, "triton": triton}
"""What is compared, by name."""


def moved(launches: tuple[Launch, ...]) -> int:
    """Return the bytes read and written by all launches."""
    return sum(launch.read + launch.written for launch in launches)


def triton_share(step: Step) -> float:
    """Return the bytes of the one Triton launch over those of vLLM's own strongest configuration."""
    return moved(triton(step)) / moved(vllm_fused(step))


def _assemble(step: Step) -> Launch:
    name = "concat + quantisation" if step.stored == 1 else "concat"
    return Launch(name, ACT * step.query, step.stored * step.query)


def _absorb(step: Step) -> Launch:
    weights = int(step.weight * step.heads * step.nope * step.latent)
    latent = ACT * step.tokens * step.heads * step.latent
    return Launch("absorb BMM", weights + ACT * step.tokens * step.heads * step.nope, latent)
