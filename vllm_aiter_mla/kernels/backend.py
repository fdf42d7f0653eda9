"""What every kernel back end answers: the protocol, whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.compare import EXACT, Bounds
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError

Run = Callable[[DecodeInputs], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Binding:
    """What a back end does with calls of one key.

    Attributes:
        run: q_prepared [T, N, L+R] of ``out_dtype`` from operands of that key; writes the KV rows whose slot is >= 0.
        kernel: which of the back end's kernels runs, where it has several, or None.
        numerics: the roundings it follows.
    """

    run: Run
    kernel: str | None = None
    numerics: reference.Numerics = reference.AITER


class KernelBackend(ABC):
    """One way to run the decode-side preparation.

    Attributes:
        name: as the option ``kernel`` has it.
        trusted: whether it needs no self-check: it holds no new code, or is what a check compares with.
        bounds: what counts as agreement with the reference.
    """

    name: ClassVar[str]
    trusted: ClassVar[bool] = False
    bounds: ClassVar[Bounds] = EXACT

    @abstractmethod
    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """What runs calls with the ``call_key`` of ``inputs``, or why this back end takes none of them.

        Metadata only: no device synchronisation. Nothing is remembered here; a :class:`Selector` asks once per key.
        """

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Why this call cannot be taken, or None."""
        bound = self.bind(inputs)
        return bound if isinstance(bound, str) else None

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Bind and run: for a single call, outside serving.

        Raises:
            KernelInputError: ``refuse`` has a reason; it is the message.
        """
        bound = self.bind(inputs)
        if isinstance(bound, str):
            raise KernelInputError(f"{self.name}: {bound}")
        return bound.run(inputs)

    def numerics(self, inputs: DecodeInputs) -> reference.Numerics:
        """The roundings that this call follows; the reference's own where it is refused."""
        bound = self.bind(inputs)
        return reference.AITER if isinstance(bound, str) else bound.numerics

    def kernel_of(self, inputs: DecodeInputs) -> str | None:
        """Which of its kernels runs this call, or None where it has one only, launches nothing or refuses."""
        bound = self.bind(inputs)
        return None if isinstance(bound, str) else bound.kernel

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """Token counts that a check of such calls has to try, so that each of its kernels runs once."""
        return ()

    def absorbed(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """[T, N, L], the absorbed query by its own product; None where it is the reference's or inside a launch."""
        return None

    def defined_rows(self, inputs: DecodeInputs) -> int:
        """How many leading rows of q_prepared are defined."""
        return inputs.num_tokens

    def warm_up(self, template: DecodeInputs, token_counts: Iterable[int]) -> tuple[object, ...]:
        """Compile, outside capture, what graphs of ``token_counts`` rows of that layer need; what was compiled."""
        return ()
