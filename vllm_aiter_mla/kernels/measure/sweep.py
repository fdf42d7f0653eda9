"""One layer shape timed: every candidate at a dozen token counts, within a budget of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.measure import operands
from vllm_aiter_mla.kernels.measure.clock import Clock, interleaved
from vllm_aiter_mla.kernels.measure.table import Rounds
from vllm_aiter_mla.kernels.shape import LayerShape

BUDGET_S = 3.0
"""Seconds of timing a rank, all its layer shapes together. Loading and compiling kernels does not count: what serves
has to be loaded in any case."""

ROUNDS = 11
MOST_TOKENS = 1024  # between this and the last token count nothing is timed


class OverBudgetError(RuntimeError):
    """The budget is spent; the message says how far the timing came."""


class Budget:
    """Seconds of timing that are left to a rank."""

    def __init__(self, clock: Clock, seconds: float = BUDGET_S) -> None:
        self._clock, self._left, self._started = clock, seconds, clock.now()
        self.seconds = seconds

    def resume(self) -> None:
        """Count from now on."""
        self._started = self._clock.now()

    def pause(self) -> None:
        """Stop counting, until ``resume``."""
        self._left -= self._clock.now() - self._started

    @property
    def spent(self) -> float:
        """Seconds counted up to the last ``pause``."""
        return self.seconds - self._left

    def check(self) -> None:
        """Raise OverBudgetError where no time is left."""
        if self._clock.now() - self._started > self._left:
            raise OverBudgetError(f"more than the {self.seconds:g} s that it may take")


def token_counts(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to 1024, below ``limit``, and ``limit`` itself: 11 for 1024, 12 for more."""
    powers = (1 << power for power in range(MOST_TOKENS.bit_length()))
    return (*(tokens for tokens in powers if tokens < limit), limit)


def time_shape(
    backends: Mapping[str, KernelBackend],
    shape: LayerShape,
    weight: AbsorbWeight,
    counts: Sequence[int],
    clock: Clock,
    budget: Budget,
) -> Rounds:
    """Time ``backends`` on layers of ``shape``; at a count that a back end does not take, it is left out.

    Args:
        backends: by name; checked already.
        shape: the layer.
        weight: a layer's own, so that its strides are those of serving.
        counts: token counts.
        clock: what to measure with; the budget counts by it too.
        budget: of this rank.

    Raises:
        OverBudgetError: the budget is spent.
        Exception: whatever a kernel or the device raises.
    """
    resident = clock.resident()
    weights = operands.cold_weights(weight, resident)
    rounds: Rounds = {}
    for tokens in counts:
        calls = operands.calls(shape, weights, tokens, resident)
        runs = _loaded(backends, calls[0])
        budget.resume()
        try:
            budget.check()
            replays = {name: clock.record(name, run, calls) for name, run in runs.items()}
            rounds[tokens] = interleaved(replays, ROUNDS, budget.check)
        except OverBudgetError as error:
            raise OverBudgetError(f"{error}, after {len(rounds)} of {len(counts)} token counts") from None
        finally:
            budget.pause()
    return rounds


def _loaded(backends: Mapping[str, KernelBackend], inputs: DecodeInputs) -> dict[str, Run]:
    """What runs such calls, by name; each has run once, so that nothing is compiled in a capture."""
    bound = {name: backend.bind(inputs) for name, backend in backends.items()}
    runs = {name: binding.run for name, binding in bound.items() if not isinstance(binding, str)}
    for run in runs.values():
        run(inputs)
    if inputs.q.is_cuda:
        torch.cuda.synchronize()
    return runs
