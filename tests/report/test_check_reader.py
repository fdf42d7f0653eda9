"""What the page says of a check: what ran where, what it promises, and what it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import Write, check_run, data_of, rows_of, summaries, tables
from tests.sandbox.rehearsal_card import RehearsalCard
from vllm_aiter_mla import files as our_files
from vllm_aiter_mla.commands.check.engine.distance import PrefillComparison
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.report.check_reader import VERSION_LABELS
from vllm_aiter_mla.commands.report.page import render_page
from vllm_aiter_mla.kernels import device, stopwatch
from vllm_aiter_mla.verify.results import GRAPH_ENGINE


@pytest.mark.slow
def test_field_o14_a_promise_never_looks_like_what_ran(files: dict[str, Path]) -> None:
    page = render_page([files["plan"]])
    assert "badge" not in page
    plans = page.partition("<h2>Plan</h2>")[2].partition("</section>")[0]
    assert "planned, nothing ran" in plans
    assert "<h2>Status</h2>" not in page, "a plan is no status"
    assert not re.search(r'class="word good', page), "nothing that a plan says is green"


@pytest.mark.parametrize(
    ("status", "word"), [(0, "looked up"), (1, "failed"), (3, "skipped"), (4, "no gain"), (None, "cut off")]
)
def test_field_o14_a_check_says_passed_or_not_and_what_was_skipped(
    written: Write, status: int | None, word: str
) -> None:
    looked = [{"name": "gpu", "status": "ok", "detail": "gfx942"}]
    done = (
        StepResult("passed", "", data=looked, name="machine"),
        StepResult("passed", "61/61", name="plan"),
        StepResult("passed", "61/61", name="plan, fp8 cache"),
        StepResult("skipped", "no GPU", name="timing"),
    )
    page = render_page([written("check.json", check_run(*done, status=status))])
    ((said, what, facts),) = summaries(page)
    assert (said, what, facts["Card"], facts["Skipped"]) == (word, "check of a-model", "gfx942", "timing: no GPU")
    for plan in ("plan", "plan, fp8 cache"):
        assert [plan, "planned, nothing ran"] in [row[:2] for row in rows_of(page)]
        assert plan not in facts["Means"]


@pytest.mark.parametrize("on_a_card", [True, False])
def test_what_passed_on_a_cpu_never_looks_like_what_passed_on_a_card(written: Write, on_a_card: bool) -> None:
    page = render_page(
        [written("check.json", check_run(StepResult("passed", "", name="engine"), status=0, on_a_card=on_a_card))]
    )
    assert (">passed</span>" in page, ">passed on a CPU</span>" in page) == (on_a_card, not on_a_card)
    assert ('class="word good' in page) is on_a_card


@pytest.mark.parametrize("name", ["machine", "issues"])
def test_a_check_that_ran_nothing_on_a_card_is_not_green(written: Write, name: str) -> None:
    page = render_page([written("check.json", check_run(StepResult("passed", "nothing known", name=name), status=0))])
    assert ">looked up</span>" in page
    assert "good" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_timing_shows_ratios_what_was_slower_and_what_was_not_timed(files: dict[str, Path]) -> None:
    page = render_page([files["timing"]])
    assert ["64", "6.133", "8", "1", "1.304"] in rows_of(page)
    for text in (
        "at 256 tokens",
        "aiter: not timed: self-check",
        "aiter-opt does not count as ours: it turns",
        "aiter is wrong and was not timed: 16 heads, fp8",
        "The run stopped early: 16 heads, bf16",
    ):
        assert text in page


def test_kernels_on_a_cpu_claim_no_launches_and_repeat_a_failure(files: dict[str, Path], written: Write) -> None:
    read = json.loads(files["kernels"].read_text())
    data = data_of(read)
    data["results"][0] |= {"status": "failed", "findings": [{"oracle": "runs", "message": "broke", "step": "replay 2"}]}
    page = render_page([written("kernels.json", read)])
    assert "No graph was captured" in page
    assert "PyTorch ops of a replayed step, no GPU" in page
    assert "Launches in captured graphs" not in page
    assert "runs at replay 2: broke" in page
    assert data["results"][0]["command"] in page


def test_a_check_that_was_cut_off_shows_the_steps_that_ended(written: Write) -> None:
    done = StepResult("failed", "a reason", name="plan")
    page = render_page(
        [written("check.json", check_run(StepResult("passed", "a card", name="machine"), done, status=None))]
    )
    assert "The run was cut off after the step plan." in page
    assert ["plan", "failed", "a reason"] in [row[:3] for row in rows_of(page)]
    assert render_page([written("none.json", check_run(status=None))])
    assert "was cut off" not in render_page([written("whole.json", check_run(done, status=1))])


@pytest.mark.parametrize(("status", "word"), [(None, "cut off"), (1, "failed"), (0, "planned, nothing ran")])
def test_a_check_of_promises_that_was_cut_off_or_failed_says_so(
    files: dict[str, Path], written: Write, status: int | None, word: str
) -> None:
    plan = StepResult("passed", "61/61", data=data_of(json.loads(files["plan"].read_text())), name="plan")
    machine = StepResult("failed" if status == 1 else "passed", "a card", name="machine")
    page = render_page([written("check.json", check_run(machine, plan, status=status))])
    assert [said for said, *_ in summaries(page)] == [word]


def test_a_check_without_a_gain_says_so(written: Write) -> None:
    page = render_page(
        [written("check.json", check_run(StepResult("no gain", "faster", name="engine"), status=4, on_a_card=True))]
    )
    assert ["engine", "no gain", "faster"] in [row[:3] for row in rows_of(page)]


def test_the_first_screen_asks_for_versions_that_a_run_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed", RehearsalCard())
    assert VERSION_LABELS.keys() <= stopwatch.machine().keys()


@pytest.mark.parametrize("kind", ["plan", "kernels", "timing"])
@pytest.mark.parametrize(
    "stamp", [{"schema_version": 99}, {"schema": "vllm-aiter-mla/apples"}, None], ids=["version", "schema", "none"]
)
def test_a_record_of_another_version_in_a_check_is_named_and_not_shown(
    files: dict[str, Path], written: Write, kind: str, stamp: Mapping[str, Any] | None
) -> None:
    read = json.loads(files[kind].read_text())
    if stamp is None:
        del data_of(read)["evidence"]
    else:
        data_of(read)["evidence"] |= stamp
    with pytest.raises(ValueError, match=rf"check.json: .*{kind}: .*; this version reads {kind} \d+"):
        render_page([written("check.json", read)])


@pytest.mark.mutation
def test_mutation_where_stamps_are_not_compared_a_record_of_another_version_is_shown(
    files: dict[str, Path], written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = json.loads(files["timing"].read_text())
    data_of(read)["evidence"]["schema_version"] = 99
    monkeypatch.setattr(our_files, "parse", our_files.parse_unstamped)
    assert "timing.json: 16 heads, fp8" in render_page([written("timing.json", read)])


@pytest.mark.parametrize("amiss", ["failed", "unknown", "no gain", "cut off", ""])
def test_a_check_that_says_passed_against_its_own_steps_is_not_shown(written: Write, amiss: Any) -> None:
    done = [StepResult("passed", "", name="machine"), StepResult(amiss, "", name="plan")] if amiss else []
    with pytest.raises(ValueError, match=f"exit status 0, and {f'plan {amiss}' if amiss else 'no step'}"):
        render_page([written("check.json", check_run(*done, status=0))])


@pytest.mark.parametrize(("status", "is_shown"), [("passed", False), ("cut off", True)])
@pytest.mark.parametrize("name", ["engine", "engine, fp8 cache"])
def test_a_step_that_may_have_run_on_a_cpu_is_not_shown_as_on_a_card(
    written: Write, status: Any, is_shown: bool, name: str
) -> None:
    """A file without ``on_a_card``; a step that was cut off has not told it yet."""
    read = check_run(StepResult(status, "", name=name), status=None if is_shown else 0)
    del read["on_a_card"]
    if is_shown:
        assert [word for word, *_ in summaries(render_page([written("check.json", read)]))] == ["cut off"]
        return
    with pytest.raises(ValueError, match="on_a_card is null"):
        render_page([written("check.json", read)])


def test_what_passed_on_an_emulator_never_looks_like_what_passed_on_a_card(
    files: dict[str, Path], written: Write
) -> None:
    read = json.loads(files["kernels"].read_text()) | {"on_a_card": True}
    data_of(read).update(engine=GRAPH_ENGINE, emulated=True, machine={"card": "MI300X"})
    page = render_page([written("check.json", read)])
    ((word, _, facts),) = summaries(page)
    assert (word, facts["Card"]) == ("passed on an emulator", "emulated: MI300X")
    assert 'class="word good' not in page


def test_a_replay_by_other_means_claims_no_graphs(files: dict[str, Path], written: Write) -> None:
    read = json.loads(files["kernels"].read_text())
    data_of(read)["engine"] = "another replay"
    page = render_page([written("check.json", read)])
    assert "No graph was captured" in page
    assert "Launches in captured graphs" not in page


@pytest.mark.parametrize(
    ("on_a_card", "machine", "card"),
    [
        (True, None, "a GPU that no step names"),
        (True, {"torch": "2.13"}, "unknown"),
        (False, None, "none: nothing here ran on a GPU"),
    ],
)
def test_a_card_that_is_not_named_is_not_none(
    files: dict[str, Path], written: Write, on_a_card: bool, machine: Any, card: str
) -> None:
    data = None
    if machine is not None:
        data = data_of(json.loads(files["timing"].read_text())) | {"machine": machine}
    done = (StepResult("passed", "", name="engine"), StepResult("passed", "", data=data, name="timing"))
    page = render_page([written("check.json", check_run(*done, status=0, on_a_card=on_a_card))])
    assert [facts["Card"] for *_, facts in summaries(page)] == [card]


def test_a_ratio_to_a_stand_in_is_not_one_to_vllm(files: dict[str, Path], written: Write) -> None:
    read = json.loads(files["timing"].read_text())
    note = "the ratio is to a kernel that never serves"
    assert note not in render_page([files["timing"]])
    row = data_of(read)["rows"][0]
    row["us"]["vllm-stand-in"] = row["us"].pop("vllm")
    assert note in render_page([written("timing.json", read)])


def test_figures_of_a_step_stand_under_their_own_names(written: Write) -> None:
    figures = asdict(PrefillComparison(8, 7, 8, 0.5, 1.25, 1.5))
    turned = dict(reversed(figures.items()))
    del turned["repeated"]
    data = {"mixed": figures, "above": turned}
    read = check_run(StepResult("passed", "", data=data, name="prefill"), status=0, on_a_card=True)
    (rows,) = (rows for title, rows in tables(render_page([written("check.json", read)])) if "prefill" in title)
    assert rows == [
        ["scenario", "prompts", "equal", "repeated", "max abs dlogprob", "off ms", "on ms"],
        ["mixed", "8", "7", "8", "0.5", "1.25", "1.5"],
        ["above", "8", "7", "-", "0.5", "1.25", "1.5"],
    ]
