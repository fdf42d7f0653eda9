"""The invariants that only a real engine can show, each with the planted bug that its check catches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_engine_parity import assert_all_engaged, assert_parity

from vllm_aiter_mla.sandbox.compare import compare
from vllm_aiter_mla.sandbox.engine import EngineFailedError


def assert_same_graph_above_the_bucket(base, other):
    above = f"{other.ranges[-1][0]}-{other.ranges[-1][1]}"
    assert other.graphs[above] == base.graphs[above]


def assert_same_scenarios(base, other):
    """Parity over the scenarios that both runs hold."""
    shared = base.scenarios.keys() & other.scenarios.keys()
    assert shared
    for result in (base, other):
        assert set(result.scenarios) >= shared
    for name in shared:
        assert base.scenarios[name] == other.scenarios[name], name


# I3: prefill rows see rotated q and k_pe, whatever the batch.


@pytest.mark.engine("small-off", "mutation-raw-prefill")
@pytest.mark.mutation
def test_mutation_i3_prefill_rows_that_stay_raw_change_the_tokens(engines):
    with pytest.raises(AssertionError):
        assert_parity(engines("small-off"), engines("mutation-raw-prefill"))
    short = compare(engines("small-off"), engines("mutation-raw-prefill"))["short"]
    assert short.tokens_equal < short.tokens


# I2: piecewise capture freezes what Python saw; the op must stay outside.


@pytest.mark.engine("small-off", "piecewise-none", "piecewise-decode")
@pytest.mark.parametrize("kind", ["none", "decode"])
def test_i2_emulated_piecewise_capture_agrees_with_stock(engines, kind):
    found = engines(f"piecewise-{kind}")
    assert_parity(engines("small-off"), found)
    assert_all_engaged(found)
    assert found.pieces == found.census[0]["total"] + 1, "a piece before, between and behind the layers' ops"
    assert found.branches["rotate_and_write"] > 0


def padded(result):
    return {rows for rows in result.replays if rows[0] < rows[1]}


@pytest.mark.engine("fp32-off", "full-on")
def test_emulated_full_graphs_of_padded_batches_agree_with_stock(engines):
    """Decode batches ran in graphs of 4 or 16 rows, batches with prefill rows beside piecewise graphs."""
    found = engines("full-on")
    assert_parity(engines("fp32-off"), found, 1e-4)
    assert_all_engaged(found)
    assert found.census[0]["capture_sizes"] == [4, 16]
    assert {(1, 4), (3, 4), (5, 16)} <= padded(found)
    assert found.branches["rotate_and_write"] > 0


@pytest.mark.engine("fp32-off", "mutation-padded-slots")
@pytest.mark.mutation
def test_mutation_a_slot_for_padded_rows_of_a_full_graph_is_caught(engines):
    stock, found = engines("fp32-off"), engines("mutation-padded-slots")
    assert padded(found)
    mixed = compare(replace(stock, scenarios={"mixed": stock.scenarios["mixed"]}), found)["mixed"]
    assert mixed.tokens_equal < mixed.tokens


@pytest.mark.engine("small-off", "mutation-no-split")
@pytest.mark.mutation
def test_mutation_i2_attention_inside_a_piece_is_caught(engines):
    with pytest.raises(AssertionError):
        assert_parity(engines("small-off"), engines("mutation-no-split"))


@pytest.mark.engine("bf16-on")
def test_i13_batches_with_prefill_rows_inside_the_bucket_are_rotated_in_place(engines):
    """Both branches of the op ran, and it was given the projection's own buffer: no copy of q is made."""
    found = engines("bf16-on")
    assert found.branches["prepared_query"] > 0
    assert found.branches["rotate_and_write"] > 0
    code = found.code["1-16"]
    handed_over = re.findall(r"mla_attention_with_rope\.default\(reinterpret_tensor\((buf\d+),", code)
    assert len(handed_over) == found.census[0]["total"]
    for buffer in handed_over:
        made = re.search(rf"^ *(?:{buffer} = )?(.*\b{buffer}\b.*)$", code, re.MULTILINE)
        assert made is not None
        producers = [line for line in code.splitlines() if re.search(rf"\b{buffer}\b", line)]
        assert any("mm" in line or "linear" in line for line in producers), producers
        assert not any("clone" in line or "copy" in line for line in producers), producers


