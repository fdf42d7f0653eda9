"""The options of ``vllm serve`` as ``plan`` needs them: read by vLLM's own parser, no engine, no model loaded.

What vLLM would take from the card or the checkpoint and ``plan`` cannot see is assumed, and every assumption is kept
as a sentence for the reader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_aiter_mla.admission import ConfigView
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import offline, switches
from vllm_aiter_mla.compat.batch_defaults import BatchDefaultsError, batch_defaults
from vllm_aiter_mla.compat.offline import OptionError
from vllm_aiter_mla.compat.switches import FP4_BMM, FP8_BMM, USE_AITER, VARIABLES
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD, Settings

# Name and GiB of the smallest card of each kind: vLLM's defaults of the scheduler go by its memory.
CARDS = {"gfx942": ("AMD Instinct MI300X", 192), "gfx950": ("AMD Instinct MI350X", 288), "sm90": ("NVIDIA H100", 80)}

# Past these the products that a plan forms leave 64 bits; no engine comes near.
MOST_REQUESTS, MOST_DRAFTS, MOST_TOKENS, MOST_BLOCK, MOST_RANKS = 2**20, 2**10, 2**30, 2**16, 2**16
BATCH = ("--max-num-seqs", "--max-num-batched-tokens")
RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
         "prefill_context_parallel_size")  # fmt: skip


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
        """Whether the installed vLLM reads the variable as true."""
        return bool(switches.switched_on(name, self.values))


def environment(given: Sequence[str], process: Mapping[str, str] | None = None) -> Environment:
    """Merge ``--env NAME=VALUE`` over this process's environment over the installed vLLM's defaults.

    One default is not vLLM's: VLLM_ROCM_USE_AITER counts as on, because nothing can engage without it.

    Raises:
        OptionError: an entry without ``=``, a name that the plan does not read, or a value that vLLM cannot read.
    """
    process = os.environ if process is None else process
    values = {name: str(int(name == USE_AITER or bool(switches.switched_on(name)))) for name in VARIABLES}
    origins = dict.fromkeys(VARIABLES, "default")
    for name in VARIABLES:
        if name in process:
            values[name], origins[name] = process[name], "environment"
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in VARIABLES:
            raise OptionError(f"--env {entry}: NAME=VALUE expected, with a name of {', '.join(VARIABLES)}")
        values[name], origins[name] = value, "--env"
    for name in VARIABLES:
        try:
            switches.switched_on(name, values)
        except ValueError as error:
            raise OptionError(str(error)) from error
    return Environment(values, origins)


@dataclass(frozen=True)
class ServeOptions:
    """What the plan needs of the options; sizes are per engine unless a rank is named.

    Attributes:
        arch: the card planned for.
        settings: the plugin's own options, switched on.
        env: vLLM's variables.
        parsed: vLLM's own namespace, for vLLM's own rules.
        view: what admission reads of the options.
        tp, pp: degrees of tensor and pipeline parallelism.
        max_num_seqs, max_num_batched_tokens: the scheduler's bounds.
        block_size: of the KV cache, in tokens.
        attention_backend: as given, e.g. ``TRITON_MLA``; empty when left to vLLM.
        assumptions: sentences.
    """

    arch: str
    settings: Settings
    env: Environment
    parsed: Any
    view: ConfigView
    tp: int
    pp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    attention_backend: str
    assumptions: tuple[str, ...]


def read(arguments: Sequence[str], name: str, arch: str, env: Environment) -> ServeOptions:
    """Read the options of ``vllm serve`` for the model ``name``.

    Raises:
        SettingsError: one of the plugin's own options is wrong.
        OptionError: one of vLLM's is wrong, or out of a range that vLLM checks only when it builds the engine.
        VllmMissingError: vLLM is not importable.
    """
    from vllm_aiter_mla import plugin

    # vLLM loads plugins itself while it builds the parser; VLLM_PLUGINS may leave this one out.
    plugin.register()
    parsed = offline.serve_options([name, *arguments])
    for rank in RANKS:
        _in_range(f"--{rank.replace('_', '-')}", getattr(parsed, rank, 1), MOST_RANKS)
    _check_speculation(parsed)
    notes: list[str] = []
    seqs, batched = _batch_defaults(parsed, arch)
    from_server = f"{seqs}, the API server's default in vLLM {compat_config.vllm_version()} on {arch}"
    sixteen = "16 assumed; the backend may choose another, which may change AITER's kernel"
    return ServeOptions(
        arch=arch,
        max_num_seqs=_or_default(parsed, "max_num_seqs", seqs, MOST_REQUESTS, from_server, notes),
        max_num_batched_tokens=_or_default(
            parsed, "max_num_batched_tokens", batched, MOST_TOKENS, f"{batched}, that server's default", notes
        ),
        settings=_settings(parsed, notes),
        env=env,
        parsed=parsed,
        view=offline.view_of_options(parsed),
        tp=parsed.tensor_parallel_size,
        pp=parsed.pipeline_parallel_size,
        block_size=_or_default(parsed, "block_size", 16, MOST_BLOCK, sixteen, notes),
        attention_backend=offline.backend_name(parsed),
        assumptions=tuple(notes),
    )


def _batch_defaults(parsed: Any, arch: str) -> tuple[int, int]:
    """What vLLM takes for max_num_seqs and max_num_batched_tokens on the card; not asked where both are given."""
    given = parsed.max_num_seqs, parsed.max_num_batched_tokens
    for option, value, most in zip(BATCH, given, (MOST_REQUESTS, MOST_TOKENS), strict=True):
        if value is not None:
            _in_range(option, value, most)
    if None not in given:
        return given
    name, gibibytes = CARDS[arch]
    try:
        return batch_defaults(name, gibibytes << 30, parsed)
    except BatchDefaultsError as error:
        raise OptionError(
            f"{' and '.join(BATCH)}: the defaults of vLLM {compat_config.vllm_version()} on {arch} "
            f"are not known ({error}); give both"
        ) from error


def _settings(parsed: Any, notes: list[str]) -> Settings:
    settings = compat_config.settings_of(parsed)
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


def _or_default(parsed: Any, name: str, default: int, most: int, note: str, notes: list[str]) -> int:
    """The option's value where it is given, else the default and a note that says so."""
    value, option = getattr(parsed, name), f"--{name.replace('_', '-')}"
    if value is not None:
        return _in_range(option, value, most)
    notes.append(f"{option} is not given: {note}")
    return default


