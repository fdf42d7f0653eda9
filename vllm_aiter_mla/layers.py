"""One decision per layer: is it admitted, which kernel runs, and why. It is made once.

The passes ask before they rewrite a layer, the ops when they run it, the worker what to check, the compile cache what
its graphs depend on. This file does not know who emits a layer. No other file decides.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch

from vllm_aiter_mla.admission import Skip, admit_layer
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import kernels as vllm_kernels
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log, user_pass
from vllm_aiter_mla.kernels import absorb, select, selfcheck, vllm_own
from vllm_aiter_mla.kernels import formats as fp8
from vllm_aiter_mla.kernels import measure as table
from vllm_aiter_mla.kernels.aiter.route import ViewPolicy
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.kernels.reference import AITER, TWO_ROUNDING, ReferenceBackend
from vllm_aiter_mla.settings import Settings


@dataclass(frozen=True, slots=True)
class Decision:
    """What is decided about one layer under one rotary style.

    Attributes:
        kernel: name of the back end that runs it, or None where none takes it.
        skip: why it does not get the fast path, or None. ``kernel_shape``: the wanted kernel does not take the
            layer, and it gets vLLM's own fusion of RoPE and KV write, pass 1; any other code: no pass touches it.
        shape: what the kernel was chosen for; None where admission refused the layer first.
    """

    kernel: str | None
    skip: Skip | None = None
    shape: LayerShape | None = None

    @property
    def is_left_to_vllm(self) -> bool:
        """Whether no pass may touch the layer."""
        return self.skip is not None and self.skip.code != "kernel_shape"


@dataclass(slots=True)
class _Known:
    """What is kept about one layer: it belongs to one engine for its whole life."""

    settings: Settings
    selector: select.Selector
    decisions: dict[tuple[Any, ...], Decision] = field(default_factory=dict)


_layers: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_unchecked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Layers that must not run a kernel that needs a check, with the reason; nothing has to be read to find it."""
_checked: WeakSet[Any] = WeakSet()
"""Layers whose kernel passed its check in this process; a kernel that needs one runs for no other layer."""
_given_up: WeakSet[Any] = WeakSet()
"""Layers whose kernel has raised while it served: they run none, not even one that needs no check."""
_nothing_is_checked: list[str] = []
"""Why no layer of this process may run one, or nothing."""
_generation = [0]
_measured: set[tuple[select.Selector, LayerShape]] = set()
"""Layer shapes whose kernel a measurement chooses, per token count."""
_rejections: set[str] = set()
"""Reasons of rejections; they were said when they were found."""
_told: set[str] = set()
"""Why batches went to vLLM's own attention, without figures: what has been said."""


def decide(
    module: Any, *, is_neox: bool, act: torch.dtype | None = None, table_dtype: torch.dtype | None = None
) -> Decision:
    """The decision about a layer; the same answer until a check takes its kernel away.

    Args:
        module: vLLM's ``MLAAttention``, its weights loaded.
        is_neox: pairing of the rotation, which the layer itself does not know.
        act: the activation dtype where the graph shows it, by default that of the layer's weight.
        table_dtype: dtype of the rotary table where the graph shows it.
    """
    known = _of(module)
    key = (is_neox, act, table_dtype)
    found = known.decisions.get(key)
    if found is None:
        found = known.decisions[key] = _decide(module, known, *key)
    return found


def _decide(
    module: Any, known: _Known, is_neox: bool, act: torch.dtype | None, table_dtype: torch.dtype | None
) -> Decision:
    skip = admit_layer(compat_layer.layer_view(module, table_dtype, act))
    if skip is not None:
        return Decision(None, skip)
    shape = shape_of(module, is_neox=is_neox, act=act)
    kernel, skip = _kernel_for(module, known, shape)
    return Decision(kernel, skip, shape)


