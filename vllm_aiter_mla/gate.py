# SPDX-License-Identifier: Apache-2.0
"""The gate: reads the options, skips or engages, and makes the few changes to a ``VllmConfig`` that engage.

``compat.patches.hook_platform`` calls it for every ``VllmConfig`` that is built, after the platform's own checks and
before vLLM computes compile ranges and splitting ops. With the flag off it reads and returns: nothing is changed. If
the flag is on and the config is admitted, it changes at most four fields of ``compilation_config``:

- ``inductor_compile_config`` gains the pass, with the user's own pass chained in front;
- ``splitting_ops`` lists our attention ops next to vLLM's;
- for the passes, ``compile_ranges_endpoints`` gains the decode limit;
- for the passes, ``use_inductor_graph_partition`` becomes True if the user did not set it.

The class-wide ``CompilationConfig._attention_ops`` stays as it is: a change there would reach configs whose flag is
off in the same process, and change their cache key.
"""

import logging
from typing import Any

from vllm_aiter_mla import admission, status
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP, ConfigView, Skip, plain_name
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches
from vllm_aiter_mla.settings import FLAG_FIELD, STRICT_OPTION, Settings, SettingsError, set_options


def apply(vllm_config: Any) -> int | Skip | None:
    """Decide on ``vllm_config`` and engage it if it is admitted. Idempotent: ``replace()`` runs it again.

    Returns:
        the decode limit in tokens if the fast path is on, the reason if it is not although it was asked for, else None.

    Raises:
        SettingsError: an option is wrong, or the engine is skipped in strict mode.
    """
    settings = compat_config.settings_of(vllm_config)
    if not settings.enabled:
        if unused := set_options(settings):
            log.say_once(logging.WARNING, f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect")
        return None
    engaged = compat_config.engaged_pass(vllm_config)
    try:
        view = compat_config.view_of(vllm_config, settings)
        skip = next(iter(admission.config_skips(view)), None)
    except Exception as error:  # of an unknown vLLM
        skip = Skip("capability", f"this vLLM's config cannot be read: {type(error).__name__}: {error}")
    if skip is None and engaged is None:
        skip = compat_config.why_not_chainable(vllm_config.compilation_config)
    if skip is not None:
        # A draft model's config shares compilation_config with its target: the target's pass stays.
        if engaged is None:
            _skip(vllm_config, skip, settings)
        return skip
    limit = admission.decode_limit(
        vllm_config.scheduler_config.max_num_seqs, vllm_config.num_speculative_tokens, settings.max_token_num
    )
    if engaged is not None and settings.max_token_num is None:
        # A draft model's config may hold no draft tokens; it must not shrink the limit that it shares with its target.
        limit = max(limit, engaged.limit)
    integration = admission.integration_of(view) if engaged is None else engaged.integration
    _engage(vllm_config, settings, limit, engaged, integration)
    _announce(vllm_config, view, integration, settings, limit)
    return limit


def _engage(vllm_config: Any, settings: Settings, limit: int, engaged: Any, integration: str) -> None:
    compilation = vllm_config.compilation_config
    before = compat_config.gates_options(compilation)
    # New containers instead of changes in place: another config may hold the same list or dict.
    if integration == "passes":
        compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), limit})
        _, splitting_ops = patches.users_cuts(compilation)
        if splitting_ops is None and not compilation.use_inductor_graph_partition:  # keep the layer in one graph
            compilation.use_inductor_graph_partition = True
    _split(compilation, integration)
    if engaged is not None and (engaged.limit, engaged.settings) == (limit, settings):
        return
    chained = compat_config.wrapped_pass(compilation) if engaged is None else engaged.chained
    # The hook before the pass: should it fail, no worker may run kernels that nobody has checked.
    patches.hook_workers()
    # Imports torch's compiler, which a run with the flag off must not pay for.
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    added = {name: value for name, value in compat_config.gates_options(compilation).items() if value != before[name]}
    if engaged is not None:
        added = engaged.added | added
    pass_ = AiterMLAPipeline(
        vllm_config, limit=limit, settings=settings, chained=chained, integration=integration, added=added
    )
    slot = compat_config.pass_slot()
    compilation.inductor_compile_config = {**compilation.inductor_compile_config, slot: pass_}
    with log.warned(f"the gauge {status.GAUGE} is not available"):
        status.show_gauge(compat_config.cache_folder())


