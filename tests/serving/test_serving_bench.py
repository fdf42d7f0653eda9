"""Claims about `serve_bench.py` from option to table, with fakes in place of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import bench, engaged, page, session
from serving_runs import bench_run, gone


def test_table_holds_both_arms_their_ratio_and_what_is_not_claimed(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--json", str(fakes.out.with_suffix(".json"))) == 0
    page = fakes.out.read_text()
    assert "| input-len | prefix-len | output-len | rr | off_ttft ms | on_ttft ms |" in page
    row = "| 1024 | 0 | 256 | 50 | 100.00 ± 5.77 | 100.00 ± 6.66 | 1.000 ± 0.088 | not distinguishable "
    assert row + "| 10.00 ± 0.10 | 8.00 ± 0.20 | 1.250 ± 0.034 | on faster |" in page
    for part in ("## Not claimed", "On-arm: 4/4 MLA layers engaged", "fake card", "0.32.0", "# off", "per-run"):
        assert part in page
    record = json.loads(fakes.out.with_suffix(".json").read_text())
    assert record["gauges"] == {"off": {}, "on": {"engaged": 4, "refused": 0}}
    assert record["results"]["on"]["2"][1]["mean_tpot_ms"] == 8.3464


def test_arms_alternate_and_get_the_same_seeds_and_another_per_run(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--warmups", "4") == 0
    calls = fakes.calls()
    assert [call["server"] for call in calls if "server" in call] == ["on", "off", "off", "on", "on", "off"]
    sent = [call["bench"] for call in calls if "bench" in call and "--save-result" in call["bench"]]
    by_arm = {
        arm: sorted(
            (int(one["--seed"]), one["--request-rate"]) for one in sent if f"-{arm}-" in one["--result-filename"]
        )
        for arm in ("off", "on")
    }
    assert by_arm["off"] == by_arm["on"]
    assert len({number for number, _ in by_arm["on"]}) == 6
    warm = [call["bench"] for call in calls if "bench" in call and "--save-result" not in call["bench"]]
    assert len(warm) == 6
    assert {one["--seed"] for one in warm} == {str(bench.WARM_UP_SEED)}


def test_one_start_per_arm_where_that_is_asked_for_and_said_so(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--servers", "per-arm") == 0
    assert [call["server"] for call in fakes.calls() if "server" in call] == ["on", "off"]
    assert "servers per-arm" in fakes.out.read_text()


def test_serve_options_reach_both_arms(fakes: SimpleNamespace) -> None:
    assert bench_run(fakes, "--servers", "per-arm", "--", "-tp", "8") == 0
    for call in fakes.calls():
        assert "server" not in call or call["argv"][:4] == ["--model", "MODEL", "-tp", "8"]


def test_nothing_engaged_gives_the_reason_and_no_table(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(server="refused")
    assert bench_run(fakes) == 1
    assert "0/4: fp8_bmm: the absorb weight is fp8" in capsys.readouterr().err
    assert not fakes.out.exists()
    assert [call["server"] for call in fakes.calls() if "server" in call] == ["on"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("silent", "no proof that the on-arm is on"),
        ("off-is-on", "the off-arm has the fast path on"),
        ("other-version", "different versions of vLLM"),
        ("dies", "HIP out of memory"),
    ],
)
def test_arms_that_do_not_compare_give_no_table(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], how: str, said: str
) -> None:
    fakes.set(server=how)
    assert bench_run(fakes) == 1
    assert said in capsys.readouterr().err
    assert not fakes.out.exists()
    assert all(gone(call["pid"]) for call in fakes.calls() if "pid" in call)


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


@pytest.mark.mutation
def test_an_unchecked_census_is_caught(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engaged, "check_on", lambda log, metrics: "trust me")
    with pytest.raises(AssertionError):
        test_nothing_engaged_gives_the_reason_and_no_table(fakes, capsys)


@pytest.mark.mutation
def test_uncounted_failures_are_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "invalid", lambda result, point, prompts: None)
    with pytest.raises(AssertionError):
        test_a_bad_measurement_invalidates_its_row(fakes, "failed", "on, run 2: 3 of 200 requests failed")


@pytest.mark.mutation
def test_seeds_that_differ_between_the_arms_are_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = bench.plan

    def plan(url: str, served: str, load: bench.Load, points: list, visit: session.Visit, folder: Path) -> list:
        other = bench.Load(load.prompts, load.warmups, load.seed + (visit.arm == "on"), load.tokenizer)
        return inner(url, served, other, points, visit, folder)

    monkeypatch.setattr(bench, "plan", plan)
    with pytest.raises(AssertionError):
        test_arms_alternate_and_get_the_same_seeds_and_another_per_run(fakes)


def test_variables_of_one_arm_reach_its_server_alone_and_stand_on_the_page(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    assert bench_run(fakes, "--servers", "per-arm", "--on-env", "VLLM_ROCM_USE_AITER_FP8BMM=0") == 0
    seen = {call["server"]: call["fp8bmm"] for call in fakes.calls() if "server" in call}
    assert seen == {"off": None, "on": "0"}
    assert "    VLLM_ROCM_USE_AITER_FP8BMM=0 python" in fakes.out.read_text()
    assert "VLLM_ROCM_USE_AITER=1" in page.environment()


def test_a_weaker_absorb_bmm_in_both_arms_is_named_as_not_claimed(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_run(fakes, "--servers", "per-arm") == 0
    assert "fp8 absorb BMM" not in fakes.out.read_text()
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_FP8BMM", "0")
    assert bench_run(fakes, "--servers", "per-arm") == 0
    assert "A gain over vLLM's defaults: both arms ran with VLLM_ROCM_USE_AITER_FP8BMM=0" in fakes.out.read_text()


def test_secrets_of_the_environment_stay_off_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    assert "hidden" not in page.environment()
