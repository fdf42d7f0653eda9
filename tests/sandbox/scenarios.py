"""What serving does to the decode limit, as request patterns over one engine: those of ``check``, and more."""

from __future__ import annotations

import random

from tests.sandbox.spec import LIMIT_REQUESTS
from vllm_aiter_mla.commands.check.engine import child as engine
from vllm_aiter_mla.commands.compat.llm_engine import Prompt


def prefixes() -> list[Prompt]:
    """Prompts that share their first blocks with earlier ones and then differ: partial hits of the prefix cache."""
    rng = random.Random(6)
    shared = [rng.randrange(2, 512) for _ in range(70)]
    tails = [(70, 5), (70, 9), (40, 30), (64, 3), (70, 1), (33, 20)]
    return [
        Prompt(f"6-{i}", shared[:kept] + [rng.randrange(2, 512) for _ in range(new)], 10, 4 * i)
        for i, (kept, new) in enumerate(tails)
    ]


SCENARIOS: dict[str, list[Prompt]] = {
    **engine.SCENARIOS,
    # Prompts over the token budget, in chunks whose last piece lies below the limit, among decoding requests.
    "chunked": engine.random_prompts(5, [150, 5, 133, 70], 12, [0, 1, 3, 5]),
    "prefixes": prefixes(),
    # More tokens than a small cache holds: requests are preempted and computed again.
    "crowded": engine.random_prompts(
        7, [20 + i for i in range(LIMIT_REQUESTS)], 40, [i // 4 for i in range(LIMIT_REQUESTS)]
    ),
}
