"""``check``'s engine over options of ``vllm serve``: what it leaves out, how many layers it draws, when it decodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_aiter_mla import plugin
from vllm_aiter_mla.commands.check.engine.child import SCENARIOS
from vllm_aiter_mla.commands.compat import llm_engine, rocm_config, vllm_options
from vllm_aiter_mla.commands.plan import config_source

plugin.register()
CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    "typed",
    [
        ["--data-parallel-size", "2"],
        ["--data-parallel-rank", "1"],
        ["--data-parallel-hybrid-lb"],
        ["--nnodes", "2"],
        ["--node-rank", "1"],
        ["--master-addr", "10.0.0.1"],
        ["--distributed-executor-backend", "ray"],
        ["--headless"],
        ["--api-server-count", "4"],
        ["--port", "8001"],
        ["--kv-transfer-config", CONNECTOR],
        ["--kv-events-config", "{}"],
        ["--enable-eplb"],
        ["--reasoning-parser", "deepseek_r1"],
        ["--tokenizer", "ORG/NAME"],
        ["--tool-call-parser", "kimi_k2"],
        # The engine of ``check`` asks for five log-probabilities, and holds 512 tokens.
        ["--max-logprobs", "0"],
        ["--logprobs-mode", "raw_logits"],
        ["--long-prefill-token-threshold", "4096"],
    ],
    ids=lambda typed: typed[0],
)
def test_field_f3_an_option_of_a_deployment_is_left_out_of_the_engine_and_named(typed: list[str]) -> None:
    parsed, plain = (vllm_options.parse_serve_options(["M", *options]) for options in (typed, []))
    assert llm_engine.reset_unsupported_options(parsed) == typed[:1]
    assert vars(parsed) == vars(plain)


@pytest.mark.parametrize("content", ["", "- tensor-parallel-size"])
def test_a_file_without_options_is_named(tmp_path: Path, content: str) -> None:
    """vLLM's parser takes any file to hold NAME: VALUE."""
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"--config {re.escape(str(file))}"):
        vllm_options.parse_serve_options(["M", "--config", str(file)])


def test_an_option_of_the_engine_is_honoured() -> None:
    typed = ["-tp", "8", "-ep", "--kv-cache-dtype", "fp8", "-O3", "--enable-lora", "--async-scheduling", "--block-size",
             "16", "--served-model-name", "v", "-cc.mode=3", "-pp", "2", "--max-num-seqs", "4"]  # fmt: skip
    parsed, same = (vllm_options.parse_serve_options(["M", *typed]) for _ in range(2))
    assert llm_engine.reset_unsupported_options(parsed) == []
    assert vars(parsed) == vars(same)


def test_the_engine_has_the_defaults_of_the_server_that_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has other defaults for a server than for an engine: on an MI300X 1,024 requests and 128."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    asked = []
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self, usage_context: asked.append(usage_context))
    monkeypatch.setattr("vllm.v1.engine.llm_engine.LLMEngine.__init__", lambda *_, **__: None)
    monkeypatch.setattr("vllm.v1.executor.Executor.get_class", lambda config: None)
    with config_source.find_config("deepseek-r1").folder() as folder:
        parsed = vllm_options.parse_serve_options([str(folder)])
        parsed.model = str(folder)
        rocm_config.create_engine_config(AsyncEngineArgs.from_cli_args(parsed))
        llm_engine.start_engine(parsed, None)
    assert asked[0] == asked[1]


def positions(config: Any) -> Any:
    return config.hf_text_config.max_position_embeddings


def placeholder(config: Any) -> Any:
    return config.hf_config.media_placeholder_token_id


@pytest.mark.parametrize(
    ("name", "given", "read", "value"),
    [
        ("deepseek-r1", {}, positions, 163840),
        ("deepseek-r1", {"max_position_embeddings": 4096}, positions, 4096),
        ("kimi-k2.5", {}, positions, 262144),
        ("kimi-k2.5", {"text_config": {"max_position_embeddings": 4096}}, positions, 4096),
        ("kimi-k2.5", {"media_placeholder_token_id": 7}, placeholder, 7),
        ("kimi-k2.5", {"text_config": {"num_hidden_layers": 9}}, positions, 262144),
    ],
)
def test_field_f8_four_layers_are_drawn_of_a_nested_config_too_and_the_users_overrides_stay(
    name: str, given: dict[str, Any], read: Callable[[Any], Any], value: int
) -> None:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    with config_source.find_config(name).folder() as folder:
        made = llm_engine.hf_overrides_for_layers(EngineArgs(model=str(folder), hf_overrides=given), 4)
        config = ModelConfig(model=str(folder), hf_overrides=made, skip_tokenizer_init=True)
    assert (config.get_total_num_hidden_layers(), read(config)) == (4, value)


class Scheduling:
    """Schedules as vLLM does, and runs nothing: first come, first served, within a budget of tokens, prompts in parts.

    A decode row takes ``width`` tokens, 1 + drafts.
    """

    def __init__(self, seqs: int, budget: int, width: int) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=seqs))
        self.seqs, self.budget, self.width = seqs, budget, width
        self.prompt_tokens_left: dict[str, int] = {}  # tokens that are left of each prompt
        self.left: dict[str, int] = {}  # tokens that are left to generate
        self.kinds: list[str] = []  # of the rows of the last step

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.prompt_tokens_left[name], self.left[name] = len(prompt["prompt_token_ids"]), params.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.kinds, room, outputs = [], self.budget, []
        for name in [*self.left][: self.seqs]:
            prompt, tokens = self.prompt_tokens_left[name], min(self.prompt_tokens_left[name] or self.width, room)
            if not tokens:
                break
            room -= tokens
            self.kinds.append("prefill" if prompt else "decode")
            self.prompt_tokens_left[name] = max(prompt - tokens, 0)
            if self.prompt_tokens_left[name]:
                continue
            self.left[name] -= 1 if prompt else tokens
            finished = self.left[name] <= 0
            if finished:
                del self.left[name]
            outputs.append(SimpleNamespace(request_id=name, finished=finished))
        return outputs


SCHEDULES = [(1024, 8192, 1), (16, 16, 1), (16, 24, 1), (8, 8, 1), (4, 512, 4), (16, 64, 4)]
"""``--max-num-seqs``, ``--max-num-batched-tokens`` and 1 + drafts."""


@pytest.mark.parametrize(("seqs", "budget", "width"), SCHEDULES)
def test_the_counted_step_has_decode_rows_of_every_request_that_runs_and_no_prompt(
    seqs: int, budget: int, width: int
) -> None:
    made = Scheduling(seqs, budget, width)
    with llm_engine.decode_batch(made, SCENARIOS["concurrent"]):
        made.step()
        assert made.kinds == ["decode"] * min(seqs, 16)
    assert not made.has_unfinished_requests()


def test_a_budget_that_holds_no_such_step_ends_the_wait_with_the_first_request() -> None:
    made = Scheduling(16, 16, 4)
    with llm_engine.decode_batch(made, SCENARIOS["concurrent"]):
        assert made.has_unfinished_requests()
    assert not made.has_unfinished_requests()


def test_no_request_takes_no_step() -> None:
    made = Scheduling(16, 16, 1)
    with llm_engine.decode_batch(made, []):
        assert made.kinds == []
