"""The benchmark without a GPU: which paths it times, what it counts, and what it makes of figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

pytest.importorskip("triton")

from vllm_aiter_mla.commands.bench import points, run
from vllm_aiter_mla.commands.bench.points import Point
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.measure import MAX_SETS, sets_needed

MACHINE = {"card": "a card", "torch": "2.11"}


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def row(tokens: int = 8, heads: int = 16, **us: float) -> run.Row:
    timings = {name.replace("_", " "): run.Timing(value, value, value, 1) for name, value in us.items()}
    return run.Row(Point(tokens, heads, True), 8, timings, {}, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_without_a_gpu_says_so_in_one_line_and_exits_2() -> None:
    done = bench("--tokens", 1)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "a GPU is needed" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [("--type", "fp4"), ("--weights", "fp4"), ("--rounds", 0), ("--tokens", -1), ("--tokens", 10**20), ("--heads", 0)],
)
def test_bench_names_a_wrong_option_and_exits_2_before_it_looks_for_a_gpu(wrong: tuple[str, object]) -> None:
    done = bench(*wrong)
    assert (done.exit_code, wrong[0] in done.stderr) == (2, True), done.stderr
    assert "GPU" not in done.stderr


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("fp8_weight", [True, False])
def test_bench_counts_each_byte_of_a_call_once(quantised: bool, fp8_weight: bool) -> None:
    point = Point(3, 2, quantised, fp8_weight)
    (x,) = points.operands(point, torch.float8_e4m3fn, 1, device="cpu")
    read = [x.q, x.k_pe, x.kv_c, x.weight.tensors[0][1], x.slot_mapping, x.positions, x.cos_sin_cache[:3]]
    out = reference.prepare(x)
    cache_rows = x.kv_cache.view(-1, 576)[:3]
    assert point.bytes_once == sum(t.numel() * t.dtype.itemsize for t in [*read, out, cache_rows])
    assert point.flops == 2 * x.q[..., :128].numel() * 512


def test_bench_rotates_more_bytes_than_the_caches_hold() -> None:
    for point in points.grid(points.TOKENS, points.HEADS, (True,)):
        count = sets_needed(point.bytes_once, 60 << 20)
        assert count * point.bytes_once >= 2 * (60 << 20)
        assert count <= MAX_SETS


def test_bench_operand_sets_share_nothing_but_table_and_scales() -> None:
    a, b = points.operands(Point(2, 2, True), torch.float8_e4m3fn, 2, device="cpu")
    for name in ("q", "kv_c", "w_uk_t", "kv_cache"):
        first, second = dict(a.tensors)[name], dict(b.tensors)[name]
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("us", "rival", "ratio"),
    [
        ({"one_launch": 5.0, "unfused": 12.0, "vllm": 10.0}, "vllm", 2.0),
        ({"one_launch": 5.0, "unfused": 12.0, "aiter": 4.0}, "aiter", 0.8),
        ({"one_launch": 5.0}, None, None),
        ({"unfused": 12.0}, "unfused", None),
    ],
)
def test_bench_compares_with_the_strongest_rival(us: dict[str, float], rival: str | None, ratio: float | None) -> None:
    assert (row(**us).rival, row(**us).ratio) == (rival, ratio)


def two_roundings(inputs):
    return reference.prepare(inputs, reference.TWO_ROUNDING)


def forgets_the_cache(inputs):
    return reference.prepare(replace(inputs, kv_cache=inputs.kv_cache.clone()))


def test_bench_finds_a_path_that_is_wrong_and_leaves_the_operands_as_they_are() -> None:
    (x,) = points.operands(Point(4, 2, True), torch.float8_e4m3fn, 1, device="cpu")
    before = x.kv_cache.view(torch.uint8).clone()
    able = {
        run.TORCH: two_roundings,
        "single rounding": reference.prepare,
        "unscaled": lambda inputs: reference.prepare(replace(inputs, q_scale=inputs.q_scale * 2)),
        "no cache": forgets_the_cache,
        "no memory": lambda inputs: torch.empty(1 << 60),
    }
    wrong = run.disagreements(able, x)
    assert set(wrong) == {"unscaled", "no cache", "no memory"}
    for name, word in (("unscaled", "query"), ("no cache", "cache"), ("no memory", "RuntimeError")):
        assert word in wrong[name]
    assert torch.equal(before, x.kv_cache.view(torch.uint8))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("noise", "outcome"), [(0.005, set()), (0.1, {"codes"})])
def test_bench_compares_a_product_over_codes_by_its_norm(noise: float, outcome: set[str], quantised: bool) -> None:
    """Next to zero it is several steps off: representable steps would call a right product wrong."""
    (x,) = points.operands(Point(4, 2, quantised, fp8_weight=True), torch.float8_e4m3fn, 1, device="cpu")
    absorbed = x.weight.reference(x.q_nope)
    drawn = torch.randn(absorbed.shape, generator=torch.Generator().manual_seed(0))
    product = (absorbed.float() + noise * absorbed.float().pow(2).mean().sqrt() * drawn).to(absorbed.dtype)
    able = {
        run.TORCH: two_roundings,
        "codes": lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING, product),
    }
    assert set(run.disagreements(able, x)) == outcome


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A whole run on this CPU: real operands and comparison, and times by path in place of a GPU's clock."""
    from vllm_aiter_mla.kernels.triton import launcher

    def available(sample):
        wrong = {run.VLLM: forgets_the_cache}
        able = {run.OURS: reference.prepare, run.UNFUSED: two_roundings, run.TORCH: two_roundings}
        return able | wrong, {run.AITER: "AITER needs ROCm"}

    us, real = {run.OURS: 5.0, run.UNFUSED: 12.0, run.TORCH: 40.0}, points.operands
    for attribute, value in {
        "require_gpu": lambda: None,
        "machine": lambda: MACHINE,
        "cache_bytes": lambda: 1 << 20,
        "operands": lambda point, dtype, count: real(point, dtype, count, device="cpu"),
        "available": available,
        "measure": lambda paths, sets, rounds: {name: run.Timing(us[name], 4.0, 50.0, 1) for name in paths},
    }.items():
        monkeypatch.setattr(run, attribute, value)
    monkeypatch.setattr(launcher, "current_arch", lambda: "gfx942")
    return monkeypatch


