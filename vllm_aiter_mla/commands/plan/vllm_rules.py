"""Where ``plan`` asks vLLM itself: its option parser, its default capture sizes, its compile ranges.

What: private methods of ``VllmConfig`` run on a stand-in that holds the few attributes they read.
Why: they are the installed release's rule, and building a whole ``VllmConfig`` wants the card that is planned for.
Link: ``vllm/config/vllm.py``, ``_set_cudagraph_sizes`` and ``_set_compile_ranges`` (0.30 to 0.33).
Probe: any exception becomes a sentence in place of the figures; nothing is guessed.
Remove when: vLLM offers either as a function of plain numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from vllm_aiter_mla import bucket
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.options import ServeOptions

# Where `vllm serve` has its parser: the first since 0.32, the second before.
SERVE_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")

# In place of vLLM's own, which lists all its options on 300 lines before it says which one is wrong.
USAGE = "%(prog)s MODEL [options of plan] [options of `vllm serve`]"


class VllmMissingError(RuntimeError):
    """vLLM cannot be imported, so its options cannot be parsed."""


def parse(model: str, arguments: Sequence[str], prog: str = "vllm-aiter-mla plan") -> Any:
    """Parse the options of ``vllm serve`` with vLLM's own parser; a wrong one ends the process with vLLM's message.

    Raises:
        VllmMissingError: vLLM is not importable.
        ValueError: the parser raised instead of naming the option, as over a ``--config`` file that is not there.
        SystemExit: a wrong option (status 2).
    """
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise VllmMissingError(f"plan reads the options of `vllm serve` with vLLM's own parser: {error}") from error
    from vllm_aiter_mla import plugin

    # vLLM loads plugins itself while it builds the parser; VLLM_PLUGINS may leave this one out.
    plugin.register()
    parser = _serve_parser(FlexibleArgumentParser(prog=prog, usage=USAGE))
    try:
        return parser.parse_args([model, *arguments])
    except Exception as error:
        raise ValueError(f"vLLM's parser of options: {type(error).__name__}: {error}") from error


def _serve_parser(parser: Any) -> Any:
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


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
    if options.enforce_eager:
        return Captures(note="none: --enforce-eager")
    try:
        sizes = _capture_sizes(options)
    except Exception as error:
        return Captures(note=f"not known: vLLM's own rule did not run ({type(error).__name__}: {error})")
    return Captures(
        inside=tuple(size for size in sizes if size <= limit),
        outside=tuple(size for size in sizes if size > limit),
        note="" if sizes else "none: CUDA graphs are off",
    )


def _capture_sizes(options: ServeOptions) -> list[int]:
    from vllm.config import CUDAGraphMode, VllmConfig

    compilation = copy.deepcopy(options.compilation)
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    query_len = 1 + options.num_drafts
    stand_in = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(enforce_eager=False),
        num_speculative_tokens=options.num_drafts,
        parallel_config=SimpleNamespace(tensor_parallel_size=options.tp),
        performance_mode=options.performance_mode,
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
        ),
        speculative_config=None,
        uniform_decode_query_len=query_len,
    )
    VllmConfig._set_cudagraph_sizes(stand_in)  # type: ignore[arg-type]
    return list(compilation.cudagraph_capture_sizes)


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
    endpoints, note = _all_reduce_endpoint(options, model)
    try:
        ends = _endpoints(options, bucket.endpoints_with([*endpoints], limit))
    except Exception as error:
        return Ranges(note=f"not known: vLLM's own rule did not run ({type(error).__name__}: {error})")
    starts = [1, *(end + 1 for end in ends[:-1])]
    return Ranges(
        ranges=tuple(zip(starts, ends, strict=True)),
        inside=sum(bucket.in_bucket(end, limit) for end in ends),
        note=note,
    )


def _endpoints(options: ServeOptions, ours: list[int]) -> list[int]:
    from vllm.config import VllmConfig

    compilation = copy.deepcopy(options.compilation)
    # Needs the card's own all-reduce limit; added by hand where it is known.
    compilation.pass_config.fuse_allreduce_rms = False
    compilation.compile_ranges_endpoints = [*(compilation.compile_ranges_endpoints or ()), *ours]
    stand_in = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=options.max_num_batched_tokens),
    )
    VllmConfig._set_compile_ranges(stand_in)  # type: ignore[arg-type]
    return sorted(set(compilation.compile_ranges_endpoints))


def _all_reduce_endpoint(options: ServeOptions, model: ModelFacts) -> tuple[list[int], str]:
    """vLLM ends a range where its fused all-reduce + RMSNorm stops; on ROCm the limit is a constant of its source."""
    wanted = options.compilation.pass_config.fuse_allreduce_rms
    if options.tp == 1 or wanted is False:
        return [], ""
    if options.arch.startswith("gfx") and options.env.on("VLLM_ROCM_USE_AITER") and model.hidden_size:
        try:
            module = import_module("vllm.distributed.device_communicators.aiter_custom_all_reduce")
            size = module.AiterCustomAllreduce.effective_max_size()
        except Exception:
            return [], "vLLM's all-reduce fusion may add an endpoint"
        return [size // (model.hidden_size * 2)], ""
    return [], "vLLM's all-reduce fusion may add an endpoint"


def impl_name(backend: str) -> str:
    """Class name of the attention implementation behind a name of vLLM's backend registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum[backend].value
    # CUSTOM has no class of its own: a plugin registers one.
    return str(path).rpartition(".")[2].removesuffix("Backend") + "Impl" if path else f"another plugin's ({backend})"
