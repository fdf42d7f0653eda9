"""``check``: each step fails for its own reason and no other step does; exit status, known issues, what is printed."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.sandbox.rehearsal_card import RehearsalCard, Scenario
from tests.support import in_process, plans
from tests.support.decisions import decision
from tests.support.planted import raising
from tests.support.statuses import record_of
from vllm_aiter_mla import files
from vllm_aiter_mla.admission import VLLM_FASTER, Skip
from vllm_aiter_mla.commands import machine, outputs, process
from vllm_aiter_mla.commands.check import idle, steps
from vllm_aiter_mla.commands.check import run as command
from vllm_aiter_mla.commands.check.context import CheckOptions, StepContext
from vllm_aiter_mla.commands.check.engine import child as engine_child
from vllm_aiter_mla.commands.check.engine import distance
from vllm_aiter_mla.commands.check.engine import record as engine
from vllm_aiter_mla.commands.check.engine import steps as engine_steps
from vllm_aiter_mla.commands.check.kernels import child as kernels_child
from vllm_aiter_mla.commands.check.options import KernelOptions, build_plan_environment
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult
from vllm_aiter_mla.commands.check.timing import child as timing_child
from vllm_aiter_mla.commands.check.timing import record as timing
from vllm_aiter_mla.commands.compat.vllm_options import USE_AITER
from vllm_aiter_mla.commands.machine import CheckResult
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.plan import build, config_source, issues, planner
from vllm_aiter_mla.kernels import device
from vllm_aiter_mla.status.record import NOT_RUN, DecisionGroup
from vllm_aiter_mla.verify import session
from vllm_aiter_mla.verify.results import Finding, Result, Verification

ISSUES = {issue["id"]: issue for issue in json.loads(issues.KNOWN_ISSUES.read_text())}
NO_CUSTOM_AR = "VLLM_ROCM_USE_AITER_CUSTOM_AR=0"
LOOK = machine.run_checks  # ``card`` replaces it
ENVIRONMENTS = ("machine", "kernels", "timing", "off", "on")
"""The steps and the engines that get variables, as ``card`` notes them."""
TOKEN = (3, {3: -0.5, 4: -1.0})
ANSWER = engine.EngineAnswer(
    generated_tokens={"short": [[TOKEN] * 20]},
    generated_text_logprobs={"short": [[-0.5] * 20]},
    prefill_step_logprobs={name: [[[-0.5, -0.5]] * 20] * 2 for name in engine.PREFILL_STEPS},
    step_seconds={name: [0.09, 0.02, 0.02] for name in engine.PREFILL_STEPS},
    num_launches=40,
    rank_records=(
        replace(
            record_of(["layer"], 16, "fp8", 0), engaged={"layer": "aiter"}, skipped={},
            decision_groups=(DecisionGroup(("layer",), decision((1, 16, "aiter"))),),
        ),
    ),
)  # fmt: skip


def made_up_plan(**changes: Any) -> dict[str, Any]:
    """A plan of 61 layers that engage on a gfx942, its fields replaced by ``changes``."""
    found: dict[str, Any] = json.loads(files.to_json(plans.made_up(NO_CUSTOM_AR)))
    found["reasons"], found["layers"]["engaged"] = [], found["layers"]["mla"]
    return found | {"outcome": "engaged", "heads_per_rank": 16} | changes


ASK, RUN = planner.make_plans, engine_steps.run_engine
"""What ``card`` replaces."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card on which every step passes; a test replaces what it breaks."""
    answers = {"off": deepcopy(ANSWER), "on": replace(deepcopy(ANSWER), num_launches=38)}
    made: dict[str, Any] = {"plan": made_up_plan(), "answers": answers, "checks": (CheckResult("ok", "fine"),)}
    made["results"] = [Result("fresh-data", "fp8", "aiter", "graph capture")]
    row = timing.make_row(1, 16, "fp8", {"vllm": 10.0, "triton": 5.0}, {})
    made["measured"] = timing.Measurement({"card": "a card"}, "fp8", (row,), {}, "")
    monkeypatch.setattr(machine, "run_checks", lambda _, env: made.update(machine=env) or made["checks"])
    monkeypatch.setattr(planner, "make_plans", lambda *_: (issues.with_known_issues(plans.parsed(made["plan"])),))
    # In this process, where the card is made up; tests/rehearsal runs the real ones.
    in_process.install(monkeypatch, lambda name, env: made.update({CALLED.get(name, name): env}))
    monkeypatch.setattr(session, "FINDERS", {"aiter": lambda: "of a made-up card"})
    RehearsalCard().install(monkeypatch)

    @wraps(kernels_child.verify_backend)  # ``in_process`` knows a function by its name
    def verify_backend(request: Any, _: str) -> Verification:
        made["asked"] = request
        return verified(made["results"])

    @wraps(timing_child.time_layers)
    def time_layers(request: Any, _: Any) -> timing.Measurement:
        made["timed"] = request
        return made["measured"]

    def run_engine(options: Any, environment: Any) -> engine.EngineAnswer:
        made[options.side] = environment
        return made["answers"][options.side]

    monkeypatch.setattr(kernels_child, "verify_backend", verify_backend)
    monkeypatch.setattr(timing_child, "time_layers", time_layers)
    monkeypatch.setattr(engine_steps, "run_engine", run_engine)
    return made


NEED_A_SHAPE = ("kernels", "timing", "engine", "launches")
CALLED = {
    process.import_path_of(kernels_child.verify_backend): "kernels",
    process.import_path_of(timing_child.time_layers): "timing",
}
CALLED_BY = {"timing": "timed", "engine": "on"}
"""What ``card`` notes of a step that ran."""


def let_answer(card: dict[str, Any], side: str, **changes: Any) -> None:
    """Let the engine of one side answer otherwise."""
    card["answers"][side] = replace(card["answers"][side], **changes)