# I4: a layer is rewritten completely or not at all; one layer's refusal never touches another.


@pytest.mark.engine("small-off", "mutation-half-a-layer")
def test_i4_a_refused_layer_beside_an_engaged_one_changes_nothing(engines):
    record = engines("mutation-half-a-layer").census[0]
    assert len(record["engaged"]) == 1
    assert list(record["refused"].values()) == [["geometry", "refused by the test"]]
    assert_parity(engines("small-off"), engines("mutation-half-a-layer"))


# I5: above L, and with the flag off, graph and outputs are stock's to the byte.


@pytest.mark.engine("bf16-off", "bf16-on")
def test_i5_the_graph_above_the_bucket_is_that_of_stock(engines):
    assert_same_graph_above_the_bucket(engines("bf16-off"), engines("bf16-on"))
    assert engines("bf16-on").graphs["1-16"] != engines("bf16-off").graphs["1-16"]


@pytest.mark.engine("small-off", "small-no-plugin")
def test_i5_flag_off_is_vllm_without_the_plugin(engines):
    off, bare = engines("small-off"), engines("small-no-plugin")
    assert off.graphs == bare.graphs
    assert off.scenarios == bare.scenarios
    assert off.census == bare.census == []


@pytest.mark.engine("small-off", "mutation-above-bucket")
@pytest.mark.mutation
def test_mutation_i5_passes_that_ignore_the_range_are_caught(engines):
    with pytest.raises(AssertionError):
        assert_same_graph_above_the_bucket(engines("small-off"), engines("mutation-above-bucket"))


# I8: what fired is said once; nothing fired is a warning with the reason, or an error in strict mode.


@pytest.mark.engine("bf16-on")
def test_i8_what_engaged_is_said_once(engines):
    lines = [line for line in engines("bf16-on").log if "MLA layers engaged" in line]
    assert len(lines) == 1
    assert "2/2 MLA layers engaged (reference, bf16 KV, decode bucket 1..16)" in lines[0]


@pytest.mark.engine("small-off", "refused")
@pytest.mark.mutation
def test_mutation_i8_nothing_engaged_is_one_warning_with_the_reason_and_stock_results(engines):
    lines = [line for line in engines("refused").log if "0/2" in line]
    assert len(lines) == 1
    assert "WARNING" in lines[0]
    assert "impl: attention implementation is SandboxMLAImpl" in lines[0]
    with pytest.raises(AssertionError):
        assert_all_engaged(engines("refused"))
    assert_parity(engines("small-off"), engines("refused"), 0.0)


@pytest.mark.engine("refused-strict")
def test_i8_nothing_engaged_is_an_error_in_strict_mode(engines):
    with pytest.raises(EngineFailedError, match="strict=true"):
        engines("refused-strict")


# I9: a changed plugin never runs a stale artifact; a warm start tells the same as a cold one.


@pytest.mark.engine("warm-1", "warm-2")
def test_i9_a_warm_start_runs_no_pass_and_says_the_same(engines):
    cold, warm = engines("warm-1"), engines("warm-2")
    assert cold.census[0]["compiled"]
    assert warm.census[0]["compiled"] == {}, "the passes ran again: this was no warm start"
    assert_all_engaged(warm)
    assert warm.scenarios == cold.scenarios
    said = [[line.partition("aiter-mla:")[2] for line in r.log if "engaged" in line] for r in (cold, warm)]
    assert said[0] == said[1]


@pytest.mark.engine("warm-1", "warm-changed")
def test_i9_a_changed_fingerprint_compiles_again(engines):
    assert engines("warm-changed").census[0]["compiled"]


@pytest.mark.engine("fp8-off", "mutation-scale-twice")
@pytest.mark.mutation
def test_mutation_a_scale_applied_twice_is_caught_by_the_fp8_parity(engines):
    with pytest.raises(AssertionError):
        assert_same_scenarios(engines("fp8-off"), engines("mutation-scale-twice"))
