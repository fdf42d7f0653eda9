# SPDX-License-Identifier: Apache-2.0
"""One engine of vLLM in this process: random weights, requests as in serving, and the launches of a decode step."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.kernels.device import card

RANDOM_LOAD_FORMAT = "aiter_mla_random"
"""A ``load_format`` that ``register_random_weights`` adds to vLLM."""

DEPLOYMENT_OPTIONS = frozenset({
    "nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend", "ray_workers_use_nsight",
    "all2all_backend", "enable_dbo", "ubatch_size", "enable_eplb", "eplb_config", "enable_elastic_ep",
    "elastic_ep_max_dp_size", "enable_fault_tolerance", "fault_tolerance_config", "kv_transfer_config",
    "kv_events_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config", "ec_manager_config",
    "weight_transfer_config", "otlp_traces_endpoint", "collect_detailed_traces", "tokens_only", "worker_extension_cls",
})  # fmt: skip
"""Options that need other machines, other engines or a front end, and one that this module sets. The options of data
parallelism are reset too, by their prefix."""
DRIVING_OPTIONS = frozenset({"max_logprobs", "logprobs_mode", "long_prefill_token_threshold"})
"""Options that forbid or change what this module asks for: log-probabilities, and a model of short prompts."""
MAX_DECODED_TOKENS = 64
"""The most tokens that a request of ``decode_batch`` generates: one in each step, or more with drafts."""


class Prompt(NamedTuple):
    """A request to an engine."""

    id: str
    tokens: list[int]
    new_tokens: int  # how many to generate
    arrival_step: int  # the engine's step at which the request arrives


TokenLogprobs = tuple[int, dict[int, float]]
"""One generated token: its id and the log-probabilities of the likeliest ids."""


@cache
def register_random_weights() -> None:
    """Add ``RANDOM_LOAD_FORMAT`` to vLLM: weights without a checkpoint, the same in every process."""
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader(RANDOM_LOAD_FORMAT)
    class RandomWeights(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, tensor in model.state_dict().items():
                draw_weight(name, tensor)


def draw_weight(name: str, tensor: torch.Tensor) -> None:
    """Draw one weight, the same in every process. A norm is around 1, and a matrix keeps the size of its input.

    The output of ``lm_head`` is three times as wide, so that greedy tokens vary. Queries and latents are twice as wide.
    vLLM's own "dummy" format has values of at most 1e-3, with which every comparison of tokens would pass.
    """
    if not tensor.is_floating_point():
        return
    if "scale" in name:
        tensor.fill_(2.0**-6)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if tensor.dim() < 2:
        values = 0.1 * values + (0.0 if "bias" in name else 1.0)
    elif "embed" not in name:
        gain = 3.0 if "lm_head" in name else 2.0 if "self_attn" in name else 1.0
        values *= gain / tensor.shape[-1] ** 0.5
    tensor.copy_(values)


def reset_unsupported_options(parsed: Any) -> list[str]:
    """Reset the options that one engine in this process cannot honour, and return those that the user had set.

    These are ``DEPLOYMENT_OPTIONS``, ``DRIVING_OPTIONS``, and the options of a server and of a tokenizer. The names
    returned are as vLLM's help prints them.
    """
    from vllm.engine.arg_utils import EngineArgs

    engine_options = {field.name for field in fields(EngineArgs)} | {"model_tag"}
    unsupported = DEPLOYMENT_OPTIONS | DRIVING_OPTIONS | set(vllm_options.TOKENIZER_OPTIONS)
    return vllm_options.reset_options(
        parsed, lambda name: name.startswith("data_parallel_") or name in unsupported or name not in engine_options
    )


def hf_overrides_for_layers(args: Any, num_layers: int) -> dict[str, Any]:
    """Return ``hf_overrides`` of ``EngineArgs`` that set the number of layers, in the text part of the config."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = get_config(
        args.hf_config_path or args.model, args.trust_remote_code, args.revision, args.code_revision, args.config_format
    )
    text_config, overrides = get_hf_text_config(config), dict(args.hf_overrides or {})
    layer_count = {text_config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): num_layers}
    text_field = next((name for name, value in vars(config).items() if value is text_config), None)
    if text_field is None:
        return overrides | layer_count
    return overrides | {text_field: overrides.get(text_field, {}) | layer_count}


