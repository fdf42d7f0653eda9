"""The status line's parts, from records: the cache's type, and what was timed."""

from dataclasses import replace

import pytest

from tests.support.decisions import decision, spans
from tests.support.statuses import NOTHING, with_layers
from vllm_aiter_mla.admission import ABORTED, REMEDIES, Skip
from vllm_aiter_mla.decided import RejectedKernel, ShapeTiming
from vllm_aiter_mla.status import line
from vllm_aiter_mla.status.engine_status import EngineStatus
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import DecisionGroup, merge_ranks

RECORD = with_layers(EngineStatus(), dict.fromkeys(("a", "b"), NOTHING._replace(ran_kernel="triton")))
FEW = ShapeTiming("8 heads", ("c",), spans((1, 64, "aiter")), {64: {"aiter": 1.0, "vllm": 2.0}})
US = {8: {"triton": 3.0, "vllm": 4.0}, 48: {"triton": 5.0, "vllm": 7.0}, 512: {"triton": 6.0, "vllm": 5.0}}
MOST = ShapeTiming("16 heads", ("a", "b"), spans((1, 48, "triton"), (49, 512, "vllm")), US)
TIMES = "(triton 1..48, vllm 49..512; 5.0 us a layer at 48 tokens against vLLM's own 7.0, measured here"


