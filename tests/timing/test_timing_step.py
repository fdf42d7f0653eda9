"""``check --only timing`` on a made-up card: real operands and checks, times by kernel from a made-up clock."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from tests.sandbox import gpu_ops
from tests.sandbox.rehearsal_card import RehearsalCard
from tests.support import in_process
from tests.support.made_up_clock import MadeUpClock, Named, costs, named_kernels
from tests.support.planted import raising
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.timing import child, rivals, stand_in, step
from vllm_aiter_mla.commands.check.timing.record import Measurement
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.inputs import synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend
from vllm_aiter_mla.serving import backends


class Wrong(Named):
    def bind(self, inputs):
        return Binding(lambda given: reference.prepare(replace(given, kv_cache=given.kv_cache.clone())))


@pytest.fixture
def card(monkeypatch):
    """Kernels by name; every one is the reference."""
    in_process.install(monkeypatch)
    kernels = named_kernels(monkeypatch)
    RehearsalCard().install(monkeypatch).arch = "gfx942"
    MadeUpClock(costs(aiter=8.0, triton=5.0, vllm=10.0)).install(monkeypatch)
    return kernels


def run(*options):
    return CliRunner().invoke(app, ["check", "--only", "timing", "--heads", "2", *options])


def timed(folder):
    """The record of the step, as JSON has it."""
    (step,) = json.loads((folder / "check.json").read_text())["steps"]
    return step["data"]


def test_timing_times_what_start_up_chooses_between(card, tmp_path):
    card["aiter"] = Named("aiter", most=32)
    done = run("--tokens", "1", "--tokens", "64", "--json", str(tmp_path / "check.json"))
    assert done.exit_code == 0, done.output
    rows = timed(tmp_path)["rows"]
    assert [(row["tokens"], row["cache_type"], set(row["us"])) for row in rows] == [
        (1, "fp8", {"aiter", "triton", "vllm"}),
        (64, "fp8", {"triton", "vllm"}),
        (1, "bf16", {"aiter", "triton", "vllm"}),
        (64, "bf16", {"triton", "vllm"}),
    ]
    assert {row["ratio"] for row in rows} == {2.0}
    assert "64 tokens are too many" in rows[1]["untimed_reasons"]["aiter"]
    assert "aiter: not timed: 64 tokens are too many" in done.output


@pytest.mark.parametrize(("kind", "ratio", "left_out"), [("fp8", 2.0, ["aiter"]), ("bf16", 5.0, [])])
def test_a_kernel_that_overflows_to_nan_is_timed_and_counts_as_none_of_ours(
    card, monkeypatch, tmp_path, kind, ratio, left_out
):
    """Start-up would leave it out: a ratio over it would promise what no server runs."""
    MadeUpClock(costs(aiter=2.0, triton=5.0, vllm=10.0)).install(monkeypatch)
    done = run("--tokens", "1", "--type", kind, "--json", str(tmp_path / "check.json"))
    (row,) = timed(tmp_path)["rows"]
    assert (row["us"]["aiter"], row["ratio"], row["excluded_kernels"]) == (2.0, ratio, left_out)
    assert ("aiter: it turns" in done.output) == bool(left_out)


def test_a_rival_that_never_serves_is_timed_and_held_against_ours(card, monkeypatch, tmp_path):
    MadeUpClock(costs(aiter=8.0, triton=5.0, vllm=10.0, **{"aiter-one-launch": 6.0})).install(monkeypatch)
    monkeypatch.setattr(rivals, "check_rivals", lambda *_, **__: ({"aiter-one-launch": Named("aiter-one-launch")}, {}))
    assert run("--tokens", "1", "--type", "fp8", "--json", str(tmp_path / "check.json")).exit_code == 0
    (row,) = timed(tmp_path)["rows"]
    assert (row["us"]["aiter-one-launch"], row["ratio"]) == (6.0, 1.2)


@pytest.mark.parametrize("missing", [True, False])
def test_timing_on_a_card_without_vllms_kernels_times_a_stand_in_and_says_so(card, monkeypatch, tmp_path, missing):
    RehearsalCard().install(monkeypatch).arch = "sm90"
    made = MadeUpClock(costs(aiter=8.0, triton=5.0, vllm=10.0, **{"vllm-stand-in": 15.0}))
    made.install(monkeypatch)
    monkeypatch.setattr(stand_in, "StandInBackend", lambda: Named("vllm-stand-in"))
    if missing:
        monkeypatch.setitem(backends.FACTORIES, "vllm", lambda platform, settings: "no such kernel")
    done = run("--tokens", "1", "--type", "fp8", "--json", str(tmp_path / "check.json"))
    (row,) = timed(tmp_path)["rows"]
    assert done.exit_code == 0, done.output
    assert row["ratio"] == (3.0 if missing else 2.0)
    assert set(row["us"]) == {"triton", "vllm-stand-in" if missing else "vllm"} | {"aiter"} & set(row["us"])
    for told in ("vllm-stand-in, us", "stand-in / ours", "vllm-stand-in: replaces vLLM's kernels"):
        assert (told in done.output) == missing
    assert ("rival / ours" in done.output) != missing


def test_a_stand_in_that_fails_its_check_or_takes_no_such_weights_is_not_timed(card, monkeypatch):
    RehearsalCard().install(monkeypatch).arch = "sm90"
    platform = Platform("sm90", (9, 0))
    of_fp8, of_bf16 = (child.TimingRequest((), (), (), weights).shape("bf16", 2) for weights in ("fp8", "bf16"))
    assert "fp8 weights" in rivals.check_rivals(platform, of_fp8, 8, False, {})[1]["vllm-stand-in"]
    monkeypatch.setattr(stand_in, "StandInBackend", lambda: Wrong("vllm-stand-in"))
    assert "FAILED" in rivals.check_rivals(platform, of_bf16, 8, False, {})[1]["vllm-stand-in"]


def only_codes(card, monkeypatch):
    """A card without vLLM's kernels, and absorb weights that the stand-in does not take."""
    RehearsalCard().install(monkeypatch).arch = "sm90"
    monkeypatch.setitem(backends.FACTORIES, "vllm", lambda platform, settings: "no such kernel")
    return ("--weights", "fp8"), "neither vLLM's kernels nor a stand-in was timed"


