# SPDX-License-Identifier: Apache-2.0
"""The gate: reads a finished ``VllmConfig`` once, decides, and writes once or not at all.

``compat.patches.hook_configs`` calls the gate for every ``VllmConfig`` that is built, after vLLM has filled the config.
If the flag is on and the engine is admitted, ``compat.config.write`` puts our pass into its slot and our ops into
``splitting_ops``, next to the ops of vLLM. For the passes, it also adds the decode limit to the ends of compile ranges.
No other option changes. With the flag off, the gate removes our entry of ``additional_config``. Then the cache key is
the same as without the plugin.

The class-wide ``CompilationConfig._attention_ops`` does not change. A change there would reach configs of the same
process whose flag is off, and change their cache key.
"""

import logging
from contextlib import suppress
from typing import Any

from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import ConfigView, Engagement, Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, release
from vllm_aiter_mla.settings import (
    FLAG_FIELD,
    OPTION_PREFIX,
    STRICT_OPTION,
    Settings,
    SettingsError,
    near_misses,
    non_default_options,
)
from vllm_aiter_mla.status import liveness, metrics, status_files
from vllm_aiter_mla.status.engine_status import record_of_skipped_engine


def apply(vllm_config: Any) -> Engagement | Skip | None:
    """Decide whether the engine of ``vllm_config`` may take the fast path, and change the config if so.

    Returns:
        how the engine was engaged, or why it is skipped; None if the flag is off, or if the gate must leave the config
        alone (``compat.config.is_decided``).

    Raises:
        SettingsError: an option is wrong, or the engine is skipped in strict mode.
    """
    if compat_config.is_decided(vllm_config):
        return None
    settings = compat_config.settings_of(vllm_config)
    for key in near_misses(vllm_config.additional_config, settings.enabled):
        log.say_once(logging.WARNING, f"additional_config.{key} is not read: the options belong in {OPTION_PREFIX}")
    if not settings.enabled:
        if ignored := non_default_options(settings):
            log.say_once(logging.WARNING, f"{', '.join(ignored)} set but {FLAG_FIELD} is off: no effect")
        compat_config.drop_options(vllm_config)
        return None
    define_ops()
    patches.look_at_hash()
    facts = ConfigView()
    try:
        facts = compat_config.read(vllm_config)
        result = admission.decide_engine(facts, settings)
    except Exception as error:  # an unknown vLLM may raise any error
        result = Skip("capability", f"this vLLM's config cannot be read: {type(error).__name__}: {error}")
    if isinstance(result, Engagement):
        try:  # the pass is made first, and ``write`` puts it into its slot last: without the pass none of our code runs
            compat_config.write(vllm_config, result, _make_pass(vllm_config, result, settings))
        except Exception as error:  # an unknown vLLM or a broken torch may raise any error
            result = Skip("capability", f"the pass cannot be installed: {type(error).__name__}: {error}")
    if isinstance(result, Skip):
        _report_skip(facts, result, settings)
        return result
    for line in _engagement_lines(facts, result, settings):
        log.say(logging.INFO, line)
    return result


def define_ops() -> None:
    """Define the torch ops in this process. ``patches`` keeps a failure, and the gate then skips the engine."""

    def define() -> None:
        from vllm_aiter_mla.serving import ops  # a run with the flag off must not pay for this import

        ops.register()

    patches.keep_failure("torch ops", define)


def _make_pass(vllm_config: Any, engagement: Engagement, settings: Settings) -> Any:
    """Return the pass to install, which first runs the user's own pass if there is one."""
    # The hook comes before the pass: if hooking fails, no worker may run kernels that nobody has checked.
    patches.hook_workers()
    # Imports torch's compiler, which a run with the flag off must not pay for.
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    with log.warned("the metrics are not available"):
        with suppress(OSError):  # the workers warn if they cannot write their status there
            liveness.ensure_run_lock(compat_config.cache_folder())
        metrics.register_metrics(compat_config.cache_folder())
    chained = compat_config.wrapped_pass(vllm_config.compilation_config)
    return AiterMLAPipeline(
        vllm_config, limit=engagement.limit, settings=settings, chained=chained, integration=engagement.integration
    )


def _report_skip(facts: ConfigView, skip: Skip, settings: Settings) -> None:
    """Log why the engine runs vLLM's own code, and write its status file.

    Raises:
        SettingsError: in strict mode.
    """
    line = f"off although it was switched on: {skip}"
    if settings.strict:
        raise SettingsError(f"{log.PREFIX}{line} ({STRICT_OPTION})")
    log.say_once(logging.WARNING, line)
    # The workers then run none of our code, so the process that built the config writes one record for all ranks.
    with log.warned("the status file could not be written"):
        folder = compat_config.cache_folder()
        liveness.ensure_run_lock(folder)
        record = record_of_skipped_engine(
            skip, facts.layers, kv_cache_dtype=facts.kv_cache_dtype, model_name=facts.model_name, dp_index=facts.engine,
            run=liveness.ensure_run_name(),
        )  # fmt: skip
        metrics.register_metrics(folder)
        status_files.write_status(folder, record)


def _engagement_lines(facts: ConfigView, engagement: Engagement, settings: Settings) -> list[str]:
    """Return the log lines about an engine that was engaged."""
    limit = engagement.limit
    if settings.max_token_num is not None:
        origin = f"given as {settings.max_token_num}"
    else:
        origin = f"max_num_seqs {facts.max_num_seqs} x (1 + {facts.num_drafts} drafts)"
    if engagement.integration == "module":
        integration = "integration module"
    elif limit in engagement.endpoints[:-1]:
        integration = f"integration passes, a compile range ends at {limit}"
    else:
        integration = f"integration passes, every batch up to max_num_batched_tokens {facts.max_num_batched_tokens}"
    platform_skip, passes_skip = admission.platform_skip(facts), admission.passes_skip(facts)
    platform = f", on a platform that it must be named for ({platform_skip.code})" if platform_skip else ""
    lines = [f"on: decode limit {limit} tokens ({origin}); {integration}; kernel {settings.kernel}{platform}"]
    if engagement.integration == "passes":
        on, off = "on: its fused op is taken over", "off: RoPE is fused from vLLM's unfused graph"
        state = on if facts.has_vllm_fusion else off
        lines.append(f"vLLM's own {release.VLLMS_FUSION} is {state}")
    elif settings.integration == "auto" and passes_skip and passes_skip.code == "graph_partition":
        lines.append(f"the passes would run with {admission.PARTITION_OPTION}")
    return lines
