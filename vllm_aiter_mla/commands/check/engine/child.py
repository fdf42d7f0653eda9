# SPDX-License-Identifier: Apache-2.0
"""The process that drives vLLM's engine with the flag off or on, over a small random model or a checkpoint."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.commands.check.engine.record import ABOVE_LIMIT, MIXED, PREFILL_STEPS, EngineAnswer, Side
from vllm_aiter_mla.commands.compat import llm_engine
from vllm_aiter_mla.commands.compat.llm_engine import Prompt
from vllm_aiter_mla.commands.compat.vllm_options import load_plugins, parse_serve_options
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE

NUM_DECODING_REQUESTS = 4
"""Requests that decode in a step of ``MIXED``."""
NUM_TIMED_STEPS = 11
"""Timed steps of each kind."""
MIN_PROMPT_TOKENS = 3
"""Shortest prompt in a step with prefill rows. Prompts are longer if the engine takes too few requests.

A prompt of three tokens has a log-probability behind one rotated row of each layer. Behind many rows, and in deep
models, one different bit changes everything after it. Over 23 tokens of two layers, another rounding of one value in
4096 of q_pe and k_pe gave a mean |dlogprob| of 0.016, and three roundings of each value 0.025 (CPU engine,
2026-11-27)."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one engine."""

    model_folder: str  # has ``config.json``, and the weights if the checkpoint is loaded
    serve_arguments: tuple[str, ...]  # of ``vllm serve``
    side: Side
    num_random_layers: int | None  # layers with random weights; None loads the checkpoint
    decode_limit: int  # in tokens; the batches lie on both sides of it


def random_prompts(
    seed: int, lengths: Sequence[int], new_tokens: int, arrival_steps: Sequence[int] = ()
) -> list[Prompt]:
    """Return random prompts of these lengths. By default all arrive at once."""
    generator = random.Random(seed)
    return [
        Prompt(f"{seed}-{index}", [generator.randrange(2, 512) for _ in range(length)], new_tokens, arrival_step)
        for index, (length, arrival_step) in enumerate(zip(lengths, arrival_steps or [0] * len(lengths), strict=True))
    ]


SCENARIOS = {
    # Prompts shorter than the decode limit, one at a time: prefill rows within the limit.
    "short": random_prompts(2, [3, 11, 1, 7], 12, [0, 20, 40, 60]),
    # Requests that arrive while others decode: mixed batches within the decode limit.
    "mixed": random_prompts(3, [6, 4, 5, 3, 7, 2, 5, 4], 24, [0, 0, 4, 6, 6, 9, 12, 15]),
    # Prompts longer than a small decode limit: prefill runs vLLM's own graph, and decode runs ours.
    "long": random_prompts(4, [60, 17, 33, 48], 12),
    # Sixteen requests that decode together.
    "concurrent": random_prompts(1, [5 + i % 4 for i in range(16)], 20),
}


