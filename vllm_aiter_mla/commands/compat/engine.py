# SPDX-License-Identifier: Apache-2.0
"""One engine of vLLM in this process: random weights, requests as serving brings them, what a decode step launches."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.kernels.device import card

RANDOM_FORMAT = "aiter_mla_random"
"""A ``load_format`` of vLLM's; ``register_random_weights`` makes it known."""

DEPLOYMENT = frozenset({
    "nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend", "ray_workers_use_nsight",
    "all2all_backend", "enable_dbo", "ubatch_size", "enable_eplb", "eplb_config", "enable_elastic_ep",
    "elastic_ep_max_dp_size", "enable_fault_tolerance", "fault_tolerance_config", "kv_transfer_config",
    "kv_events_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config", "ec_manager_config",
    "weight_transfer_config", "otlp_traces_endpoint", "collect_detailed_traces", "tokens_only", "worker_extension_cls",
})  # fmt: skip
"""Options that need other machines, other engines or a front end, and one that this engine sets itself. The options of
data parallelism are left out too, by their prefix."""
MOST_DECODED = 64
"""Tokens that a request of ``decoding`` generates at most: each step takes one, or more with drafts."""


class Prompt(NamedTuple):
    """What a user sends to an engine."""

    id: str
    tokens: list[int]
    new_tokens: int  # how many to generate
    arrival: int  # the engine's step at which it arrives


TokenLogprobs = tuple[int, dict[int, float]]
"""One generated token: its id and the log-probabilities of the likeliest ids."""


@cache
def register_random_weights() -> None:
    """Let vLLM know ``RANDOM_FORMAT``: a model without a checkpoint, the same in every process."""
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader(RANDOM_FORMAT)
    class RandomWeights(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, tensor in model.state_dict().items():
                fill(name, tensor)


def fill(name: str, tensor: torch.Tensor) -> None:
    """Draw one weight, the same in every process: a norm around 1, a matrix that keeps its input's size.

    The output of ``lm_head`` is three times as wide, so that greedy tokens vary; queries and latents twice. The values
    of vLLM's own "dummy" format are at most 1e-3: every comparison of tokens would pass.
    """
    if not tensor.is_floating_point():
        return
    if "scale" in name:
        tensor.fill_(2.0**-6)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if tensor.dim() < 2:
        drawn = 0.1 * drawn + (0.0 if "bias" in name else 1.0)
    elif "embed" not in name:
        gain = 3.0 if "lm_head" in name else 2.0 if "self_attn" in name else 1.0
        drawn *= gain / tensor.shape[-1] ** 0.5
    tensor.copy_(drawn)


def leave_out(parsed: Any) -> list[str]:
    """Set back the options that one engine in this process cannot honour: of ``DEPLOYMENT``, a server, a tokenizer.

    Returns:
        The options that had another value, as typed.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)} | {"model_tag"}
    others = DEPLOYMENT | set(offline.TOKENIZER_OPTIONS)
    return offline.reset(parsed, lambda name: name.startswith("data_parallel_") or name in others or name not in known)


def with_layers(args: Any, layers: int) -> dict[str, Any]:
    """Return the ``hf_overrides`` of ``EngineArgs``, with so many layers in the part of the config that has them."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = get_config(
        args.hf_config_path or args.model, args.trust_remote_code, args.revision, args.code_revision, args.config_format
    )
    text, overrides = get_hf_text_config(config), dict(args.hf_overrides or {})
    count = {text.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}
    part = next((name for name, value in vars(config).items() if value is text), None)
    return overrides | (count if part is None else {part: overrides.get(part, {}) | count})


