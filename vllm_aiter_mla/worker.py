"""What the plugin does in a worker whose fast path is on: the self-check after loading, the census after warm-up.

vLLM's memory profiling may already capture graphs, so the self-check comes right after loading; the census can tell
the truth only once the compiled graphs have run.

Both fail closed: whatever goes wrong before every kernel is checked, or before the verdict is said, is an error in
strict mode. Otherwise the layers concerned run vLLM's own kernels, one line says so, and the worker goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_aiter_mla.census import file, gauge, record, state
from vllm_aiter_mla.compat import config_view, log, user_pass, worker_hook
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or with the gate's decline, it is left as it is.

    Raises:
        SettingsError: the worker cannot be hooked, in strict mode.
    """
    _guarded(worker.vllm_config, "the worker could not be hooked", lambda: _attach(worker), checks_kernels=True)


def _attach(worker: Any) -> None:
    config = worker.vllm_config
    if not config_view.settings_of(config).enabled or engaged_pass(config) is None:
        return
    worker_hook.after(worker, "load_model", check_kernels)
    worker_hook.after(worker, "compile_or_warm_up_model", take_census)


def engaged_pass(vllm_config: Any) -> Any:
    """Our ``AiterMLAPipeline`` where the gate has engaged, else None."""
    current = user_pass.current(vllm_config.compilation_config)
    return current if current is not None and isinstance(current, pipeline_class()) else None


def pipeline_class() -> Any:
    """``AiterMLAPipeline``, imported late: it imports torch's compiler, and a run with the flag off must not pay."""
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    return AiterMLAPipeline


def check_kernels(worker: Any) -> None:
    """Start this engine's census, check every kernel that is about to run, and tell the compile cache which those are.

    Raises:
        SettingsError: a kernel fails its check, or one cannot be made, in strict mode.
    """
    config = worker.vllm_config
    _guarded(config, "the kernels could not be checked", lambda: _check_kernels(config), checks_kernels=True)


def _check_kernels(config: Any) -> None:
    from vllm_aiter_mla.runtime import selfcheck

    state.reset()
    pipeline, strict = engaged_pass(config), _is_strict(config)
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    layers = mla_layers(config)
    selfcheck.check_layers(layers, strict=strict, capture_sizes=[size for size in sizes if size <= pipeline.limit])
    # Before the first graph is compiled: which layers the passes leave alone depends on it.
    pipeline.kernels = selfcheck.verdicts(layers, strict=strict)


def take_census(worker: Any) -> None:
    """Say this rank's verdict, then write it down. No file is touched before the verdict is said.

    Raises:
        SettingsError: no layer engaged, or no verdict can be made, in strict mode.
    """
    config = worker.vllm_config
    verdict: dict[str, Any] = {}
    try:
        _guarded(config, "the verdict is not complete", lambda: _run_once(worker))
        _guarded(config, "no verdict could be made", lambda: verdict.update(_verdict(worker)))
        if verdict:
            _guarded(config, "no verdict could be said", lambda: _say(verdict, _is_strict(config)))
    finally:
        if verdict:
            _write_down(config, verdict)


def _run_once(worker: Any) -> None:
    """Run a dummy batch where no layer has run yet: warm-up covers the largest batch, and there may be no graphs."""
    if mla_layers(worker.vllm_config) and not state.current().engaged:
        worker.execute_dummy_batch()


def _verdict(worker: Any) -> dict[str, Any]:
    config = worker.vllm_config
    limit, rank = engaged_pass(config).limit, int(getattr(worker, "rank", 0))
    found = record.as_record(sorted(mla_layers(config)), limit, _cache_name(config), rank)
    return found | config_view.metric_labels(config)


def _say(verdict: dict[str, Any], strict: bool) -> None:
    """Say the verdict on rank 0. In strict mode any rank that holds MLA layers stops where none is engaged.

    Raises:
        SettingsError: strict mode, and no layer engaged.
    """
    is_first, text = verdict["rank"] == 0, record.line(verdict)
    if strict and not verdict["engaged"] and (is_first or verdict["total"]):
        raise SettingsError(f"{log.PREFIX}{text} ({STRICT_OPTION})")
    if is_first:
        # Every engine of a process has its verdict said, also one that reads like the last.
        log.say(logging.INFO if verdict["engaged"] else logging.WARNING, text)


def _write_down(config: Any, verdict: dict[str, Any]) -> None:
    """Write the census to its file and for the gauge; what fails costs a warning and nothing else."""
    with log.warned("the refusals could not be kept or read"):
        key = str(config.compute_hash())
        noted = file.keep_refusals(config_view.cache_folder(), key, verdict)
        if noted is not None and verdict["rank"] == 0:
            log.say(logging.INFO, f"noted when these graphs were compiled: {noted}")
    with log.warned("the captured sizes could not be read"):
        verdict["capture_sizes"] = capture_sizes(config.compilation_config)
    with log.warned(f"the gauge {gauge.NAME} is not available"):
        gauge.publish(verdict)
    with log.warned("the census could not be written"):
        file.write_census(config_view.cache_folder(), verdict)


def _guarded(config: Any, what: str, step: Callable[[], None], *, checks_kernels: bool = False) -> None:
    """Do ``step``; what it raises is an error in strict mode, else one line.

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
            from vllm_aiter_mla.runtime import kernel

            kernel.distrust(reason)
        strict = _is_strict(config)
        if strict and isinstance(error, SettingsError):
            raise
        if strict:
            raise SettingsError(f"{log.PREFIX}{reason} ({STRICT_OPTION})") from error
        effect = "every MLA layer runs vLLM's own kernels" if checks_kernels else "serving goes on"
        log.say_once(logging.ERROR, f"{reason}; {effect}")


def _is_strict(config: Any) -> bool:
    """Whether strict mode was asked for, from where it can be read: the options, or the pass that was made of them."""
    for read in (config_view.settings_of, lambda config: engaged_pass(config).settings):
        try:
            return bool(read(config).strict)
        except Exception:
            continue  # the other is asked; what is wrong with this one shows where it is needed
    return False


def mla_layers(vllm_config: Any) -> dict[str, Any]:
    """The MLA attention layers of the model by name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")}


def capture_sizes(compilation: Any) -> list[int]:
    """Sizes of the graphs that this engine captured; vLLM keeps its list even where the graph mode is NONE."""
    mode = compilation.cudagraph_mode
    return [] if mode is None or mode.name == "NONE" else sorted(compilation.cudagraph_capture_sizes or ())


def _cache_name(config: Any) -> str:
    """The cache's dtype; "auto" is the model's."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name