def verified(results: list[Result]) -> Verification:
    failed = any(result.status == "failed" for result in results)
    return Verification(int(failed), {"card": "a card"}, "graph capture", None, {}, tuple(results))


def outcomes(**options: Any) -> dict[str, StepResult]:
    asked = StepContext(CheckOptions(config_source.find_config("deepseek-r1"), **options))
    found = {step.name: step for step in command.run_steps(asked)}
    return {name: replace(step, seconds=0.0) for name, step in found.items()}


def failed(found: dict[str, StepResult]) -> list[str]:
    return [name for name, step in found.items() if step.status == "failed"]


def test_a_card_on_which_all_is_well_passes_every_step(card: dict[str, Any]) -> None:
    found = outcomes(is_strict=True)
    assert {name: step.status for name, step in found.items()} == dict.fromkeys(steps.STEPS, "passed")
    assert command.exit_status_of([*found.values()], uses_cpu=False) == 0


def test_env_over_the_shells_own_reaches_every_step(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan takes for granted reaches all but the look at the machine, which says that it is not so."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    monkeypatch.delenv(USE_AITER, raising=False)
    outcomes(plan_environment={"VLLM_MLA_DISABLE": ("0", "--env"), USE_AITER: ("1", "default")})
    seen = {step: (card[step]["VLLM_MLA_DISABLE"], card[step].get(USE_AITER)) for step in ENVIRONMENTS}
    assert seen == dict.fromkeys(ENVIRONMENTS, ("0", "1")) | {"machine": ("0", None)}


@pytest.mark.parametrize("home", ["usable", "/proc/none"])
def test_an_engine_shares_vllms_notes_where_vllm_keeps_them_and_does_without_where_no_file_can_be(
    tmp_path: Path, home: str
) -> None:
    root, cache = tmp_path / home, tmp_path / "engine"
    cache.mkdir()
    engine_steps._share_model_notes(cache, {"XDG_CACHE_HOME": str(root), "HOME": str(tmp_path / "other")})
    assert [one.resolve() for one in cache.iterdir()] == ([root / "vllm/modelinfos"] if home == "usable" else [])


@pytest.mark.parametrize("has_tiles", [True, False])
def test_an_engine_runs_the_tiles_that_were_tuned_for_servers(tmp_path: Path, has_tiles: bool) -> None:
    folder = tmp_path / "vllm" / "aiter_mla"
    if has_tiles:
        folder.mkdir(parents=True)
        (folder / "tuned-a-card-triton-3.json").write_text("tiles")
        (folder / "status-1-a-1-0-0.json").write_text("another server's")
    engine_steps._copy_tuned_tiles(tmp_path / "engine", {"XDG_CACHE_HOME": str(tmp_path)})
    copied = {path.name: path.read_text() for path in (tmp_path / "engine").iterdir()}
    assert copied == ({"tuned-a-card-triton-3.json": "tiles"} if has_tiles else {})


def a_problem_of_the_machine(card: dict[str, Any]) -> None:
    card["checks"] = (CheckResult("problem", "torch is missing", "install it", "torch"),)


def a_module_without_code_for_this_card(card: dict[str, Any]) -> None:
    module = {Path("module_cache.so"): {"gfx942"}}
    replaced = {"gpu_arch": lambda: "gfx950", "compiled_modules": lambda: list(module), "architectures_of": module.get}
    with mock.patch.multiple(machine.checks, **replaced):
        card["checks"] = LOOK([machine.checks.check_code_objects], {})


def a_shape_with_a_known_issue(card: dict[str, Any]) -> None:
    card["plan"] = of_shape(64, 0, "fp8")


def no_layer_engages(card: dict[str, Any]) -> None:
    card["plan"] = made_up_plan(outcome="skipped")


def a_wrong_kernel(card: dict[str, Any]) -> None:
    card["results"][0].add([Finding("query-nope", "2 values differ")], "replay 1")


def span(kernel: str) -> dict[str, Any]:
    return {"first": 1, "last": 16, "kernel": kernel, "detail": "", "rejected_kernels": []}


def an_aiter_that_does_not_saturate(card: dict[str, Any]) -> None:
    """The user named it: otherwise start-up leaves it out."""
    card["results"][0].writes_nan = True
    card["plan"]["kernels"] = [span("aiter")]
    card["plan"]["options"]["kv_cache_dtype"] = "fp8"


def a_kernel_fails_its_self_check(card: dict[str, Any]) -> None:
    card["measured"].failed_kernels["aiter"] = "3 values differ"


def nothing_is_timed(card: dict[str, Any]) -> None:
    card["measured"] = replace(card["measured"], rows=())


def other_tokens(card: dict[str, Any]) -> None:
    card["answers"]["on"].generated_tokens["short"] = [[(4, {4: -0.1, 3: -3.0})] * 20]
    card["answers"]["on"].generated_text_logprobs["short"] = [[-0.1] * 20]


def log_probabilities_apart(card: dict[str, Any]) -> None:
    card["answers"]["on"].generated_tokens["short"] = [[(3, {3: -1.5, 4: -3.0})] * 20]
    card["answers"]["on"].generated_text_logprobs["short"] = [[-1.5] * 20]


def three_roundings_above_the_limit(card: dict[str, Any]) -> None:
    """They change every prompt by less than any bound on tokens would show; the engine repeats itself exactly."""
    other_prompts(card, engine.ABOVE_LIMIT, 20)


def three_roundings_among_decodes(card: dict[str, Any]) -> None:
    other_prompts(card, engine.MIXED, 20)


def a_row_that_is_not_a_number(card: dict[str, Any]) -> None:
    """As where vLLM's own attention saw a query that nobody wrote."""
    other_prompts(card, engine.ABOVE_LIMIT, 1, float("nan"))


def a_row_of_another_request(card: dict[str, Any]) -> None:
    other_prompts(card, engine.MIXED, 1, -4.0)


def other_prompts(card: dict[str, Any], name: str, count: int, other: float = -0.501) -> None:
    """Give so many of the twenty prompts another log-probability with the flag on."""
    card["answers"]["on"].prefill_step_logprobs[name] = [[[-0.5, other]] * count + [[-0.5, -0.5]] * (20 - count)] * 2


def nothing_engaged(card: dict[str, Any]) -> None:
    let_answer(card, "on", rank_records=(record_of(["layer"], 16, "fp8", 0),))


def a_draft_that_is_not_engaged(card: dict[str, Any]) -> None:
    """A faster layer of vLLM's own beside it explains nothing."""
    a_draft(card, NOT_RUN)


def a_rank_without_a_status(card: dict[str, Any]) -> None:
    let_answer(card, "on", rank_records=(replace(ANSWER.rank_records[0], num_ranks=2),))


def a_draft(card: dict[str, Any], *skips: Skip) -> None:
    """The model's layer engaged. Another one is faster with vLLM's kernels; one more is skipped for each reason."""
    skipped = dict(enumerate([Skip(VLLM_FASTER, "it is faster"), *skips]))
    rank = replace(
        ANSWER.rank_records[0],
        num_layers=1 + len(skipped),
        skipped={f"draft {number}": skip for number, skip in skipped.items()},
    )
    let_answer(card, "on", rank_records=(rank,))


def a_broken_decode_on_both_sides(card: dict[str, Any]) -> None:
    for answer in card["answers"].values():
        answer.generated_text_logprobs["short"] = [[-2.5] * 20]


def a_decode_that_is_not_a_number(card: dict[str, Any]) -> None:
    card["answers"]["on"].generated_text_logprobs["short"] = [[float("nan")] * 20]


def a_profiler_that_sees_nothing(card: dict[str, Any]) -> None:
    for side in ("off", "on"):
        let_answer(card, side, num_launches=0)


def an_extra_launch(card: dict[str, Any]) -> None:
    let_answer(card, "on", num_launches=40)


PLANTED: dict[str, dict[Callable[[dict[str, Any]], None], str]] = {
    "machine": {a_problem_of_the_machine: "1 problem", a_module_without_code_for_this_card: "1 problem"},
    "plan": {no_layer_engages: "61/61 MLA layers"},
    "issues": {a_shape_with_a_known_issue: "1 for this shape"},
    "kernels": {a_wrong_kernel: "0 passed, 1 failed", an_aiter_that_does_not_saturate: "1 passed, 0 failed"},
    "timing": {
        a_kernel_fails_its_self_check: "wrong, not timed: aiter",
        nothing_is_timed: "none of our kernels was timed",
    },
    "engine": {
        other_tokens: "off and on are apart in short",
        log_probabilities_apart: "off and on are apart in short",
        nothing_engaged: "not every MLA layer engaged",
        a_draft_that_is_not_engaged: "not every MLA layer engaged",
        a_rank_without_a_status: "1 of 2 ranks wrote no status",
    },
    "prefill": {
        three_roundings_above_the_limit: engine.ABOVE_LIMIT,
        three_roundings_among_decodes: engine.MIXED,
        a_row_that_is_not_a_number: engine.ABOVE_LIMIT,
        a_row_of_another_request: engine.MIXED,
    },
    "decode": {
        a_broken_decode_on_both_sides: "off: 2, on: 2",
        a_decode_that_is_not_a_number: "off: 0, on: inf",
    },
    "launches": {an_extra_launch: "off 40, on 40", a_profiler_that_sees_nothing: "saw no kernel"},
}
"""What is wrong, by the step that must fail, and what that step then shows."""


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("step", "plant", "shown"), [(step, *planted) for step, of in PLANTED.items() for planted in of.items()]
)
def test_mutation_a_planted_fault_makes_its_own_step_fail(
    card: dict[str, Any], step: str, plant: Callable[[dict[str, Any]], None], shown: str
) -> None:
    plant(card)
    found = outcomes(is_strict=True)
    assert failed(found) == [step] or (plant is nothing_engaged and failed(found) == [step, "launches"])
    assert shown in found[step].detail
    assert command.exit_status_of([*found.values()], uses_cpu=False) == 1