def _check_speculation(parsed: Any) -> None:
    """Refuse numbers of drafts that no engine comes near; vLLM's own config checks the rest."""
    spec = {} if parsed.speculative_config is None else parsed.speculative_config
    if not isinstance(spec, Mapping):
        raise OptionError(f"--speculative-config {spec}: a JSON object expected")
    places = ("--spec-tokens", getattr(parsed, "spec_tokens", None)), (
        "--speculative-config num_speculative_tokens", spec.get("num_speculative_tokens"))  # fmt: skip
    for option, count in places:
        if count is not None:
            _in_range(option, count, MOST_DRAFTS)


def about_the_card(options: ServeOptions, bf16_weight: bool) -> list[str]:
    """What is assumed of the card and its variables; ``bf16_weight``: whether a ``kv_b_proj`` is held in bfloat16."""
    arch, env = options.arch, options.env
    if not arch.startswith("gfx"):
        return []
    notes = ["ROCm 7 or newer, an AITER with the 15-argument op: `vllm-aiter-mla doctor` looks at the machine"]
    if options.settings.measures:
        notes.append(
            "kernel=auto: the server times aiter, triton and unmodified vLLM on its card; shown is the order without it"
        )
    if env.origins[USE_AITER] == "default":
        notes.append("VLLM_ROCM_USE_AITER=1 is assumed; vLLM's default is 0: export it")
    # The fp4 switch does nothing on another card, and nothing beside another kv_b_proj.
    for name in (FP8_BMM, FP4_BMM) if arch == "gfx950" and bf16_weight else (FP8_BMM,):
        if env.origins[name] == "default":
            state, other, value = ("on", "without", 0) if env.on(name) else ("off", "with", 1)
            default = f"{state}, the default of vLLM {compat_config.vllm_version()}"
            notes.append(f"{name} is unset: {default}; plan {other} it by --env {name}={value}")
    return notes
