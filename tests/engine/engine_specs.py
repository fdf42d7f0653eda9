"""Every engine that the tests start, by name: those of the topics' ``specs_*.py``."""

from tests.engine import (
    specs_aiter,
    specs_default_options,
    specs_invariants,
    specs_parity,
    specs_topology,
)

MOST = 16
"""Engines that compile in .ci/run; one takes up to a minute. Show what you can without one, or in eager mode, which
takes half of that, or mark its test ``wide``. One run of unmodified vLLM serves many tests."""

TOPICS = (specs_aiter, specs_default_options, specs_invariants, specs_parity, specs_topology)
SPECS = {name: spec for topic in TOPICS for name, spec in topic.SPECS.items()}
AFTER = {name: earlier for topic in TOPICS for name, earlier in topic.AFTER.items()}
"""Engines that start after another one, in its cache."""


def cache_of(name: str) -> str:
    """Return the engine whose cache this one starts in: the first of its chain."""
    return cache_of(AFTER[name]) if name in AFTER else name


def longest_first(names: list[str]) -> list[str]:
    """Return the order in which to start engines, two at a time, so that the last ones end together.

    Interpreted kernels are slow; else it is layers to compile and scenarios to run. A chain of warm starts is one
    after the other, so its head goes first.
    """

    def length(name: str) -> float:
        spec = SPECS[name]
        layers = spec.vllm.model.get("num_hidden_layers", 4) + (spec.vllm.drafts > 0)
        return layers * (1 + 0.3 * len(spec.scenarios)) * (3 if spec.emulation.interpret else 1)

    return sorted(names, key=lambda name: (name not in AFTER.values(), -length(name)))