def test_the_timing_is_of_the_models_own_layer(card: dict[str, Any]) -> None:
    widths = {"nope": 192, "rope": 32, "latent": 256}
    card["plan"]["model"]["kinds"][0].update(widths)
    card["plan"]["model"]["dtype"], card["plan"]["options"]["kv_cache_dtype"] = "float16", "auto"
    outcomes()
    assert [*card["timed"].layers()] == [("fp16", 16)]
    shape = card["timed"].shape("fp16", 16)
    assert (shape.nope_dim, shape.rope, shape.latent, shape.act) == (*widths.values(), torch.float16)
    assert timing_child.cache_type_of(shape) == "fp16"


@pytest.mark.parametrize(
    ("weight_format", "dtype", "named"),
    [
        ("bf16", "bfloat16", "bf16"),
        ("bf16", "float16", "fp16"),
        ("fp8", "float16", "fp8"),
        ("mxfp4", "bfloat16", "mxfp4"),
    ],
)
def test_unquantised_weights_are_named_by_their_own_type(weight_format: str, dtype: str, named: str) -> None:
    request = timing_child.TimingRequest((), (), (), weight_format, activation_dtype=dtype)
    assert request.weights == named


def test_a_models_timing_without_a_baseline_is_unknown(card: dict[str, Any]) -> None:
    row = timing.make_row(1, 16, "fp8", {"triton": 5.0}, {})
    card["measured"] = replace(card["measured"], rows=(row,))
    assert outcomes()["timing"].status == "unknown"


def kernels_by_tokens(card: dict[str, Any], *spans: tuple[int, int, str]) -> None:
    groups = (DecisionGroup(("layer",), decision(*spans)),)
    let_answer(card, "on", rank_records=(replace(ANSWER.rank_records[0], decision_groups=groups),))


