# SPDX-License-Identifier: Apache-2.0
"""The kernel back ends of one engine: which there are, in which order they are tried, and how each is built."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import absorb, stopwatch
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.kernels.reference import AITER, VLLM_COMPILED, ReferenceBackend
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend
from vllm_aiter_mla.serving.decision import VLLM
from vllm_aiter_mla.settings import KERNELS, Settings

AITER_KERNELS = ("aiter", "aiter-opt")
"""Names of the back ends that call AITER's op."""

Factory = Callable[[Platform, Settings], KernelBackend | str]
"""Builds a back end for a card and an engine's options, or says why there is none."""


def candidates(kernel: str, platform: Platform) -> tuple[str, ...]:
    """Return the back ends to try, in order, for the option ``kernel`` on ``platform``.

    "auto" is AITER on gfx942 and gfx950, its per-head kernel first, then Triton, which takes an fp8 cache if AITER's
    build does not saturate. It is the reference on a CPU and vLLM's own kernels elsewhere. Timing may put another first
    (``layer.Layer.ranges``). A kernel that was asked for by name falls back to "vllm". On a CPU, where vLLM has no such
    kernels, it falls back to the reference.

    Raises:
        ValueError: an unknown ``kernel``.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no such kernel: {kernel!r}; one of {', '.join(KERNELS)}")
    if kernel == "auto" and platform.arch in ARCHITECTURES:
        return (*AITER_KERNELS, "triton", VLLM)
    kernel = VLLM if kernel == "auto" else kernel
    last = "reference" if platform.arch == "cpu" else VLLM
    return (last,) if kernel in (last, VLLM) else (kernel, last)


def contenders(kernel: str, platform: Platform) -> tuple[str, ...]:
    """Return the back ends that timing may choose between, in static order; "vllm" is the last.

    Empty if the user named a kernel, or on a CPU.
    """
    if kernel != "auto" or platform.arch == "cpu":
        return ()
    return (*AITER_KERNELS, "triton", VLLM) if platform.arch in ARCHITECTURES else ("triton", VLLM)


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
    chosen, left_out = tuning.load(folders, machine["card"], machine["triton"], card().arch)
    if left_out:
        log.say_once(logging.WARNING, f"tuned tiles are left out, `measure --tune` makes new ones: {left_out}")
    return TritonBackend(chosen)


def vllm_factory(platform: Platform, settings: Settings) -> KernelBackend | str:
    """Build the back end of vLLM's own kernels, or return why not."""
    if not compat_layer.has_rope_and_write():
        return "this build of vLLM has no concat_and_cache_mla_rope_fused"
    return VLLMBackend(compat_layer, platform.arch)


FACTORIES: dict[str, Factory] = {
    "aiter": aiter_factory,
    "aiter-opt": partial(aiter_factory, opt=True),
    "triton": triton_factory,
    "reference": lambda _, settings: ReferenceBackend(VLLM_COMPILED if settings.debug.rounding == "two" else AITER),
    VLLM: vllm_factory,
}


class Backends:
    """The back ends of one engine, each built when it is first asked for.

    Args:
        settings: the engine's options.
        platform: the card; see ``detect_platform``.
        factories: what builds each back end, by name.
    """

    def __init__(self, settings: Settings, platform: Platform, factories: Mapping[str, Factory] | None = None) -> None:
        self.settings, self.platform = settings, platform
        self.names = candidates(settings.kernel, platform)
        self.contenders = contenders(settings.kernel, platform) if settings.measures else ()
        self._factories = FACTORIES if factories is None else factories
        self._built: dict[str, KernelBackend | str] = {}
        if platform.arch in ARCHITECTURES:
            absorb.GEMMS.update(compat_layer.absorb_products())

    def get(self, name: str) -> KernelBackend | str:
        """Return the back end called ``name``, or why there is none."""
        if name not in self._built:
            factory = self._factories.get(name)
            known = f"no {name} kernels are registered"
            self._built[name] = known if factory is None else factory(self.platform, self.settings)
        return self._built[name]

    @property
    def default(self) -> str:
        """The back end that runs without figures: the first of ``names``, with "auto" the first that can be built."""
        built = (name for name in self.names if not isinstance(self.get(name), str))
        return next(built, self.names[0]) if self.settings.kernel == "auto" else self.names[0]

    def refuse(self, name: str, reason: str) -> None:
        """Keep this process off a back end."""
        self._built[name] = reason

    def reloaded(self) -> None:
        """Let the back ends that were built renew what they derived from tensors of the model."""
        for backend in self._built.values():
            if not isinstance(backend, str):
                backend.reloaded()

    def bind(self, name: str, inputs: DecodeInputs) -> Binding | str:
        """Return what the back end does with calls like ``inputs``, or why it does not take them."""
        backend = self.get(name)
        return backend if isinstance(backend, str) else backend.bind(inputs)


def of_engine(config: Any) -> Backends:
    """Return the back ends of the engine of a ``VllmConfig``, which its pass owns: no other engine has the same."""
    engaged = compat_config.engaged_pass(config)
    if engaged is None:  # nothing of ours runs in this engine
        return Backends(compat_config.settings_of(config), current_platform())
    if engaged.backends is None:
        engaged.backends = Backends(compat_config.settings_of(config), current_platform())
    found: Backends = engaged.backends
    return found


def current_platform() -> Platform:
    """Return the card of this process."""
    return detect_platform()
