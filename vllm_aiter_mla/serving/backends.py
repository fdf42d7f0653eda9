# SPDX-License-Identifier: Apache-2.0
"""The kernel back ends of one engine: which there are, in which order they are tried, and how each is built."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import VLLM
from vllm_aiter_mla.kernels import absorb, stopwatch
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, meta_inputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.kernels.reference import AITER, VLLM_COMPILED, VLLM_KERNEL, ReferenceBackend
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend
from vllm_aiter_mla.serving.decision import Offer
from vllm_aiter_mla.settings import Settings

AITER_KERNELS = ("aiter", "aiter-opt")
"""Names of the back ends that call AITER's op."""

Factory = Callable[[Platform, Settings], KernelBackend | str]
"""Builds a back end for a card and an engine's options, or says why there is none."""


def candidates(settings: Settings, platform: Platform) -> tuple[str, ...]:
    """Return the back ends that may run a layer with these options on ``platform``, in static order.

    A kernel that was named is the only one. "auto" is AITER, its per-head kernel first, then Triton, which takes an fp8
    cache if AITER's build does not saturate, and vLLM's own, which timing may choose. On a CPU it is the reference.
    """
    if platform.arch == "cpu" and settings.kernel in ("auto", VLLM):
        return ("reference",)
    return (*AITER_KERNELS, "triton", VLLM) if settings.kernel == "auto" else (settings.kernel,)


def aiter_factory(platform: Platform, settings: Settings, opt: bool = False) -> KernelBackend | str:
    """Build one of AITER's back ends, or return why not. Imports AITER on an AMD card only."""
    if platform.arch not in ARCHITECTURES:
        return f"AITER's op is for gfx942 and gfx950; this card is {platform.arch}"
    try:
        return AiterBackend(platform, opt=opt)
    except AiterUnavailableError as error:
        return str(error)


def triton_factory(platform: Platform, settings: Settings) -> KernelBackend | str:
    """Build our Triton back end, or return why not."""
    from vllm_aiter_mla.kernels.triton import interpreted, tuning
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    if not card().is_there():
        return TritonBackend() if interpreted() else "Triton needs a GPU"
    machine, folders = stopwatch.machine(), (compat_config.cache_folder(), tuning.SHIPPED)
    chosen, left_out = tuning.load(folders, machine["card"], machine["triton"], card().units(), card().arch)
    if left_out:
        log.say_once(
            logging.WARNING, f"tuned tiles are left out, `check --only timing --tune` makes new ones: {left_out}"
        )
    return TritonBackend(chosen)


def vllm_factory(platform: Platform, settings: Settings) -> KernelBackend | str:
    """Build the back end of vLLM's own kernels, or return why not."""
    if not compat_layer.has_rope_and_write():
        return "this build of vLLM has no concat_and_cache_mla_rope_fused"
    return VLLMBackend(compat_layer, platform.arch)


NUMERICS = {"single": AITER, "two": VLLM_COMPILED, "three": VLLM_KERNEL}
"""How the reference kernel rounds, by the option ``debug.rounding``."""
FACTORIES: dict[str, Factory] = {
    "aiter": aiter_factory,
    "aiter-opt": partial(aiter_factory, opt=True),
    "triton": triton_factory,
    "reference": lambda _, settings: ReferenceBackend(NUMERICS[settings.debug.rounding]),
    VLLM: vllm_factory,
}
FAMILIES = {"AITER": AITER_KERNELS, "Triton": ("triton",)}
"""Kernels that are built or compiled here, by what builds them: if one of them ends the process in its first call, the
next start leaves out all of its family."""


class Backends:
    """The back ends of one engine, each built when it is first asked for.

    Args:
        settings: the engine's options.
        platform: the card; see ``detect_platform``.
        factories: what builds each back end, by name.
    """

    def __init__(self, settings: Settings, platform: Platform, factories: Mapping[str, Factory] | None = None) -> None:
        self.settings, self.platform = settings, platform
        self.names = candidates(settings, platform)
        self._factories = FACTORIES if factories is None else factories
        self._built: dict[str, KernelBackend | str] = {}
        self._aborted: set[str] = set()
        self._offers: dict[Any, tuple[tuple[int, ...], dict[str, Offer]]] = {}
        if platform.arch in ARCHITECTURES:
            absorb.GEMMS.update(compat_layer.absorb_products())

    def get(self, name: str) -> KernelBackend | str:
        """Return the back end called ``name``, or why there is none."""
        if name not in self._built:
            factory = self._factories.get(name)
            known = f"no {name} kernels are registered"
            self._built[name] = known if factory is None else factory(self.platform, self.settings)
        return self._built[name]

    def leave_out(self, name: str, reason: str, aborted: bool = False) -> None:
        """Keep this process off a back end; ``aborted``: because an earlier start ended in its first call."""
        self._built[name] = reason
        if aborted:
            self._aborted.add(name)
        self._offers.clear()

    def offers(self, shape: LayerShape, limit: int) -> tuple[tuple[int, ...], dict[str, Offer]]:
        """Return what each candidate says of layers of a shape, with the token counts where an answer may change.

        Args:
            shape: of the layer.
            limit: the decode limit in tokens.
        """
        key = (shape, limit)
        if key not in self._offers:
            self._offers[key] = self._asked(shape, limit)
        return self._offers[key]

    def _asked(self, shape: LayerShape, limit: int) -> tuple[tuple[int, ...], dict[str, Offer]]:
        """Ask on operands without memory: a contract looks at sizes and types only."""
        built = {name: self.get(name) for name in self.names}
        row = meta_inputs(shape)
        counts = {count for one in built.values() if not isinstance(one, str) for count in one.tried_counts(row)}
        starts = (1, *sorted(count for count in counts if 1 < count <= limit))
        points = (*(start - 1 for start in starts[1:]), limit)
        calls = [meta_inputs(shape, start) for start in starts]
        offers = {}
        for name, backend in built.items():
            if isinstance(backend, str):
                offers[name] = Offer(absent=backend, aborted=name in self._aborted)
                continue
            bound = zip(points, map(backend.bind, calls), strict=True)
            declines = {point: reason for point, reason in bound if isinstance(reason, str)}
            offers[name] = Offer("", declines, not backend.trusted)
        return points, offers

    def reloaded(self) -> None:
        """Let the back ends that were built renew what they derived from tensors of the model."""
        for backend in self._built.values():
            if not isinstance(backend, str):
                backend.reloaded()
        self._offers.clear()

    def bind(self, name: str, inputs: DecodeInputs) -> Binding | str:
        """Return what the back end does with calls like ``inputs``, or why it does not take them."""
        backend = self.get(name)
        return backend if isinstance(backend, str) else backend.bind(inputs)


def of_config(config: Any) -> Backends:
    """Return back ends of their own for the options of a ``VllmConfig``."""
    return Backends(compat_config.settings_of(config), current_platform())


def current_platform() -> Platform:
    """Return the card of this process."""
    return detect_platform()