def start(parsed: Any, random_layers: int | None) -> Any:
    """Start vLLM's ``LLMEngine`` from parsed options of ``vllm serve``, with the defaults that a server has.

    It draws the weights of ``random_layers`` layers; None loads the checkpoint.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs.from_cli_args(parsed)
    args.skip_tokenizer_init, args.tokenizer = True, None
    args.worker_extension_cls = f"{KernelCounter.__module__}.{KernelCounter.__qualname__}"
    if random_layers is not None:
        register_random_weights()
        args.load_format, args.hf_overrides = RANDOM_FORMAT, with_layers(args, random_layers)
    return LLMEngine.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)


def generate(engine: Any, prompts: Sequence[Prompt]) -> list[list[TokenLogprobs]]:
    """Drive the engine through prompts, greedily; return tokens and top-5 log-probabilities of each."""
    from vllm import SamplingParams

    waiting = sorted(prompts, key=lambda prompt: prompt.arrival)
    done: dict[str, list[TokenLogprobs]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrival <= step or not engine.has_unfinished_requests()):
            prompt = waiting.pop(0)
            params = SamplingParams(
                temperature=0, max_tokens=prompt.new_tokens, ignore_eos=True, detokenize=False, logprobs=5
            )
            engine.add_request(prompt.id, {"prompt_token_ids": prompt.tokens}, params)
        for output in engine.step():
            if output.finished:
                completion = output.outputs[0]
                probs = [{id_: entry.logprob for id_, entry in of.items()} for of in completion.logprobs]
                done[output.request_id] = list(zip(completion.token_ids, probs, strict=True))
        step += 1
    return [done[prompt.id] for prompt in prompts]


def prompt_logprobs(engine: Any, texts: Sequence[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of a text but the first, as prefill computes it."""
    return [
        [probs[token].logprob for token, probs in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
        for text, output in zip(texts, _prefill(engine, texts, prompt_logprobs=0), strict=True)
    ]


def seconds_of_prefill(engine: Any, texts: Sequence[list[int]]) -> float:
    """Return the seconds until each of the texts, which arrive together, has its first token."""
    begin = time.perf_counter()
    _prefill(engine, texts)
    return time.perf_counter() - begin


def _prefill(engine: Any, texts: Sequence[list[int]], **sampling: Any) -> list[Any]:
    """Return vLLM's output for each text and one more token. Requests that run before go on meanwhile."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, **sampling)
    waiting = {f"prefill-{number}": text for number, text in enumerate(texts)}
    for request_id, text in waiting.items():
        engine.add_request(request_id, {"prompt_token_ids": text}, params)
    outputs: dict[str, Any] = {}
    while len(outputs) < len(texts) and engine.has_unfinished_requests():
        ended = [output for output in engine.step() if output.finished]
        outputs |= {output.request_id: output for output in ended if output.request_id in waiting}
    return [outputs[request_id] for request_id in waiting]


@contextmanager
def decoding(engine: Any, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Let these prompts decode during a block, for at most ``MOST_DECODED`` tokens each; then end them.

    The block begins once every request that runs at the same time has its first token: no step in it has a prefill row.
    If a request ends before that, the budget of tokens is too small for such a step, and the block begins at once.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MOST_DECODED, ignore_eos=True, detokenize=False)
    names = [f"decoding-{prompt.id}" for prompt in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt.tokens}, params)
    at_once = min(len(names), engine.vllm_config.scheduler_config.max_num_seqs)
    begun, ended = set[str](), False
    while len(begun) < at_once and not ended:  # a small budget spreads the prompts over many steps
        for output in engine.step():
            begun.add(output.request_id)
            ended |= output.finished
    yield
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


class KernelCounter:
    """What vLLM adds to its workers (``worker_extension_cls``), so that kernels are counted where they are launched."""

    def start_counting(self) -> None:
        """Start to count."""
        self._stop = card().count_kernels()

    def stop_counting(self) -> int:
        """Return how many kernels ran on this worker's GPU; 0 on a CPU."""
        return self._stop()


def launches_of_a_step(engine: Any, prompts: Sequence[Prompt]) -> int:
    """Return how many kernels one decode step of these prompts launches on the first rank; 0 on a CPU."""
    with decoding(engine, prompts):
        engine.collective_rpc("start_counting")
        engine.step()
        counts = engine.collective_rpc("stop_counting")
    return int(counts[0])
