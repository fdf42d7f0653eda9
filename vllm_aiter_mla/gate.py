# SPDX-License-Identifier: Apache-2.0
"""The gate: reads a finished ``VllmConfig`` once, decides, and writes once or not at all.

``compat.patches.hook_configs`` calls it for every ``VllmConfig`` that is built, after vLLM has filled everything in.
Where the flag is on and the engine is admitted, ``compat.config.write`` puts our pass into its slot, our ops next to
those of vLLM in ``splitting_ops`` and, for the passes, the decode limit among the ends of compile ranges. No other
option changes. With the flag off, our entry leaves ``additional_config``: the cache key is as without the plugin.

The class-wide ``CompilationConfig._attention_ops`` stays as it is: a change there would reach configs whose flag is
off in the same process, and change their cache key.
"""

import logging
from contextlib import suppress
from typing import Any

from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import ConfigView, Engage, Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, release
from vllm_aiter_mla.settings import (
    FLAG_FIELD,
    OPTIONS,
    STRICT_OPTION,
    Settings,
    SettingsError,
    near_misses,
    set_options,
)
from vllm_aiter_mla.status import metrics, status_files
from vllm_aiter_mla.status.engine_status import record_of_skipped_engine


def apply(vllm_config: Any) -> Engage | Skip | None:
    """Decide on ``vllm_config``, and engage it if it is admitted.

    Returns:
        what was decided; None if the flag is off, or if an engine stands on the options already.

    Raises:
        SettingsError: an option is wrong, or the engine is skipped in strict mode.
    """
    if compat_config.is_decided(vllm_config):
        return None
    settings = compat_config.settings_of(vllm_config)
    for key in near_misses(vllm_config.additional_config):
        log.say_once(logging.WARNING, f"additional_config.{key} is not read: the options belong into {OPTIONS}")
    if not settings.enabled:
        if unused := set_options(settings):
            log.say_once(logging.WARNING, f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect")
        compat_config.drop_options(vllm_config)
        return None
    define_ops()
    patches.look_at_hash()
    facts = ConfigView()
    try:
        facts = compat_config.read(vllm_config)
        decided = admission.decide_engine(facts, settings)
    except Exception as error:  # of an unknown vLLM
        decided = Skip("capability", f"this vLLM's config cannot be read: {type(error).__name__}: {error}")
    if isinstance(decided, Engage):
        try:  # the pass comes first and is put into its slot last: without it nothing of ours runs
            compat_config.write(vllm_config, decided, _pass(vllm_config, decided, settings))
        except Exception as error:  # of an unknown vLLM, or of a broken torch
            decided = Skip("capability", f"the pass cannot be installed: {type(error).__name__}: {error}")
    if isinstance(decided, Skip):
        _skip(facts, decided, settings)
        return decided
    for line in _lines(facts, decided, settings):
        log.say(logging.INFO, line)
    return decided


def define_ops() -> None:
    """Define the torch ops in this process. A failure is kept, and an engine is skipped because of it."""

    def define() -> None:
        from vllm_aiter_mla.serving import ops  # a run with the flag off must not pay for it

        ops.register()

    patches.keep_failure("torch ops", define)


def _pass(vllm_config: Any, engage: Engage, settings: Settings) -> Any:
    """Return the pass to install, with the user's own chained in front."""
    # The hook before the pass: should it fail, no worker may run kernels that nobody has checked.
    patches.hook_workers()
    # Imports torch's compiler, which a run with the flag off must not pay for.
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    with log.warned("the metrics are not available"):
        with suppress(OSError):  # a worker that cannot write its status there says so
            status_files.hold_run_lock(compat_config.cache_folder())
        metrics.register_metrics(compat_config.cache_folder())
    chained = compat_config.wrapped_pass(vllm_config.compilation_config)
    return AiterMLAPipeline(
        vllm_config, limit=engage.limit, settings=settings, chained=chained, integration=engage.integration
    )


def _skip(facts: ConfigView, skip: Skip, settings: Settings) -> None:
    """Say why the engine runs vLLM's own code, and write it down.

    Raises:
        SettingsError: in strict mode.
    """
    line = f"off although it was switched on: {skip}"
    if settings.strict:
        raise SettingsError(f"{log.PREFIX}{line} ({STRICT_OPTION})")
    log.say_once(logging.WARNING, line)
    # The workers run nothing of ours then, so the process that built the config writes one record for all ranks.
    with log.warned("the status file could not be written"):
        folder = compat_config.cache_folder()
        record = record_of_skipped_engine(
            skip, facts.layers, kv_cache_dtype=facts.kv_cache_dtype, model_name=facts.model_name, engine=facts.engine,
            run=status_files.hold_run_lock(folder),
        )  # fmt: skip
        metrics.register_metrics(folder)
        status_files.write(folder, record)


def _lines(facts: ConfigView, engage: Engage, settings: Settings) -> list[str]:
    """Return what is said of an engine that was engaged."""
    limit = engage.limit
    if settings.max_token_num is not None:
        origin = f"given as {settings.max_token_num}"
    else:
        origin = f"max_num_seqs {facts.max_num_seqs} x (1 + {facts.num_drafts} drafts)"
    if engage.integration == "module":
        ranges = "integration module"
    elif limit in engage.endpoints[:-1]:
        ranges = f"integration passes, a compile range ends at {limit}"
    else:
        ranges = f"integration passes, every batch up to max_num_batched_tokens {facts.max_num_batched_tokens}"
    other = admission.why_not_platform(facts)
    named = f", on a platform that it must be named for ({other.code})" if other else ""
    lines = [f"on: decode limit {limit} tokens ({origin}); {ranges}; kernel {settings.kernel}{named}"]
    cut = admission.why_not_passes(facts)
    if engage.integration == "passes":
        state = "on: its fused op is taken over" if facts.fusion else "off: RoPE is fused from vLLM's unfused graph"
        lines.append(f"vLLM's own {release.VLLMS_FUSION} is {state}")
    elif settings.integration == "auto" and cut and cut.code == "graph_partition":
        lines.append(f"the passes would run with {admission.PARTITION}")
    return lines
