# SPDX-License-Identifier: Apache-2.0
"""The gate: reads the options, skips or engages, and makes the few changes to a ``VllmConfig`` that engage.

``compat.patches.hook_platform`` calls it for every ``VllmConfig`` that is built, after the platform's own checks and
before vLLM computes compile ranges and splitting ops. If the flag is on and the config is admitted, it changes
``compilation_config``:

- ``inductor_compile_config`` gains the pass, with the user's own pass chained in front, and ``inductor_passes`` no
  longer names that one;
- ``splitting_ops`` lists our attention ops next to vLLM's;
- for the passes, ``compile_ranges_endpoints`` gains the decode limit;
- for the passes, ``use_inductor_graph_partition`` becomes True if the user did not set it, and then
  ``pass_config.fuse_rope_kvcache_cat_mla`` becomes what vLLM's defaults give for that.

The pass keeps a :class:`Changes` of all this. With the flag off, the gate takes back what an earlier run added, drops
options that say ``enabled: false``, and changes nothing else.

The class-wide ``CompilationConfig._attention_ops`` stays as it is: a change there would reach configs whose flag is
off in the same process, and change their cache key.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from vllm_aiter_mla import admission, status
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP, ConfigView, Skip, plain_name
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches
from vllm_aiter_mla.settings import (
    FLAG_FIELD,
    OPTIONS,
    STRICT_OPTION,
    Settings,
    SettingsError,
    near_misses,
    set_options,
)
from vllm_aiter_mla.status import gauge

CHANGED = ("use_inductor_graph_partition", "splitting_ops", "inductor_passes", patches.FUSION_FIELD)
"""What the gate may change besides the pass and the compile ranges; the last is a field of ``pass_config``."""


@dataclass(frozen=True)
class Changes:
    """What the gate made of a ``compilation_config``, and what it needs to take that back."""

    given: patches.Given  # by the user, before vLLM and the gate filled anything in
    drafts: int  # draft tokens of the target model, which its draft's config may not know
    endpoints: tuple[int, ...]  # ends of compile ranges with the decode limit, if the gate added that; else empty
    fields: dict[str, tuple[Any, Any]]  # values before and after, of those of ``CHANGED`` that differ

    @property
    def partition(self) -> bool:
        """Whether the gate switched graph partition on."""
        return CHANGED[0] in self.fields

    @property
    def added(self) -> dict[str, Any]:
        """The options that the engine gets besides the kernels, by the NAME of ``-cc.NAME``."""
        named = {CHANGED[0]: CHANGED[0], patches.FUSION_FIELD: compat_config.VLLMS_FUSION}
        found = {option: self.fields[field][1] for field, option in named.items() if field in self.fields}
        return found | ({"compile_ranges_endpoints": list(self.endpoints)} if self.endpoints else {})


def apply(vllm_config: Any) -> int | Skip | None:
    """Decide on ``vllm_config`` and engage it if it is admitted. Idempotent: ``replace()`` runs it again.

    Nothing changes once layers were built from its ``compilation_config``, which a draft model's config shares.

    Returns:
        the decode limit in tokens if the fast path is on, the reason if it is not although it was asked for, else None.

    Raises:
        SettingsError: an option is wrong, or the engine is skipped in strict mode.
    """
    engaged = compat_config.engaged_pass(vllm_config)
    if compat_config.has_layers(vllm_config):  # vLLM's compiler holds a copy of the options by now
        return None if engaged is None else int(engaged.limit)
    settings = compat_config.settings_of(vllm_config)
    for key in near_misses(vllm_config.additional_config):
        log.say_once(logging.WARNING, f"additional_config.{key} is not read: the options belong into {OPTIONS}")
    if not settings.enabled:
        _switch_off(vllm_config, settings, engaged)
        return None
    try:
        view = compat_config.view_of(vllm_config, settings)
        skip = next(iter(admission.config_skips(view)), None)
    except Exception as error:  # of an unknown vLLM
        skip = Skip("capability", f"this vLLM's config cannot be read: {type(error).__name__}: {error}")
    if skip is None and engaged is None:
        skip = compat_config.why_not_chainable(vllm_config.compilation_config)
    if skip is None:
        # A draft model's config may hold no draft tokens; it must not shrink the limit that it shares with its target.
        drafts = max(vllm_config.num_speculative_tokens, 0 if engaged is None else engaged.changes.drafts)
        limit = admission.decode_limit(vllm_config.scheduler_config.max_num_seqs, drafts, settings.max_token_num)
        integration = admission.integration_of(view) if engaged is None else engaged.integration
        try:  # before anything is changed
            made = _pass(vllm_config, limit, settings, engaged, integration)
        except Exception as error:  # of an unknown vLLM, or of a broken torch
            skip = Skip("capability", f"the pass cannot be made: {type(error).__name__}: {error}")
    if skip is not None:
        # A draft model's config shares compilation_config with its target: the target's pass stays.
        if engaged is None or not compat_config.shares_compilation(vllm_config):
            _take_back(vllm_config.compilation_config, engaged)
            _skip(vllm_config, skip, settings)
        return skip
    _engage(vllm_config, made, drafts, engaged)
    _announce(vllm_config, view, integration, settings, limit, drafts)
    return limit


def _switch_off(vllm_config: Any, settings: Settings, engaged: Any) -> None:
    """Leave the config as it is without the plugin."""
    _take_back(vllm_config.compilation_config, engaged)
    if unused := set_options(settings):
        log.say_once(logging.WARNING, f"{', '.join(unused)} set but {FLAG_FIELD} is off: no effect")
    compat_config.drop_options(vllm_config)


def _pass(vllm_config: Any, limit: int, settings: Settings, engaged: Any, integration: str) -> Any:
    """Return the pass to install. A worker's pass knows which kernels were checked: it stays if nothing has changed."""
    if engaged is not None and (engaged.limit, engaged.settings) == (limit, settings):
        return engaged
    # The hook before the pass: should it fail, no worker may run kernels that nobody has checked.
    patches.hook_workers()
    # Imports torch's compiler, which a run with the flag off must not pay for.
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    with log.warned(f"the gauge {gauge.NAME} is not available"):
        gauge.show(compat_config.cache_folder())
    chained = compat_config.wrapped_pass(vllm_config.compilation_config) if engaged is None else engaged.chained
    return AiterMLAPipeline(vllm_config, limit=limit, settings=settings, chained=chained, integration=integration)


