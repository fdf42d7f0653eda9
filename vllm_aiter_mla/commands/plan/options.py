"""The options of ``vllm serve`` as ``plan`` reads them: vLLM's own parser, no engine, no model loaded.

What vLLM would take from the card or the checkpoint and ``plan`` cannot see is assumed, and every assumption is kept
as a sentence for the reader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_aiter_mla.commands.fields import DTYPES
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD, Settings, resolve

# max_num_seqs and max_num_batched_tokens of an API server, by card: EngineArgs.get_batch_defaults of vLLM 0.32 goes by
# memory (160 GiB and more, 70 GiB and more).
BATCH_DEFAULTS = {"gfx942": (1024, 16384), "gfx950": (1024, 16384), "sm90": (1024, 8192)}
ARCHES = tuple(BATCH_DEFAULTS)

# Past these a plan's products leave 64 bits; no engine is near.
MOST_REQUESTS, MOST_DRAFTS, MOST_TOKENS, MOST_BLOCK, MOST_RANKS = 2**20, 2**10, 2**30, 2**16, 2**16

# vLLM's own defaults (vllm/envs.py), except VLLM_ROCM_USE_AITER: that one is off, and nothing can engage without it.
ENV_DEFAULTS = {
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_MLA": "1",
    "VLLM_ROCM_USE_AITER_FP8BMM": "1",
    "VLLM_ROCM_USE_AITER_FP4BMM": "1",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
    "VLLM_MLA_DISABLE": "0",
}


class OptionError(ValueError):
    """An option is wrong; the message names it and its value."""


@dataclass(frozen=True)
class Environment:
    """vLLM's environment variables that decide, and where each value comes from.

    Attributes:
        values: by name.
        origins: "--env", "environment" or "default", by name.
    """

    values: Mapping[str, str]
    origins: Mapping[str, str]

    def on(self, name: str) -> bool:
        """Whether vLLM reads the variable as true."""
        return self.values[name].lower() in ("1", "true")


def environment(given: Sequence[str], process: Mapping[str, str] | None = None) -> Environment:
    """Merge ``--env NAME=VALUE`` over this process's environment over the defaults.

    Raises:
        OptionError: an entry without ``=``, or a name that plays no part in the plan.
    """
    process = os.environ if process is None else process
    values, origins = dict(ENV_DEFAULTS), dict.fromkeys(ENV_DEFAULTS, "default")
    for name in ENV_DEFAULTS:
        if name in process:
            values[name], origins[name] = process[name], "environment"
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in ENV_DEFAULTS:
            raise OptionError(f"--env {entry}: NAME=VALUE expected, with a name of {', '.join(ENV_DEFAULTS)}")
        values[name], origins[name] = value, "--env"
    return Environment(values, origins)


@dataclass(frozen=True)
class ServeOptions:
    """What the plan needs of the options; sizes are per engine unless a rank is named.

    Attributes:
        arch: the card planned for.
        settings: the plugin's own options, switched on.
        tp, pp, dcp, pcp: degrees of tensor, pipeline, decode- and prefill-context parallelism.
        max_num_seqs, max_num_batched_tokens, num_drafts: the scheduler's bounds.
        block_size: of the KV cache, in tokens.
        compilation: vLLM's parsed ``CompilationConfig``.
        attention_backend: as given, e.g. ``TRITON_MLA``; empty when left to vLLM.
        assumptions: sentences.
    """

    arch: str
    settings: Settings
    env: Environment
    compilation: Any
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_drafts: int = 0
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    block_size: int = 16
    enforce_eager: bool = False
    mode: str = "VLLM_COMPILE"
    performance_mode: str = "balanced"
    attention_backend: str = ""
    hisparse: bool = False
    assumptions: tuple[str, ...] = ()


def read(parsed: Any, model: ModelFacts, arch: str, env: Environment) -> ServeOptions:
    """Turn vLLM's parsed namespace into :class:`ServeOptions`.

    Raises:
        SettingsError: one of the plugin's own options is wrong.
        OptionError: one of vLLM's is out of range; vLLM finds that only when it builds the engine.
    """
    notes: list[str] = []
    seqs, batched = _batch(parsed, arch, notes)
    return ServeOptions(
        arch=arch,
        settings=_settings(parsed, notes),
        env=env,
        compilation=parsed.compilation_config,
        tp=_ranks(parsed, "tensor_parallel_size"),
        pp=_ranks(parsed, "pipeline_parallel_size"),
        dcp=_ranks(parsed, "decode_context_parallel_size"),
        pcp=_ranks(parsed, "prefill_context_parallel_size"),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        num_drafts=_drafts(parsed, model, notes),
        kv_cache_dtype=str(parsed.kv_cache_dtype),
        dtype=_dtype(parsed, model),
        block_size=_block_size(parsed, notes),
        enforce_eager=bool(parsed.enforce_eager),
        mode=_mode(parsed),
        performance_mode=str(getattr(parsed, "performance_mode", "balanced")),
        attention_backend=_backend(parsed),
        hisparse=getattr(parsed.attention_config, "hisparse_config", None) is not None,
        assumptions=(*notes, *_about(arch, env)),
    )


def _settings(parsed: Any, notes: list[str]) -> Settings:
    from vllm_aiter_mla.compat.patches import pass_config

    settings = resolve(pass_config.values_of(parsed.compilation_config.pass_config), parsed.additional_config)
    if settings.max_token_num is not None:
        _in_range(f"{LIMIT_FIELD} (or aiter_mla.max_token_num)", settings.max_token_num, MOST_TOKENS)
    if settings.enabled:
        return settings
    notes.append(f"pass_config.{FLAG_FIELD} is not given: planned as if it were true")
    return replace(settings, enabled=True)


def _in_range(option: str, value: object, most: int) -> int:
    """``value`` where it is a whole number from 1 to ``most``, else OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise OptionError(f"{option} {value}: a whole number from 1 to {most} expected")
    return value