def too_many_tokens(card, monkeypatch):
    card |= {name: Named(name, most=0) for name in ("aiter", "triton")}
    return (), "none of our kernels was timed"


@pytest.mark.parametrize("nothing", [only_codes, too_many_tokens])
def test_timing_that_has_nothing_to_compare_is_unknown(card, monkeypatch, tmp_path, nothing):
    options, missing = nothing(card, monkeypatch)
    done = run("--tokens", "1", "--type", "bf16", *options, "--json", str(tmp_path / "check.json"))
    (step,) = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert (done.exit_code, step["status"], missing in step["detail"]) == (3, "unknown", True), done.output
    assert [row["ratio"] for row in step["data"]["rows"]] == [None]


class VLLMOwn(Named):
    """vLLM's own sequence on the sandbox's ops: it rounds as vLLM's kernel does."""

    trusted = True

    def bind(self, inputs):
        bound = VLLMBackend(compat_layer, "gfx942").bind(inputs)
        assert not isinstance(bound, str), bound
        run = partial(bound.run)
        run.name = self.name  # for the clock
        return replace(bound, run=run)


def test_vllm_numerics_are_no_reason_for_timing_to_call_vllm_wrong(card, tmp_path):
    gpu_ops.register()
    card["vllm"] = VLLMOwn("vllm")
    done = run("--tokens", "8", "--type", "bf16", "--json", str(tmp_path / "check.json"))
    found = timed(tmp_path)
    assert (done.exit_code, found["failed_kernels"]) == (0, {}), done.output
    assert set(found["rows"][0]["us"]) == {"aiter", "triton", "vllm"}
    inputs = synthetic_inputs(child.TimingRequest((), (), (), "bf16").shape("bf16", 2), 8)
    assert card["vllm"].numerics(inputs) == reference.VLLM_KERNEL