def _engage(vllm_config: Any, made: Any, drafts: int, engaged: Any) -> None:
    compilation, limit, integration = vllm_config.compilation_config, made.limit, made.integration
    _take_back(compilation, engaged)
    given, before = patches.given(compilation), _values(compilation)
    endpoints = compilation.compile_ranges_endpoints or []
    if integration == "passes":
        _open(vllm_config, given, limit)
    compilation.splitting_ops = splitting_ops(compilation, integration)
    slot = compat_config.pass_slot()
    # Else vLLM puts the user's pass into the slot again when it copies the config.
    compilation.inductor_passes = {key: name for key, name in compilation.inductor_passes.items() if key != slot}
    after = _values(compilation)
    differ = {name: (before[name], after[name]) for name in CHANGED if before[name] != after[name]}
    added = integration == "passes" and limit not in endpoints
    # At a second run vLLM has added its own ends since.
    theirs = endpoints if engaged is None else [end for end in engaged.changes.endpoints if end != engaged.limit]
    made.changes = Changes(given, drafts, tuple(sorted({*theirs, limit})) * added, differ)
    # New containers instead of changes in place: another config may hold the same list or dict.
    compilation.inductor_compile_config = {**compilation.inductor_compile_config, slot: made}


def _open(vllm_config: Any, given: patches.Given, limit: int) -> None:
    """End a compile range at the limit, and keep a layer in one graph where the user left that to vLLM."""
    compilation = vllm_config.compilation_config
    compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), limit})
    if given.splitting_ops is not None or compilation.use_inductor_graph_partition:
        return
    compilation.use_inductor_graph_partition = True
    if given.fusion is not None:
        return
    name, pass_config = patches.FUSION_FIELD, compilation.pass_config
    with log.warned(f"vLLM's default of {name} could not be asked; it stays {getattr(pass_config, name, None)}"):
        setattr(pass_config, name, compat_config.default_of_fusion(vllm_config))