def _kernel_for(module: Any, known: _Known, shape: LayerShape) -> tuple[str | None, Skip | None]:
    """(name of the back end that will run, why it is not the wanted one)."""
    selector, asked = known.selector, known.settings.kernel
    if (selector, shape) in _measured and why_unchecked(module) is None:
        first = _choice(selector, shape).backend
        return None if first is None else first.name, None
    wanted = selector.names[0]
    if asked == "auto" and wanted == "vllm":
        arch = selector.platform.arch
        unknown = f"auto knows no fused kernel for {arch}; kernel=triton can be asked for by name"
        return None, Skip("kernel_unavailable", unknown)
    backend, unchecked = selector.backend(wanted), why_unchecked(module)
    if unchecked is not None and (isinstance(backend, str) or not backend.trusted):
        return selector.names[-1], Skip("kernel_shape", unchecked)
    if isinstance(backend, str):
        return None, Skip("kernel_unavailable", f"kernel={asked}: {backend}")
    choice = _choice(selector, shape)
    reason = next((reason for name, reason in choice.skips if name == wanted), None)
    skip = None if reason is None else Skip("kernel_shape", reason)
    return None if choice.backend is None else choice.backend.name, skip


@lru_cache(maxsize=64)
def _choice(selector: select.Selector, shape: LayerShape) -> select.Choice:
    """The choice for a layer shape: a model has few of them, and drawing operands for each of its layers takes long."""
    return selector.choose(synthetic_inputs(shape, tokens=1))


def shape_of(module: Any, *, is_neox: bool, act: torch.dtype | None = None) -> LayerShape:
    """What decides the kernel of a layer, without a batch; ``act`` as in ``decide``.

    Raises:
        UnknownWeightError: the absorbed weight is held in no form that the kernels know.
    """
    act = act or compat_layer.activation_dtype(module)
    assert act is not None, "admission refuses a layer without an absorbed weight"
    weight = weight_of(module)
    quantised = module.kv_cache_dtype.startswith("fp8")
    return LayerShape(
        heads=module.num_heads,
        nope_dim=module.qk_nope_head_dim,
        cache_dtype=vllm_kernels.fp8_dtype() if quantised else act,
        out_dtype=compat_layer.prepared_query_dtype(module, act),
        block_size=compat_layer.block_size(module),
        is_neox=is_neox,
        act=act,
        device=weight.tensors[0][1].device,
        latent=module.kv_lora_rank,
        rope=module.qk_rope_head_dim,
        weight=weight.key,
    )


def weight_of(module: Any) -> absorb.AbsorbWeight:
    """The layer's W_UK in the form in which vLLM multiplies by it; read per call, because reloading replaces it.

    Raises:
        UnknownWeightError: no form of ours is in the layer's tensors.
    """
    return absorb.read(compat_layer.absorb_tensors(module))


def kernel_for(module: Any, inputs: DecodeInputs) -> tuple[str, Run | None]:
    """Name of what runs calls of this shape, and its function; "vllm" and None where vLLM's own attention does.

    Whatever goes wrong here, the batch is served by vLLM's own attention, and one line says why.
    """
    if module in _given_up:
        return table.VLLM, None  # said when it raised
    try:
        choice = _of(module).selector.choose(inputs)
    except Exception as error:
        return _vllm(f"no kernel could be chosen: {type(error).__name__}: {error}")
    if choice.backend is None or choice.run is None:
        return _vllm("; ".join(f"{name}: {reason}" for name, reason in choice.skips))
    if not choice.backend.trusted and why_unchecked(module) is not None:
        return table.VLLM, None  # said when it was found
    if not choice.backend.trusted and module not in _checked:
        # A compiled artifact may hold the op although nothing was checked in this process.
        return _vllm(f"{choice.backend.name} was not checked in this process")
    if choice.backend.name != table.VLLM:
        return choice.backend.name, choice.run
    skips = [(name, reason) for name, reason in choice.skips if reason not in _rejections]
    return _vllm("; ".join(f"{name}: {reason}" for name, reason in skips)) if skips else (table.VLLM, None)


def _vllm(reason: str) -> tuple[str, None]:
    """Say it once: a reason that comes back with other figures, for instance another token count, is the same."""
    kind = re.sub(r"\d+", "N", reason)
    if kind not in _told:
        _told.add(kind)
        log.say_once(logging.ERROR, f"decode batches of some layers run vLLM's own attention: {reason}")
    return table.VLLM, None


def limit_of(module: Any) -> int:
    """L, the most tokens that the layer's kernel is given; the passes keep to it by compile ranges."""
    compilation = getattr(compat_layer.config_of(module), "compilation_config", None)
    limit = getattr(user_pass.current(compilation), "limit", None)
    return limit if isinstance(limit, int) else sys.maxsize