def _split(compilation: Any, integration: str) -> None:
    """Keep our attention ops outside piecewise graphs; in other compilation modes nothing is cut."""
    if compilation.mode is None or compilation.mode.name != "VLLM_COMPILE":
        return
    _, splitting_ops = patches.users_cuts(compilation)
    if splitting_ops is None and not set(ATTENTION_OPS) <= set(compilation.splitting_ops or ()):
        _fill_in(compilation, integration)
    ops = compilation.splitting_ops or []
    cut = (MLA_ATTENTION_OP,) if integration == "passes" else (MLA_ATTENTION_OP, KV_UPDATE_OP)
    if any(plain_name(op) in cut for op in ops):
        compilation.splitting_ops = [*ops, *(op for op in ATTENTION_OPS if op not in ops)]


def _fill_in(compilation: Any, integration: str) -> None:
    """Fill in what vLLM's set_splitting_ops_for_v1 would fill in later, when nothing can be added any more."""
    if integration == "passes":
        compilation.splitting_ops = list(compilation._attention_ops)
        return
    partition = compilation.use_inductor_graph_partition
    if compilation.splitting_ops is not None or (compilation.pass_config.fuse_attn_quant and not partition):
        return  # the platform's own, or no cut at all
    updates = [] if partition else ["vllm::unified_kv_cache_update", KV_UPDATE_OP]
    compilation.splitting_ops = [*compilation._attention_ops, *updates]


def _skip(vllm_config: Any, skip: Skip, settings: Settings) -> None:
    line = f"off although it was switched on: {skip}"
    if settings.strict:
        raise SettingsError(f"{log.PREFIX}{line} ({STRICT_OPTION})")
    log.say_once(logging.WARNING, f"{line} (run: vllm-aiter-mla doctor)")
    # The workers run nothing of ours then, so the process that built the config writes one record for all ranks.
    with log.warned("the status file could not be written"):
        layers, cache = compat_config.mla_layers(vllm_config.model_config), str(vllm_config.cache_config.cache_dtype)
        record = status.record_of_skipped_engine(skip.code, skip.message, layers, cache)
        status.show_gauge(compat_config.cache_folder())
        status.write(compat_config.cache_folder(), record | compat_config.metric_labels(vllm_config))


def _announce(vllm_config: Any, view: ConfigView, integration: str, settings: Settings, limit: int) -> None:
    scheduler = vllm_config.scheduler_config
    if settings.max_token_num is not None:
        origin = f"given as {settings.max_token_num}"
    else:
        origin = f"max_num_seqs {scheduler.max_num_seqs} x (1 + {vllm_config.num_speculative_tokens} drafts)"
    batched = scheduler.max_num_batched_tokens
    if integration == "module":
        because = admission.why_not_passes(view)
        ranges = "the module integration puts the op into the layers" + (
            f" (the passes cannot run: {because.code})" if because else ""
        )
    elif batched is not None and limit >= batched:
        ranges = f"it covers every batch up to max_num_batched_tokens {batched}"
    else:
        ranges = f"compile ranges end at {limit}; above it the graph is left to vLLM"
    log.say_once(logging.INFO, f"on: decode limit {limit} tokens ({origin}); {ranges}; kernel {settings.kernel}")
    if added := compat_config.added_options(vllm_config):
        line = f"besides the kernels this engine gets {compat_config.as_typed(added)}"
        why = ": vLLM compiles every batch in another way, so tokens can change above the decode limit too"
        log.say_once(logging.INFO, line + why * ("use_inductor_graph_partition" in added))
