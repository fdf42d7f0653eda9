"""Claims about the numbers of a plan: the decode limit, vLLM's ranges and capture sizes, bytes and launches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.plan_support import planned
from vllm_aiter_mla.admission import LayerView
from vllm_aiter_mla.commands.plan import formulas, kernels, printout
from vllm_aiter_mla.settings import LIMIT_FIELD, Settings

R1 = ("deepseek-r1", "-tp", "8")
LIMIT = f"-cc.pass_config.{LIMIT_FIELD}"
REQUESTS = ("--max-num-seqs", "256")


def test_256_requests_and_one_draft_make_512() -> None:
    plan = planned(*R1, *REQUESTS, "--spec-method", "mtp", "--spec-tokens", "1")
    assert plan["limit"] == 512
    assert plan["captures"]["inside"][-1] == 512
    assert plan["captures"]["outside"] == ()
    assert (plan["options"]["num_drafts"], plan["layers"]["drafts"]) == (1, 1)


def test_capture_sizes_and_compile_ranges_end_at_the_limit() -> None:
    plan = planned(*R1, *REQUESTS)
    captures, ranges = plan["captures"], plan["compile_ranges"]
    assert (captures["inside"][0], captures["inside"][-1]) == (1, 256)
    assert (captures["outside"][0], captures["outside"][-1]) == (272, 512)
    assert (ranges["inside"], ranges["ranges"][0], ranges["ranges"][1][0]) == (1, (1, 256), 257)


def test_a_decode_limit_beyond_the_largest_graph_is_pointed_out_with_the_limit_that_ends_it() -> None:
    beyond = printout.text(planned(*R1, "--max-num-seqs", "1024"))
    assert "513..1024 run without a graph" in beyond
    assert "512 would end the limit there" in beyond


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ranges", "inside"),
    [
        ((*R1, *REQUESTS, "--max-num-batched-tokens", "8192"), ((1, 256), (257, 4681), (4682, 8192)), 1),
        ((*R1, *REQUESTS, "--max-num-batched-tokens", "8192", "-O1"), ((1, 256), (257, 8192)), 1),
        ((*R1, *REQUESTS, "--max-num-batched-tokens", "256"), ((1, 256),), 1),
        ((*R1, "--max-num-seqs", "1024", f"{LIMIT}=512"), ((1, 512), (513, 4681), (4682, 16384)), 1),
        ((*R1, "--enforce-eager"), (), 0),
        ((*R1, "-O0"), (), 0),
    ],
)
def test_compile_ranges_are_those_of_the_finished_config(
    arguments: tuple[str, ...], ranges: tuple[tuple[int, int], ...], inside: int
) -> None:
    plan = planned(*arguments)
    assert (plan["compile_ranges"]["ranges"], plan["compile_ranges"]["inside"]) == (ranges, inside)
    assert bool(plan["compile_ranges"]["note"]) is (not ranges)
    assert "run without a graph" not in printout.text(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "inside", "outside"),
    [
        (("--enforce-eager",), (), ()),
        (("-O0",), (), ()),
        ((*REQUESTS, "-cc.cudagraph_capture_sizes=[8, 300]"), (8,), (300,)),
    ],
)
def test_captured_sizes_are_those_of_the_finished_config(
    arguments: tuple[str, ...], inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    captures = planned(*R1, *arguments)["captures"]
    assert (captures["inside"], captures["outside"]) == (inside, outside)
    assert bool(captures["note"]) is (not inside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), (1024, 16384)),
        (("--max-num-batched-tokens", "512"), (512, 512)),
        (("--performance-mode", "throughput"), (2048, 32768)),
        (("--no-enable-chunked-prefill", "--max-model-len", "20000"), (1024, 20000)),
    ],
)
def test_the_schedulers_defaults_are_the_installed_vllms(arguments: tuple[str, ...], found: tuple[int, int]) -> None:
    options = planned(*R1, *arguments)["options"]
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == found


SIZES = st.integers(1, 512)


def bytes_once(t: int, n: int, stored: int, weight: int) -> int:
    """Bytes of DeepSeek's widths: weights, q, latent, k_pe, table rows, slot and position; query and cache rows."""
    read = n * 128 * 512 * weight + t * n * 192 * 2 + t * 576 * 2 + t * (64 * 2 + 16)
    return read + t * (n + 1) * 576 * stored


