"""Claims about the proof that a server is what its side is called."""

from __future__ import annotations

import pytest

from tools.common import RunError
from tools.serving import proof

STATUS = "(Worker pid=1) INFO [worker.py:193] aiter-mla: 61/61 MLA layers engaged (aiter, fp8 KV, decode limit 1..256)"
METRICS = """# TYPE vllm:aiter_mla_layers gauge
vllm:aiter_mla_layers{state="engaged"} 58.0
vllm:aiter_mla_layers{state="refused"} 3.0
"""


def test_status_line_is_the_proof_and_is_shown() -> None:
    assert proof.check_on(STATUS, None) == "61/61 MLA layers engaged (aiter, fp8 KV, decode limit 1..256)"


def test_gauge_is_the_proof_for_a_server_whose_log_is_not_here() -> None:
    assert proof.gauge(METRICS) == {"engaged": 58, "skipped": 3}
    assert proof.check_on(None, METRICS) == "58/61 MLA layers engaged (by /metrics)"


def test_gauge_with_more_labels_is_read_too() -> None:
    text = "".join(f'vllm:aiter_mla_layers{{engine="{n}",model_name="a b",state="engaged"}} 2\n' for n in (0, 1))
    assert proof.gauge(text) == {"engaged": 4}


@pytest.mark.parametrize(
    ("log", "metrics", "said"),
    [
        ("aiter-mla: 0/61: fp8_bmm: the absorb weight is fp8 (run: doctor)", None, "fp8_bmm"),
        ("aiter-mla: off although it was switched on: eager: enforce_eager", "", "enforce_eager"),
        ("aiter-mla: 1 hook failed, vLLM runs unmodified: AttributeError", None, "AttributeError"),
        ("nothing", "vllm:other 1", "no proof"),
        (None, 'vllm:aiter_mla_layers{state="engaged"} 0.0\nvllm:aiter_mla_layers{state="refused"} 61.0', "0/61"),
        # The gauge knows all ranks, the line rank 0 alone.
        (STATUS, 'vllm:aiter_mla_layers{state="engaged"} 0.0\nvllm:aiter_mla_layers{state="refused"} 61.0', "0/61"),
    ],
)
def test_flag_on_without_engaged_layers_is_refused_with_the_reason(
    log: str | None, metrics: str | None, said: str
) -> None:
    with pytest.raises(RunError, match=said):
        proof.check_on(log, metrics)


@pytest.mark.parametrize(("log", "metrics"), [(STATUS, None), (None, METRICS)])
def test_flag_off_with_engaged_layers_is_refused(log: str | None, metrics: str | None) -> None:
    with pytest.raises(RunError, match="fast path is on with the flag off"):
        proof.check_off(log, metrics)


def test_a_server_that_says_nothing_is_off() -> None:
    proof.check_off("INFO", "vllm:other 1")


def test_a_baseline_whose_pass_vllm_lists_is_shown_as_listed() -> None:
    log = "INFO Enabled custom fusions: norm_quant, rope_kvcache_cat_mla"
    assert "lists its own pass as on" in proof.check_baseline(log, "vllm-fused")
    assert "not proved" in proof.check_baseline("quiet", "vllm-fused")
    assert "not checked" in proof.check_baseline(None, "vllm-fused")


@pytest.mark.parametrize(
    "log",
    [
        "INFO Enabled custom fusions: norm_quant",
        "MLA KV cache update with RoPE fusion enabled but the current platform is not CUDA or ROCm.",
    ],
)
def test_a_baseline_whose_pass_vllm_dropped_is_refused(log: str) -> None:
    with pytest.raises(RunError, match="--baseline unmodified vLLM"):
        proof.check_baseline(log, "vllm-fused")


def test_what_is_looked_for_stands_in_the_installed_vllm_and_in_the_plugin() -> None:
    vllm = pytest.importorskip("vllm")
    from pathlib import Path

    from vllm_aiter_mla.status import gauge
    from vllm_aiter_mla.status import record as status_record

    source = (Path(vllm.__file__).parent / "config" / "compilation.py").read_text()
    assert proof._NO_VLLM_PASS in source
    assert "Enabled custom fusions: %s" in source
    assert gauge.NAME == proof.GAUGE
    record = {"engaged": {"a": "aiter"}, "total": 1, "kv_cache_dtype": "fp8", "decode_limit": [1, 8], "skipped": {}}
    record["measured"] = []
    assert proof.check_on(f"aiter-mla: {status_record.line(record)}", None).startswith("1/1 MLA layers engaged")
    record |= {"engaged": {}, "partial": {}, "skipped": {"a": ("key", "text")}}
    with pytest.raises(RunError, match="key: text"):
        proof.check_on(f"aiter-mla: {status_record.line(record)}", None)
