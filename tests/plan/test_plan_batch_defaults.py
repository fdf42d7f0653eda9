"""Claims about the scheduler's defaults: they are the installed vLLM's, and what it cannot be asked is no default."""

from __future__ import annotations

import contextlib

import pytest
from plan_support import planned
from vllm.engine import arg_utils

from vllm_aiter_mla.commands.plan import serve_options
from vllm_aiter_mla.compat.batch_defaults import BatchDefaultsError, batch_defaults
from vllm_aiter_mla.compat.offline import OptionError

GIB = 1 << 30


def test_the_defaults_go_by_the_cards_memory_as_vllm_has_them() -> None:
    platform = arg_utils.current_platform
    large, middle, small = (batch_defaults("a card", size * GIB) for size in (192, 80, 24))
    assert large[1] > middle[1] > small[1]
    assert large[0] == middle[0] > small[0]
    assert arg_utils.current_platform is platform


def test_a_plan_takes_the_defaults_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "batch_defaults", lambda name, memory: (77, memory // GIB))
    read = serve_options.read([], "deepseek-v2-lite", "gfx950", serve_options.environment([], {}))
    assert (read.max_num_seqs, read.max_num_batched_tokens) == (77, 288)


def test_a_rule_that_asks_for_more_is_refused_and_not_taken_for_a_small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = arg_utils.EngineArgs.get_batch_defaults

    def asks_more(world_size: int) -> object:
        with contextlib.suppress(Exception):  # as vLLM asks the platform
            arg_utils.current_platform.compute_units()  # type: ignore[attr-defined]
        return stock(world_size)

    monkeypatch.setattr(arg_utils.EngineArgs, "get_batch_defaults", asks_more)
    with pytest.raises(BatchDefaultsError, match="asks for compute_units"):
        batch_defaults("a card", 192 * GIB)
    with pytest.raises(OptionError, match=r"--max-num-seqs and --max-num-batched-tokens: .*not known .*; give both"):
        serve_options.read([], "deepseek-v2-lite", "gfx942", serve_options.environment([], {}))
    assert planned("deepseek-v2-lite", "--max-num-batched-tokens", "512")["verdict"]