@given(tokens=SIZES, heads=st.sampled_from([1, 2, 8, 16, 128]), quantised=st.booleans())
def test_the_one_launch_moves_each_value_once(tokens: int, heads: int, quantised: bool) -> None:
    step = formulas.Step(tokens, heads, 128, 64, 512, 1 if quantised else 2)
    once = formulas.moved(formulas.triton(step))
    assert once == bytes_once(tokens, heads, 1 if quantised else 2, 2)
    # docs/triton.md: the unfused sequence writes and reads the absorbed and the rotated query once each, and k_pe back.
    assert formulas.moved(formulas.vllm_fused(step)) - once == 4 * tokens * heads * 576 + 2 * tokens * 64
    assert formulas.moved(formulas.aiter(step)) - once == 4 * tokens * heads * 512


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_one_launch_over_fp8_weights_moves_each_value_once(tokens: int) -> None:
    step = formulas.Step(tokens, 16, 128, 64, 512, 1, weight=1)
    assert formulas.moved(formulas.triton(step)) == bytes_once(tokens, 16, 1, 1)


def test_at_64_tokens_and_16_heads_the_one_launch_over_fp8_weights_moves_at_most_half_of_vllms_bytes() -> None:
    step = formulas.Step(64, 16, 128, 64, 512, stored=1, weight=1)
    assert formulas.moved(formulas.triton(step)) == 2_151_424
    assert formulas.triton_share(step) == pytest.approx(0.476, abs=0.0005)
    assert formulas.triton_share(step) <= 0.5
    assert formulas.triton_share(formulas.Step(64, 16, 128, 64, 512, stored=1)) > 0.5, "plain weights: not half"
    assert formulas.triton_share(replace(step, weight=17 / 32)) == pytest.approx(0.412, abs=0.0005), "mxfp4"


def test_launches_per_layer_are_those_of_the_architecture() -> None:
    """vLLM's own concat and fp8 quantisation are one compiled kernel: docs/ledger.md counts it so."""
    for stored in (1, 2):
        step = formulas.Step(8, 16, 128, 64, 512, stored)
        assert tuple(len(path(step)) for path in formulas.PATHS.values()) == (4, 3, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "arch", "cache", "said"),
    [
        ("kimi-k2", "gfx950", "auto", True),
        ("kimi-k2", "gfx950", "fp8", False),
        ("kimi-k2", "gfx942", "auto", False),
        ("deepseek-r1", "gfx950", "auto", False),
    ],
)
def test_a_decode_that_may_need_no_concat_is_said(model: str, arch: str, cache: str, said: bool) -> None:
    """Kimi-K2 has 8 heads a rank here, DeepSeek-R1 16."""
    plan = planned(model, "-tp", "8", "--kv-cache-dtype", cache, arch=arch)
    assert any("needs no concat" in note for note in plan["assumptions"]) is said


def test_launches_per_step_count_every_mla_layer() -> None:
    plan = planned("kimi-k3", "-tp", "8", "--kv-cache-dtype", "fp8", *REQUESTS)
    paths = plan["figures"]["by_tokens"][256]
    assert paths["vllm"]["launches_per_step"] == 4 * 24
    assert paths["aiter"]["launches_per_step"] == 2 * 24
    assert plan["figures"]["q_prepared_bytes"] == 256 * 12 * 576


LAYER = LayerView(num_heads=2, model_dtype="bfloat16")


@pytest.mark.parametrize("limit", [2, 200, 256, 1024])
def test_kernel_spans_cover_the_decode_limit_without_gaps(limit: int) -> None:
    spans = kernels.spans("gfx942", Settings(), LAYER, "plain", 16, limit)
    assert not isinstance(spans, str)
    assert (spans[0].first, spans[-1].last) == (1, limit)
    for before, after in pairwise(spans):
        assert after.first == before.last + 1
    # The answer of a span holds at each of its ends.
    chooser = kernels.PlannedLayer("gfx942", Settings())
    for span in spans:
        for tokens in (span.first, span.last):
            one = kernels.at(chooser, kernels.operands(LAYER, "plain", 16, chooser.platform, tokens))
            assert (one.kernel, one.detail) == (span.kernel, span.detail)