@pytest.mark.parametrize(("fastest", "status"), [("vllm", "passed"), ("aiter", "failed")])
def test_no_launch_is_promised_of_a_step_in_which_vllms_own_kernels_run(
    card: dict[str, Any], fastest: str, status: str
) -> None:
    """The counted step has sixteen tokens; the layer counts as engaged because ours runs at others."""
    kernels_by_tokens(card, (1, 15, "aiter"), (16, 16, fastest))
    an_extra_launch(card)
    assert outcomes()["launches"].status == status


@pytest.mark.parametrize(("limit", "captured", "status"), [
    (8, [8], "passed"), (20, [8, 24], "passed"), (24, [8, 24], "failed"), (16, [8], "failed"),
])  # fmt: skip
def test_no_launch_is_promised_of_a_step_beyond_the_decode_limit(
    card: dict[str, Any], limit: int, captured: list[int], status: str
) -> None:
    """Sixteen tokens, or the captured size that they are padded to."""
    card["plan"] |= {"limit": limit}
    inside, outside = ([size for size in captured if (size <= limit) is within] for within in (True, False))
    card["plan"]["captures"] |= {"within_limit": inside, "above_limit": outside, "full": inside}
    an_extra_launch(card)
    assert outcomes()["launches"].status == status


@pytest.mark.parametrize(("arch", "status"), [("gfx950", "passed"), ("gfx942", "failed")])
def test_a_decode_of_vllm_that_needs_no_concat_leaves_one_launch_less_to_save(
    card: dict[str, Any], arch: str, status: str
) -> None:
    card["plan"] = made_up_plan(arch=arch, heads_per_rank=8)
    card["plan"]["options"]["kv_cache_dtype"] = "auto"
    let_answer(card, "on", num_launches=40)
    assert outcomes()["launches"].status == status


def test_two_sides_tokens_with_the_flag_on_are_compared_with_those_of_the_flag_off(card: dict[str, Any]) -> None:
    other_tokens(card)
    found = outcomes()["engine"]
    assert {name: figures["tokens_equal"] for name, figures in found.data["distances"].items()} == {"short": 0}
    assert ENVIRONMENTS[-2:] == tuple(side for side in card["answers"] if card[side]), "both engines ran, and no third"


@pytest.mark.parametrize(("differ", "status"), [(0, "passed"), (10, "passed"), (11, "failed")])
@pytest.mark.parametrize("name", engine.PREFILL_STEPS)
def test_prompts_with_the_same_bytes_are_counted_and_half_of_them_may_differ_by_a_rounding(
    card: dict[str, Any], name: str, differ: int, status: str
) -> None:
    other_prompts(card, name, differ)
    found = outcomes()["prefill"]
    assert found.status == status
    assert (found.data[name]["prompts"], found.data[name]["equal"]) == (20, 20 - differ)
    assert f"{20 - differ} of 20 prompts have the same bytes" in " ".join(found.lines)


@pytest.mark.mutation
def test_mutation_prefill_rows_without_a_bound_hide_three_roundings(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distance, "MAX_UNEQUAL_SHARE", 1.0)
    with pytest.raises(AssertionError, match="'passed' == 'failed'"):
        test_prompts_with_the_same_bytes_are_counted_and_half_of_them_may_differ_by_a_rounding(
            card, engine.ABOVE_LIMIT, 20, "failed"
        )


def test_an_engine_that_does_not_repeat_itself_is_held_to_its_own_noise(card: dict[str, Any]) -> None:
    card["answers"]["off"].prefill_step_logprobs[engine.ABOVE_LIMIT] = [[[-0.5, -0.5]] * 20, [[-0.5, -0.502]] * 20]
    three_roundings_above_the_limit(card)
    assert outcomes()["prefill"].status == "passed"


@pytest.mark.parametrize("name", engine.PREFILL_STEPS)
@pytest.mark.parametrize(("on_card", "median_s", "status"), [
    (True, 0.0203, "passed"), (True, 0.0205, "warning"), (False, 0.0205, "passed"),
])  # fmt: skip
def test_a_slower_step_with_prefill_rows_is_a_warning_on_a_card_and_no_failure(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, on_card: bool, median_s: float, status: str
) -> None:
    card["answers"]["on"].step_seconds[name] = [0.01, median_s, 0.5]
    asked = StepContext(answers=card["answers"])
    monkeypatch.setattr(device.card(), "is_there", lambda: on_card)
    found = engine_steps.compare_prefill_rows(asked)
    assert (found.status, name in found.detail) == (status, status == "warning")
    assert found.data[name]["on_ms"] == pytest.approx(1e3 * median_s)
    assert command.exit_status_of([found], uses_cpu=True) == 0


@given(st.integers(0, 8192), st.integers(1, 1024), st.integers(8, 504))
def test_short_prompts_fill_one_step_and_are_as_short_as_the_requests_allow(
    total: int, requests: int, longest: int
) -> None:
    lengths = engine_child.short_prompt_lengths(total, requests, longest)
    if not lengths:
        shortest = engine_child.MIN_PROMPT_TOKENS
        assert total < shortest or total > requests * longest or total // shortest * longest < total
        return
    assert (sum(lengths), len(lengths) <= requests, max(lengths) <= longest) == (total, True, True)
    assert min(lengths) >= engine_child.MIN_PROMPT_TOKENS
    assert len(lengths) == requests or max(lengths) - engine_child.MIN_PROMPT_TOKENS < 3


@pytest.mark.parametrize(("limit", "batched"), [(64, 8192), (8184, 8192), (8185, 8192), (8192, 8192)])
def test_a_prefill_step_lies_above_the_limit_or_is_left_out_and_a_mixed_one_fills_it(limit: int, batched: int) -> None:
    found = engine_child.prefill_step_tokens(limit, batched, num_decode_rows=12)
    assert limit < found[engine.ABOVE_LIMIT] <= batched or (found[engine.ABOVE_LIMIT] == 0 and limit + 8 > batched)
    assert found[engine.MIXED] + 12 == limit