def generation() -> int:
    """Changes whenever a decision may: what was found for an older one has to be found anew."""
    return _generation[0]


def trust(module: Any) -> None:
    """Let the layer run its chosen kernel: the check of every shape that it may have has passed."""
    _checked.add(module)
    _generation[0] += 1


def distrust(reason: str, module: Any = None) -> None:
    """Keep a layer, or without one every layer of this process, off its chosen kernel until the process ends.

    Where the self-check raises there may be no operands to reject a layer shape by; the layer itself is known.

    Args:
        reason: why its kernel could not be checked.
        module: the attention layer; None for all.
    """
    if module is None:
        _nothing_is_checked.append(reason)
    else:
        _unchecked[module] = reason
        _checked.discard(module)
    _forget_decisions()


def give_up(module: Any, error: Exception) -> None:
    """Take the layer's kernel away because it has raised while it served."""
    reason = f"its kernel has raised: {type(error).__name__}: {error}"
    _given_up.add(module)
    distrust(reason, module)
    kept = "graphs that were captured keep the kernel"
    log.say_once(logging.ERROR, f"a layer runs vLLM's own attention from now on; {kept}: {reason}")


def why_unchecked(module: Any) -> str | None:
    """Why the chosen kernel must not run for the layer, or None."""
    if _nothing_is_checked:
        return _nothing_is_checked[0]
    return _unchecked.get(module) if _unchecked else None


def self_check(
    module: Any, shape: LayerShape, capture_sizes: Sequence[int] = (), limit: int | None = None
) -> str | None:
    """Run the chosen kernel beside the reference: why it must not serve this shape, or None.

    One that cannot be compiled or launched is as bad as a wrong one.

    Args:
        module: a layer of the shape.
        shape: one of ``shapes``.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        limit: L, the largest batch that it will be given; None: any.
    """
    inputs = synthetic_inputs(shape, tokens=1)
    backend = selector_of(module).choose(inputs).backend
    if backend is None or backend.trusted:
        return None
    return _trouble_of(backend, shape, capture_sizes, limit)


def _trouble_of(
    backend: KernelBackend, shape: LayerShape, capture_sizes: Sequence[int], limit: int | None
) -> str | None:
    try:
        result = selfcheck.self_check(backend, shape, limit)
        if result.ok and capture_sizes:
            backend.warm_up(synthetic_inputs(shape, tokens=1), capture_sizes)
    except Exception as error:
        return f"{backend.name}: self-check FAILED: {type(error).__name__}: {error}"
    log.say_once(logging.DEBUG, result.message)
    return None if result.ok else result.message


def check_contenders(
    module: Any, shape: LayerShape, capture_sizes: Sequence[int] = (), limit: int | None = None
) -> tuple[str, ...]:
    """Check, as ``self_check`` does, what a measurement may choose besides; what fails is rejected, with the reasons.

    Nobody has asked for these by name, and without them the chosen kernel runs: that is no failure of the engine.
    """
    found = contenders(module, shape)
    if not found:
        return ()
    inputs, selector = synthetic_inputs(shape, tokens=1), selector_of(module)
    chosen, failed = selector.choose(inputs).backend, []
    for name, backend in found.items():
        trouble = None
        if backend is not chosen and not backend.trusted:
            trouble = _trouble_of(backend, shape, capture_sizes, limit)
        if trouble is not None:
            selector.reject(name, inputs, trouble)
            failed.append(trouble)
    return tuple(failed)


def contenders(module: Any, shape: LayerShape) -> dict[str, KernelBackend]:
    """The back ends between which a measurement may choose for layers of this shape; none where none is to be made."""
    known = _of(module)
    if not known.settings.measures or not known.selector.contenders:
        return {}
    return known.selector.takers(synthetic_inputs(shape, tokens=1))


def prefer(module: Any, ranges: table.Ranges) -> None:
    """Let layers of this shape run what was measured, under both rotary styles; without ``ranges`` the static order."""
    selector = selector_of(module)
    for shape in shapes(module):
        selector.prefer(synthetic_inputs(shape, tokens=1), ranges)
        (_measured.add if ranges else _measured.discard)((selector, shape))
    _forget_decisions()


