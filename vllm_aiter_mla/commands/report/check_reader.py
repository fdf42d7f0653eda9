# SPDX-License-Identifier: Apache-2.0
"""Add a run of ``check`` to a page: its steps, and the records of the steps plan, kernels and timing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult, has_run_card_step
from vllm_aiter_mla.commands.check.timing.record import STAND_IN, Measurement
from vllm_aiter_mla.commands.outputs import EXIT_MEANINGS
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import (
    LOOKED_UP,
    NO_CARD,
    NOTHING_RAN,
    ON_CPU,
    ON_EMULATOR,
    InputSummary,
    Page,
    PageInput,
)
from vllm_aiter_mla.commands.report.plan_reader import add_plan, plan_label
from vllm_aiter_mla.kernels.triton.tiles import TUNED_SCHEMA
from vllm_aiter_mla.verify.results import GRAPH_ENGINE, RESULT_STATUSES, Verification

CUT_OFF_MEANING = "the run was cut off: it proves nothing"
PASSED_WORDS = {True: "passed", False: ON_CPU, None: LOOKED_UP}
"""The outcome of a step that passed, by ``CheckRun.on_a_card``."""
STATIC_STEPS = ("machine", "plan", "issues")
"""Steps that run nothing of the fast path."""
VERSION_LABELS = {"torch": "torch", "runtime": "for", "triton": "Triton", "python": "Python"}
"""Labels on the first screen of the versions in ``stopwatch.machine``."""


def add_check(page: Page, page_input: PageInput, run: CheckRun) -> InputSummary:
    """Add the steps of a check, and the records of its plan, its kernels and its timings.

    Raises:
        ValueError: the run contradicts itself, or a record in it is of another version.
    """
    _check_consistency(run)
    records_to_show = [(add_record, record) for step in run.steps for add_record, record in _step_records(step)]
    records = [record for _, record in records_to_show]
    is_emulated = any(isinstance(record, Verification) and record.emulated for record in records)
    passed_word = ON_EMULATOR if is_emulated else PASSED_WORDS[run.on_a_card]
    rows = [(step.name, _step_outcome(step, passed_word), step.detail, list(step.lines)) for step in run.steps]
    cut_off_place = f"after the step {run.steps[-1].name}" if run.steps else "before a step had ended"
    alarms = [f"The run was cut off {cut_off_place}."] * (run.exit is None)
    title = f"{page_input.name}, {run.model or 'no model'}: the steps"
    page.add_block(page_input, "Check", title, ("step", "outcome", "finding", "more"), rows, alarms=alarms)
    for add_record, record in records_to_show:
        add_record(page, page_input, record)
    for step in run.steps:
        _add_figures(page, page_input, step)
    return _summary_of_run(run, records, passed_word)


def _check_consistency(run: CheckRun) -> None:
    """Raise ValueError if a run contradicts itself, so that it cannot look as if everything had passed."""
    bad_steps = [
        f"{step.name} {step.status}" for step in run.steps if step.status not in ("passed", "warning", "skipped")
    ]
    if run.exit == 0 and (bad_steps or not run.steps):
        raise ValueError(f"exit status 0, and {', '.join(bad_steps) or 'no step'}")
    if run.on_a_card is None and has_run_card_step(run.steps):
        raise ValueError("on_a_card is null, and a step ran that can run on a card")


def _step_records(step: StepResult) -> Iterator[tuple[Callable[[Page, PageInput, Any], None], Any]]:
    """Yield each record of a step, with the function that adds it to the page.

    Raises:
        ValueError: the data is not a record of this version.
    """
    if step.data is None or step.base_name not in STEP_RECORDS:
        return
    record_type, add_record = STEP_RECORDS[step.base_name]
    for data in step.data if isinstance(step.data, list) else [step.data]:
        if files.layout_of(data)[0] != TUNED_SCHEMA:  # the lines of the step say the same as the record of --tune
            yield add_record, files.parse(record_type, Path(step.name), data)


def _step_outcome(step: StepResult, passed_word: str) -> str:
    """Return the outcome of a step. A plan, or a step that passed on a CPU, never looks as if it passed on a card."""
    if step.status != "passed":
        return step.status
    return NOTHING_RAN if step.base_name == "plan" else passed_word


def _run_outcome(run: CheckRun, plans: Sequence[Plan], passed_word: str) -> tuple[str, str]:
    """Return the outcome of a run and its meaning; ``passed_word`` is the outcome of its steps that passed."""
    failed_steps = [step.name for step in run.steps if step.status == "failed"]
    if (
        plans
        and run.exit is not None
        and {step.name for step in run.steps} <= {*STATIC_STEPS}
        and {*failed_steps} <= {"plan"}
    ):
        return NOTHING_RAN, _plan_meaning(plans)
    outcome, meaning = _exit_meaning(run.exit)
    if failed_steps:
        return outcome, f"{meaning}: {', '.join(failed_steps)}"
    if outcome != "passed":
        return outcome, meaning
    if passed_word == ON_CPU:
        meaning += ", on this CPU, which shows nothing of a card"
    passed_steps = [
        step.name for step in run.steps if step.status in ("passed", "warning") and step.base_name != "plan"
    ]
    return passed_word, f"{meaning}: {', '.join(passed_steps)}"


def _exit_meaning(exit_status: int | None) -> tuple[str, str]:
    """Return the outcome and the meaning of an exit status of ``check``; None if the run was cut off."""
    if exit_status is None:
        return "cut off", CUT_OFF_MEANING
    if (meaning := EXIT_MEANINGS.get(exit_status)) is None:
        return "failed", f"exit status {exit_status}"
    return meaning.check_outcome, meaning.check_text


def _plan_meaning(plans: Sequence[Plan]) -> str:
    """Return the meaning of a run that has only plans."""
    if any(record.outcome == "unknown" for record in plans):
        return "nothing was run, and vLLM could not say whether layers would engage"
    layers = ", ".join(f"{record.layers.engaged}/{record.layers.mla} at TP {record.options.tp}" for record in plans)
    return f"nothing was run: by vLLM's own config these MLA layers would engage: {layers}"


def _summary_of_run(run: CheckRun, records: Sequence[Any], passed_word: str) -> InputSummary:
    """Return the summary of a run whose steps have these ``records``."""
    plans = [record for record in records if isinstance(record, Plan)]
    verifications = [record for record in records if isinstance(record, Verification)]
    outcome, meaning = _run_outcome(run, plans, passed_word)
    meaning += "; an emulator says nothing of time, nor of a card's faults" * (passed_word == ON_EMULATOR)
    meaning += "; no graph was captured" * any(record.engine != GRAPH_ENGINE for record in verifications)
    checks: Any = next((step.data for step in run.steps if step.name == "machine"), None) or ()
    machine_facts = {check["name"]: check["detail"] for check in checks if check["status"] in ("ok", "warning")}
    machines = (record.machine for record in records if not isinstance(record, Plan))
    recorded_machine: Mapping[str, str] = next(filter(None, machines), {})
    card = (
        f"none: planned for {plans[0].arch}"
        if outcome == NOTHING_RAN
        else _card_name(recorded_machine, machine_facts, run.on_a_card)
    )
    versions = {
        label: machine_facts[name] for name, label in (("torch", "torch"), ("rocm", "ROCm")) if name in machine_facts
    }
    versions |= {label: recorded_machine[name] for name, label in VERSION_LABELS.items() if recorded_machine.get(name)}
    skipped = [f"{step.name}: {step.detail}" for step in run.steps if step.status in ("skipped", "unknown")]
    skipped += [str(reason) for record in plans for reason in record.reasons]
    skipped += [f"{backend}: {why}" for record in verifications for backend, why in record.missing.items()]
    card = "emulated: " * (passed_word == ON_EMULATOR) + card
    title = " and ".join(map(plan_label, plans)) or run.model or "no model"
    return InputSummary(outcome, f"check of {title}", card, meaning, list(dict.fromkeys(skipped)), versions)


def _card_name(recorded_machine: Mapping[str, str], machine_facts: Mapping[str, str], ran_on_card: bool | None) -> str:
    """Return the card that the records name, or else the card of the step ``machine``."""
    if not recorded_machine:
        return machine_facts.get("gpu", "a GPU that no step names" if ran_on_card else NO_CARD)
    card = recorded_machine.get("card") or "unknown"
    return NO_CARD if card.startswith("none") else f"{card} {recorded_machine.get('arch', '')}".strip()


def _add_figures(page: Page, page_input: PageInput, step: StepResult) -> None:
    """Add the figures of a step without a record, under their names in its data."""
    step_name, title_suffix = step.base_name, f"{step.name}, {page_input.name}"
    figures: Any = step.data
    if not figures:
        return
    if step_name == "engine":
        _add_by_scenario(page, page_input, f"Flag off and on, token by token: {title_suffix}", figures["distances"])
    elif step_name == "prefill":
        _add_by_scenario(page, page_input, f"Steps with prefill rows, flag off and on: {title_suffix}", figures)
    elif step_name == "launches":
        page.add_block(
            page_input, "Check", f"Kernels of one decode step: {title_suffix}", ("side", "kernels"), figures.items()
        )


def _add_by_scenario(page: Page, page_input: PageInput, title: str, scenarios: Mapping[str, Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for figures in scenarios.values() for name in figures)
    rows = [(scenario, *map(figures.get, names)) for scenario, figures in scenarios.items()]
    page.add_block(page_input, "Check", title, ("scenario", *(name.replace("_", " ") for name in names)), rows)


def add_timing(page: Page, page_input: PageInput, record: Measurement) -> None:
    """Add one chart and one table per number of heads and type: time over tokens, with one line per kernel."""
    alarms = [f"The run stopped early: {record.stop_reason}"] if record.stop_reason else []
    alarms += [f"{kernel} is wrong and was not timed: {reason}" for kernel, reason in record.failed_kernels.items()]
    notes = [f"Medians of replayed graphs, {record.weights} weights. Ratio: the fastest rival's time over ours."]
    if any(STAND_IN in row.us for row in record.rows):
        notes.append(
            f"{STAND_IN} launches as many kernels as vLLM, which is not installed: the ratio is to a kernel that never "
            "serves."
        )
    page.add_block(page_input, "Timing", page_input.name, notes=notes, alarms=alarms)
    for (heads, cache_type), group in groupby(record.rows, lambda row: (row.heads, row.cache_type)):
        rows_of_shape = list(group)
        kernels = list(dict.fromkeys(kernel for row in rows_of_shape for kernel in row.us))
        columns = ("tokens", *(f"{kernel}, us" for kernel in kernels), "ratio")
        cells = [(row.tokens, *map(row.us.get, kernels), row.ratio) for row in rows_of_shape]
        slower_tokens = [str(row.tokens) for row in rows_of_shape if row.ratio is not None and row.ratio < 1]
        alarms = (
            [f"Our fastest kernel is slower than a rival at {', '.join(slower_tokens)} tokens."]
            if slower_tokens
            else []
        )
        notes = [
            f"{kernel}: not timed: {reason}" for row in rows_of_shape for kernel, reason in row.untimed_reasons.items()
        ]
        notes += [
            f"{kernel} does not count as ours: it {OVERFLOW}"
            for row in rows_of_shape
            for kernel in row.excluded_kernels
        ]
        chart = charts.chart_over_tokens(kernels, cells)
        page.add_block(
            page_input,
            "Timing",
            f"{page_input.name}: {heads} heads, {cache_type}",
            columns,
            cells,
            chart,
            notes,
            alarms,
        )


def add_kernels(page: Page, page_input: PageInput, record: Verification) -> None:
    """Add results by back end, failures with the command that repeats them, and launch counts."""
    name, results, has_graphs = page_input.name, record.results, record.engine == GRAPH_ENGINE
    counts = {
        backend: dict.fromkeys(RESULT_STATUSES, 0) for backend in dict.fromkeys(result.backend for result in results)
    }
    notes = [] if has_graphs else ["No graph was captured on this machine."]
    notes += [f"{backend}: not measured: {reason}" for backend, reason in record.missing.items()]
    alarms = []
    for result in results:
        counts[result.backend][result.status] += result.rounds
        if result.status == "skipped":
            notes.append(f"skipped: {result.reason}")
        if result.status == "failed":
            failure = "; ".join(f"{finding.oracle} at {finding.step}: {finding.message}" for finding in result.findings)
            alarms.append(
                f"{result.case} ({result.variant}, {result.backend}) failed: {failure}. {result.command}".strip()
            )
    rows = [(backend, *count.values()) for backend, count in counts.items()]
    page.add_block(
        page_input,
        "Kernels",
        f"{name}, {record.engine}",
        ("back end", *RESULT_STATUSES),
        rows,
        notes=notes,
        alarms=alarms,
    )
    title = f"Launches in captured graphs, {name}" if has_graphs else f"PyTorch ops of a replayed step, no GPU, {name}"
    launch_rows = [
        (result.backend, result.variant, *launches) for result in results for launches in result.launches.items()
    ]
    if launch_rows:
        page.add_block(page_input, "Kernels", title, ("backend", "variant", "tokens", "counted"), launch_rows)


STEP_RECORDS: dict[str, tuple[type[Any], Callable[[Page, PageInput, Any], None]]] = {
    "plan": (Plan, add_plan),
    "kernels": (Verification, add_kernels),
    "timing": (Measurement, add_timing),
}
"""The record of a step, and the function that adds it to the page, by the name of the step."""
