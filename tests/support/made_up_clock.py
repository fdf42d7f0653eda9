"""Kernels that are the reference and a clock with made-up figures, in the place of a card's."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from vllm_aiter_mla.kernels import reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.serving import backends

ORDER = ("aiter", "triton", "vllm")
Cost = Callable[[str, int], float]
"""Microseconds per call of a candidate at a number of tokens."""


class Named(KernelBackend):
    """The reference under another name; takes at most ``most`` tokens. vLLM's own needs no check.

    As on a card, only AITER's turns an fp8 overflow into NaN.
    """

    def __init__(self, name: str, most: int = 1 << 30) -> None:
        self.name, self.most, self.trusted = name, most, name == "vllm"

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        if inputs.num_tokens > self.most:
            return f"{inputs.num_tokens} tokens are too many"
        numerics = reference.AITER if self.name.startswith("aiter") else reference.TRITON
        run = partial(reference.prepare, numerics=numerics)
        run.name = self.name  # type: ignore[attr-defined]  for the clock
        return contract_violation(inputs) or Binding(run, numerics=numerics)


def named_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a ``Named`` in the place of each back end of a card; what is changed in the result serves."""
    kernels: dict[str, Any] = {name: Named(name) for name in ORDER}
    for name in ORDER:
        monkeypatch.setitem(backends.FACTORIES, name, lambda platform, settings, name=name: kernels[name])
    return kernels


class MadeUpClock:
    """Costs by a function, with noise from a seeded generator; ``replay_s`` seconds a replay."""

    def __init__(self, cost: Cost, noise: float = 0.0, seed: int = 0, replay_s: float = 0.0) -> None:
        self.cost, self.noise, self.replay_s = cost, noise, replay_s
        self.draw, self.seconds, self.given_back = random.Random(seed), 0.0, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``measure`` use this clock."""
        monkeypatch.setattr(card(), "now", lambda: self.seconds)
        monkeypatch.setattr(card(), "cache_bytes", lambda: 4096)
        for how in ("record", "looped"):
            monkeypatch.setattr(stopwatch, how, lambda run, calls: self.record(run, calls))
        monkeypatch.setattr(card(), "give_back", self.give_back)

    def record(self, run: Any, calls: Sequence[DecodeInputs]) -> stopwatch.Replay:
        tokens = calls[0].num_tokens
        name = next(iter(run.args[0].values())).name  # one of its bindings, of which each weight has one

        def replay() -> float:
            self.seconds += self.replay_s
            return self.cost(name, tokens) * self.draw.lognormvariate(0.0, self.noise)

        return replay

    def give_back(self) -> None:
        self.given_back += 1


def costs(**by_name: float) -> Cost:
    return lambda name, tokens: by_name[name]