@pytest.mark.mutation
def test_mutation_a_prefill_step_at_the_limit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {engine.ABOVE_LIMIT: 64, engine.MIXED: 52}
    monkeypatch.setattr(engine_child, "prefill_step_tokens", lambda *limits, num_decode_rows: planted)
    with pytest.raises(AssertionError, match="64 < 64"):
        test_a_prefill_step_lies_above_the_limit_or_is_left_out_and_a_mixed_one_fills_it(64, 8192)


def test_every_step_has_a_planted_fault() -> None:
    assert set(PLANTED) == set(steps.STEPS)


def of_shape(heads: int, drafts: int, cache: str, arch: str = "gfx942", vllm: str = "0.33.0") -> dict[str, Any]:
    found = made_up_plan(heads_per_rank=heads, arch=arch, vllm=vllm)
    found["options"] |= {"num_drafts": drafts, "kv_cache_dtype": cache}
    found["captures"] |= {"inside": [1, 2, 4], "full": [1, 2, 4]}
    return found


@pytest.mark.parametrize(("kernel", "cache", "lines"), [("triton", "fp8", 1), ("aiter", "auto", 0)])
def test_an_overflow_of_a_kernel_or_a_cache_that_does_not_serve_does_not_fail_the_step(
    card: dict[str, Any], kernel: str, cache: str, lines: int
) -> None:
    an_aiter_that_does_not_saturate(card)
    card["plan"]["kernels"], card["plan"]["options"]["kv_cache_dtype"] = [span(kernel)], cache
    found = outcomes()["kernels"]
    assert (found.status, len(found.lines)) == ("passed", lines)


def test_a_model_without_mla_fails_its_plan_and_runs_nothing_on_the_card(card: dict[str, Any]) -> None:
    card["plan"] |= {"outcome": "skipped", "absorb_weight": None, "kernels": None}
    card["plan"]["layers"] |= {"mla": 0, "engaged": 0}
    card["plan"]["model"]["kinds"] = []
    found = outcomes()
    assert failed(found) == ["plan"]
    assert {found[name].status for name in NEED_A_SHAPE} == {"skipped"}


def test_field_f5_a_plan_that_is_not_known_does_not_pass(card: dict[str, Any]) -> None:
    """vLLM could not build the layers here: no step takes their missing shape for one."""
    answer = plans.simulated_facts()
    skip, facts = Skip("not_known", "no such kernel"), replace(answer.model, listed_layers=61)
    made = build.make_plan(
        replace(answer, model=facts, layers=[], skip=skip), plans.VLLM, build_plan_environment((), {})
    )
    card["plan"] = json.loads(files.to_json(made))
    found = outcomes(is_strict=True)
    assert (card["plan"]["outcome"], found["plan"].status, failed(found)) == ("unknown", "unknown", [])
    assert command.exit_status_of([*found.values()], uses_cpu=True) == outputs.EXIT_INCOMPLETE
    assert found["issues"] == StepResult("skipped", "not looked up: the plan is not known", name="issues")
    others = {found[name].detail for name in NEED_A_SHAPE}
    assert others == {"the plan is not known"}
    assert found["decode"].status == "skipped"


@pytest.mark.mutation
def test_mutation_an_unknown_shape_that_is_looked_up_is_caught(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "no_shape_reason", lambda plan: None)
    with pytest.raises(AssertionError, match=r"'kernels', 'timing', 'launches'\] != \[\]"):
        test_field_f5_a_plan_that_is_not_known_does_not_pass(card)


def test_an_engine_that_needs_more_gpus_than_are_here_is_skipped(card: dict[str, Any]) -> None:
    card["plan"]["options"] |= {"tp": 8, "pp": 2}
    found = outcomes()
    assert found["engine"] == StepResult("skipped", "one engine needs 16 GPUs; this machine has 8", name="engine")
    assert failed(found) == []


BUSY = [
    ("timing", 0, 0.06, {}, True),
    ("timing", 0, 0.04, {}, False),
    ("timing", 1, 0.06, {"tp": 2}, False),
    ("engine", 0, 0.06, {"tp": 1}, True),
    ("engine", 1, 0.06, {"tp": 1}, False),
    ("engine", 3, 0.06, {"tp": 2, "pp": 2}, True),
    ("engine", 3, 0.04, {"tp": 2, "pp": 2}, False),
    ("engine", 4, 0.06, {"tp": 2, "pp": 2}, False),
    ("engine", 7, 0.06, {"tp": 4, "pcp": 2}, True),
]
"""A step, the number of a card, the share of its memory that others use, how many cards an engine takes, and whether
the step must not run."""


@pytest.mark.parametrize(("step", "number", "share", "sizes", "busy"), BUSY)
def test_a_card_in_use_stops_the_steps_that_need_it(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    step: str, number: int, share: float, sizes: dict[str, int], busy: bool,
) -> None:  # fmt: skip
    RehearsalCard(Scenario(in_use_gib=[0.0] * number + [192 * share])).install(monkeypatch)
    card["plan"]["options"] |= sizes
    found = outcomes()[step]
    assert (found.status, f"card {number} is not idle" in found.detail) == ("unknown" if busy else "passed", busy)
    assert (CALLED_BY[step] in card) is not busy, "it ran"


@pytest.mark.mutation
@pytest.mark.parametrize("row", [BUSY[4], BUSY[5], BUSY[8]])
def test_mutation_cards_of_an_engine_that_are_counted_wrongly_are_caught(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, row: Any
) -> None:
    monkeypatch.setattr(engine_steps, "num_cards_of", lambda plan: 1 if row[-1] else 8)
    with pytest.raises(AssertionError, match="'passed', False" if row[-1] else "'unknown', True"):
        test_a_card_in_use_stops_the_steps_that_need_it(card, monkeypatch, *row)


