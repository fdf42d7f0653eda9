# SPDX-License-Identifier: Apache-2.0
"""The protocol of every kernel back end, and the terms in which results are compared."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from vllm_aiter_mla.kernels.inputs import DecodeInputs

Run = Callable[[DecodeInputs], torch.Tensor]


class KernelCaptureError(RuntimeError):
    """Work that must happen outside a graph capture was asked for inside one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a kernel rounds the rotated half and what an fp8 overflow there becomes; the reference follows it."""

    # "aiter" rotates in float32 and rounds once, to the stored type. "vllm-compiled" is the graph that vLLM compiles:
    # float32, rounded to the activation dtype, then to fp8. "vllm-kernel" is ``concat_and_cache_mla_rope_fused``: it
    # computes in the activation dtype, so both products and their sum are rounded, and the result once more to fp8.
    rounding: Literal["aiter", "vllm-compiled", "vllm-kernel"] = "aiter"
    # AITER's opt kernel on gfx942 truncates the rope part of a bf16 cache toward zero
    truncate_cache_rope: bool = False
    saturates: bool = False  # whether an fp8 overflow becomes the largest value; in AITER's op it becomes NaN

    def accepted(self) -> "tuple[Numerics, ...]":
        """Return this and what a newer build may do instead: round where this truncates, saturate where it does not."""
        both = (self, replace(self, truncate_cache_rope=False))
        return tuple(dict.fromkeys((*both, *(replace(one, saturates=True) for one in both))))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What still counts as agreement, in representable steps of the stored type (PR vllm-project/vllm#55230's bar)."""

    nope_steps: int = 0  # largest distance in the un-rotated part
    nope_share: float = 0.0  # largest share of un-rotated elements that differ at all
    rope_steps: int = 1  # largest distance in the rotated part
    rope_share: float = 0.01  # largest share of rotated elements that differ at all
    # Differences of the query's un-rotated part up to this share of its largest magnitude do not count
    slack: float = 0.0


EXACT = Bounds()
# A kernel with a BMM of its own sums in another order: a step here and there, many of them next to zero.
OWN_BMM = Bounds(nope_steps=1, nope_share=0.02, slack=2**-8)


@dataclass(frozen=True, slots=True)
class Binding:
    """How a back end runs calls of one key."""

    # Returns q_prepared [T, N, L+R] of ``out_dtype`` for operands of that key, or [T, M, L+R] with its heads where
    # ``DecodeInputs.real_heads`` finds them; every row of these heads is defined. Writes the KV rows whose slot is >= 0
    run: Run
    kernel: str | None = None  # which of the back end's kernels runs, or None if it has only one
    numerics: Numerics = Numerics()  # the roundings it follows


class KernelBackend(ABC):
    """One way to run the decode-side preparation.

    Attributes:
        name: as the option ``kernel`` has it.
        trusted: whether it needs no self-check: it holds no new code, or is what a check compares with.
        bounds: what counts as agreement with the reference.
        caches: what a check has to try: for each cache whether it spans 2 GiB or more.
    """

    name: str
    trusted: ClassVar[bool] = False
    bounds: ClassVar[Bounds] = EXACT
    caches: ClassVar[tuple[bool, ...]] = (False,)

    @abstractmethod
    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """Return what runs calls like ``inputs``, or why this back end takes none of them.

        Reads metadata only, without a device synchronisation. Remembers nothing: the caller asks once per key.
        """

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Return why this call cannot be taken, or None."""
        bound = self.bind(inputs)
        return bound if isinstance(bound, str) else None

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Bind and run: for a single call, outside serving.

        Raises:
            ValueError: ``refuse`` has a reason, which is the message.
        """
        bound = self.bind(inputs)
        if isinstance(bound, str):
            raise ValueError(f"{self.name}: {bound}")
        return bound.run(inputs)

    def numerics(self, inputs: DecodeInputs) -> Numerics:
        """Return the roundings that this call follows; AITER's if the call is not taken."""
        bound = self.bind(inputs)
        return Numerics() if isinstance(bound, str) else bound.numerics

    def kernel_of(self, inputs: DecodeInputs) -> str | None:
        """Return which of its kernels runs this call; None if it has one, launches nothing or refuses."""
        bound = self.bind(inputs)
        return None if isinstance(bound, str) else bound.kernel

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """Return the token counts that a check of such calls has to try, so that each of its kernels runs once."""
        return ()

    def tuned(self, inputs: DecodeInputs) -> str:
        """Return which variants a file of this machine has chosen for such calls, in words; empty if none has."""
        return ""

    def untune(self, inputs: DecodeInputs) -> None:  # noqa: B027  most have no such file
        """Forget what a file has chosen for such calls."""

    def reloaded(self) -> None:  # noqa: B027  most keep nothing
        """Renew, in place, what was derived from tensors that vLLM has loaded again."""

    def absorbed(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """Return the absorbed query [T, N, L] by its own product; None if it has none of its own outside a launch."""
        return None

    def warm_up(self, template: DecodeInputs, token_counts: Iterable[int]) -> None:  # noqa: B027  most need nothing
        """Compile, outside capture, what graphs of ``token_counts`` rows of a layer need; ``bind`` takes its row."""
