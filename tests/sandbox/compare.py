"""Compare two engine runs token by token, and count what a graph holds."""

from __future__ import annotations

import re

from tests.sandbox.spec import EngineResult
from vllm_aiter_mla.commands.check.engine.distance import TokenComparison, compare_requests

# The op called, and the first argument: for ``auto_functionalized`` the op inside it.
_CALL = re.compile(r"= call_function\[target=([^\]]+)\](?:\(args = \(([\w.]+))?")
_FREE = re.compile(
    r"aten\.(reshape|view|slice|split|split_with_sizes|unsqueeze|squeeze|expand|permute|transpose|alias|select)\b"
    r"|operator\.getitem|aten\.sym_size"
)


def compare(base: EngineResult, other: EngineResult) -> dict[str, TokenComparison]:
    """Figures by scenario.

    Raises:
        ValueError: the runs hold different scenarios or numbers of requests.
    """
    if base.scenarios.keys() != other.scenarios.keys():
        raise ValueError(f"different scenarios: {list(base.scenarios)} and {list(other.scenarios)}")
    return {name: compare_requests(base.scenarios[name], other.scenarios[name]) for name in base.scenarios}


def op_count(graph: str) -> int:
    """Count the calls in a graph's text that compute something: views and unpacked results do not."""
    calls = (inner if inner and "auto_functionalized" in target else target for target, inner in _CALL.findall(graph))
    return sum(not _FREE.search(target) for target in calls)