def warm_vllm(module: Any) -> None:
    """Let vLLM compile the function in which its own attention quantises a query.

    vLLM alone compiles it in its warm-up, of decode batches. Those go to our op; without this the first batch that
    mixes prefill and decode rows would compile it while it serves.
    """
    shape = next(iter(shapes(module)), None)
    if shape is None or not fp8.is_fp8(shape.out_dtype):
        return
    # torch compiles for one row apart, and once for all other counts.
    for rows in (2, 1):
        absorbed, query = (
            torch.zeros(rows, shape.heads, width, dtype=shape.act, device=shape.device)
            for width in (shape.latent, shape.nope_dim + shape.rope)
        )
        with torch.inference_mode():
            compat_layer.quantise(module, absorbed, query[..., shape.nope_dim :])


def reject(module: Any, shape: LayerShape, reason: str) -> None:
    """Take the chosen back end away from every layer of this shape until the process ends: its self-check failed."""
    selector, inputs = selector_of(module), synthetic_inputs(shape, tokens=1)
    backend = selector.choose(inputs).backend
    if backend is not None:
        selector.reject(backend.name, inputs, reason)
        _rejections.add(reason)
    _forget_decisions()  # an engine before this one may have decided for the kernel


def shapes(module: Any) -> tuple[LayerShape, ...]:
    """What the layer's kernel is chosen for, under both rotary styles, as it does not know its own; none if refused."""
    decisions = [decide(module, is_neox=is_neox) for is_neox in (False, True)]
    return tuple(decision.shape for decision in decisions if decision.shape is not None)


def selector_of(module: Any) -> select.Selector:
    """The back ends of the layer's engine."""
    return _of(module).selector


def key_of(module: Any) -> tuple[str, ...]:
    """What the layer will run on, or why it will not, under both rotary styles: a part of the compile cache's key.

    A graph is rewritten or not by this, and none of vLLM's own keys knows of AITER, the card or a failed check: without
    it an engine would start from the unchanged graph of a run before AITER was repaired. What was measured is no part
    of it: the one op is in the graph whichever kernel it then runs, so another choice needs no other graph.
    """
    found = []
    for decision in (decide(module, is_neox=is_neox) for is_neox in (False, True)):
        if decision.shape is not None:
            # The card by its type: its index differs from rank to rank, and may from start to start.
            kind = replace(decision.shape, device=torch.device(decision.shape.device).type)
            measured = (selector_of(module), decision.shape) in _measured
            # Not its message: what an exception says may differ at every start.
            code = None if decision.skip is None else decision.skip.code
            found.append(f"{kind}: {'measured' if measured else decision.kernel}; {code}")
    return tuple(found)


def reset() -> None:
    """Forget the platform and every decision: the sandbox changes the platform between engines."""
    _layers.clear()
    _unchecked.clear()
    _checked.clear()
    _given_up.clear()
    _nothing_is_checked.clear()
    _generation[0] += 1
    _measured.clear()
    _rejections.clear()
    _told.clear()
    current_platform.cache_clear()
    _selector.cache_clear()


@lru_cache(maxsize=1)
def current_platform() -> Platform:
    """The card of this process."""
    return detect_platform()


def _of(module: Any) -> _Known:
    """What is kept about a layer; its options are its engine's, because it keeps its engine's config.

    A worker that starts from a compiled artifact sees neither the gate nor a pass, so they are read here.
    """
    known = _layers.get(module)
    if known is None:
        settings = compat_config.settings_of(compat_layer.config_of(module))
        view = cast(ViewPolicy, settings.aiter_view)
        selector = _selector(settings.kernel, settings.measures, settings.debug.rounding, view, current_platform())
        known = _layers[module] = _Known(settings, selector)
    return known


@lru_cache(maxsize=8)
def _selector(kernel: str, measures: bool, rounding: str, view: ViewPolicy, platform: Platform) -> select.Selector:
    """The back ends for one engine's options; engines with the same options share it, what was measured included."""
    numerics = TWO_ROUNDING if rounding == "two" else AITER
    factories: dict[str, select.Factory] = {
        **select.FACTORIES,
        "aiter": partial(select.aiter_factory, view=view),
        "vllm": partial(vllm_own.factory, vllm=vllm_kernels),
        "reference": lambda _: ReferenceBackend(numerics),
    }
    return select.Selector(kernel, platform, factories)


def _forget_decisions() -> None:
    _generation[0] += 1
    _choice.cache_clear()
    for known in _layers.values():
        known.decisions.clear()
