"""Where vLLM's compile ranges and captured sizes lie beside the decode limit, by the installed vLLM's own rules."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import ConfigView, integration_of
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import offline
from vllm_aiter_mla.compat.switches import USE_AITER

# A bfloat16 value of the residual stream.
ACT = 2


def captures(options: ServeOptions, model: ModelFacts, limit: int) -> dict[str, Any]:
    """The sizes for which vLLM would capture graphs: ``inside`` (up to L), ``outside``, ``note`` where there are none.

    Speculative decoding may round some up to whole requests afterwards.
    """
    sizes: tuple[int, ...] = ()
    if options.view.enforce_eager:
        note = "none: --enforce-eager"
    else:
        try:
            sizes = offline.capture_sizes(
                options.parsed, options.max_num_seqs, model.vllm.num_drafts, options.max_num_batched_tokens
            )
            note = "" if sizes else "none: CUDA graphs are off"
        except Exception as error:
            note = _not_known(error)
    inside = tuple(size for size in sizes if size <= limit)
    return {"inside": inside, "outside": tuple(size for size in sizes if size > limit), "note": note}


def compile_ranges(options: ServeOptions, model: ModelFacts, limit: int, view: ConfigView) -> dict[str, Any]:
    """The ranges vLLM would compile, for the passes with L among the endpoints, each one more compile of the model.

    ``ranges`` holds (first, last) token count in order; the first ``inside`` of them lie below the limit; ``note`` says
    what is not known.
    """
    if options.view.enforce_eager or options.view.mode != "VLLM_COMPILE":
        return {"ranges": (), "inside": 0, "note": "none: vLLM compiles no graph with these options"}
    passes = integration_of(view) == "passes"
    try:
        more, note = _all_reduce_endpoint(options, model)
        wanted = admission.endpoints_with(more, limit) if passes else more
        ends = offline.compile_range_ends(options.parsed, wanted, options.max_num_batched_tokens)
    except Exception as error:
        return {"ranges": (), "inside": 0, "note": _not_known(error)}
    ranges = tuple(zip([1, *(end + 1 for end in ends)], ends, strict=False))
    return {
        "ranges": ranges,
        "inside": passes * sum(admission.within_limit(end, limit) for end in ends),
        "note": note,
    }


def _all_reduce_endpoint(options: ServeOptions, model: ModelFacts) -> tuple[list[int], str]:
    """vLLM ends a range where its fused all-reduce + RMSNorm stops, in tokens; on ROCm the limit can be asked for."""
    if options.tp == 1 or not offline.fuses_all_reduce(options.parsed):
        return [], ""
    if options.arch.startswith("gfx") and options.env.on(USE_AITER) and model.vllm.hidden_size:
        try:
            return [offline.all_reduce_bytes() // (model.vllm.hidden_size * ACT)], ""
        except Exception:
            pass
    return [], "vLLM's all-reduce fusion may add an endpoint"


def _not_known(error: Exception) -> str:
    return f"not known: vLLM's own rule did not run ({type(error).__name__}: {error})"
