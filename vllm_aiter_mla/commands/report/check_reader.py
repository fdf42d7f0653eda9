# SPDX-License-Identifier: Apache-2.0
"""What a page shows of a run of ``check``: its steps, and the records that its plan, kernels and timing left.

The demo names a step by what it ran over too, as in "engine, fp8 cache": the part before the comma is the step's name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.check.steps import ran_what_a_card_can
from vllm_aiter_mla.commands.check.timing.record import STAND_IN, Measurement
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import NO_CARD, NOTHING_RAN, ON_CPU, ON_EMULATOR, Glance, Page
from vllm_aiter_mla.commands.report.engine_reader import label_of, plan
from vllm_aiter_mla.verify.results import Verification

MEANING = {
    None: ("cut off", "the run was cut off: it proves nothing"),
    0: ("passed", "every step that ran passed"),
    1: ("failed", "do not switch the fast path on before the failed steps pass"),
    2: ("failed", "an option or the model was wrong, and the rest did not run"),
    3: ("skipped", "something could not be told, nothing ran on a card, or a step that was asked for did not run"),
    4: ("no gain", "vLLM's own kernels are the fastest for this model on this card: leave the flag off"),
}
"""Outcome and meaning of each exit status of ``check``."""
STATIC_STEPS = ("machine", "plan", "issues")
"""Steps that run nothing of the fast path."""
GRAPHS = "graph capture"
"""What ``Verification.engine`` is on a card, as ``verify.engine.GraphEngine`` names itself."""
TUNED = "tuned"
"""Schema of what `--tune` leaves in the step ``timing``; its lines say the same."""
STATES = ("passed", "failed", "skipped")
VERSIONS = {"torch": "torch", "runtime": "for", "triton": "Triton", "python": "Python"}
"""Versions of ``stopwatch.machine`` on the first screen, with the words before them."""


def check(page: Page, run: CheckRun) -> Glance:
    """Add the steps of a check, and what its plan, its kernels and its timings found.

    Raises:
        ValueError: the run contradicts itself, or a record in it is of another version.
    """
    _check_that_it_agrees(run)
    shown = [(show, record) for step in run.steps for show, record in _records(step)]
    records = [record for _, record in shown]
    is_emulated = any(isinstance(record, Verification) and record.emulated for record in records)
    passed = ON_EMULATOR if is_emulated else ON_CPU if run.on_a_card is False else "passed"
    rows = [(step.name, _outcome_of_step(step, passed), step.detail, list(step.lines)) for step in run.steps]
    ended = f"after the step {run.steps[-1].name}" if run.steps else "before a step had ended"
    alarms = [f"The run was cut off {ended}."] * (run.exit is None)
    title = f"{page.input.name}, {run.model or 'no model'}: the steps"
    page.add("Check", title, ("step", "outcome", "finding", "more"), rows, alarms=alarms)
    for show, record in shown:
        show(page, record)
    for step in run.steps:
        _add_figures(page, step)
    return _glance(run, records, passed)


def _check_that_it_agrees(run: CheckRun) -> None:
    """Raise ValueError where a run says what no run of ours does: it must not look as if everything had passed."""
    amiss = [f"{step.name} {step.status}" for step in run.steps if step.status not in ("passed", "warning", "skipped")]
    if run.exit == 0 and (amiss or not run.steps):
        raise ValueError(f"exit status 0, and {', '.join(amiss) or 'no step'}")
    if run.on_a_card is None and ran_what_a_card_can(run.steps):
        raise ValueError("on_a_card is null, and a step ran that can run on a card")


def _step_name(step: Step) -> str:
    return step.name.partition(",")[0]


def _records(step: Step) -> Iterator[tuple[Callable[[Page, Any], None], Any]]:
    """Yield each record in a step with what shows it.

    Raises:
        ValueError: a record is of another version, or is none.
    """
    if step.data is None or _step_name(step) not in RECORDS:
        return
    cls, show = RECORDS[_step_name(step)]
    for data in step.data if isinstance(step.data, list) else [step.data]:
        if files.layout_of(data)[0] != TUNED:
            yield show, files.parse(cls, Path(step.name), data)


def _outcome_of_step(step: Step, passed: str) -> str:
    """Return the word for a step: what passed on a CPU, or is a promise, never looks like what passed on a card."""
    if step.status != "passed":
        return step.status
    return NOTHING_RAN if _step_name(step) == "plan" else passed


def _outcome(run: CheckRun, plans: Sequence[Plan], passed: str) -> tuple[str, str]:
    """Return the word for a run, and what it means; ``passed`` is the word for a step that passed where it ran."""
    failed = [step.name for step in run.steps if step.status == "failed"]
    if (
        plans
        and run.exit is not None
        and {step.name for step in run.steps} <= {*STATIC_STEPS}
        and {*failed} <= {"plan"}
    ):
        return NOTHING_RAN, _promise(plans)
    word, means = MEANING.get(run.exit, ("failed", f"exit status {run.exit}"))
    if failed:
        return word, f"{means}: {', '.join(failed)}"
    if word != "passed":
        return word, means
    if passed == ON_CPU:
        means = "every step that ran passed, on this CPU, which shows nothing of a card"
    done = [step.name for step in run.steps if step.status in ("passed", "warning") and _step_name(step) != "plan"]
    return passed, f"{means}: {', '.join(done)}"


def _promise(plans: Sequence[Plan]) -> str:
    """Return what plans alone mean."""
    if any(record.outcome == "unknown" for record in plans):
        return "nothing was run, and vLLM could not say whether layers would engage"
    layers = ", ".join(f"{record.layers.engaged}/{record.layers.mla} at TP {record.options.tp}" for record in plans)
    return f"nothing was run: by vLLM's own config these MLA layers would engage: {layers}"


def _glance(run: CheckRun, records: Sequence[Any], passed: str) -> Glance:
    """Return what the first screen says of a run, whose steps left ``records``."""
    plans = [record for record in records if isinstance(record, Plan)]
    verifications = [record for record in records if isinstance(record, Verification)]
    word, means = _outcome(run, plans, passed)
    means += "; an emulator says nothing of time, nor of a card's faults" * (passed == ON_EMULATOR)
    means += "; no graph was captured" * any(record.engine != GRAPHS for record in verifications)
    checks = next((step.data for step in run.steps if step.name == "machine"), None) or ()
    here = {check["name"]: check["detail"] for check in checks if check["status"] in ("ok", "warning")}
    machines = (record.machine for record in records if not isinstance(record, Plan))
    used: Mapping[str, str] = next(filter(None, machines), {})
    card = f"none: planned for {plans[0].arch}" if word == NOTHING_RAN else _card(used, here, run.on_a_card)
    versions = {head: here[name] for name, head in (("torch", "torch"), ("rocm", "ROCm")) if name in here}
    versions |= {head: used[name] for name, head in VERSIONS.items() if used.get(name)}
    left = [f"{step.name}: {step.detail}" for step in run.steps if step.status in ("skipped", "unknown")]
    left += [str(reason) for record in plans for reason in record.reasons]
    left += [f"{backend}: {why}" for record in verifications for backend, why in record.missing.items()]
    card = "emulated: " * (passed == ON_EMULATOR) + card
    what = " and ".join(map(label_of, plans)) or run.model or "no model"
    return Glance(word, f"check of {what}", card, means, list(dict.fromkeys(left)), versions)


def _card(used: Mapping[str, str], here: Mapping[str, str], on_a_card: bool | None) -> str:
    """Return the card that the records name, else the one that the step ``machine`` found."""
    if not used:
        return here.get("gpu", "a GPU that no step names" if on_a_card else NO_CARD)
    card = used.get("card") or "not told"
    return NO_CARD if card.startswith("none") else f"{card} {used.get('arch', '')}".strip()


def _add_figures(page: Page, step: Step) -> None:
    """Add the figures of a step that leaves no record, under their names there."""
    kind, of = _step_name(step), f"{step.name}, {page.input.name}"
    if not step.data:
        return
    if kind == "engine":
        _add_by_scenario(page, f"Flag off and on, token by token: {of}", step.data["distances"])
    elif kind == "prefill":
        _add_by_scenario(page, f"Steps with prefill rows, flag off and on: {of}", step.data)
    elif kind == "launches":
        page.add("Check", f"Kernels of one decode step: {of}", ("side", "kernels"), step.data.items())


def _add_by_scenario(page: Page, title: str, scenarios: Mapping[str, Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for figures in scenarios.values() for name in figures)
    rows = [(scenario, *map(figures.get, names)) for scenario, figures in scenarios.items()]
    page.add("Check", title, ("scenario", *(name.replace("_", " ") for name in names)), rows)


def timing(page: Page, record: Measurement) -> None:
    """Add one chart and table per number of heads and type: time over tokens, one line per kernel."""
    alarms = [f"The run stopped early: {record.stopped}"] if record.stopped else []
    alarms += [f"{kernel} is wrong and was not timed: {why}" for kernel, why in record.wrong.items()]
    notes = [f"Medians of replayed graphs, {record.weights} weights. Ratio: the fastest rival's time over ours."]
    if any(STAND_IN in row.us for row in record.rows):
        notes.append(
            f"{STAND_IN} launches as many kernels as vLLM, which is not here: the ratio is to no kernel that serves."
        )
    page.add("Timing", page.input.name, notes=notes, alarms=alarms)
    for (heads, kind), group in groupby(record.rows, lambda row: (row.heads, row.kind)):
        sizes = list(group)
        kernels = list(dict.fromkeys(kernel for row in sizes for kernel in row.us))
        columns = ("tokens", *(f"{kernel}, us" for kernel in kernels), "ratio")
        rows = [(row.tokens, *map(row.us.get, kernels), row.ratio) for row in sizes]
        slower = [str(row.tokens) for row in sizes if row.ratio is not None and row.ratio < 1]
        alarms = [f"Our fastest kernel is slower than a rival at {', '.join(slower)} tokens."] if slower else []
        notes = [f"{kernel}: not timed: {why}" for row in sizes for kernel, why in row.untimed.items()]
        notes += [f"{kernel} does not count as ours: it {OVERFLOW}" for row in sizes for kernel in row.left_out]
        chart = charts.over_tokens(kernels, rows)
        page.add("Timing", f"{page.input.name}: {heads} heads, {kind}", columns, rows, chart, notes, alarms)


def kernels(page: Page, record: Verification) -> None:
    """Add results by back end, failures with the command that repeats them, and counted launches."""
    name, results, on_graphs = page.input.name, record.results, record.engine == GRAPHS
    counts = {backend: dict.fromkeys(STATES, 0) for backend in dict.fromkeys(result.backend for result in results)}
    notes = [] if on_graphs else ["No graph was captured on this machine."]
    notes += [f"{backend}: not measured: {why}" for backend, why in record.missing.items()]
    alarms = []
    for result in results:
        counts[result.backend][result.status] += result.rounds
        if result.status == "skipped":
            notes.append(f"skipped: {result.reason}")
        if result.status == "failed":
            broken = "; ".join(f"{finding.oracle} at {finding.step}: {finding.message}" for finding in result.findings)
            alarms.append(
                f"{result.case} ({result.variant}, {result.backend}) failed: {broken}. {result.command}".strip()
            )
    rows = [(backend, *count.values()) for backend, count in counts.items()]
    page.add("Kernels", f"{name}, {record.engine}", ("back end", *STATES), rows, notes=notes, alarms=alarms)
    title = f"Launches in captured graphs, {name}" if on_graphs else f"PyTorch ops of a replayed step, no GPU, {name}"
    counted = [(ran.backend, ran.variant, *launches) for ran in results for launches in ran.launches.items()]
    if counted:
        page.add("Kernels", title, ("backend", "variant", "tokens", "counted"), counted)


RECORDS: dict[str, tuple[type[Any], Callable[[Page, Any], None]]] = {
    "plan": (Plan, plan),
    "kernels": (Verification, kernels),
    "timing": (Measurement, timing),
}
"""Record and what shows it, by the name of a step."""
