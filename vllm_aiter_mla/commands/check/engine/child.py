# SPDX-License-Identifier: Apache-2.0
"""The process that drives vLLM's engine with the flag off or on, over a small random model or a checkpoint."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.commands.check.engine.record import ABOVE, MIXED, PREFILLS, EngineAnswer, Side
from vllm_aiter_mla.commands.compat import engine as compat_engine
from vllm_aiter_mla.commands.compat.engine import Prompt
from vllm_aiter_mla.commands.compat.vllm_options import load_plugins, parse_serve_options
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE

DECODING_REQUESTS = 4
"""How many decode in a step of ``MIXED``."""
TIMED_STEPS = 11
"""How often each kind of step is timed."""
SHORTEST_PROMPT = 3
"""Tokens of a prompt in such a step, if the engine takes enough of them.

A prompt of three tokens has a log-probability behind one rotated row of each layer. Behind many rows, and in deep
models, one other bit moves all that follows: over 23 tokens of two layers, another rounding of one value of q_pe and
k_pe in 4096 gave a mean |dlogprob| of 0.016, and three roundings of each value 0.025 (CPU engine, 2026-11-27)."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What one engine runs over."""

    folder: str  # holds ``config.json``, and the checkpoint if it is to be loaded
    arguments: tuple[str, ...]  # of ``vllm serve``
    side: Side  # whether the flag is off or on
    random_layers: int | None  # how many layers of random weights to draw; None loads the checkpoint
    limit: int  # the decode limit in tokens, for batches on both sides of it


def random_prompts(seed: int, lengths: Sequence[int], new_tokens: int, arrivals: Sequence[int] = ()) -> list[Prompt]:
    """Return random prompts of these lengths; all arrive at once by default."""
    rng = random.Random(seed)
    return [
        Prompt(f"{seed}-{i}", [rng.randrange(2, 512) for _ in range(length)], new_tokens, arrival)
        for i, (length, arrival) in enumerate(zip(lengths, arrivals or [0] * len(lengths), strict=True))
    ]


SCENARIOS = {
    # Prompts shorter than the decode limit, one at a time: prefill rows inside it.
    "short": random_prompts(2, [3, 11, 1, 7], 12, [0, 20, 40, 60]),
    # Requests that arrive while others decode: mixed batches within the decode limit.
    "mixed": random_prompts(3, [6, 4, 5, 3, 7, 2, 5, 4], 24, [0, 0, 4, 6, 6, 9, 12, 15]),
    # Prompts longer than a small decode limit: their prefill runs vLLM's own graph, their decode ours.
    "long": random_prompts(4, [60, 17, 33, 48], 12),
    # Sixteen requests that decode together.
    "concurrent": random_prompts(1, [5 + i % 4 for i in range(16)], 20),
}


def short_prompts(total: int, requests: int, longest: int) -> list[int]:
    """Return lengths of prompts that have ``total`` tokens together, as short as so many requests allow.

    The list is empty if no such prompts fit.
    """
    count = min(total // SHORTEST_PROMPT, requests)
    if count < 1 or total > count * longest:
        return []
    return [total // count + (number < total % count) for number in range(count)]


def drive_engine(options: EngineOptions) -> EngineAnswer:
    """Start one engine in this process and send it the prompts; return its answer, but for what the ranks wrote."""
    engine, left_out = _start(options)
    generated = {name: compat_engine.generate(engine, prompts) for name, prompts in SCENARIOS.items()}
    prefilled = {}
    for name, prompts in SCENARIOS.items():
        pairs = zip(prompts, generated[name], strict=True)
        texts = [prompt.tokens + [token for token, _ in tokens] for prompt, tokens in pairs]
        prefilled[name] = compat_engine.prompt_logprobs(engine, texts)
    logprobs_of_prompts, seconds = _with_prefill_rows(engine, options.limit)
    launches = compat_engine.count_decode_launches(engine, SCENARIOS["concurrent"])
    return EngineAnswer(generated, prefilled, logprobs_of_prompts, seconds, launches, tuple(left_out))


def _start(options: EngineOptions) -> tuple[Any, list[str]]:
    """Start vLLM's engine with the flag as ``options.side`` says; return it, and the options that it cannot honour."""
    load_plugins()
    parsed = parse_serve_options([options.folder, *options.arguments])
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, options.side == "on")
    additional = parsed.additional_config or {}
    # ``enabled`` in the plugin's own config is another spelling of the flag.
    own = {name: value for name, value in additional.get(NAMESPACE, {}).items() if name != "enabled"}
    parsed.additional_config = {**additional, NAMESPACE: own}
    left_out = compat_engine.reset_unsupported_options(parsed)
    parsed.model = options.folder
    return compat_engine.start_engine(parsed, options.random_layers), left_out


def _with_prefill_rows(engine: Any, limit: int) -> tuple[dict[str, list[list[list[float]]]], dict[str, list[float]]]:
    """Run the steps of ``PREFILLS``; return ``EngineAnswer.prompts`` and ``EngineAnswer.seconds``."""
    scheduler, longest = engine.vllm_config.scheduler_config, engine.model_config.max_model_len - 8
    budget, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    decoding = min(requests // 2, DECODING_REQUESTS)
    room = min(limit, budget) - decoding * (1 + engine.vllm_config.num_speculative_tokens)
    above = limit + 8 if limit + 8 <= budget else 0
    lengths = {
        ABOVE: short_prompts(above, requests, longest), MIXED: short_prompts(room, requests - decoding, longest)
    }  # fmt: skip
    logprobs, seconds = {}, {}
    for name in PREFILLS:
        others = SCENARIOS["concurrent"][: decoding if name == MIXED else 0]
        # Other prompts for each step: vLLM would take those of an earlier one from its prefix cache.
        batches = [
            [prompt.tokens for prompt in random_prompts(8 + turn, lengths[name], 1)] for turn in range(1 + TIMED_STEPS)
        ]
        compared, *timed = batches
        with compat_engine.decode_batch(engine, others):
            logprobs[name] = [compat_engine.prompt_logprobs(engine, compared) for _ in range(2)]
            seconds[name] = [compat_engine.prefill_seconds(engine, batch) for batch in timed if batch]
    return logprobs, seconds