def start_engine(parsed: Any, num_random_layers: int | None) -> Any:
    """Start vLLM's ``LLMEngine`` from parsed options of ``vllm serve``, with a server's defaults.

    The model has ``num_random_layers`` layers with random weights. If that is None, the checkpoint is loaded.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs.from_cli_args(parsed)
    args.skip_tokenizer_init, args.tokenizer = True, None
    args.worker_extension_cls = f"{KernelCounter.__module__}.{KernelCounter.__qualname__}"
    if num_random_layers is not None:
        register_random_weights()
        args.load_format, args.hf_overrides = RANDOM_LOAD_FORMAT, hf_overrides_for_layers(args, num_random_layers)
    return LLMEngine.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)


def generate(engine: Any, prompts: Sequence[Prompt]) -> list[list[TokenLogprobs]]:
    """Run the engine on prompts, with greedy sampling. Return the tokens of each, with top-5 log-probabilities."""
    from vllm import SamplingParams

    waiting = sorted(prompts, key=lambda prompt: prompt.arrival_step)
    completions: dict[str, list[TokenLogprobs]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrival_step <= step or not engine.has_unfinished_requests()):
            prompt = waiting.pop(0)
            sampling_params = SamplingParams(
                temperature=0, max_tokens=prompt.new_tokens, ignore_eos=True, detokenize=False, logprobs=5
            )
            engine.add_request(prompt.id, {"prompt_token_ids": prompt.tokens}, sampling_params)
        for output in engine.step():
            if output.finished:
                completion = output.outputs[0]
                logprobs = [
                    {token_id: entry.logprob for token_id, entry in entries.items()} for entries in completion.logprobs
                ]
                completions[output.request_id] = list(zip(completion.token_ids, logprobs, strict=True))
        step += 1
    return [completions[prompt.id] for prompt in prompts]


def prompt_logprobs(engine: Any, texts: Sequence[list[int]]) -> list[list[float]]:
    """Return the log-probability in prefill of each token of a text except the first."""
    return [
        [entries[token].logprob for token, entries in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
        for text, output in zip(texts, _prefill(engine, texts, prompt_logprobs=0), strict=True)
    ]


def prefill_seconds(engine: Any, texts: Sequence[list[int]]) -> float:
    """Return the seconds until each of these texts has its first token. They arrive together."""
    started_at = time.perf_counter()
    _prefill(engine, texts)
    return time.perf_counter() - started_at


def _prefill(engine: Any, texts: Sequence[list[int]], **sampling_options: Any) -> list[Any]:
    """Return vLLM's output for each text, with one new token. Requests that already run continue."""
    from vllm import SamplingParams

    sampling_params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, **sampling_options)
    text_by_request = {f"prefill-{number}": text for number, text in enumerate(texts)}
    for request_id, text in text_by_request.items():
        engine.add_request(request_id, {"prompt_token_ids": text}, sampling_params)
    outputs: dict[str, Any] = {}
    while len(outputs) < len(texts) and engine.has_unfinished_requests():
        finished_outputs = [output for output in engine.step() if output.finished]
        outputs |= {output.request_id: output for output in finished_outputs if output.request_id in text_by_request}
    return [outputs[request_id] for request_id in text_by_request]


@contextmanager
def decode_batch(engine: Any, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Let these prompts decode during a block, for at most ``MAX_DECODED_TOKENS`` tokens each, and end them after it.

    The block starts when every request of the batch has its first token, so that no step in it has a prefill row. If
    a request ends before that, the token budget is too small for such a step, and the block starts at once.
    """
    from vllm import SamplingParams

    sampling_params = SamplingParams(temperature=0, max_tokens=MAX_DECODED_TOKENS, ignore_eos=True, detokenize=False)
    request_ids = [f"decoding-{prompt.id}" for prompt in prompts]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt.tokens}, sampling_params)
    max_running = min(len(request_ids), engine.vllm_config.scheduler_config.max_num_seqs)
    started_ids, has_ended = set[str](), False
    while len(started_ids) < max_running and not has_ended:  # a small token budget spreads prompts over many steps
        for output in engine.step():
            started_ids.add(output.request_id)
            has_ended |= output.finished
    yield
    engine.abort_request(request_ids)
    while engine.has_unfinished_requests():
        engine.step()


class KernelCounter:
    """An extension of vLLM's workers (``worker_extension_cls``) that counts kernels where they are launched."""

    def start_counting(self) -> None:
        """Start counting."""
        self._stop = card().count_kernels()

    def stop_counting(self) -> int:
        """Stop counting, and return the number of kernels on this worker's GPU. On a CPU it is 0."""
        return self._stop()


def count_decode_launches(engine: Any, prompts: Sequence[Prompt]) -> int:
    """Run one decode step of these prompts. Return the number of kernels on the first rank, which is 0 on a CPU."""
    with decode_batch(engine, prompts):
        engine.collective_rpc("start_counting")
        engine.step()
        counts = engine.collective_rpc("stop_counting")
    return int(counts[0])
