"""The invariants that only a real engine can show, each with the planted bug that its check catches."""

import re

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity, figures, padded, same_scenarios
from tests.sandbox.engine import EngineFailedError
from tests.sandbox.runs import EXACT, SUM_ORDER

VLLMS_FUSED = "fused_rope_unified_mla_kv_cache_update"


def above_the_decode_limit(result):
    return result.graphs["{}-{}".format(*result.ranges[-1])]


# Planted bugs that the tokens show. A wide one is caught in seconds too, where its line says.


def planted(base, bug, *invariants, wide=False):
    marks = [pytest.mark.engine(base, bug), pytest.mark.mutation(*invariants), *[pytest.mark.wide] * wide]
    return pytest.param(base, bug, marks=marks)


@pytest.mark.parametrize(
    ("base", "bug"),
    [
        planted("fp32-off", "mutation-padded-slots", "I10"),
        planted("eager-drafts-off", "mutation-draft-rows"),
        planted("eager-off", "mutation-swapped", wide=True),  # tests/serving/test_module_forward.py
        planted("eager-off", "mutation-no-kv-write", wide=True),  # tests/verify/test_verify_faults.py
        planted("eager-drafts-off", "mutation-mixed-as-decode", "I3", wide=True),  # tests/runner_v2, tests/passes
        # tests/passes/test_layers_differ.py and tests/serving/test_layers_differ.py plant the first layer's scale.
        planted("eager-drafts-off", "mutation-scale-twice", wide=True),
    ],
)
def test_mutation_a_wrong_op_changes_tokens(engines, base, bug):
    assert bug != "mutation-padded-slots" or padded(engines(bug))
    mixed = figures(engines(base), engines(bug))["mixed"]
    assert mixed.tokens_equal < mixed.tokens


@pytest.mark.parametrize(
    ("base", "bug"),
    [
        pytest.param(base, bug, marks=[pytest.mark.engine(base, bug), *marks])
        for base, bug, *marks in (
            ("eager-drafts-off", "mutation-first-q-scale", pytest.mark.wide),
            ("fp8-passes-off", "mutation-first-k-scale", pytest.mark.wide),
        )
    ],
)
@pytest.mark.mutation
def test_mutation_own_scales_that_are_those_of_the_first_layer_change_tokens(engines, base, bug):
    assert_all_engaged(engines(bug))
    mixed = figures(engines(base), engines(bug))["mixed"]
    assert mixed.tokens_equal < mixed.tokens


@pytest.mark.wide  # tests/serving/test_op_mutations.py
@pytest.mark.engine("mutation-no-split")
@pytest.mark.mutation("I2")
def test_mutation_i2_an_op_inside_a_captured_piece_ends_the_start_and_names_the_option(engines):
    with pytest.raises(EngineFailedError) as failure:
        engines("mutation-no-split")
    assert "is inside a piecewise graph" in failure.value.log
    assert "compilation_config.splitting_ops" in failure.value.log


@pytest.mark.wide  # tests/passes/test_recognised.py plants it too
@pytest.mark.engine("bf16-off", "mutation-raw-prefill-and-no-range")
@pytest.mark.mutation("I3")
def test_mutation_i3_prefill_rows_that_stay_raw_change_the_tokens(engines):
    for name, found in figures(engines("bf16-off"), engines("mutation-raw-prefill-and-no-range")).items():
        assert found.tokens_equal < found.tokens, name
        # The bound of the demo on a GPU is wider than equality, and fails too.
        assert not SUM_ORDER.holds(found), (name, found)
        assert not EXACT.holds(found), (name, found)


@pytest.mark.engine("bf16-on")
def test_i13_batches_with_prefill_rows_inside_the_decode_limit_are_rotated_in_place(engines):
    """Both branches of the op ran, and it got the projection's buffer: no copy of q is made."""
    found = engines("bf16-on")
    assert found.branches["prepared_query"] > 0
    assert found.branches["rotate_and_write"] > 0
    code = found.code["1-16"]
    handed_over = re.findall(r"mla_attention_with_rope\.default\(reinterpret_tensor\((buf\d+),", code)
    assert len(handed_over) == found.status[0]["num_layers"]
    for buffer in handed_over:
        (producer,) = uses_before_the_op(code, buffer)
        assert re.search(rf"\bmm\(.*\bout={buffer}\b", producer), producer


def uses_before_the_op(code, buffer):
    """The calls that are given ``buffer`` before the op is. Inductor names a value once and may reuse memory."""
    lines = [line.partition("#")[0].strip() for line in code.splitlines()]
    used = [line for line in lines if re.search(rf"\b{buffer}\b", line)]
    op = next(at for at, line in enumerate(used) if "mla_attention_with_rope" in line)
    return [line for line in used[:op] if not line.startswith((f"{buffer} = ", "assert_", "del "))]


# I4: a layer is rewritten completely or not at all, and never because of another layer.


@pytest.mark.wide  # tests/passes/test_layers_apart.py
@pytest.mark.engine("bf16-off", "mutation-half-a-layer")
def test_i4_a_skipped_layer_changes_nothing_for_an_engaged_one(engines):
    record = engines("mutation-half-a-layer").status[0]
    assert len(record["engaged"]) == 1
    assert list(record["skipped"].values()) == [{"code": "geometry", "message": "skipped by the test"}]
    assert_parity(engines("bf16-off"), engines("mutation-half-a-layer"))


