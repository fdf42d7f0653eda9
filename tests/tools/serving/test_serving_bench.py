"""Claims about `serve_bench.py` from option to table, with fakes in place of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.serving.serving_runs import bench_run, soon_gone
from tools.common import RunError
from tools.serving import bench, page, proof, sweep


def test_table_holds_both_sides_their_ratio_and_what_is_not_claimed(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--servers", "per-run", "--json", str(fakes.out.with_suffix(".json"))) == 0
    page = fakes.out.read_text()
    assert "| input-len | prefix-len | output-len | rr | off_ttft ms | on_ttft ms |" in page
    row = "| 1024 | 0 | 256 | 50 | 100.00 ± 5.77 | 100.00 ± 6.66 | 1.000 ± 0.088 | not distinguishable "
    assert row + "| 10.00 ± 0.10 | 8.00 ± 0.20 | 1.250 ± 0.034 | on faster |" in page
    for part in ("## Not claimed", "Flag on: 4/4 MLA layers engaged", "fake card", "0.32.0", "# flag off", "per-run"):
        assert part in page
    record = json.loads(fakes.out.with_suffix(".json").read_text())
    assert record["gauges"] == {"off": {}, "on": {"engaged": 4, "skipped": 0}}
    assert record["results"]["on"]["2"][0]["mean_tpot_ms"] == 8.3464


def test_sides_alternate_and_get_the_same_seeds_and_another_per_run(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--servers", "per-run", "--rates", "1,50", "--warmups", "4") == 0
    assert [call["server"] for call in fakes.calls("server")] == ["on", "off", "off", "on", "on", "off"]
    sent = fakes.calls("bench")
    seeds = {
        side: [
            (one["run"], one["bench"]["--seed"], one["bench"]["--request-rate"]) for one in sent if one["side"] == side
        ]
        for side in ("off", "on")
    }
    assert seeds["off"] == seeds["on"]
    assert len({number for _, number, _ in seeds["on"]}) == 6
    assert {one["bench"]["--num-warmups"] for one in sent} == {"4"}


def test_one_start_per_side_where_that_is_asked_for_and_said_so(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--", "-tp", "8") == 0
    servers = fakes.calls("server")
    assert [call["server"] for call in servers] == ["on", "off"]
    assert all(call["argv"][:4] == ["--model", "MODEL", "-tp", "8"] for call in servers)
    assert len(fakes.calls("bench")) == 6
    assert "servers per-side" in fakes.out.read_text()


def test_nothing_engaged_gives_the_reason_and_no_table(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(server="skipped")
    assert bench_run(fakes) == 1
    assert "0/4: fp8_bmm: the absorb weight is fp8" in capsys.readouterr().err
    assert not fakes.out.exists()
    assert [call["server"] for call in fakes.calls("server")] == ["on"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("silent", "no proof that the fast path is on"),
        ("off-is-on", "the fast path is on with the flag off"),
        ("other-version", "different versions of vLLM"),
        ("dies", "HIP out of memory"),
    ],
)
def test_sides_that_do_not_compare_give_no_table(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], how: str, said: str
) -> None:
    fakes.set(server=how)
    assert bench_run(fakes) == 1
    assert said in capsys.readouterr().err
    assert not fakes.out.exists()
    assert all(soon_gone(call["pid"]) for call in fakes.calls() if "pid" in call)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("failed", "on, run 2: 3 of 200 requests failed"),
        ("short", "off, run 1: 51199 output tokens instead of 51200"),
        ("no-tpot", "off, run 1: no tpot"),
    ],
)
def test_a_bad_measurement_invalidates_its_row(fakes: SimpleNamespace, how: str, said: str) -> None:
    fakes.set(bench=how)
    assert bench_run(fakes) == 1
    assert f"**invalid**: {said}" in fakes.out.read_text()
    assert "on faster" not in fakes.out.read_text()


def test_a_client_s_death_is_reported(fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.set(bench="crashes")
    assert bench_run(fakes) == 1
    assert "ConnectionResetError: the client is gone" in capsys.readouterr().err


def test_a_result_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\('off', 0, 0\)"):
        sweep.collect(tmp_path, [{"run": 0, "point": 0}])


HOSTILE = "x|y`z` <script>alert(1)</script> [a](javascript:b) \x1b[2J\nnext"


def test_hostile_text_reaches_the_page_as_text(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "machine", lambda: {"card": HOSTILE})
    monkeypatch.setenv("FAKE_SERVER", "hostile-version")
    assert bench_run(fakes, "--on-env", "A=1\n# heading", "--", "--served-model-name", HOSTILE) == 0
    shown = fakes.out.read_text()
    assert "\x1b" not in shown
    assert "# heading" not in shown.splitlines()
    outside = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
    assert "<script>" not in outside
    assert "[a](" not in outside
    assert "&lt;script&gt;" in outside


def test_a_bad_measurement_cannot_add_a_cell() -> None:
    point = bench.Point(1, 0, 2, 1.0)
    rows = bench.tables([bench.Row(point, {}, "off, run 1: a | b\n| c")])
    assert len(rows) == 3
    assert rows[2].count("|") == rows[0].count("|") + 2
    assert "a \\| b \\| c" in rows[2]


@pytest.mark.mutation
def test_an_unchecked_status_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def skipped() -> None:
        with pytest.raises(RunError):
            proof.prove({"side": "on", "url": "http://127.0.0.1:1", "log": None}, tmp_path, "vllm")

    skipped()
    monkeypatch.setattr(proof, "check_on", lambda log, metrics: "trust me")
    monkeypatch.setattr(proof, "get", lambda url: '{"version": "1", "data": [{"id": "m"}]}')
    with pytest.raises(pytest.fail.Exception):
        skipped()


@pytest.mark.mutation
def test_uncounted_failures_are_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "invalid", lambda result, point, prompts: None)
    with pytest.raises(AssertionError):
        test_a_bad_measurement_invalidates_its_row(fakes, "failed", "on, run 2: 3 of 200 requests failed")


def test_variables_of_one_side_reach_its_server_alone_and_stand_on_the_page(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    assert bench_run(fakes, "--on-env", "VLLM_ROCM_USE_AITER_FP8BMM=0") == 0
    seen = {call["server"]: call["fp8bmm"] for call in fakes.calls("server")}
    assert seen == {"off": None, "on": "0"}
    assert "    VLLM_ROCM_USE_AITER_FP8BMM=0 python" in fakes.out.read_text()
    assert "VLLM_ROCM_USE_AITER=1" in page.environment()


def test_a_weaker_absorb_bmm_on_both_sides_is_named_as_not_claimed(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_run(fakes) == 0
    assert "fp8 absorb BMM" not in fakes.out.read_text()
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_FP8BMM", "0")
    assert bench_run(fakes) == 0
    assert "A gain over vLLM's defaults: both sides ran with VLLM_ROCM_USE_AITER_FP8BMM=0" in fakes.out.read_text()


def test_secrets_of_the_environment_stay_off_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    assert "hidden" not in page.environment()
