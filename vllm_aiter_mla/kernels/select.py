"""Which kernel runs a layer: asked for by the user, allowed by the platform, able to take the call.

One :class:`Selector` per process answers both questions, "can this call be taken?" and "take it", by the same key, so
that they cannot disagree. The order of candidates ends in a fallback; what was passed over keeps its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.contract import call_key, layer_key
from vllm_aiter_mla.kernels.aiter.dispatch import ViewPolicy
from vllm_aiter_mla.kernels.aiter.module import AiterUnavailableError
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform

KERNELS = ("auto", "aiter", "triton", "stock", "reference")
_KEEP = 4096

# Builds a back end for a platform, or says why there is none.
Factory = Callable[[Platform], "KernelBackend | str"]
_FACTORIES: dict[str, Factory] = {}


class NoKernelError(RuntimeError):
    """No candidate takes a call; the message holds every candidate's reason."""


def register_backend(name: str, factory: Factory) -> None:
    """Make a back end available under ``name``; a later registration replaces an earlier one.

    This is the seam for back ends that may not live in this package: the runtime registers "stock" (vLLM's own
    kernels) here. ``factory`` is called once per :class:`Selector`, on first use.

    Raises:
        ValueError: a name that ``kernel=`` does not know.
    """
    if name not in KERNELS[1:]:
        raise ValueError(f"no such kernel: {name!r}; one of {', '.join(KERNELS[1:])}")
    _FACTORIES[name] = factory


def candidates(kernel: str, platform: Platform) -> tuple[str, ...]:
    """The back ends to try, in order, for the option ``kernel`` on ``platform``.

    "auto" is AITER on gfx942 and gfx950, the reference on a CPU and vLLM's own kernels elsewhere: Triton is opt-in
    until it is measured on the user's card. Anything asked for by name falls back to "stock", and on a CPU, where
    there are no such kernels, to the reference.

    Raises:
        ValueError: an unknown ``kernel``.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no such kernel: {kernel!r}; one of {', '.join(KERNELS)}")
    if kernel == "auto":
        kernel = "aiter" if platform.arch in ("gfx942", "gfx950") else "stock"
    if platform.arch == "cpu":
        kernel = "reference" if kernel == "stock" else kernel
        return (kernel,) if kernel == "reference" else (kernel, "reference")
    return (kernel,) if kernel == "stock" else (kernel, "stock")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who runs a call, and who was passed over and why.

    Attributes:
        backend: the back end that runs it, or None where every candidate refused.
        refusals: (name, reason) of the candidates before it.
        run: its ``prepare`` for calls of this shape, bound where the back end offers that (``bind``): what follows
            from the shape alone is then not looked up again at every call.
    """

    backend: KernelBackend | None
    refusals: tuple[tuple[str, str], ...] = ()
    run: Callable[[DecodeInputs], torch.Tensor] | None = None


class Selector:
    """Chooses a back end per call shape and remembers the choice.

    Args:
        kernel: the user's option, one of ``KERNELS``.
        platform: the card; see ``detect_platform``.
    """

    def __init__(self, kernel: str, platform: Platform) -> None:
        self.platform = platform
        self.names = candidates(kernel, platform)
        self._built: dict[str, KernelBackend | str] = {}
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._demoted: dict[tuple[str, tuple[Any, ...]], str] = {}

    def backend(self, name: str) -> KernelBackend | str:
        """The back end called ``name``, built on first use, or the reason why there is none."""
        if name not in self._built:
            factory = _FACTORIES.get(name)
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
        refusals: list[tuple[str, str]] = []
        for name in self.names:
            backend = self.backend(name)
            reason = backend if isinstance(backend, str) else self._objection(name, backend, inputs)
            if reason is None and not isinstance(backend, str):
                bind = getattr(backend, "bind", None)
                return Choice(backend, tuple(refusals), backend.prepare if bind is None else bind(inputs))
            refusals.append((name, reason or ""))
        return Choice(None, tuple(refusals))

    def _objection(self, name: str, backend: KernelBackend, inputs: DecodeInputs) -> str | None:
        # Demotions are looked up lazily: layer_key() needs shapes that the back end's refusal has vetted.
        reason = backend.refuse(inputs)
        if reason is None and self._demoted:
            reason = self._demoted.get((name, layer_key(inputs)))
        return reason

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run the chosen back end: q_prepared [T, N, L+R], KV rows written.

        Raises:
            NoKernelError: every candidate refused; the message holds the reasons.
        """
        choice = self.choose(inputs)
        if choice.run is None:
            raise NoKernelError("; ".join(f"{name}: {reason}" for name, reason in choice.refusals))
        return choice.run(inputs)

    def demote(self, name: str, inputs: DecodeInputs, reason: str) -> None:
        """Take the back end ``name`` away from the layer shape of ``inputs``, for good: its self-check failed."""
        self._demoted[name, layer_key(inputs)] = reason
        self._choices.clear()


class ReferenceBackend:
    """The reference as a back end: runs anywhere, takes whatever the shared contract allows."""

    name = "reference"

    def __init__(self, numerics: reference.Numerics = reference.AITER) -> None:
        self._numerics = numerics

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Why the shared contract is broken, or None."""
        return contract_violation(inputs)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """See ``reference.prepare``."""
        return reference.prepare(inputs, self._numerics)

    def numerics(self, inputs: DecodeInputs) -> reference.Numerics:
        """The roundings it follows."""
        return self._numerics


def aiter_factory(platform: Platform, view: ViewPolicy = "auto") -> KernelBackend | str:
    """AITER for ``platform``, or why not. Imports AITER on an AMD card only."""
    if platform.arch not in ("gfx942", "gfx950"):
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


register_backend("aiter", aiter_factory)
register_backend("triton", triton_factory)
register_backend("reference", lambda platform: ReferenceBackend())
