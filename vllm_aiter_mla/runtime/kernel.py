"""Which kernel runs for a layer: joins the settings, the platform and the back ends of ``kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from vllm_aiter_mla.kernels import select
from vllm_aiter_mla.kernels.aiter.dispatch import ViewPolicy
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.kernels.reference import AITER, TWO_ROUNDING
from vllm_aiter_mla.kernels.reference_backend import ReferenceBackend
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs
from vllm_aiter_mla.report import census
from vllm_aiter_mla.runtime.absorb import weight_of
from vllm_aiter_mla.settings import Settings

_settings: WeakKeyDictionary[Any, Settings] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run for a layer, decided before the first call.

    Attributes:
        kernel: name of the back end, or None where none takes the layer.
        unavailable: why the wanted back end cannot run in this process at all, or None.
        refused: why the wanted back end does not take a layer of this shape, or None.
    """

    kernel: str | None
    unavailable: str | None = None
    refused: str | None = None


def settings_of(layer: Any) -> Settings:
    """The plugin's options of the engine that ``layer`` belongs to: the layer keeps its engine's config.

    A worker that starts from a compiled artifact sees neither the gate nor a pass, so they are read here.
    """
    found = _settings.get(layer)
    if found is None:
        from vllm_aiter_mla.compat import config_view

        found = _settings[layer] = config_view.settings_of(layer._vllm_config)
    return found


@lru_cache(maxsize=8)
def selector(kernel: str, rounding: str, view: ViewPolicy, platform: Platform) -> select.Selector:
    """The chooser for one engine's options; it remembers a choice per call shape."""
    from vllm_aiter_mla.runtime import stock

    numerics = TWO_ROUNDING if rounding == "two" else AITER
    factories: dict[str, select.Factory] = {
        **select.FACTORIES,
        "aiter": partial(select.aiter_factory, view=view),
        "stock": stock.factory,
        "reference": lambda _: ReferenceBackend(numerics),
    }
    return select.Selector(kernel, platform, factories)


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
    choice = chooser.choose(inputs)
    if choice.backend is None or choice.run is None:
        return chooser.prepare(inputs)  # raises with every candidate's reason
    census.engage(layer_name, choice.backend.name)
    return choice.run(inputs)


def shape_of(layer: Any, *, is_neox: bool, act: torch.dtype, out_dtype: torch.dtype) -> LayerShape:
    """What decides the kernel of a layer, without a batch."""
    quantised = layer.kv_cache_dtype.startswith("fp8")
    weight = weight_of(layer)
    return LayerShape(
        heads=layer.num_heads,
        nope_dim=layer.qk_nope_head_dim,
        cache_dtype=fp8_dtype() if quantised else act,
        out_dtype=out_dtype,
        block_size=layer._vllm_config.cache_config.block_size or 16,
        is_neox=is_neox,
        act=act,
        device=weight.tensors[0][1].device,
        latent=layer.kv_lora_rank,
        rope=layer.qk_rope_head_dim,
        weight=weight.key,
    )


def fp8_dtype() -> torch.dtype:
    """The card's fp8 type."""
    return current_platform().fp8


def plan(layer: Any, shape: LayerShape) -> Plan:
    """Decide the kernel of a layer from its shape; the same chooser serves the calls later."""
    return plan_of(selector_of(layer), settings_of(layer).kernel, shape)


@lru_cache(maxsize=64)
def plan_of(chooser: select.Selector, asked: str, shape: LayerShape) -> Plan:
    """As ``plan``, for a chooser, the kernel that was asked for and a shape."""
    wanted = chooser.names[0]
    if asked == "auto" and wanted == "stock":
        # vLLM's kernels on private copies would cost more than leaving the layer alone.
        arch = chooser.platform.arch
        return Plan(None, unavailable=f"auto knows no fused kernel for {arch}; kernel=triton can be asked for by name")
    backend = chooser.backend(wanted)
    if isinstance(backend, str):
        return Plan(None, unavailable=f"kernel={asked}: {backend}")
    choice = chooser.choose(synthetic_inputs(shape, tokens=1))
    refused = next((reason for name, reason in choice.refusals if name == wanted), None)
    return Plan(None if choice.backend is None else choice.backend.name, refused=refused)


def reset() -> None:
    """Forget the platform and every choice: the sandbox changes the platform between engines."""
    current_platform.cache_clear()
    selector.cache_clear()
    plan_of.cache_clear()