def _take_back(compilation: Any, engaged: Any) -> None:
    """Undo what an earlier run of the gate added; a value that was changed since stays."""
    if engaged is None:
        return
    for name, (before, after) in engaged.changes.fields.items():
        if _values(compilation)[name] == after:
            setattr(_holder(compilation, name), name, before)
    if engaged.changes.endpoints:
        kept = [one for one in compilation.compile_ranges_endpoints or () if one != engaged.limit]
        compilation.compile_ranges_endpoints = kept
    slot = compat_config.pass_slot()
    others = {key: value for key, value in compilation.inductor_compile_config.items() if key != slot}
    compilation.inductor_compile_config = others | ({} if engaged.chained is None else {slot: engaged.chained})
    patches.note(compilation, engaged.changes.given)


def _values(compilation: Any) -> dict[str, Any]:
    return {name: getattr(_holder(compilation, name), name, None) for name in CHANGED}


def _holder(compilation: Any, name: str) -> Any:
    return compilation.pass_config if name == patches.FUSION_FIELD else compilation


def splitting_ops(compilation: Any, integration: str) -> list[str] | None:
    """Return the splitting ops with which our attention ops stay outside piecewise graphs.

    In other compilation modes than vLLM's own nothing is cut, and the ops stay as they are.
    """
    ops: list[str] | None = compilation.splitting_ops
    if compilation.mode is None or compilation.mode.name != "VLLM_COMPILE":
        return ops
    if patches.given(compilation).splitting_ops is None and not set(ATTENTION_OPS) <= set(ops or ()):
        ops = _vllms_splitting_ops(compilation, integration)
    cut = (MLA_ATTENTION_OP,) if integration == "passes" else (MLA_ATTENTION_OP, KV_UPDATE_OP)
    if any(plain_name(op) in cut for op in ops or ()):
        return [*(ops or ()), *(op for op in ATTENTION_OPS if op not in (ops or ()))]
    return ops


def _vllms_splitting_ops(compilation: Any, integration: str) -> list[str] | None:
    """Return what vLLM's set_splitting_ops_for_v1 would fill in later, when nothing can be added any more."""
    own, partition = list(compilation._attention_ops), compilation.use_inductor_graph_partition
    if integration == "passes":
        return own
    ops: list[str] | None = compilation.splitting_ops
    if ops is not None or (compilation.pass_config.fuse_attn_quant and not partition):
        return ops  # the platform's own, or no cut at all
    return own if partition else [*own, "vllm::unified_kv_cache_update", KV_UPDATE_OP]


def _skip(vllm_config: Any, skip: Skip, settings: Settings) -> None:
    line = f"off although it was switched on: {skip}"
    if settings.strict:
        raise SettingsError(f"{log.PREFIX}{line} ({STRICT_OPTION})")
    log.say_once(logging.WARNING, line)
    # The workers run nothing of ours then, so the process that built the config writes one record for all ranks.
    with log.warned("the status file could not be written"):
        layers, cache = compat_config.mla_layers(vllm_config.model_config), str(vllm_config.cache_config.cache_dtype)
        record = status.record.record_of_skipped_engine(skip.code, skip.message, layers, cache)
        labels = compat_config.metric_labels(vllm_config)
        record = replace(record, model_name=labels["model_name"], engine=labels["engine"])
        gauge.show(compat_config.cache_folder())
        status.record.write(compat_config.cache_folder(), record)


def _announce(
    vllm_config: Any, view: ConfigView, integration: str, settings: Settings, limit: int, drafts: int
) -> None:
    scheduler = vllm_config.scheduler_config
    if settings.max_token_num is not None:
        origin = f"given as {settings.max_token_num}"
    else:
        origin = f"max_num_seqs {scheduler.max_num_seqs} x (1 + {drafts} drafts)"
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
    other = admission.why_not_platform(view)
    named = f", on a platform that it must be named for ({other.code})" if other else ""
    log.say_once(logging.INFO, f"on: decode limit {limit} tokens ({origin}); {ranges}; kernel {settings.kernel}{named}")
    if added := compat_config.added_options(vllm_config):
        line = f"besides the kernels this engine gets {compat_config.as_typed(added)}"
        why = ": vLLM compiles every batch in another way, so tokens can change above the decode limit too"
        log.say_once(logging.INFO, line + why * ("use_inductor_graph_partition" in added))