# I5: above L, and with the flag off, graph and outputs are vLLM's own to the byte.


@pytest.mark.engine("bf16-off", "bf16-on")
def test_i5_the_graph_above_the_decode_limit_is_that_of_vllm(engines):
    assert above_the_decode_limit(engines("bf16-on")) == above_the_decode_limit(engines("bf16-off"))
    assert engines("bf16-on").graphs["1-16"] != engines("bf16-off").graphs["1-16"]


@pytest.mark.wide
@pytest.mark.engine("vllms-pass-off", "vllms-pass-on")
def test_i5_prerequisite_above_the_decode_limit_the_graph_is_vllms_own_fused_one(engines):
    off, on = engines("vllms-pass-off"), engines("vllms-pass-on")
    above = above_the_decode_limit(off)
    assert above_the_decode_limit(on) == above
    assert above.count(VLLMS_FUSED) >= 2
    assert not any(word in above for word in ("aten.clone", "aten.copy", "slice_scatter")), "vLLM's op costs no copy"
    assert on.graphs["1-16"] != off.graphs["1-16"]


@pytest.mark.engine("default-off", "no-plugin")
def test_i5_flag_off_is_vllm_without_the_plugin(engines):
    off, bare = engines("default-off"), engines("no-plugin")
    assert off.graphs
    assert off.graphs == bare.graphs
    assert same_scenarios(off, bare).scenarios == bare.scenarios
    assert off.status == bare.status == []


@pytest.mark.wide  # tests/startup/test_startup.py plants it too
@pytest.mark.engine("bf16-off", "mutation-raw-prefill-and-no-range")
@pytest.mark.mutation("I5")
def test_mutation_i5_passes_that_ignore_the_range_are_caught(engines):
    off, on = map(above_the_decode_limit, (engines("bf16-off"), engines("mutation-raw-prefill-and-no-range")))
    assert ("vllm_aiter_mla" in off, "vllm_aiter_mla" in on) == (False, True)


# I8: the status line says once what engaged. No engaged layer is a warning with the reason, or an error when strict.


@pytest.mark.engine("bf16-on")
def test_i8_what_engaged_is_said_once(engines):
    lines = [line for line in engines("bf16-on").log if "MLA layers engaged" in line]
    assert len(lines) == 1
    assert "2/2 MLA layers engaged (reference, bf16 KV, decode limit 16, integration passes)" in lines[0]


@pytest.mark.engine("fp8-on")
def test_i8_an_engine_in_which_nothing_failed_warns_of_nothing(engines):
    assert [line for line in engines("fp8-on").log if "WARNING" in line or "ERROR" in line] == []


@pytest.mark.parametrize(
    ("bug", "line", "words"),
    [
        pytest.param(bug, *said, marks=[pytest.mark.engine("eager-off", bug), pytest.mark.mutation(invariant), *marks])
        for bug, invariant, marks, *said in (
            # tests/status/test_status.py, tests/gate/test_admission.py, tests/passes/test_layers_apart.py
            ("skipped", "I8", [pytest.mark.wide], "0/2", ("WARNING", "impl: ", "SandboxMLAImpl")),
            # tests/gate/test_gate_skips.py renames it too.
            (
                "renamed", "I11", [pytest.mark.wide], "off although it was switched on",
                ("capability: ", "get_attention_context"),
            ),
        )
    ],
)  # fmt: skip
def test_mutation_nothing_engaged_is_one_line_with_the_reason_and_vllm_results(engines, bug, line, words):
    (said,) = [one for one in engines(bug).log if line in one]
    assert [word for word in words if word not in said] == []
    assert not any(record["engaged"] for record in engines(bug).status)
    assert_parity(engines("eager-off"), engines(bug), 0.0)


@pytest.mark.wide  # tests/gate/test_gate_skips.py ends a start so too
@pytest.mark.engine("strict")
def test_i8_nothing_engaged_is_an_error_with_the_reason_in_strict_mode(engines):
    """Triton cannot run on this CPU: no layer engages."""
    with pytest.raises(EngineFailedError, match="strict=true") as failure:
        engines("strict")
    assert "kernel=triton: Triton needs a GPU" in failure.value.log


# I9: a changed plugin never runs a stale artifact; a warm start says the same as a cold one.


@pytest.mark.wide  # the module's warm start is in the CI: test_engine_default_options.py
@pytest.mark.engine("bf16-on", "warm")
def test_i9_a_warm_start_runs_no_pass_and_says_the_same(engines):
    cold, warm = engines("bf16-on"), engines("warm")
    assert cold.status[0]["pass_counts"]
    assert warm.status[0]["pass_counts"] == {}, "the passes ran again: this was no warm start"
    assert_all_engaged(warm)
    assert warm.scenarios == same_scenarios(cold, warm).scenarios
    said = [[line.partition("aiter-mla:")[2] for line in r.log if "engaged" in line] for r in (cold, warm)]
    assert said[0] == said[1]


@pytest.mark.wide
@pytest.mark.engine("bf16-on", "mutation-half-a-layer")
def test_i9_a_changed_fingerprint_compiles_again(engines):
    """It started in the cache of ``bf16-on``, whose artifact holds both layers fused."""
    assert engines("mutation-half-a-layer").status[0]["pass_counts"]
