"""Which kernel runs for a layer: joins the settings, the platform and the back ends of ``kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from vllm_aiter_mla.admission import Refusal
from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import kernels as vllm_kernels
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import select, stock
from vllm_aiter_mla.kernels.aiter.dispatch import ViewPolicy
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.kernels.reference import AITER, TWO_ROUNDING
from vllm_aiter_mla.kernels.selfcheck import LayerShape, synthetic_inputs
from vllm_aiter_mla.settings import Settings

_settings: WeakKeyDictionary[Any, Settings] = WeakKeyDictionary()

_unchecked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Layers that must not run the chosen kernel, with the reason: its self-check could not be made."""
_nothing_is_checked: list[str] = []
"""The reason why no layer of this process may, or nothing."""


TRUSTED = frozenset({"reference", "stock"})
"""What the self-check compares with, and vLLM's own kernels: nothing to fall back to, and no new code."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run for a layer, decided before the first call.

    Attributes:
        kernel: name of the back end, or None where none takes the layer.
        refusal: why the wanted back end does not run it, or None: ``kernel_unavailable`` where it cannot run in this
            process at all, ``kernel_shape`` where it does not take a layer of this shape.
    """

    kernel: str | None
    refusal: Refusal | None = None


def settings_of(layer: Any) -> Settings:
    """The plugin's options of the engine that ``layer`` belongs to: the layer keeps its engine's config.

    A worker that starts from a compiled artifact sees neither the gate nor a pass, so they are read here.
    """
    found = _settings.get(layer)
    if found is None:
        found = _settings[layer] = compat_config.settings_of(layer._vllm_config)
    return found


@lru_cache(maxsize=8)
def selector(kernel: str, rounding: str, view: ViewPolicy, platform: Platform) -> select.Selector:
    """The chooser for one engine's options; it remembers a choice per call shape."""
    select.register_backend("stock", partial(stock.factory, vllm=vllm_kernels))
    numerics = TWO_ROUNDING if rounding == "two" else AITER
    select.register_backend("reference", lambda _: select.ReferenceBackend(numerics))
    select.register_backend("aiter", partial(select.aiter_factory, view=view))
    chooser = select.Selector(kernel, platform)
    for name in {*chooser.names, "reference"}:
        chooser.backend(name)  # built now: another engine in this process may register other options
    return chooser


def selector_of(layer: Any) -> select.Selector:
    """The chooser of the engine that ``layer`` belongs to."""
    settings = settings_of(layer)
    view = cast(ViewPolicy, settings.aiter_view)
    return selector(settings.kernel, settings.debug.rounding, view, current_platform())


@lru_cache(maxsize=1)
def current_platform() -> Platform:
    """The card of this process."""
    return detect_platform()


def prepare(layer_name: str, layer: Any, inputs: DecodeInputs) -> torch.Tensor:
    """Run the layer's back end: q_prepared [T, N, L+R], KV rows written.

    Raises:
        NoKernelError: no back end takes the call; the message holds every reason.
    """
    chooser = selector_of(layer)
    if why_unchecked(layer) is not None:
        return _fall_back(layer_name, chooser, inputs)
    choice = chooser.choose(inputs)
    if choice.backend is None or choice.run is None:
        return chooser.prepare(inputs)  # raises with every candidate's reason
    census.engage(layer_name, choice.backend.name)
    return choice.run(inputs)


def _fall_back(layer_name: str, chooser: select.Selector, inputs: DecodeInputs) -> torch.Tensor:
    """Run the last candidate, which needs no self-check: vLLM's own kernels, on a CPU the reference."""
    backend = chooser.backend(chooser.names[-1])
    reason = backend if isinstance(backend, str) else backend.refuse(inputs)
    if reason is not None or isinstance(backend, str):
        raise select.NoKernelError(f"{chooser.names[-1]}: {reason}")
    census.engage(layer_name, backend.name)
    return backend.prepare(inputs)


def distrust(reason: str, layer: Any = None) -> None:
    """Keep ``layer``, or without one every layer of this process, off its chosen kernel for good.

    Where the self-check raises there may be no operands to demote a layer shape by; the layer itself is known.

    Args:
        reason: why its kernel could not be checked.
        layer: the attention layer; None for all.
    """
    if layer is None:
        _nothing_is_checked.append(reason)
    else:
        _unchecked[layer] = reason


def why_unchecked(layer: Any) -> str | None:
    """Why the chosen kernel must not run for ``layer``, or None."""
    if _nothing_is_checked:
        return _nothing_is_checked[0]
    return _unchecked.get(layer) if _unchecked else None


def shape_of(layer: Any, *, is_neox: bool, act: torch.dtype, out_dtype: torch.dtype) -> LayerShape:
    """What decides the kernel of a layer, without a batch."""
    quantised = layer.kv_cache_dtype.startswith("fp8")
    weight, weight_scale = compat_layer.absorb_weight(layer)
    return LayerShape(
        heads=layer.num_heads,
        nope_dim=layer.qk_nope_head_dim,
        cache_dtype=vllm_kernels.fp8_dtype() if quantised else act,
        out_dtype=out_dtype,
        block_size=compat_layer.block_size(layer),
        is_neox=is_neox,
        act=act,
        device=weight.device,
        latent=layer.kv_lora_rank,
        rope=layer.qk_rope_head_dim,
        weight_dtype=None if weight_scale is None else weight.dtype,
    )


def plan(layer: Any, shape: LayerShape) -> Plan:
    """Decide the kernel of a layer from its shape; the same chooser serves the calls later."""
    chooser, reason = selector_of(layer), why_unchecked(layer)
    if reason is None or chooser.names[0] in TRUSTED:
        return plan_of(chooser, settings_of(layer).kernel, shape)
    return Plan(chooser.names[-1], Refusal("kernel_shape", reason))


@lru_cache(maxsize=64)
def plan_of(chooser: select.Selector, asked: str, shape: LayerShape) -> Plan:
    """As ``plan``, for a chooser, the kernel that was asked for and a shape."""
    wanted = chooser.names[0]
    if asked == "auto" and wanted == "stock":
        # vLLM's kernels on private copies would cost more than leaving the layer alone.
        arch = chooser.platform.arch
        unknown = f"auto knows no fused kernel for {arch}; kernel=triton can be asked for by name"
        return Plan(None, Refusal("kernel_unavailable", unknown))
    backend = chooser.backend(wanted)
    if isinstance(backend, str):
        return Plan(None, Refusal("kernel_unavailable", f"kernel={asked}: {backend}"))
    choice = chooser.choose(synthetic_inputs(shape, tokens=1))
    reason = next((reason for name, reason in choice.refusals if name == wanted), None)
    refusal = None if reason is None else Refusal("kernel_shape", reason)
    return Plan(None if choice.backend is None else choice.backend.name, refusal)


def reset() -> None:
    """Forget the platform and every choice: the sandbox changes the platform between engines."""
    current_platform.cache_clear()
    selector.cache_clear()
    plan_of.cache_clear()
    _unchecked.clear()
    _nothing_is_checked.clear()