def test_what_is_left_out_of_the_engine_is_said(card: dict[str, Any]) -> None:
    let_answer(card, "on", unsupported_options=("--data-parallel-size", "--nnodes"))
    (line,) = [line for line in outcomes()["engine"].lines if "ran without" in line]
    assert "--data-parallel-size, --nnodes" in line


def test_the_kernels_are_verified_at_the_models_sizes(card: dict[str, Any]) -> None:
    card["plan"] |= {"heads_per_rank": 20, "absorb_weight": "mxfp4", "limit": 512}
    card["plan"]["options"] |= {"block_size": 16, "kv_cache_dtype": "auto"}
    card["plan"]["model"]["dtype"] = "float16"
    outcomes()
    asked = card["asked"]
    assert (asked.geometry_sizes["heads"], asked.weight_format) == (20, "mxfp4")
    assert (asked.options.limit, asked.options.quick) == (512, True)
    assert (asked.geometry_sizes["block_size"], asked.geometry_sizes["blocks"]) == (16, 12)
    assert (asked.activation_dtype, asked.has_fp8_cache) == ("float16", False)


def repeats_with_the_same_sizes(card: dict[str, Any], typed: list[str]) -> None:
    """Check that the command which repeats a failed case asks for that case as it ran."""
    runner = CliRunner()
    runner.invoke(app, ["check", *typed, "--only", "kernels", "--backend", "aiter", "--data-seed", "3"])
    first = card["asked"]
    made = session.Session(model=first.model or "", again=first.repeat_arguments)
    failed = made.command(Result("fresh-data", "fp8", "aiter", "", 7))
    done = runner.invoke(app, shlex.split(failed)[1:])
    assert "kernels" in done.output, failed
    selected = replace(first.options, case=("fresh-data",), variant=("fp8",), seed=7)
    assert card["asked"] == replace(first, options=selected), failed


@pytest.mark.parametrize(
    "typed",
    [
        ["deepseek-r1", "-tp", "8", "--env", "VLLM_MLA_DISABLE=0"],
        ["deepseek-r1", "--limit", "512", "--long-run", "8", "-cc.cudagraph_capture_sizes=[1, 2]"],
        ["deepseek-r1", "--arch", "gfx950", "--device", "cpu"],
        ["--heads", "5", "--nope", "64", "--v", "32", "--weights", "mxfp4", "--quick"],
        ["--small", "--emulated"],
    ],
    ids=" ".join,
)
def test_a_failed_case_repeats_with_the_sizes_that_it_had(card: dict[str, Any], typed: list[str]) -> None:
    """Also with those that no option gives: the rotated width and the latent of the model."""
    card["plan"]["model"]["kinds"][0].update(rope=32, latent=256)
    repeats_with_the_same_sizes(card, typed)


@pytest.mark.mutation
def test_mutation_a_command_without_the_model_is_caught(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    command_of = session.Session.command
    monkeypatch.setattr(session.Session, "command", lambda made, result: command_of(replace(made, model=""), result))
    with pytest.raises(AssertionError, match="--only kernels"):
        test_a_failed_case_repeats_with_the_sizes_that_it_had(card, ["deepseek-r1"])


def test_a_known_issue_is_a_warning_with_its_link_and_a_failure_in_strict_mode(card: dict[str, Any]) -> None:
    card["plan"] = of_shape(64, 0, "fp8")
    loose, strict = (outcomes(is_strict=strict)["issues"] for strict in (False, True))
    assert (loose.status, strict.status) == ("warning", "failed")
    assert ISSUES["aiter#4363"]["link"] in loose.lines[0]


def test_a_step_that_raises_has_failed_and_the_next_one_runs(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_steps, "run_engine", raising(RuntimeError("out of memory")))
    found = outcomes()
    assert failed(found) == ["engine"]
    assert "out of memory" in found["engine"].detail
    assert found["decode"].status == found["launches"].status == "skipped"


@pytest.mark.parametrize(
    ("function", "step", "said", "skipped"),
    [
        (machine.check_machine, "machine", "its process {how}: {line}", []),
        (planner.make_plans_in_child, "plan", "vLLM {how}", [*steps.STEPS][2:]),
        (idle.busy_cards_reason, "timing", "its process {how}: {line}", []),
        (engine_child.drive_engine, "engine",
         "vLLM's engine with the flag on {how}: {line}", ["prefill", "decode", "launches"]),
    ],
)  # fmt: skip
def test_a_step_whose_process_ends_has_failed_and_the_record_says_how(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    function: Callable[..., Any], step: str, said: str, skipped: list[str],
) -> None:  # fmt: skip
    """Of kernels, timing and tuning, which tell what they find, tests are next to those of the steps."""
    in_process.install(monkeypatch, ends={process.import_path_of(function): 0})
    monkeypatch.setattr(planner, "make_plans", ASK if step == "plan" else planner.make_plans)
    monkeypatch.setattr(engine_steps, "run_engine", RUN if step == "engine" else engine_steps.run_engine)
    path = tmp_path / "check.json"
    done = CliRunner().invoke(app, ["check", "deepseek-r1", "-tp", "8", "--json", str(path)])
    assert done.exit_code == 1, done.output
    found = {one.name: one for one in files.read_record(CheckRun, path).steps}
    assert failed(found) == [step]
    assert said.format(how=in_process.ENDED.ending, line=in_process.ENDED.lines[-1]) in found[step].detail
    assert [name for name, one in found.items() if one.status == "skipped"] == skipped
    assert {one.status for name, one in found.items() if name not in (step, *skipped)} == {"passed"}


def test_without_a_gpu_the_steps_of_a_card_are_skipped_and_the_exit_status_is_3(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device.card(), "is_there", lambda: False)
    monkeypatch.setattr(kernels_child, "verify_backend", raising(session.NotHereError("torch sees no GPU")))
    path = tmp_path / "check.json"
    done = CliRunner().invoke(app, ["check", "deepseek-r1", "-tp", "8", "--json", str(path)])
    assert done.exit_code == 3, done.output
    assert "nothing ran on a card" in done.output
    record = json.loads(path.read_text())
    skipped = {step["name"] for step in record["steps"] if step["status"] == "skipped"}
    assert skipped == {"kernels", "timing", "engine", "prefill", "decode", "launches"}
    assert (record["exit"], record["evidence"]["schema"]) == (3, "vllm-aiter-mla/check")


def test_the_page_of_a_check_shows_its_steps_and_what_plan_kernels_and_timing_found(
    card: dict[str, Any], tmp_path: Path
) -> None:
    other_tokens(card)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["check", "deepseek-r1", "--html", str(page)])
    assert done.exit_code == 1, done.output
    text = page.read_text()
    for shown in (
        '<span class="word bad">failed</span>',
        "deepseek-r1: the steps",
        "token by token",
        "Kernels of one decode step",
        "<svg",
    ):
        assert shown in text, shown


