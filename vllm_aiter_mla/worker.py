"""What the plugin does in a worker whose fast path is on: the self-check after loading, the status file after warm-up.

vLLM's memory profiling may already capture graphs, so the self-check comes right after loading. The status file counts
layers that have run, so it comes after the compiled graphs have run once.

Both fail closed: whatever goes wrong before every kernel is checked, or before the status line is said, is an error in
strict mode. Otherwise the layers concerned run vLLM's own kernels, one line says so, and the worker goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

from vllm_aiter_mla import layers, measuring
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat import log as ranks
from vllm_aiter_mla.compat import patches as worker_hook
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.status import file, gauge, record, state


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or with the gate's decline, it is left as it is.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    _guarded(worker.vllm_config, "the worker could not be hooked", lambda: _attach(worker), checks_kernels=True)


def _attach(worker: Any) -> None:
    config = worker.vllm_config
    engaged = engaged_pass(config)
    if not compat_config.settings_of(config).enabled or engaged is None:
        return
    if engaged.integration == "module":
        worker_hook.within(worker, "load_model", integration().installed)
    worker_hook.after(worker, "load_model", check_kernels)
    worker_hook.after(worker, "compile_or_warm_up_model", take_status, failed=hand_over_nothing)


def engaged_pass(vllm_config: Any) -> Any:
    """Our ``AiterMLAPipeline`` where the gate has engaged, else None."""
    current = compat_config.current_pass(vllm_config.compilation_config)
    return current if current is not None and isinstance(current, pipeline_class()) else None


def pipeline_class() -> Any:
    """``AiterMLAPipeline``, imported late: it imports torch's compiler, and a run with the flag off must not pay."""
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    return AiterMLAPipeline


def integration() -> Any:
    """``vllm_aiter_mla.module``, imported late: the passes do not need it."""
    from vllm_aiter_mla import module

    return module


def check_kernels(worker: Any) -> None:
    """Start this engine's status, check every kernel that is about to run, and tell the compile cache which those are.

    Raises:
        SettingsError: a kernel fails its check, or one cannot be made, in strict mode.
    """
    config = worker.vllm_config
    what, is_checked = "the kernels could not be checked", False
    try:
        is_checked = _guarded(config, what, lambda: _check_kernels(config), checks_kernels=True)
    finally:
        # Also where the check has raised: the other ranks wait for this one's answer.
        measuring.choose(config, partial(_limit, config) if is_checked else None)
    _guarded(config, what, lambda: _emit(config), checks_kernels=True)
    _guarded(config, what, lambda: _tell_the_cache(config), checks_kernels=True)
    if is_checked:
        with log.warned("what vLLM's own attention compiles could not be compiled ahead"):
            _warm_vllm(config)


def _warm_vllm(config: Any) -> None:
    for module in compat_config.mla_modules(config).values():
        if layers.why_unchecked(module) is None:
            layers.warm_vllm(module)


def _emit(config: Any) -> None:
    """Put the op into the layers where the module integration does; the passes do it when a graph is compiled."""
    engaged = engaged_pass(config)
    if engaged.integration == "module":
        engaged.emitted = integration().emit(compat_config.mla_modules(config))


def _limit(config: Any) -> int:
    """L of the decode limit."""
    return int(engaged_pass(config).limit)


def _check_kernels(config: Any) -> None:
    state.reset()
    limit, sizes = _limit(config), config.compilation_config.cudagraph_capture_sizes or ()
    modules = compat_config.mla_modules(config)
    inside = [size for size in sizes if size <= limit]
    check_layers(modules, strict=_is_strict(config), capture_sizes=inside, limit=limit)


def _tell_the_cache(config: Any) -> None:
    """Before the first graph is compiled: which layers the passes leave alone depends on it."""
    engaged_pass(config).kernels = cache_key(compat_config.mla_modules(config), strict=_is_strict(config))


