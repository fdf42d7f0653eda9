"""Which kernel runs a layer: asked for by the user, allowed by the platform, able to take the call.

One :class:`Selector` per process remembers the answer, by one key per call. The order of candidates ends in a fallback;
what was passed over keeps its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError
from vllm_aiter_mla.kernels.aiter.route import ViewPolicy
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs, call_key, layer_key
from vllm_aiter_mla.kernels.measure import Ranges, name_at
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.settings import KERNELS

_KEEP = 4096  # call shapes remembered; a serving process sees its capture sizes, not thousands

# Builds a back end for a platform, or says why there is none.
Factory = Callable[[Platform], KernelBackend | str]


def candidates(kernel: str, platform: Platform) -> tuple[str, ...]:
    """The back ends to try, in order, for the option ``kernel`` on ``platform``.

    This order is static: "auto" is AITER on gfx942 and gfx950, the reference on a CPU and vLLM's own kernels elsewhere.
    Measured figures come before it: ``Selector.prefer``. Anything asked for by name falls back to "vllm", and on a
    CPU, where there are no such kernels, to the reference.

    Raises:
        ValueError: an unknown ``kernel``.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no such kernel: {kernel!r}; one of {', '.join(KERNELS)}")
    if kernel == "auto":
        kernel = "aiter" if platform.arch in ARCHITECTURES else "vllm"
    if platform.arch == "cpu":
        kernel = "reference" if kernel == "vllm" else kernel
        return (kernel,) if kernel == "reference" else (kernel, "reference")
    return (kernel,) if kernel == "vllm" else (kernel, "vllm")


def contenders(kernel: str, platform: Platform) -> tuple[str, ...]:
    """The back ends between which a measurement on the user's card may choose, in static order; "vllm" ends it.

    None where the user has named a kernel, and on a CPU.
    """
    if kernel != "auto" or platform.arch == "cpu":
        return ()
    return ("aiter", "triton", "vllm") if platform.arch in ARCHITECTURES else ("triton", "vllm")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who runs calls of one key, and who was passed over and why.

    Attributes:
        backend: the back end that runs them, or None where every candidate refused.
        skips: (name, reason) of the candidates before it.
        run: its function for calls of this key.
    """

    backend: KernelBackend | None
    skips: tuple[tuple[str, str], ...] = ()
    run: Run | None = None


class Selector:
    """Chooses a back end per call shape and remembers the choice: the one memo of "which kernel?".

    Args:
        kernel: the user's option, one of ``KERNELS``.
        platform: the card; see ``detect_platform``.
        factories: by name, what builds each back end, on first use. "vllm", vLLM's own kernels, is the caller's.
    """

    def __init__(self, kernel: str, platform: Platform, factories: Mapping[str, Factory] | None = None) -> None:
        self.platform = platform
        self.names = candidates(kernel, platform)
        self.contenders = contenders(kernel, platform)
        self._factories = dict(FACTORIES if factories is None else factories)
        self._built: dict[str, KernelBackend | str] = {}
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._rejected: dict[tuple[str, tuple[Any, ...]], str] = {}
        self._preferred: dict[tuple[Any, ...], Ranges] = {}

    def backend(self, name: str) -> KernelBackend | str:
        """The back end called ``name``, built on first use, or the reason why there is none."""
        if name not in self._built:
            factory = self._factories.get(name)
            self._built[name] = f"no {name} kernels are registered" if factory is None else factory(self.platform)
        return self._built[name]

    def choose(self, inputs: DecodeInputs) -> Choice:
        """The choice for this call shape; metadata only, remembered by ``call_key``."""
        key = call_key(inputs)
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= _KEEP:
                self._choices.clear()
            choice = self._choices[key] = self._choose(inputs)
        return choice

    def _choose(self, inputs: DecodeInputs) -> Choice:
        skips: list[tuple[str, str]] = []
        for name in self._order(inputs):
            backend, bound = self.backend(name), self._bind(name, inputs)
            if not isinstance(backend, str) and not isinstance(bound, str):
                return Choice(backend, tuple(skips), bound.run)
            skips.append((name, str(bound)))
        return Choice(None, tuple(skips))

    def _order(self, inputs: DecodeInputs) -> tuple[str, ...]:
        """What was measured to be the fastest at this many tokens, then the static order."""
        measured = self._preferred.get(layer_key(inputs), ()) if self._preferred else ()
        name = name_at(measured, inputs.num_tokens)
        return self.names if name is None else tuple(dict.fromkeys((name, *self.names)))

    def _bind(self, name: str, inputs: DecodeInputs) -> Binding | str:
        backend = self.backend(name)
        bound = backend if isinstance(backend, str) else backend.bind(inputs)
        return bound if isinstance(bound, str) else self._rejected.get((name, layer_key(inputs)), bound)

    def takers(self, inputs: DecodeInputs) -> dict[str, KernelBackend]:
        """The contenders that take this call and passed their check, by name."""
        found = {name: self.backend(name) for name in self.contenders}
        return {
            name: backend
            for name, backend in found.items()
            if not isinstance(backend, str) and not isinstance(self._bind(name, inputs), str)
        }

    def prefer(self, inputs: DecodeInputs, ranges: Ranges) -> None:
        """Let calls of the layer shape of ``inputs`` run what ``ranges`` says; without any, by the static order again.

        Where the preferred back end does not take a call, the static order goes on from there.
        """
        self._preferred[layer_key(inputs)] = ranges
        self._choices.clear()

    def reject(self, name: str, inputs: DecodeInputs, reason: str) -> None:
        """Take the back end ``name`` away from the layer shape of ``inputs``, lastingly: its self-check failed."""
        self._rejected[name, layer_key(inputs)] = reason
        self._choices.clear()


def aiter_factory(platform: Platform, view: ViewPolicy = "auto") -> KernelBackend | str:
    """AITER for ``platform``, or why not. Imports AITER on an AMD card only."""
    if platform.arch not in ARCHITECTURES:
        return f"AITER's op is for gfx942 and gfx950; this card is {platform.arch}"
    try:
        return AiterBackend(platform, view=view)
    except AiterUnavailableError as error:
        return str(error)


def triton_factory(platform: Platform) -> KernelBackend | str:
    """The one-launch Triton kernel, or why not; whether Triton itself is there, its ``refuse`` says."""
    from vllm_aiter_mla.kernels.triton import interpreted
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    return "Triton needs a GPU" if platform.arch == "cpu" and not interpreted() else TritonBackend()


FACTORIES: dict[str, Factory] = {
    "aiter": aiter_factory,
    "triton": triton_factory,
    "reference": lambda platform: ReferenceBackend(),
}
