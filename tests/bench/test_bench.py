"""The benchmark without a GPU: what it says then, what it counts, and what it makes of figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from vllm_aiter_mla.commands.bench import command, page, paths, points, run, timing
from vllm_aiter_mla.commands.bench.points import Point
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.measure import MAX_SETS, sets_needed

MACHINE = {"card": "a card", "torch": "2.11", "triton": "3.6", "runtime": "CUDA 13", "python": "3.12"}


def row(tokens, heads, ours, unfused, quantised=True, **more):
    timings = {
        paths.OURS: timing.Timing(ours, ours, ours, 1),
        paths.UNFUSED: timing.Timing(unfused, unfused, unfused, 3),
        **{name: timing.Timing(value, value, value, 3) for name, value in more.items()},
    }
    return run.Row(Point(tokens, heads, quantised), 8, timings, {paths.AITER: "AITER needs ROCm"}, {})


def report(*rows):
    return run.Report(MACHINE, "sm90", 4000.0, 50, list(rows))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_triton_bench_without_a_gpu_says_so_in_one_line_and_exits_2(capsys):
    assert command.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "a GPU is needed" in said.err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kind": "fp4"}, "--type fp4: fp8, bf16, both expected"),
        ({"weights": "fp4"}, "--weights fp4: bf16, fp8 expected"),
        ({"rounds": 0}, "--rounds 0: between 1 and"),
        ({"tokens": (4, -1)}, "--tokens -1: between 1 and"),
        ({"tokens": (10**20,)}, "--tokens 100000000000000000000: between 1 and"),
        ({"heads": ()}, "--heads: at least one value"),
        ({"json_path": Path("no/such/folder/x.json")}, "--json no/such/folder/x.json: its folder does not exist"),
        ({"html_path": Path(".")}, "--html .: is a folder"),
    ],
)
def test_triton_bench_names_a_wrong_option_and_exits_2_before_it_looks_for_a_gpu(capsys, wrong, told):
    assert command.main(**wrong) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"bench: {told}")
    assert said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_triton_bench_command_line_exits_2_without_a_gpu():
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from vllm_aiter_mla.commands.bench.command import bench

    app = typer.Typer()
    app.command()(bench)
    assert CliRunner().invoke(app, ["--tokens", "1", "--heads", "16"]).exit_code == 2


def test_triton_bench_covers_the_grid_of_the_issue():
    assert points.TOKENS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert points.HEADS == (8, 16, 32, 64, 128)
    assert len(points.grid(points.TOKENS, points.HEADS, (True, False))) == 100


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("fp8_weight", [True, False])
def test_triton_bench_counts_each_byte_of_a_call_once(quantised, fp8_weight):
    point = Point(3, 2, quantised, fp8_weight)
    (x,) = points.operands(point, torch.float8_e4m3fn, 1, device="cpu")
    read = [x.q, x.k_pe, x.kv_c, x.weight.tensors[0][1], x.slot_mapping, x.positions, x.cos_sin_cache[:3]]
    out = reference.prepare(x)
    cache_rows = x.kv_cache.view(-1, 576)[:3]
    assert point.bytes_once == sum(t.numel() * t.dtype.itemsize for t in [*read, out, cache_rows])
    assert point.flops == 2 * x.q[..., :128].numel() * 512


def test_triton_bench_rotates_more_bytes_than_the_caches_hold():
    for point in points.grid(points.TOKENS, points.HEADS, (True,)):
        count = sets_needed(point.bytes_once, 60 << 20)
        assert count * point.bytes_once >= 2 * (60 << 20)
        assert count <= MAX_SETS


def test_triton_bench_operand_sets_share_nothing_but_table_and_scales():
    a, b = points.operands(Point(2, 2, True), torch.float8_e4m3fn, 2, device="cpu")
    for name in ("q", "kv_c", "w_uk_t", "kv_cache"):
        first, second = dict(a.tensors)[name], dict(b.tensors)[name]
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_triton_bench_compares_with_the_best_unfused_sequence():
    slow_ours = row(8, 16, ours=5.0, unfused=12.0, **{paths.VLLM: 10.0})
    assert slow_ours.ratio == 2.0, "vLLM's own is the stronger baseline here"


def test_triton_bench_names_the_cap_that_its_figures_call_for():
    found = report(row(64, 16, 5, 10), row(256, 16, 10, 9), row(512, 16, 20, 15), row(256, 16, 5, 9, quantised=False))
    assert run.caps(found) == ['Cap("sm90", 16, True, 256, "a card, 2.11, 3.6, CUDA 13, 3.12")']
    assert 'Cap("sm90", 16, True, 256' in page.text(found)
    assert "slower than the unfused sequence" in page.text(found)


def test_triton_bench_holds_the_bounds_and_leaves_open_what_was_not_measured():
    good = run.bounds(report(row(64, 16, 5, 10), row(256, 16, 10, 13)))
    assert [bound.holds for bound in good] == [True, True, True, None]
    bad = run.bounds(report(row(64, 16, 5, 9.9), row(256, 16, 10, 9), row(256, 128, 1000, 2000)))
    assert [bound.holds for bound in bad] == [False, False, False, False]
    assert "bound: share of the copy bandwidth >= 0.70 for N = 128, T = 256, fp8: not measured" in page.text(report())


def test_triton_bench_gives_bandwidth_by_bytes_over_time():
    one = row(256, 128, ours=10.0, unfused=20.0)
    assert one.gbps == pytest.approx(Point(256, 128, True).bytes_once / 10e-6 / 1e9)


def test_triton_bench_does_not_time_a_path_that_is_wrong():
    (x,) = points.operands(Point(4, 2, True), torch.float8_e4m3fn, 1, device="cpu")
    before = x.kv_cache.view(torch.uint8).clone()

    def forgets_the_cache(inputs):
        return reference.prepare(run.replace(inputs, kv_cache=inputs.kv_cache.clone()))

    ways = [
        paths.Path(paths.TORCH, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
        paths.Path("single rounding", reference.prepare),
        paths.Path("unscaled", lambda inputs: reference.prepare(run.replace(inputs, q_scale=inputs.q_scale * 2))),
        paths.Path("no cache", forgets_the_cache),
        paths.Path("no memory", lambda inputs: torch.empty(1 << 60)),
        paths.Path(paths.AITER, None, "AITER needs ROCm"),
    ]
    wrong = run.disagreements(ways, x)
    assert set(wrong) == {"unscaled", "no cache", "no memory"}
    assert wrong["no memory"].startswith("it raised RuntimeError: ")
    assert "query" in wrong["unscaled"]
    assert "cache" in wrong["no cache"]
    assert torch.equal(before, x.kv_cache.view(torch.uint8)), "the operands that are timed stay as they were"


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("noise", "outcome"), [(0.005, set()), (0.1, {"codes"})])
def test_triton_bench_compares_a_product_over_codes_by_its_norm(noise: float, outcome: set[str], quantised: bool):
    """Next to zero it is several steps off: representable steps would call a right product wrong."""
    (x,) = points.operands(Point(4, 2, quantised, fp8_weight=True), torch.float8_e4m3fn, 1, device="cpu")
    absorbed = x.weight.reference(x.q_nope)
    drawn = torch.randn(absorbed.shape, generator=torch.Generator().manual_seed(0))
    product = (absorbed.float() + noise * absorbed.float().pow(2).mean().sqrt() * drawn).to(absorbed.dtype)
    ways = [
        paths.Path(paths.TORCH, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
        paths.Path("codes", lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING, product)),
    ]
    assert set(run.disagreements(ways, x)) == outcome


def test_triton_bench_keeps_what_it_has_measured_when_a_point_fails(pretended_gpu, monkeypatch):
    row_of = run._row

    def fails(point, *rest):
        if point.tokens == 2:
            raise MemoryError("planted")
        return row_of(point, *rest)

    monkeypatch.setattr(run, "_row", fails)
    found = run.run([Point(1, 2, True), Point(2, 2, True), Point(4, 2, True)], 2)
    assert [row.point.tokens for row in found.rows] == [1]
    assert "STOPPED at T=2 N=2 fp8: MemoryError: planted" in page.text(found)


def test_triton_bench_files_are_readable_and_self_contained(tmp_path: Path):
    found = report(row(1, 16, 4, 9), row(2, 16, 5, 9), row(1, 8, 4, 9, quantised=False))
    read = json.loads(json.dumps(found.as_dict()))
    assert read["rows"][0]["ratio"] == 2.25
    assert read["machine"]["card"] == "a card"
    text = page.page(found)
    assert text.count("<svg") == 2
    assert "://" not in text
    assert "default-src &#39;none&#39;" in text
    assert "aiter: not measured: AITER needs ROCm" in text


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The whole run with everything that needs a GPU replaced: its wiring, not its figures."""
    from vllm_aiter_mla.kernels.triton import launcher

    def ways(sample):
        return [
            paths.Path(paths.OURS, reference.prepare),
            paths.Path(paths.UNFUSED, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
            paths.Path(paths.TORCH, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
            paths.Path(paths.AITER, None, "AITER needs ROCm"),
        ]

    def measure(timed, sets, rounds):
        speed = {paths.OURS: 5.0, paths.UNFUSED: 12.0, paths.TORCH: 40.0}
        return {way.name: timing.Timing(speed[way.name], 4.0, 50.0, 1) for way in timed if way.prepare is not None}

    real = points.operands
    monkeypatch.setattr(launcher, "current_arch", lambda: "sm90")
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "machine", lambda: MACHINE)
    monkeypatch.setattr(run, "cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(run, "operands", lambda point, dtype, count: real(point, dtype, count, device="cpu"))
    monkeypatch.setattr(paths, "available", ways)
    monkeypatch.setattr(timing, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(timing, "measure", measure)


def test_triton_bench_run_prints_its_table_and_writes_its_files(pretended_gpu, tmp_path: Path, capsys):
    files = tmp_path / "bench.json", tmp_path / "bench.html"
    assert command.main((1, 4), (2,), "both", 3, *files) == 0
    out = capsys.readouterr().out
    assert out.count("2.40") == 5, "one ratio per point, and the lowest of them beside the bound"
    assert "caps: none called for" in out
    assert len(json.loads(files[0].read_text())["rows"]) == 4
    assert files[1].read_text().count("<svg") == 2


def test_triton_bench_check_fails_on_a_broken_bound_only_when_asked(pretended_gpu, monkeypatch, capsys):
    monkeypatch.setattr(timing, "measure", lambda timed, sets, rounds: row(1, 16, ours=5.0, unfused=6.0).timings)
    assert command.main((1,), (16,), "fp8", 3, check=False) == 0
    assert command.main((1,), (16,), "fp8", 3, check=True) == 1
    assert "bound: ratio >= 2.0 for T <= 64, N = 16, fp8: BROKEN (lowest 1.20)" in capsys.readouterr().out


def test_triton_bench_on_a_card_without_hardware_fp8_asks_for_bf16(pretended_gpu, monkeypatch, capsys):
    from vllm_aiter_mla.kernels.triton import launcher

    monkeypatch.setattr(launcher, "current_arch", lambda: "sm80")
    assert command.main((1,), (2,), "fp8", 3) == 2
    assert "sm80 has no fp8 conversion in hardware" in capsys.readouterr().err
    assert command.main((1,), (2,), "bf16", 3) == 0
