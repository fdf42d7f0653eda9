"""Claims about the numbers of a plan: the decode limit, vLLM's ranges and capture sizes, bytes and launches."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.plan_support import ENGAGING, facts, planned
from vllm_aiter_mla.commands.bench.points import Point
from vllm_aiter_mla.commands.plan import formulas, kernels, printout, serve_options
from vllm_aiter_mla.kernels import select
from vllm_aiter_mla.settings import LIMIT_FIELD

MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')


def test_256_requests_and_one_draft_make_512() -> None:
    for spelling in (MTP, ("--spec-method", "mtp", "--spec-tokens", "1")):
        plan = planned("deepseek-r1", "-tp", "8", *spelling)
        assert plan["limit"] == 512
        assert plan["captures"]["inside"][-1] == 512
        assert plan["captures"]["outside"] == ()


def test_an_mtp_method_without_a_number_of_drafts_is_refused_as_vllm_refuses_it() -> None:
    plan = planned("deepseek-r1", "-tp", "8", "--speculative-config", '{"method": "mtp"}')
    assert [reason["code"] for reason in plan["reasons"]] == ["vllm_refuses"]
    assert "num_speculative_tokens must be provided" in plan["reasons"][0]["message"]


def test_the_layers_of_the_draft_are_counted() -> None:
    plan = planned("deepseek-r1", "-tp", "8", *MTP)
    assert plan["layers"] == {"mla": 62, "drafts": 1, "total": 61, "engaged": 62}


def test_a_decode_limit_beyond_the_largest_graph_is_pointed_out_with_the_limit_that_ends_it() -> None:
    beyond = planned("deepseek-r1", "-tp", "8", "--max-num-seqs", "1024")
    text = printout.text(beyond)
    assert "513..1024 run without a graph" in text
    assert "512 would end the decode limit there" in text
    ended = planned("deepseek-r1", "-tp", "8", "--max-num-seqs", "1024", f"-cc.pass_config.{LIMIT_FIELD}=512")
    assert "run without a graph" not in printout.text(ended)


def test_capture_sizes_are_split_at_the_limit() -> None:
    captures = planned("kimi-k2", "-tp", "8")["captures"]
    assert (captures["inside"][0], captures["inside"][-1]) == (1, 256)
    assert (captures["outside"][0], captures["outside"][-1]) == (272, 512)
    assert planned("kimi-k2", "--enforce-eager")["captures"]["note"] == "none: --enforce-eager"
    assert planned("kimi-k2", "-O0")["captures"] == {"inside": (), "outside": (), "note": "none: CUDA graphs are off"}
    given_sizes = planned("kimi-k2", "-cc.cudagraph_capture_sizes=[8, 300]")["captures"]
    assert (given_sizes["inside"], given_sizes["outside"]) == ((8,), (300,))


def test_the_limit_ends_a_compile_range() -> None:
    one = planned("kimi-k2", "--max-num-batched-tokens", "8192")["compile_ranges"]
    assert (one["ranges"], one["inside"]) == (((1, 256), (257, 8192)), 1)
    eight = planned("kimi-k2", "-tp", "8", "--max-num-batched-tokens", "8192")["compile_ranges"]
    assert eight["ranges"] == ((1, 256), (257, 4681), (4682, 8192))


@pytest.mark.parametrize("options", [("-O0",), ("--enforce-eager",), ("-cc.mode=0",)])
def test_where_vllm_compiles_nothing_there_are_no_ranges(options: tuple[str, ...]) -> None:
    found = planned("kimi-k2", "-tp", "8", *options)["compile_ranges"]
    assert found == {"ranges": (), "inside": 0, "note": "none: vLLM compiles no graph with these options"}


def test_an_optimization_level_without_the_fusion_of_all_reduce_has_no_range_for_it() -> None:
    one = planned("kimi-k2", "-tp", "8", "-O1", "--max-num-batched-tokens", "8192")["compile_ranges"]
    assert one["ranges"][-1] == (257, 8192)


def test_a_limit_beyond_every_batch_leaves_one_range_inside() -> None:
    small = planned("kimi-k2", "--max-num-batched-tokens", "200")["compile_ranges"]
    assert (small["ranges"], small["inside"]) == (((1, 200),), 1)


def test_the_option_overrides_the_limit() -> None:
    flag = "-cc.pass_config.aiter_qk_rope_kvcache_fusion_max_token_num=64"
    assert planned("kimi-k2", flag)["limit"] == 64


SIZES = st.integers(1, 512)


@given(tokens=SIZES, heads=st.sampled_from([1, 2, 8, 16, 128]), quantised=st.booleans())
def test_the_one_launch_moves_what_the_benchmark_counts(tokens: int, heads: int, quantised: bool) -> None:
    step = formulas.Step(tokens, heads, 128, 64, 512, 1 if quantised else 2)
    once = formulas.moved(formulas.triton(step))
    assert once == Point(tokens, heads, quantised).bytes_once
    # docs/triton.md: the unfused sequence writes and reads the absorbed and the rotated query once each, and k_pe back.
    assert formulas.moved(formulas.vllm_fused(step)) - once == 4 * tokens * heads * 576 + 2 * tokens * 64
    assert formulas.moved(formulas.aiter(step)) - once == 4 * tokens * heads * 512


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_one_launch_over_fp8_weights_moves_what_the_benchmark_counts(tokens: int) -> None:
    step = formulas.Step(tokens, 16, 128, 64, 512, 1, weight=1)
    assert formulas.moved(formulas.triton(step)) == Point(tokens, 16, True, fp8_weight=True).bytes_once


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
    figures = planned("kimi-k3", "-tp", "8", "--kv-cache-dtype", "fp8")["figures"]
    paths = figures["by_tokens"][256]
    assert paths["vllm"]["launches_per_step"] == 4 * 24
    assert paths["aiter"]["launches_per_step"] == 2 * 24
    assert figures["q_prepared_bytes"] == 256 * 12 * 576


@pytest.mark.parametrize("limit", [2, 200, 256, 1024])
def test_kernel_spans_cover_the_decode_limit_without_gaps(limit: int) -> None:
    options = serve_options.read(["-tp", "8"], "deepseek-v2-lite", "gfx942", serve_options.environment(ENGAGING, {}))
    found = facts("deepseek-v2-lite", options)
    spans = kernels.spans(options, found, found.kinds[0], limit)
    assert not isinstance(spans, str)
    assert (spans[0].first, spans[-1].last) == (1, limit)
    for before, after in pairwise(spans):
        assert after.first == before.last + 1
    # The answer of a span holds at each of its ends.
    chooser = kernels.PlannedSelector(options)
    for span in spans:
        for tokens in (span.first, span.last):
            one = kernels.at(chooser, kernels.operands(options, found, found.kinds[0], chooser.platform, tokens))
            assert (one.kernel, one.detail) == (span.kernel, span.detail)


@pytest.mark.parametrize("kernel", ["auto", "aiter", "triton", "vllm"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm90"])
def test_a_plan_asks_the_servers_candidates_in_the_servers_order(kernel: str, arch: str) -> None:
    asked = ("--additional-config", json.dumps({"aiter_mla": {"kernel": kernel}}))
    options = serve_options.read(asked, "deepseek-r1", arch, serve_options.environment(ENGAGING, {}))
    chooser = kernels.PlannedSelector(options)
    assert chooser.names == select.candidates(kernel, chooser.platform)
    assert all(chooser.backend(name) for name in chooser.names)
