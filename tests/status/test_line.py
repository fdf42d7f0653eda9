"""The status line's parts, from records: the cache's type, and what was timed."""

from dataclasses import replace

import pytest

from vllm_aiter_mla.status import EngineStatus, Outcome, line
from vllm_aiter_mla.status.record import Timed

RECORD = EngineStatus().record_of({"a": Outcome("triton"), "b": Outcome("triton")}, 512, "fp8", 0, "module", "cpu")
FEW = Timed("8 heads", ("c",), ((1, 64, "aiter"),), {64: {"aiter": 1.0, "vllm": 2.0}})
US = {8: {"triton": 3.0, "vllm": 4.0}, 48: {"triton": 5.0, "vllm": 7.0}, 512: {"triton": 6.0, "vllm": 5.0}}
MOST = Timed("16 heads", ("a", "b"), ((1, 48, "triton"), (49, 512, "vllm")), US)
TIMES = "(triton 1..48, vllm 49..512; 5.0 us a layer at 48 tokens against vLLM's own 7.0, measured here"


@pytest.mark.parametrize(
    ("dtype", "named"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")],
)
def test_the_line_names_the_type_of_the_cache(dtype, named):
    assert line.of(replace(RECORD, kv_cache_dtype=dtype)).endswith(f"(triton, {named} KV, decode limit 512)")


@pytest.mark.parametrize(("integration", "named"), [("module", False), ("passes", True)])
def test_the_line_names_the_integration_that_default_options_do_not_take(integration, named):
    assert (", integration passes)" in line.of(replace(RECORD, integration=integration))) == named


@pytest.mark.parametrize("measured", [(FEW, MOST), (MOST, FEW)])
def test_the_line_gives_the_times_of_the_shape_that_most_layers_have(measured):
    assert f"{TIMES}; 1 more layer shape in the status file)" in line.of(replace(RECORD, measured=measured))


@pytest.mark.parametrize(("since", "said"), [("", ")"), ("2026-11-26T10:00:00+00:00", " on 2026-11-26)")])
def test_the_line_says_since_when_kept_figures_hold(since, said):
    assert f"{TIMES}{said}" in line.of(replace(RECORD, measured=(replace(MOST, since=since),)))
