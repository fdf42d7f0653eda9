"""``verify`` against itself: every planted fault must be caught by its named case, and nothing else may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from vllm_aiter_mla.verify.cases import cases
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.faults import Fault
from vllm_aiter_mla.verify.runner import Options, Result, run_case
from vllm_aiter_mla.verify.setting import Variant
from vllm_aiter_mla.verify.subject import Subject

# Enough for a leak of one buffer a step to show; a self-test is no long run.
SOAK = 40


@dataclass(frozen=True, slots=True)
class Outcome:
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
    faults: Iterable[Fault], subject: Callable[[], Subject], engine: EagerEngine, variant: Variant, options: Options
) -> Iterator[Outcome]:
    """Plant each fault in a right back end and run the case that must catch it.

    Args:
        faults: what to plant.
        subject: makes the right back end anew: faults may leave something behind in it.
        engine: where to run.
        variant: dtypes; fp8, for the faults about scales.
        options: sizes and seed; the long run is shortened.
    """
    options = replace(options, soak=SOAK)
    by_name = {case.name: case for case in cases(options.limit)}
    for fault in faults:
        case = by_name[fault.case]
        control = run_case(case, variant, fault.base(subject()), engine, options)
        result = run_case(case, variant, fault.plant(fault.base(subject())), engine, options)
        named = [finding.message for finding in result.findings if finding.oracle == fault.oracle]
        message = named[0] if named else _said(result)
        yield Outcome(fault, bool(named), message, "" if control.status == "passed" else _said(control))


def _said(result: Result) -> str:
    if result.findings:
        return f"{result.findings[0].oracle}: {result.findings[0].message}"
    return f"{result.status}: {result.reason}" if result.reason else result.status
