"""Claims about the scheduler's defaults: they are the installed vLLM's, and what it cannot be asked is no default."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from vllm.engine import arg_utils

from tests.plan.plan_support import planned
from vllm_aiter_mla.commands.plan import serve_options
from vllm_aiter_mla.compat import offline
from vllm_aiter_mla.compat.batch_defaults import BatchDefaultsError, batch_defaults
from vllm_aiter_mla.compat.offline import OptionError

GIB = 1 << 30


def options(*given: str) -> Any:
    return offline.serve_options(["deepseek-v2-lite", *given])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), (1024, 16384)),
        (("--max-num-batched-tokens", "512"), (512, 512)),
        (("--max-num-seqs", "8", "--max-model-len", "100"), (8, 800)),
        (("--performance-mode", "throughput"), (2048, 32768)),
        (("--no-enable-chunked-prefill", "--max-model-len", "20000"), (1024, 20000)),
        (("--enable-expert-parallel", "-dp", "2", "--all2all-backend", "deepep_low_latency"), (256, 256)),
    ],
)
def test_what_is_not_given_is_bounded_as_vllm_bounds_it(given: tuple[str, ...], found: tuple[int, int]) -> None:
    assert batch_defaults("AMD Instinct MI300X", 192 * GIB, options(*given)) == found


def test_a_prefill_in_one_piece_needs_the_models_length() -> None:
    with pytest.raises(OptionError, match="vLLM goes by --max-model-len, which is not given"):
        serve_options.read(["--no-enable-chunked-prefill"], "deepseek-r1", "gfx942", serve_options.environment([], {}))


def test_the_defaults_go_by_the_cards_memory_as_vllm_has_them() -> None:
    platform = arg_utils.current_platform
    large, middle, small = (batch_defaults("a card", size * GIB, options()) for size in (192, 80, 24))
    assert large[1] > middle[1] > small[1]
    assert large[0] == middle[0] > small[0]
    assert arg_utils.current_platform is platform


def test_a_plan_takes_the_defaults_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "batch_defaults", lambda name, memory, parsed: (77, memory // GIB))
    read = serve_options.read([], "deepseek-v2-lite", "gfx950", serve_options.environment([], {}))
    assert (read.max_num_seqs, read.max_num_batched_tokens) == (77, 288)


def test_a_rule_that_asks_for_more_is_refused_and_not_taken_for_a_small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_own = arg_utils.EngineArgs.get_batch_defaults

    def asks_more(world_size: int) -> object:
        with contextlib.suppress(Exception):  # as vLLM asks the platform
            arg_utils.current_platform.compute_units()  # type: ignore[attr-defined]
        return vllm_own(world_size)

    monkeypatch.setattr(arg_utils.EngineArgs, "get_batch_defaults", asks_more)
    with pytest.raises(BatchDefaultsError, match="asks for compute_units"):
        batch_defaults("a card", 192 * GIB, options())
    with pytest.raises(OptionError, match=r"--max-num-seqs and --max-num-batched-tokens: .*not known .*; give both"):
        serve_options.read([], "deepseek-v2-lite", "gfx942", serve_options.environment([], {}))
    assert planned("deepseek-v2-lite", "--max-num-batched-tokens", "512")["outcome"]
