"""The harness against itself: every planted fault must be caught by its named case, and nothing else may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vllm_aiter_mla.verify.cases import Case, cases
from vllm_aiter_mla.verify.engines import Engine
from vllm_aiter_mla.verify.faults import FAULTS, Fault
from vllm_aiter_mla.verify.runner import Options, Result, run_case
from vllm_aiter_mla.verify.setting import Variant
from vllm_aiter_mla.verify.subject import Subject

# Enough for a leak of one buffer a step to show; a self-test is no long run.
SOAK = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault.

    Attributes:
        fault: the planted fault.
        caught: its case failed under its oracle.
        message: what the oracle said, or what happened instead.
        control: why the same case fails without the fault too; empty where it passes, as it must.
    """

    fault: Fault
    caught: bool
    message: str
    control: str

    @property
    def ok(self) -> bool:
        """Caught, and the control passes."""
        return self.caught and not self.control


def self_test(
    subject: Callable[[], Subject],
    engine: Engine,
    variant: Variant,
    options: Options,
    faults: Iterable[Fault] | None = None,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Plant every fault in a right back end and run the case that must catch it.

    Args:
        subject: makes the right back end anew: faults may leave something behind in it.
        engine: where to run.
        variant: dtypes; fp8, for the faults about scales.
        options: sizes and seed; the long run is shortened.
        faults: ``FAULTS`` by default.
        progress: told each verdict as it comes.
    """
    options = replace(options, soak=SOAK)
    by_name = {case.name: case for case in cases(options.limit)}
    verdicts = []
    for fault in FAULTS if faults is None else faults:
        verdict = _judge(fault, subject, by_name[fault.case], engine, variant, options)
        verdicts.append(verdict)
        progress(verdict)
    return verdicts


def _judge(
    fault: Fault, subject: Callable[[], Subject], case: Case, engine: Engine, variant: Variant, options: Options
) -> Verdict:
    right = run_case(case, variant, fault.base(subject()), engine, options)
    wrong = run_case(case, variant, fault.plant(fault.base(subject())), engine, options)
    named = [finding["message"] for finding in wrong.findings if finding["oracle"] == fault.oracle]
    control = "" if right.status == "passed" else _said(right)
    return Verdict(fault, bool(named), named[0] if named else _said(wrong), control)


def _said(result: Result) -> str:
    if not result.findings:
        return result.status if not result.reason else f"{result.status}: {result.reason}"
    first = result.findings[0]
    return f"{first['oracle']}: {first['message']}"