def _ranks(parsed: Any, name: str) -> int:
    return _in_range(f"--{name.replace('_', '-')}", getattr(parsed, name, 1), MOST_RANKS)


def _dtype(parsed: Any, model: ModelFacts) -> str:
    asked = str(parsed.dtype).removeprefix("torch.")
    return model.dtype if asked == "auto" else DTYPES.get(asked, asked)


def _batch(parsed: Any, arch: str, notes: list[str]) -> tuple[int, int]:
    seqs, batched = parsed.max_num_seqs, parsed.max_num_batched_tokens
    default_seqs, default_batched = BATCH_DEFAULTS[arch]
    if seqs is None:
        notes.append(f"--max-num-seqs is not given: {default_seqs}, the API server's default in vLLM 0.32 on {arch}")
    if batched is None:
        notes.append(f"--max-num-batched-tokens is not given: {default_batched}, that server's default")
    return (
        default_seqs if seqs is None else _in_range("--max-num-seqs", seqs, MOST_REQUESTS),
        default_batched if batched is None else _in_range("--max-num-batched-tokens", batched, MOST_TOKENS),
    )


def _drafts(parsed: Any, model: ModelFacts, notes: list[str]) -> int:
    """Speculative tokens per request; from the checkpoint where an MTP method leaves the number open, as vLLM does."""
    spec = parsed.speculative_config
    if spec is not None and not isinstance(spec, Mapping):
        raise OptionError(f"--speculative-config {spec}: a JSON object expected")
    given = getattr(parsed, "spec_tokens", None)
    if given is not None:
        return _in_range("--spec-tokens", given, MOST_DRAFTS)
    count = (spec or {}).get("num_speculative_tokens")
    if count is not None:
        return _in_range("--speculative-config num_speculative_tokens", count, MOST_DRAFTS)
    method = getattr(parsed, "spec_method", None) or (spec or {}).get("method")
    if not method:
        return 0
    notes.append(f"num_speculative_tokens is not given: {max(model.draft_layers, 1)} assumed for {method}")
    return max(model.draft_layers, 1)


def _block_size(parsed: Any, notes: list[str]) -> int:
    if parsed.block_size is not None:
        return _in_range("--block-size", parsed.block_size, MOST_BLOCK)
    notes.append(
        "--block-size is not given: 16 assumed; the backend may choose another, which may change AITER's kernel"
    )
    return 16


def _mode(parsed: Any) -> str:
    mode = parsed.compilation_config.mode
    if mode is not None:
        return str(mode.name)
    return "VLLM_COMPILE" if int(parsed.optimization_level) > 0 else "NONE"


def _backend(parsed: Any) -> str:
    chosen = getattr(parsed, "attention_backend", None) or getattr(parsed.attention_config, "backend", None)
    return str(getattr(chosen, "name", chosen) or "")


def _about(arch: str, env: Environment) -> list[str]:
    if not arch.startswith("gfx"):
        return []
    notes = ["ROCm 7 and an AITER with the 15-argument op are assumed: `vllm-aiter-mla doctor` looks at the machine"]
    if env.origins["VLLM_ROCM_USE_AITER"] == "default":
        notes.append("VLLM_ROCM_USE_AITER=1 is assumed; vLLM's default is 0, and without it nothing engages: export it")
    for name in ("VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"):
        if env.origins[name] == "default" and (arch == "gfx950" or "FP8" in name):
            notes.append(f"{name} is unset: on, vLLM's default; plan without it by --env {name}=0")
    return notes
