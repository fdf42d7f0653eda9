"""Compare two engine runs token by token, and count what a graph holds."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from tests.sandbox.spec import EngineResult, Step

# The op called, and the first argument: for ``auto_functionalized`` the op inside it.
_CALL = re.compile(r"= call_function\[target=([^\]]+)\](?:\(args = \(([\w.]+))?")
_FREE = re.compile(
    r"aten\.(reshape|view|slice|split|split_with_sizes|unsqueeze|squeeze|expand|permute|transpose|alias|select)\b"
    r"|operator\.getitem|aten\.sym_size"
)


@dataclass(slots=True)
class Figures:
    """One scenario of one run against its baseline.

    Attributes:
        tokens: generated tokens of the baseline.
        tokens_equal: how many are the same, up to each request's first difference.
        compared: positions whose context is the same in both runs.
        agreed: of these, positions with the same likeliest token.
        max_abs_dlogprob: largest difference of log-probability over the common top 5 of these positions.
        mean_abs_dlogprob: their mean.
    """

    tokens: int = 0
    tokens_equal: int = 0
    compared: int = 0
    agreed: int = 0
    max_abs_dlogprob: float = 0.0
    mean_abs_dlogprob: float = 0.0

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same context whose likeliest token is the same."""
        return self.agreed / self.compared if self.compared else 1.0

    def as_dict(self) -> dict[str, Any]:
        """What the demo's JSON holds per scenario."""
        return asdict(self) | {"top1_agreement": self.top1_agreement}


def compare(base: EngineResult, other: EngineResult) -> dict[str, Figures]:
    """Figures by scenario.

    Raises:
        ValueError: the runs hold different scenarios or numbers of requests.
    """
    if base.scenarios.keys() != other.scenarios.keys():
        raise ValueError(f"different scenarios: {list(base.scenarios)} and {list(other.scenarios)}")
    return {name: _scenario(base.scenarios[name], other.scenarios[name]) for name in base.scenarios}


def _scenario(base: list[list[Step]], other: list[list[Step]]) -> Figures:
    figures, total = Figures(), 0.0
    entries = 0
    for one, two in zip(base, other, strict=True):
        figures.tokens += len(one)
        for (token, probs), (token2, probs2) in zip(one, two, strict=True):
            differences = [_distance(probs[key], probs2[key]) for key in probs.keys() & probs2.keys()] or [math.inf]
            figures.compared += 1
            figures.max_abs_dlogprob = max([figures.max_abs_dlogprob, *differences])
            total, entries = total + sum(differences), entries + len(differences)
            if token != token2:
                break  # from here on the two runs answer different questions
            figures.agreed += 1
            figures.tokens_equal += 1
    figures.mean_abs_dlogprob = total / entries if entries else 0.0
    return figures


def _distance(one: float, two: float) -> float:
    """Infinite where one is not a number: ``max`` would pass over it."""
    found = abs(one - two)
    return math.inf if math.isnan(found) else found


def op_count(graph: str) -> int:
    """Count the calls in a graph's text that compute something: views and unpacked results do not."""
    calls = (inner if inner and "auto_functionalized" in target else target for target, inner in _CALL.findall(graph))
    return sum(not _FREE.search(target) for target in calls)