@pytest.mark.parametrize(
    ("dtype", "named"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")],
)
def test_the_line_names_the_type_of_the_cache(dtype, named):
    assert status_line(replace(RECORD, kv_cache_dtype=dtype)).endswith(f"(triton, {named} KV, decode limit 512)")


@pytest.mark.parametrize(("integration", "named"), [("module", False), ("passes", True)])
def test_the_line_names_the_integration_that_default_options_do_not_take(integration, named):
    assert (", integration passes)" in status_line(replace(RECORD, integration=integration))) == named


@pytest.mark.parametrize("shape_timings", [(FEW, MOST), (MOST, FEW)])
def test_the_line_gives_the_times_of_the_shape_that_most_layers_have(shape_timings):
    said = status_line(replace(RECORD, shape_timings=shape_timings))
    assert f"{TIMES}; 1 more layer shape in the status file)" in said


def test_a_fault_comes_before_what_is_only_slower_with_its_layers_and_its_remedy():
    slow, broken = Skip("vllm_faster", "slow"), Skip("kernel_shape", "broken")
    said = status_line(replace(RECORD, engaged={}, skipped={"a": slow, "b": broken, "c": broken}, num_layers=3))
    assert said == f"0/3: 2 skipped: kernel_shape: broken; 1 skipped: vllm_faster: slow -> {REMEDIES['kernel_shape']}"
    said = status_line(replace(RECORD, engaged={"d": "triton"}, skipped={"a": slow, "b": broken}, num_layers=3))
    assert f"; 1 skipped: kernel_shape: broken; 1 skipped: vllm_faster: slow -> {REMEDIES['kernel_shape']}" in said


def test_the_line_of_a_pipeline_gives_the_times_of_the_shape_that_most_layers_of_all_its_ranks_have():
    stages = [
        replace(RECORD, rank=0, num_ranks=2, engaged={"c": "aiter"}, num_layers=1, shape_timings=(FEW,)),
        replace(RECORD, rank=1, num_ranks=2, shape_timings=(MOST,)),
    ]
    assert f"{TIMES}; 1 more layer shape in the status file)" in status_line(*stages)
    same = [replace(stages[0], shape_timings=(replace(MOST, layers=("c",)),)), stages[1]]
    assert "more layer shape" not in status_line(*same), "one shape with the layers of both stages"


@pytest.mark.parametrize(("since", "said"), [("", ")"), ("2026-11-26T10:00:00+00:00", " on 2026-11-26)")])
def test_the_line_says_since_when_kept_figures_hold(since, said):
    assert f"{TIMES}{said}" in status_line(replace(RECORD, shape_timings=(replace(MOST, kept_since=since),)))


DIED = f"{ABORTED}: a start ended in its first call"
REJECTED = (
    *(RejectedKernel(kernel, DIED, aborted=True) for kernel in ("aiter", "aiter-opt")),
    RejectedKernel("vllm", "later"),
)
WITHOUT_AITER = DecisionGroup(("a", "b"), decision((1, 512, "triton"), rejected_kernels=REJECTED))


def names_what_was_left_out(ranks, head):
    said = status_line(*ranks)
    assert said.startswith(head)
    assert said.count("; aiter, aiter-opt left out: aborted_before") == 1, "the line does not say it"
    assert REMEDIES[ABORTED] in said or "vllm-aiter-mla status" in said
    assert list(line.remedies(ranks).values())[:1] == [REMEDIES[ABORTED]]


LEFT_OUT = replace(RECORD, decision_groups=(WITHOUT_AITER,))
FASTER = replace(LEFT_OUT, engaged={}, skipped=dict.fromkeys(("a", "b"), Skip("vllm_faster", "why")))
CASES = {
    "engaged": ([LEFT_OUT], "2/2 MLA layers engaged (triton"),
    "on one rank": ([RECORD, replace(LEFT_OUT, rank=1), None], "2/2 MLA layers engaged on 2 of 3 ranks"),
    "vllm is faster": ([FASTER], "0/2: vllm_faster: why"),
}


@pytest.mark.parametrize(("ranks", "head"), CASES.values(), ids=CASES)
def test_the_line_names_kernels_that_an_earlier_start_died_in(ranks, head):
    names_what_was_left_out(ranks, head)


def test_the_line_says_once_that_the_named_kernel_is_the_one_that_was_left_out():
    skipped = dict.fromkeys(("a", "b"), Skip("kernel_unavailable", f"kernel=aiter: {DIED}"))
    said = status_line(replace(LEFT_OUT, engaged={}, skipped=skipped))
    assert said.count(ABORTED) == 1
    assert said.endswith((REMEDIES[ABORTED], "(run: vllm-aiter-mla status)"))


def test_the_line_of_a_start_that_left_nothing_out_does_not_say_so():
    """Whatever the words of the reason are."""
    without = decision((1, 512, "triton"), rejected_kernels=(RejectedKernel("aiter", DIED),))
    assert "left out" not in status_line(replace(RECORD, decision_groups=(DecisionGroup(("a", "b"), without),)))


def test_a_rank_that_runs_another_kernel_is_named_and_does_not_agree():
    other = replace(RECORD, rank=1, engaged=dict.fromkeys(RECORD.engaged, "aiter"))
    assert "on 1 of 2 ranks (triton" in status_line(RECORD, other)
    assert "; rank 1 runs aiter" in status_line(RECORD, other)
    assert not merge_ranks([RECORD, other]).ranks_agree
    assert merge_ranks([RECORD, replace(RECORD, rank=1)]).ranks_agree


def test_ranks_that_fell_back_for_the_same_reason_are_named_together():
    wrong, window = Skip("kernel_shape", "wrong"), Skip("sliding_window", "a window")
    fell_back = [
        replace(RECORD, rank=n, engaged={}, skipped={"a": why}) for n, why in ((1, wrong), (2, window), (3, wrong))
    ]
    said = status_line(RECORD, *fell_back)
    assert "; ranks 1, 3 fell back: kernel_shape: wrong; rank 2 fell back: sliding_window: a window" in said


def test_a_rank_and_a_layer_have_the_first_of_several_reasons():
    failed, not_run = Skip("kernel_failed", "it raised"), Skip("not_run", "why")
    second = replace(RECORD, rank=1, engaged={}, skipped={"a": failed, "b": not_run})
    said = status_line(RECORD, second)
    assert "; rank 1 fell back: kernel_failed: it raised" in said
    assert said.endswith(f" -> {REMEDIES['kernel_failed']}")
    first = replace(second, rank=0)
    third = replace(second, skipped={"a": not_run, "b": not_run})
    assert merge_ranks([first, third]).skipped == {"a": failed, "b": not_run}


@pytest.mark.parametrize("message", ["why", "why " * 200], ids=["short", "long"])
def test_the_line_ends_with_the_remedy_however_long_the_reason_is(message):
    skipped = dict.fromkeys(("a", "b"), Skip("impl", message))
    assert status_line(replace(RECORD, engaged={}, skipped=skipped)).endswith(f" -> {REMEDIES['impl']}")


@pytest.mark.mutation("I8")
def test_mutation_a_line_that_forgets_what_was_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(line, "aborted_kernels", lambda ranks: [])
    with pytest.raises(AssertionError, match="the line does not say it"):
        names_what_was_left_out(*CASES["engaged"])


@pytest.mark.parametrize("engaged", [RECORD.engaged, {}])
def test_the_line_says_that_the_number_of_ranks_is_unknown(engaged):
    """The ranks could not be asked, so each has a record that knows of no other."""
    unknown = [replace(RECORD, rank=rank, num_ranks=0, engaged=engaged) for rank in range(2)]
    assert "; ranks unknown" in status_line(*unknown)
    assert " of 2 ranks" not in status_line(*unknown)
    assert not merge_ranks(unknown).ranks_agree
    assert "unknown" not in status_line(unknown[0], replace(unknown[1], num_ranks=2))