def test_bench_times_only_right_paths_and_exits_1_for_a_wrong_one(on_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = bench("-t", 1, "-t", 4, "-n", 2, "--json", tmp_path / "bench.json")
    assert done.exit_code == 1
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(rows) == 4
    assert {row["rival"] for row in rows} == {"unfused"}
    assert all(set(row["timings"]) == {run.OURS, run.UNFUSED, run.TORCH} for row in rows)
    for said in ("2.40", "WRONG, not timed: vllm at T=1 N=2", "aiter: not measured: AITER needs ROCm", "a card"):
        assert said in done.stdout


def test_bench_keeps_what_it_has_measured_when_a_point_fails(on_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = run._row

    def fails(point, *rest):
        if point.tokens == 2:
            raise MemoryError("planted")
        return real(point, *rest)

    on_cpu.setattr(run, "_row", fails)
    done = bench("-t", 1, "-t", 2, "-t", 4, "-n", 2, "--type", "fp8", "--json", tmp_path / "bench.json")
    found = json.loads((tmp_path / "bench.json").read_text())
    assert done.exit_code == 1
    assert [one["point"]["tokens"] for one in found["rows"]] == [1]
    assert found["stopped"] == "T=2 N=2 fp8: MemoryError: planted"
    assert "STOPPED at T=2" in done.stdout


def test_bench_on_a_card_without_hardware_fp8_asks_for_bf16(on_cpu: pytest.MonkeyPatch) -> None:
    from vllm_aiter_mla.kernels.triton import launcher

    on_cpu.setattr(launcher, "current_arch", lambda: "sm80")
    fp8 = bench("-t", 1, "-n", 2, "--type", "fp8")
    assert (fp8.exit_code, "sm80 has no fp8 conversion in hardware" in fp8.stderr) == (2, True)
    assert "1" in bench("-t", 1, "-n", 2, "--type", "bf16").stdout