def check_layers(
    modules: dict[str, Any], *, strict: bool, capture_sizes: Sequence[int] = (), limit: int | None = None
) -> None:
    """Load each layer shape's kernel, compare it with the reference, and reject it to ``vllm`` where it fails.

    A layer whose check cannot be made goes to ``vllm`` too, and the layers after it are still checked.

    Args:
        modules: the model's MLA layers by name.
        strict: whether a kernel that fails its check, or cannot be checked, is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        limit: L, the largest batch that a kernel will be given; None: any.

    Raises:
        SettingsError: a mismatch, or anything that raises on the way, in strict mode.
    """
    checked: set[tuple[Any, ...]] = set()

    def check(module: Any) -> None:
        shapes = layers.shapes(module)
        for shape in shapes:
            kind = (layers.selector_of(module), shape)
            if kind not in checked:
                _check(module, shape, strict, capture_sizes, limit)
                for trouble in layers.check_contenders(module, shape, capture_sizes, limit):
                    log.say_once(logging.WARNING, f"{trouble} ({_named(shape)}); it is not among those that are timed")
                # Only now: if the check raises, the next layer of this kind must not pass for checked.
                checked.add(kind)
        if shapes:
            layers.trust(module)
        else:
            layers.distrust("it was not admitted when the kernels were checked", module)

    _each(modules, check, strict)


def _check(
    module: Any, shape: layers.LayerShape, strict: bool, capture_sizes: Sequence[int], limit: int | None
) -> None:
    trouble = layers.self_check(module, shape, capture_sizes, limit)
    if trouble is None:
        return
    if strict:
        raise SettingsError(f"{log.PREFIX}{trouble} ({_named(shape)}; {STRICT_OPTION})")
    log.say_once(logging.ERROR, f"{trouble} ({_named(shape)}); this layer shape falls back to vLLM's own kernels")
    layers.reject(module, shape, trouble)


def _named(shape: layers.LayerShape) -> str:
    return f"heads {shape.heads}, {shape.cache_dtype} cache, block size {shape.block_size}"


def cache_key(modules: dict[str, Any], *, strict: bool = False) -> tuple[str, ...]:
    """What each layer shape will run on, or why it will not: a key for the compile cache.

    Raises:
        SettingsError: a layer cannot be asked, in strict mode.
    """
    found: set[str] = set()
    checked = {name: module for name, module in modules.items() if layers.why_unchecked(module) is None}
    _each(checked, lambda module: found.update(layers.key_of(module)), strict)
    unchecked = {name: layers.why_unchecked(module) for name, module in modules.items()}
    # Not the reason: what an exception says may differ at every start.
    found.update(f"{name}: unchecked" for name, reason in unchecked.items() if reason is not None)
    return tuple(sorted(found))


def _each(modules: dict[str, Any], step: Callable[[Any], None], strict: bool) -> None:
    """Do ``step`` for every layer; one for which it raises goes to vLLM's own kernels, all of them in one line."""
    failed: dict[str, str] = {}
    for name, module in modules.items():
        try:
            step(module)
        except Exception as error:
            if strict and isinstance(error, SettingsError):
                raise
            reason = f"its kernel could not be checked: {type(error).__name__}: {error}"
            layers.distrust(reason, module)
            if strict:
                raise SettingsError(f"{log.PREFIX}{name}: {reason} ({STRICT_OPTION})") from error
            failed[name] = reason
    if failed:
        name, reason = next(iter(failed.items()))
        what = f"{len(failed)} MLA layer(s) fall back to vLLM's own kernels"
        log.say_once(logging.ERROR, f"{what}: {name}: {reason}")


def take_status(worker: Any) -> None:
    """Say this rank's status line, then write it down. No file is touched before the status line is said.

    Raises:
        SettingsError: no layer engaged, or no status line can be made, in strict mode.
    """
    config = worker.vllm_config
    outcome: dict[str, Any] = {}
    stages = [outcome]
    try:
        try:
            _guarded(config, "the status line is not complete", lambda: _run_once(worker))
            _guarded(config, "no status line could be made", lambda: outcome.update(_outcome(worker)))
        finally:
            # A rank that stops here hands over what it has: the other stages wait for it.
            _guarded(config, "the stages' status lines could not be gathered", lambda: _gather(stages))
        if outcome:
            _guarded(config, "no status line could be said", lambda: _say(config, stages, outcome, _is_strict(config)))
    finally:
        if outcome:
            _write_down(config, outcome)


def hand_over_nothing(worker: Any) -> None:
    """For a rank whose warm-up has failed: the other pipeline stages wait for its status line, and it has none.

    It does not wait for them: vLLM must hear of the failure now, and a stage may wait for another rank that has failed.
    The graphs that it has compiled may be loaded by the next start, which then needs the reasons of refused layers.
    """
    with log.warned("the other stages could not be told that this one has failed"):
        Thread(target=_tell_the_stages, daemon=True).start()
    with log.warned("the skips could not be kept or read"):
        found = {"rank": int(getattr(worker, "rank", 0)), "skipped": {}, "partial": {}}
        file.keep_skips(compat_config.cache_folder(), str(worker.vllm_config.compute_hash()), found)