def short_prompt_lengths(num_tokens: int, max_requests: int, max_length: int) -> list[int]:
    """Return lengths of prompts that have ``num_tokens`` tokens together, as short as so many requests allow.

    Return an empty list if no such prompts fit.
    """
    num_prompts = min(num_tokens // MIN_PROMPT_TOKENS, max_requests)
    if num_prompts < 1 or num_tokens > num_prompts * max_length:
        return []
    return [num_tokens // num_prompts + (number < num_tokens % num_prompts) for number in range(num_prompts)]


def prefill_step_tokens(decode_limit: int, max_batched_tokens: int, num_decode_rows: int) -> dict[str, int]:
    """Return how many prompt tokens each step of ``PREFILL_STEPS`` has; below 1 if vLLM would not run it in one step.

    The step above the limit has a few tokens more than the decode limit. The mixed step has, with its decode rows, as
    many as the limit.
    """
    num_tokens_above_limit = decode_limit + 8 if decode_limit + 8 <= max_batched_tokens else 0
    return {ABOVE_LIMIT: num_tokens_above_limit, MIXED: min(decode_limit, max_batched_tokens) - num_decode_rows}


def drive_engine(options: EngineOptions) -> EngineAnswer:
    """Start one engine in this process and send it the prompts; return its answer without ``rank_records``."""
    engine, unsupported_options = _start_with_flag(options)
    generated_tokens = {scenario: llm_engine.generate(engine, prompts) for scenario, prompts in SCENARIOS.items()}
    generated_text_logprobs = {}
    for scenario, prompts in SCENARIOS.items():
        prompts_and_tokens = zip(prompts, generated_tokens[scenario], strict=True)
        texts = [prompt.tokens + [token for token, _ in tokens] for prompt, tokens in prompts_and_tokens]
        generated_text_logprobs[scenario] = llm_engine.prompt_logprobs(engine, texts)
    prefill_step_logprobs, step_seconds = _run_prefill_steps(engine, options.decode_limit)
    num_launches = llm_engine.count_decode_launches(engine, SCENARIOS["concurrent"])
    return EngineAnswer(
        generated_tokens,
        generated_text_logprobs,
        prefill_step_logprobs,
        step_seconds,
        num_launches,
        tuple(unsupported_options),
    )


def _start_with_flag(options: EngineOptions) -> tuple[Any, list[str]]:
    """Start vLLM's engine with the flag of ``options.side``; return the engine, and the options it does not support."""
    load_plugins()
    engine_args = parse_serve_options([options.model_folder, *options.serve_arguments])
    setattr(engine_args.compilation_config.pass_config, FLAG_FIELD, options.side == "on")
    additional_config = engine_args.additional_config or {}
    # ``enabled`` in the plugin's config is another spelling of the flag.
    own_config = {name: value for name, value in additional_config.get(NAMESPACE, {}).items() if name != "enabled"}
    engine_args.additional_config = {**additional_config, NAMESPACE: own_config}
    unsupported_options = llm_engine.reset_unsupported_options(engine_args)
    engine_args.model = options.model_folder
    return llm_engine.start_engine(engine_args, options.num_random_layers), unsupported_options


def _run_prefill_steps(
    engine: Any, decode_limit: int
) -> tuple[dict[str, list[list[list[float]]]], dict[str, list[float]]]:
    """Run the steps of ``PREFILL_STEPS``; return their ``prefill_step_logprobs`` and ``step_seconds``."""
    scheduler_config, max_length = engine.vllm_config.scheduler_config, engine.model_config.max_model_len - 8
    max_batched_tokens, max_requests = scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
    num_decoding = min(max_requests // 2, NUM_DECODING_REQUESTS)
    num_decode_rows = num_decoding * (1 + engine.vllm_config.num_speculative_tokens)
    num_tokens = prefill_step_tokens(decode_limit, max_batched_tokens, num_decode_rows)
    lengths_by_kind = {
        ABOVE_LIMIT: short_prompt_lengths(num_tokens[ABOVE_LIMIT], max_requests, max_length),
        MIXED: short_prompt_lengths(num_tokens[MIXED], max_requests - num_decoding, max_length),
    }
    step_logprobs, step_seconds = {}, {}
    for step_kind in PREFILL_STEPS:
        decoding_prompts = SCENARIOS["concurrent"][: num_decoding if step_kind == MIXED else 0]
        # Each step has its own prompts: vLLM would take repeated ones from its prefix cache.
        batches = [
            [prompt.tokens for prompt in random_prompts(8 + repetition, lengths_by_kind[step_kind], 1)]
            for repetition in range(1 + NUM_TIMED_STEPS)
        ]
        compared_batch, *timed_batches = batches
        with llm_engine.decode_batch(engine, decoding_prompts):
            step_logprobs[step_kind] = [llm_engine.prompt_logprobs(engine, compared_batch) for _ in range(2)]
            step_seconds[step_kind] = [llm_engine.prefill_seconds(engine, batch) for batch in timed_batches if batch]
    return step_logprobs, step_seconds