@pytest.mark.parametrize(
    ("arguments", "named"), [(["no-such-model"], "no-such-model"), (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype")]
)
def test_a_wrong_model_or_option_exits_2_and_is_named(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["check", *arguments])
    assert done.exit_code == 2
    assert named in done.output


def test_rounding_does_not_explain_a_run_without_tokens() -> None:
    assert not distance.can_rounding_explain_tokens(distance.TokenComparison())
    assert distance.can_rounding_explain_tokens(
        replace(distance.TokenComparison(), tokens=1, compared=1, tokens_equal=1)
    )


def vllm_is_faster(card: dict[str, Any]) -> None:
    record = record_of(["layer"], 16, "fp8", 0)
    skipped = {"layer": Skip(VLLM_FASTER, "it is faster")}
    let_answer(card, "on", rank_records=(replace(record, skipped=skipped),), num_launches=40)


def test_a_card_on_which_vllm_is_faster_does_not_fail_and_has_an_exit_status_of_its_own(card: dict[str, Any]) -> None:
    vllm_is_faster(card)
    found = outcomes()
    assert (found["engine"].status, failed(found)) == ("no gain", [])
    assert command.exit_status_of([*found.values()], uses_cpu=False) == outputs.EXIT_NO_GAIN
    other_tokens(card)
    assert outcomes()["engine"].status == "failed"


def test_a_draft_for_which_vllm_is_faster_does_not_fail_beside_layers_that_engaged(card: dict[str, Any]) -> None:
    a_draft(card)
    found = outcomes()
    assert (found["engine"].status, failed(found)) == ("passed", [])
    assert "every MLA layer engaged but 1, for which vLLM's own kernels were the fastest" in found["engine"].detail


@pytest.mark.parametrize(("apart", "status"), [(0.09, "passed"), (0.27, "failed")])
def test_over_an_fp8_cache_an_engine_may_differ_by_what_the_cast_does_to_vllms_own(
    card: dict[str, Any], apart: float, status: str
) -> None:
    """Each token is another one here, as a random model's may be: only the size of the differences is judged."""
    card["plan"]["options"]["kv_cache_dtype"] = "fp8"
    for answer in card["answers"].values():
        answer.generated_text_logprobs["short"] = [[-0.67] * 20]
    other = (4, {3: TOKEN[1][3] - apart, 4: TOKEN[1][4] + apart})
    card["answers"]["on"].generated_tokens["short"] = [[other] * 20]
    card["answers"]["on"].generated_text_logprobs["short"] = [[-1.0] * 20]
    assert outcomes()["engine"].status == status


def test_batches_that_all_ran_vllms_own_kernels_compare_nothing(card: dict[str, Any]) -> None:
    """The layer counts as engaged because ours runs above them."""
    card["plan"]["captures"] |= {"within_limit": [8, 16], "above_limit": [], "full": [8, 16]}
    kernels_by_tokens(card, (1, 16, "vllm"), (17, 1024, "triton"))
    found = outcomes()["engine"]
    assert found.status == "unknown"
    assert "17..1024" in found.detail
    kernels_by_tokens(card, (1, 15, "vllm"), (16, 1024, "triton"))
    assert outcomes()["engine"].status == "passed"
    compared, other = ((1, 1024, "triton"),), ((1, 16, "vllm"), (17, 1024, "triton"))
    groups = tuple(DecisionGroup((name,), decision(*of)) for name, of in (("layer", compared), ("draft", other)))
    let_answer(card, "on", rank_records=(replace(ANSWER.rank_records[0], decision_groups=groups),))
    assert outcomes()["engine"].status == "unknown", "layers of another shape that ran none of ours"


@pytest.mark.parametrize(("fifth", "explained"), [(-3.2, False), (-0.75, True)])
def test_over_an_fp8_cache_another_winner_is_as_far_as_the_other_list_ends(fifth: float, explained: bool) -> None:
    """Only tokens that both sides list have a distance, and here that is the last one, with none."""
    last = {5: fifth}
    off, on = [(1, {1: -0.7} | last)] * 20, [(9, {9: -0.7} | last)] * 20
    assert distance.can_rounding_explain_tokens(distance.compare_requests([off], [on]), 0.17) is explained


def test_over_an_fp8_cache_fifteen_right_requests_do_not_hide_a_wrong_one() -> None:
    right, noise = [TOKEN] * 20, 0.17
    wrong = [(TOKEN[0], {token: logprob - 0.27 for token, logprob in TOKEN[1].items()})] * 20
    assert distance.can_rounding_explain_tokens(distance.compare_requests([right] * 16, [right] * 16), noise)
    assert not distance.can_rounding_explain_tokens(
        distance.compare_requests([right] * 16, [right] * 15 + [wrong]), noise
    )


def test_a_noise_that_is_a_fault_explains_nothing() -> None:
    apart = replace(distance.TokenComparison(), tokens=1, compared=1, mean_abs_dlogprob=0.6)
    assert not distance.can_rounding_explain_tokens(apart, math.inf)
    assert distance.can_rounding_explain_tokens(replace(apart, mean_abs_dlogprob=0.4), math.inf)


def test_on_a_card_a_reference_that_is_compared_with_itself_does_not_pass(card: dict[str, Any]) -> None:
    card["results"] = [Result("fresh-data", "fp8", "reference", "graph capture")]
    assert outcomes()["kernels"].status == "skipped"
    # Nor beside kernels that take no such case, as none does over mxfp4 on gfx942.
    card["results"] += [Result("fresh-data", "fp8", "triton", "graph capture", status="skipped", reason="no mxfp4")]
    assert outcomes()["kernels"].status == "skipped"


@pytest.mark.parametrize(
    ("named", "status"),
    [
        ((), "failed"),
        (("--attention-backend", "ROCM_AITER_MLA"), "passed"),
        (("--attention_backend=rocm_aiter_mla",), "passed"),
        (("-ac.backend=ROCM_AITER_MLA",), "passed"),
        (("--attention-config.backend", "ROCM_AITER_MLA"), "passed"),
        (("-ac", '{"backend": "ROCM_AITER_MLA"}'), "passed"),
        (("--config", "flat.yaml"), "passed"),
        (("--config", "nested.yaml"), "passed"),
        (("--config", "nested.yaml", "--attention-backend", "TRITON_MLA"), "failed"),
        (("--attention-config", "no JSON"), "failed"),
        (("--config", "absent.yaml"), "failed"),
        (("--config", "empty.yaml"), "failed"),
    ],
)
def test_aiters_attention_by_name_needs_no_switch_and_none_is_assumed(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: tuple[str, ...], status: str
) -> None:
    monkeypatch.delenv(USE_AITER, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("flat", "attention-backend: ROCM_AITER_MLA"), ("nested", "attention_config:\n  backend: ROCM_AITER_MLA"),
        ("empty", ""),
    ):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(text)
    card["checks"] = (CheckResult("problem", "aiter_off: vLLM takes another attention", "set it", name="switches"),)
    assert outcomes(serve_arguments=named)["machine"].status == status
    assert (USE_AITER in build_plan_environment((), {}, named)) is (status == "failed")


def test_each_back_end_that_was_named_has_to_be_compared(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FINDERS", dict.fromkeys(("reference", "triton"), lambda: "here"))
    card["results"] = [
        Result("fresh-data", "fp8", "reference", "graph capture"),
        Result("fresh-data", "fp8", "triton", "graph capture", status="skipped", reason="no mxfp4"),
    ]
    for named, status in (("reference",), "passed"), (("reference", "triton"), "skipped"):
        found = outcomes(kernels=KernelOptions(backend=named))["kernels"]
        assert (found.status, "triton took no case" in found.detail) == (status, len(named) == 2)


def test_a_model_in_float32_is_not_timed(card: dict[str, Any]) -> None:
    card["plan"]["model"]["dtype"] = "float32"
    assert (outcomes()["timing"].status, "float32" in outcomes()["timing"].detail) == ("skipped", True)


def test_prefill_that_has_nothing_to_compare_does_not_pass(card: dict[str, Any]) -> None:
    for side in ("off", "on"):
        let_answer(card, side, prefill_step_logprobs={name: [[], []] for name in engine.PREFILL_STEPS})
    assert outcomes()["prefill"].status == "skipped"


def test_a_check_that_is_cut_off_leaves_the_steps_before(card: dict[str, Any], tmp_path: Path) -> None:
    class Cut(BaseException):
        """As SIGINT would raise."""

    path = tmp_path / "check.json"
    with mock.patch.object(engine_steps, "run_engine", raising(Cut())), pytest.raises(Cut):
        app(["check", "deepseek-r1", "-tp", "8", "--json", str(path)], standalone_mode=False)
    kept = files.read_record(CheckRun, path)
    assert kept.exit is None
    assert [step.name for step in kept.steps] == ["machine", "plan", "issues", "kernels", "timing"]


def test_a_process_answers_with_records_and_whole_numbers_as_they_are() -> None:
    plan = plans.parsed(made_up_plan())
    assert process.call(dict, {3: plan}) == {3: plan}


@pytest.mark.parametrize(("pp", "layers"), [(1, 4), (8, 8)])
def test_an_engine_of_random_weights_has_a_layer_for_each_stage(
    monkeypatch: pytest.MonkeyPatch, pp: int, layers: int
) -> None:
    """And not the user's partition, which divides the layers of the whole model."""
    asked = []
    monkeypatch.setattr(engine_steps, "run_engine", lambda options, environment: asked.append((options, environment)))
    context = StepContext(CheckOptions(config_source.find_config("deepseek-r1")))
    plan = plans.parsed(made_up_plan())
    context.plan = replace(plan, options=replace(plan.options, pp=pp))
    with engine_steps.engine_runner(context, {"VLLM_PP_LAYER_PARTITION": "31,30", "A": "1"}) as run_side:
        run_side("on")
    ((options, environment),) = asked
    assert (options.num_random_layers, environment) == (layers, {"A": "1"})


def test_a_stage_without_an_mla_layer_is_no_layer_that_did_not_engage() -> None:
    whole = ANSWER.rank_records[0]
    stage = replace(whole, rank=1, num_layers=0, engaged={}, skipped={})
    assert engine_steps._not_engaged_reason(replace(ANSWER, rank_records=(whole, stage))) is None
    assert engine_steps._not_engaged_reason(replace(ANSWER, rank_records=(stage,))) is not None
