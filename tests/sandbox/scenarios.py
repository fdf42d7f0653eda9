"""What serving does to the decode limit, as request patterns over one engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.sandbox.spec import LIMIT_REQUESTS, Step

# (request id, prompt token ids, tokens to generate, engine step at which it arrives)
Request = tuple[str, list[int], int, int]


def _prompts(seed: int, lengths: list[int], new_tokens: int, arrivals: list[int] | None = None) -> list[Request]:
    rng = random.Random(seed)
    arrivals = arrivals or [0] * len(lengths)
    return [
        (f"{seed}-{i}", [rng.randrange(2, 512) for _ in range(length)], new_tokens, arrival)
        for i, (length, arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]


def concurrent() -> list[Request]:
    """Sixteen requests that decode together: the decode limit is full."""
    return _prompts(1, [5 + i % 4 for i in range(LIMIT_REQUESTS)], 20)


def short() -> list[Request]:
    """Prompts shorter than the decode limit, one at a time: prefill rows inside it."""
    return _prompts(2, [3, 11, 1, 7], 12, [0, 20, 40, 60])


def mixed() -> list[Request]:
    """Requests that arrive while others decode: mixed batches within the decode limit."""
    return _prompts(3, [6, 4, 5, 3, 7, 2, 5, 4], 24, [0, 0, 4, 6, 6, 9, 12, 15])


def long() -> list[Request]:
    """Prompts longer than the decode limit: their prefill runs vLLM's own range, their decode the fused one."""
    return _prompts(4, [60, 17, 33, 48], 12)


def chunked() -> list[Request]:
    """Prompts over the token budget, in chunks whose last piece lies below the limit, among decoding requests."""
    return _prompts(5, [150, 5, 133, 70], 12, [0, 1, 3, 5])


def prefixes() -> list[Request]:
    """Prompts that share their first blocks with earlier ones and then differ: partial hits of the prefix cache."""
    rng = random.Random(6)
    shared = [rng.randrange(2, 512) for _ in range(70)]
    tails = [(70, 5), (70, 9), (40, 30), (64, 3), (70, 1), (33, 20)]
    return [
        (f"6-{i}", shared[:kept] + [rng.randrange(2, 512) for _ in range(new)], 10, 4 * i)
        for i, (kept, new) in enumerate(tails)
    ]


def crowded() -> list[Request]:
    """More tokens than a small cache holds: requests are preempted and computed again."""
    return _prompts(7, [20 + i for i in range(LIMIT_REQUESTS)], 40, [i // 4 for i in range(LIMIT_REQUESTS)])


SCENARIOS: dict[str, Callable[[], list[Request]]] = {
    "concurrent": concurrent,
    "short": short,
    "mixed": mixed,
    "long": long,
    "chunked": chunked,
    "prefixes": prefixes,
    "crowded": crowded,
}


def run(engine: Any, name: str, adapter: Any = None) -> list[list[Step]]:
    """Drive ``engine`` (vLLM's ``LLMEngine``) through a scenario, greedily; tokens and top-5 log-probabilities.

    ``adapter`` is a ``LoRARequest``, for every second request.

    Raises:
        KeyError: an unknown scenario.
    """
    from vllm import SamplingParams

    requests = SCENARIOS[name]()
    waiting = sorted(requests, key=lambda request: request[3])
    done: dict[str, list[Step]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][3] <= step or not engine.has_unfinished_requests()):
            request_id, prompt, new_tokens, _ = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=5)
            lora = adapter if int(request_id.rpartition("-")[2]) % 2 else None
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = _steps(output.outputs[0])
        step += 1
    return [done[request[0]] for request in requests]


def _steps(completion: Any) -> list[Step]:
    return [
        (token, {id_: entry.logprob for id_, entry in probs.items()})
        for token, probs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