@pytest.mark.parametrize(
    ("arch", "heads", "copied"), [("gfx942", 8, True), ("gfx942", 16, False), ("gfx950", 8, False)]
)
def test_a_query_that_vllm_pads_is_timed_with_that_copy(card, monkeypatch, arch, heads, copied):
    """vLLM pads none of gfx950's few heads in 16 bits, and a kernel that lays its query out padded needs no copy."""
    RehearsalCard().install(monkeypatch).arch = arch
    gpu_ops.register()
    card["vllm"], helper, padded = VLLMOwn("vllm"), compat_layer.padding_helper(), []
    pad = helper.get_mla_padded_q
    monkeypatch.setattr(helper, "get_mla_padded_q", lambda n, q: padded.append((n, q.shape[1])) or pad(n, q))
    MadeUpClock(costs(aiter=8.0, triton=5.0, vllm=10.0)).install(monkeypatch)
    found = child.time_layers(child.TimingRequest((2,), (heads,), ("bf16",), nope=192), {})
    assert (found.stop_reason, found.rows[0].ratio, padded) == ("", 2.0, [(8, 8)] * stopwatch.MIN_SETS * copied)


def test_a_vllm_that_pads_no_heads_is_timed_without_padding(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.rocm_aiter_mla", None)
    assert child.TimingRequest((), (), (), "bf16").shape("bf16", 8).out_heads == 0


def test_timing_does_not_time_a_wrong_kernel_and_exits_1(card, tmp_path):
    card["triton"] = Wrong("triton")
    done = run("--tokens", "1", "--type", "bf16", "--json", str(tmp_path / "check.json"))
    assert done.exit_code == 1
    (row,) = timed(tmp_path)["rows"]
    assert set(row["us"]) == {"aiter", "vllm"}
    assert "WRONG, not timed: triton: 2 heads, bf16" in done.output


def test_timing_names_a_wrong_kernel_if_a_later_check_raises(card, monkeypatch, tmp_path):
    card["triton"] = Wrong("triton")
    monkeypatch.setattr(rivals, "check_rivals", raising(MemoryError("planted")))
    run("--tokens", "1", "--type", "bf16", "--json", str(tmp_path / "check.json"))
    found = timed(tmp_path)
    assert ([*found["failed_kernels"]], found["stop_reason"]) == (["triton"], "2 heads, bf16: MemoryError: planted")


def test_timing_keeps_what_was_timed_when_a_size_fails(card, monkeypatch):
    real = stopwatch.time_shape

    def fails(able, shape, weight, counts, budget, pad):
        if counts == [8]:
            raise MemoryError("planted")
        return real(able, shape, weight, counts, budget, pad=pad)

    monkeypatch.setattr(stopwatch, "time_shape", fails)
    done = run("--tokens", "1", "--tokens", "8", "--tokens", "64", "--type", "fp8")
    assert done.exit_code == 1
    assert "STOPPED: 2 heads, fp8: MemoryError: planted" in done.output
    assert " 1 │ 2 " in done.output
    assert " 64 │ 2 " not in done.output


# The process tells its record without rows, then of the checks of aiter, aiter-opt, triton, vLLM's own kernels and two
# rivals, and for each number of tokens of the timing and its row.


NAME = process.import_path_of(child.time_layers)


def ends(monkeypatch, folder, told):
    """The process ends after it told so many values; return what was printed, and the step and its record."""
    in_process.install(monkeypatch, ends={NAME: told})
    done = run("--tokens", "1", "--tokens", "64", "--type", "fp8", "--json", str(folder / "check.json"))
    assert done.exit_code == 1, done.output
    (step,) = json.loads((folder / "check.json").read_text())["steps"]
    return step["status"], step["detail"], step["data"]


def test_timing_whose_process_ends_names_the_kernel_that_it_had_found_wrong(card, monkeypatch, tmp_path):
    """It ends in the timing, after all checks."""
    card["triton"] = Wrong("triton")
    status, _, found = ends(monkeypatch, tmp_path, 9)
    assert (status, [*found["failed_kernels"]]) == ("failed", ["triton"])
    assert found["rows"] == []


@pytest.mark.parametrize(("told", "kernel", "other"), [(2, "aiter", "triton"), (4, "triton", "aiter")])
def test_timing_leaves_a_kernel_out_in_whose_check_its_process_ended(card, monkeypatch, tmp_path, told, kernel, other):
    status, _, found = ends(monkeypatch, tmp_path, told)
    said = in_process.ENDED.sentence(f"the check of {kernel} at 2 heads, fp8")
    assert (status, found["stop_reason"], found["failed_kernels"]) == ("failed", "", {kernel: said})
    assert [set(row["us"]) for row in found["rows"]] == [{other, "vllm"}] * 2
    assert found["rows"][0]["untimed_reasons"][kernel] == said


@pytest.mark.parametrize(
    ("told", "doing", "kept"),
    [
        (0, "its start", []),
        (8, "the timing of aiter, triton, vllm at 1 tokens, 2 heads, fp8", []),
        (10, "the timing of aiter, triton, vllm at 64 tokens, 2 heads, fp8", [1]),
    ],
)
def test_timing_keeps_what_was_timed_when_its_process_ends(card, monkeypatch, tmp_path, told, doing, kept):
    status, detail, found = ends(monkeypatch, tmp_path, told)
    assert (status, detail, found["stop_reason"]) == ("failed", *[in_process.ENDED.sentence(doing)] * 2)
    assert [row["tokens"] for row in found["rows"]] == kept


RIVAL = "aiter-one-launch"


def a_rival_that_ends_the_process(card, monkeypatch, tmp_path):
    """AITER's checks end a process by an abort, also in a function that only a rival calls."""
    MadeUpClock(costs(aiter=8.0, triton=5.0, vllm=10.0, **{"aiter-decode-tile": 6.0, RIVAL: 7.0})).install(monkeypatch)
    monkeypatch.setattr(rivals, "_one_launch_backend", lambda *_: Named(RIVAL))
    monkeypatch.setattr(rivals, "_decode_tile_backend", lambda *_: Named("aiter-decode-tile"))
    in_process.install(monkeypatch, ends={NAME: 7})
    done = run("--tokens", "1", "--tokens", "64", "--type", "fp8", "--json", str(tmp_path / "check.json"))
    found = timed(tmp_path)
    assert [row["tokens"] for row in found["rows"]] == [1, 64], "an abort of a rival costs the rows"
    return done, found


def test_a_rival_in_whose_check_the_process_ended_is_not_timed_and_not_wrong(card, monkeypatch, tmp_path):
    done, found = a_rival_that_ends_the_process(card, monkeypatch, tmp_path)
    said = in_process.ENDED.sentence(f"the check of {RIVAL} at 2 heads, fp8")
    assert (done.exit_code, found["failed_kernels"], found["stop_reason"]) == (0, {}, ""), done.output
    assert [row["untimed_reasons"][RIVAL] for row in found["rows"]] == [said] * 2
    assert set(found["rows"][0]["us"]) == {"aiter", "triton", "vllm", "aiter-decode-tile"}


@pytest.mark.mutation
def test_mutation_an_abort_that_names_no_rival_is_caught(card, monkeypatch, tmp_path):
    check_rivals = rivals.check_rivals
    monkeypatch.setattr(rivals, "check_rivals", lambda *given: check_rivals(*given[:-1]))
    with pytest.raises(AssertionError, match="an abort of a rival costs the rows"):
        a_rival_that_ends_the_process(card, monkeypatch, tmp_path)


def test_a_size_is_named_with_its_heads_and_its_type(card, monkeypatch, tmp_path):
    MadeUpClock(costs(aiter=8.0, triton=12.0, vllm=10.0)).install(monkeypatch)
    card["aiter"] = Named("aiter", most=8)
    run("--tokens", "1", "--tokens", "64", "--type", "bf16", "--json", str(tmp_path / "check.json"))
    (step,) = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert step["detail"] == "slower at 1 of 2 sizes: 2 heads, bf16, 64 tokens"
    assert step["lines"][0].startswith("2 heads, bf16, 1 tokens: aiter 8.00 us")


def test_a_process_that_ends_is_said_in_one_sentence(card, monkeypatch):
    in_process.install(monkeypatch, ends={NAME: 0})
    assert f"STOPPED: {in_process.ENDED.sentence('its start')}" in run("--tokens", "1").output


@pytest.mark.mutation
def test_mutation_timing_that_keeps_nothing_of_a_process_that_ended_is_caught(card, monkeypatch, tmp_path):
    def without_rows(made, **changes):
        return replace(made, **changes | ({"rows": ()} if isinstance(made, Measurement) else {}))

    monkeypatch.setattr(step, "replace", without_rows)
    doing = "the timing of aiter, triton, vllm at 64 tokens, 2 heads, fp8"
    with pytest.raises(AssertionError, match=r"\[\] == \[1\]"):
        test_timing_keeps_what_was_timed_when_its_process_ends(card, monkeypatch, tmp_path, 10, doing, [1])
