"""Where vLLM's compile ranges and captured sizes lie beside the decode bucket, by the installed vLLM's own rules."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_aiter_mla import bucket
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import offline

# A bfloat16 value of the residual stream.
ACT = 2


@dataclass(frozen=True)
class Captures:
    """Sizes for which vLLM captures graphs, split at L; ``note`` replaces them where they are not known.

    Attributes:
        inside: sizes up to L.
        outside: sizes above L.
        note: why there are none, or what to know about them.
    """

    inside: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    note: str = ""


def captures(options: ServeOptions, limit: int) -> Captures:
    """The sizes vLLM would capture; speculative decoding may round some up to whole requests afterwards."""
    if options.view.enforce_eager:
        return Captures(note="none: --enforce-eager")
    try:
        sizes = offline.capture_sizes(
            options.parsed, options.max_num_seqs, options.num_drafts, options.max_num_batched_tokens
        )
    except Exception as error:
        return Captures(note=_not_known(error))
    return Captures(
        inside=tuple(size for size in sizes if size <= limit),
        outside=tuple(size for size in sizes if size > limit),
        note="" if sizes else "none: CUDA graphs are off",
    )


@dataclass(frozen=True)
class Ranges:
    """vLLM's compile ranges with L among the endpoints.

    Attributes:
        ranges: (first, last) token count, in order.
        inside: how many of them, from the first on, lie in the bucket.
        note: what is not known about them.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    inside: int = 0
    note: str = ""


def compile_ranges(options: ServeOptions, model: ModelFacts, limit: int) -> Ranges:
    """The ranges vLLM would compile, each one more Inductor compile of the model."""
    more, note = _all_reduce_endpoint(options, model)
    try:
        ends = offline.compile_range_ends(
            options.parsed, bucket.endpoints_with(more, limit), options.max_num_batched_tokens
        )
    except Exception as error:
        return Ranges(note=_not_known(error))
    starts = [1, *(end + 1 for end in ends[:-1])]
    inside = sum(bucket.in_bucket(end, limit) for end in ends)
    return Ranges(tuple(zip(starts, ends, strict=True)), inside, note)


def _all_reduce_endpoint(options: ServeOptions, model: ModelFacts) -> tuple[list[int], str]:
    """vLLM ends a range where its fused all-reduce + RMSNorm stops, in tokens; on ROCm the limit can be asked for."""
    if options.tp == 1 or options.parsed.compilation_config.pass_config.fuse_allreduce_rms is False:
        return [], ""
    if options.arch.startswith("gfx") and options.env.on("VLLM_ROCM_USE_AITER") and model.hidden_size:
        try:
            return [offline.all_reduce_bytes() // (model.hidden_size * ACT)], ""
        except Exception:
            pass
    return [], "vLLM's all-reduce fusion may add an endpoint"


def _not_known(error: Exception) -> str:
    return f"not known: vLLM's own rule did not run ({type(error).__name__}: {error})"