def _tell_the_stages() -> None:
    with log.warned("the other stages could not be told that this one has failed"):
        _gather([{}])


def _run_once(worker: Any) -> None:
    """Run a dummy batch where no graph below the limit was captured: warm-up itself covers the largest batch alone.

    A dummy batch holds collectives: every rank of a group has to run it, or none. So the config decides, which all
    share, and not what one rank knows alone, for instance that its kernel was rejected.
    """
    config = worker.vllm_config
    if compat_config.mla_modules(config) and not _captured_inside(config):
        worker.execute_dummy_batch()


def _captured_inside(config: Any) -> bool:
    """Whether a graph within the decode limit was captured; a config that does not tell, tells no rank."""
    try:
        sizes, limit = compat_config.capture_sizes(config.compilation_config), engaged_pass(config).limit
    except Exception:
        return False
    return any(size <= limit for size in sizes)


def _outcome(worker: Any) -> dict[str, Any]:
    config = worker.vllm_config
    engaged, rank = engaged_pass(config), int(getattr(worker, "rank", 0))
    names = sorted(compat_config.mla_modules(config))
    cache, card = compat_config.cache_name(config), layers.current_platform().arch
    found = record.as_record(names, engaged.limit, cache, rank, engaged.integration, card)
    return found | compat_config.metric_labels(config)


def _gather(stages: list[dict[str, Any]]) -> None:
    """Replace this rank's status line by those of all pipeline stages, in their order. Every rank has to come here."""
    stages[:] = ranks.of_stages(stages[0])


def _say(config: Any, stages: list[dict[str, Any]], outcome: dict[str, Any], strict: bool) -> None:
    """Say the status on rank 0, for all pipeline stages. Strict mode stops a rank whose MLA layers are all refused.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    anywhere = any(stage and stage["engaged"] for stage in stages)
    if strict and not outcome["engaged"] and (outcome["total"] or not anywhere):
        raise SettingsError(f"{log.PREFIX}{record.line(outcome)} ({STRICT_OPTION})")
    if outcome["rank"] == 0:
        found = record.of_engine(stages) | {"replica": compat_config.replica(config)}
        # Every engine of a process has its status line said, also one that reads like the last.
        log.say(logging.INFO if found["engaged"] else logging.WARNING, record.line(found))


def _write_down(config: Any, outcome: dict[str, Any]) -> None:
    """Write the status file to its file and for the gauge; what fails costs a warning and nothing else."""
    with log.warned("the skips could not be kept or read"):
        key = str(config.compute_hash())
        noted = file.keep_skips(compat_config.cache_folder(), key, outcome)
        if noted is not None and outcome["rank"] == 0:
            log.say(logging.INFO, f"noted when these graphs were compiled: {noted}")
    with log.warned("the captured sizes could not be read"):
        outcome["capture_sizes"] = compat_config.capture_sizes(config.compilation_config)
    with log.warned(f"the gauge {gauge.NAME} is not available"):
        gauge.publish(outcome)
    with log.warned("the status file could not be written"):
        file.write_status(compat_config.cache_folder(), outcome)


def _guarded(config: Any, what: str, step: Callable[[], None], *, checks_kernels: bool = False) -> bool:
    """Do ``step``, and return whether it did not raise; what it raises is an error in strict mode, else one line.

    Args:
        config: the worker's.
        what: what has failed, should it raise.
        step: to be done.
        checks_kernels: no kernel counts as checked where it raises.
    """
    try:
        step()
    except Exception as error:
        reason = f"{what}: {type(error).__name__}: {error}"
        if checks_kernels:
            layers.distrust(reason)
        strict = _is_strict(config)
        if strict and isinstance(error, SettingsError):
            raise
        if strict:
            raise SettingsError(f"{log.PREFIX}{reason} ({STRICT_OPTION})") from error
        effect = "every MLA layer runs vLLM's own kernels" if checks_kernels else "serving goes on"
        log.say_once(logging.ERROR, f"{reason}; {effect}")
        return False
    return True


def _is_strict(config: Any) -> bool:
    """Whether strict mode was asked for, from where it can be read: the options, or the pass that was made of them."""
    for read in (compat_config.settings_of, lambda config: engaged_pass(config).settings):
        try:
            return bool(read(config).strict)
        except Exception:
            continue  # the other is asked; what is wrong with this one shows where it is needed
    return False
