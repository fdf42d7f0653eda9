"""Two moments in a worker's life: after its weights are loaded, and after its warm-up.

vLLM's memory profiling may already capture graphs, so the self-check comes right after loading; the census can tell
the truth only once the compiled graphs have run.
"""

from __future__ import annotations

import logging
import sys
from functools import wraps
from typing import Any

from vllm_aiter_mla.compat import config_view, log
from vllm_aiter_mla.settings import SettingsError

_MARK = "_aiter_mla_worker_hook"


def install_if_loaded() -> None:
    """Install where vLLM's worker module is imported already; importing it for a run that is off would cost 0.6 s.

    vLLM loads plugins in the engine core and in each worker after that import; a process that holds both the front
    end and the engine loads them before it, and there the gate installs the hook when it engages.
    """
    if "vllm.v1.worker.worker_base" in sys.modules:
        install()


def install() -> None:
    """Wrap ``WorkerBase.__init__``: spawned workers load plugins when their wrapper is half built. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    inner = WorkerBase.__init__
    if getattr(inner, _MARK, False):
        return

    @wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        attach(self)

    setattr(init, _MARK, True)
    WorkerBase.__init__ = init  # type: ignore[method-assign]


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or with the gate's decline, it is left as it is."""
    if not config_view.settings_of(worker.vllm_config).enabled or engaged_limit(worker.vllm_config) is None:
        return
    _after(worker, "load_model", _check_kernels)
    _after(worker, "compile_or_warm_up_model", _take_census)


def engaged_limit(vllm_config: Any) -> int | None:
    """L of the decode bucket where the gate has engaged, else None."""
    current = vllm_config.compilation_config.inductor_compile_config.get("post_grad_custom_post_pass")
    return getattr(current, "limit", None)


def _after(worker: Any, method: str, then: Any) -> None:
    inner = getattr(worker, method)

    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        _guarded(then, worker)
        return result

    setattr(worker, method, call)


def _guarded(then: Any, worker: Any) -> None:
    """Our own trouble must not take a worker down; strict mode's errors are meant to."""
    try:
        then(worker)
    except SettingsError:
        raise
    except Exception as error:
        log.say_once(logging.WARNING, f"{then.__name__.strip('_')} failed: {type(error).__name__}: {error}")


def mla_layers(vllm_config: Any) -> dict[str, Any]:
    """The MLA attention layers of the model by name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")}


def _check_kernels(worker: Any) -> None:
    from vllm_aiter_mla.runtime import selfcheck

    config = worker.vllm_config
    limit = engaged_limit(config) or 0
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    selfcheck.check_layers(
        mla_layers(config),
        strict=config_view.settings_of(config).strict,
        capture_sizes=[size for size in sizes if size <= limit],
    )


def _take_census(worker: Any) -> None:
    from vllm_aiter_mla.report import announce, census

    config = worker.vllm_config
    layers = mla_layers(config)
    if layers and not census.current().engaged:
        # Nothing inside the bucket has run yet: warm-up covers the largest batch, and there may be no graphs.
        worker.execute_dummy_batch()
    announce.after_warm_up(
        total=sorted(layers),
        limit=engaged_limit(config) or 0,
        kv_cache_dtype=_cache_name(config),
        strict=config_view.settings_of(config).strict,
        rank=int(getattr(worker, "rank", 0)),
        key=str(config.compute_hash()),
        capture_sizes=_capture_sizes(config.compilation_config),
    )


def _capture_sizes(compilation: Any) -> list[int]:
    """Sizes of the graphs that this engine captured; vLLM keeps its list even where the graph mode is NONE."""
    mode = compilation.cudagraph_mode
    return [] if mode is None or mode.name == "NONE" else sorted(compilation.cudagraph_capture_sizes or ())


def _cache_name(config: Any) -> str:
    """The cache's dtype; "auto" is the model's."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name
