# SPDX-License-Identifier: Apache-2.0
"""Print the record of the step ``timing``: a table, and lines for the kernels that were not timed."""

from rich.console import Console
from rich.table import Table

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands.check.timing.record import STAND_IN, Measurement


def print_record(record: Measurement, console: Console) -> None:
    """Print the table, and the reasons why kernels were not timed."""

    def print_line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    rows, failed_kernels = record.rows, record.failed_kernels
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    title = "; ".join(filter(None, (", ".join(record.machine.values()), f"{record.weights} weights")))
    rival = "stand-in" if STAND_IN in names else "rival"
    table = Table("T", "N", "type", *(f"{name}, us" for name in names), f"{rival} / ours", title=title)
    for row in rows:
        us = [f"{row.us[name]:.2f}" if name in row.us else "-" for name in names]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}{' (slower)' if row.ratio < 1 else ''}"
        table.add_row(str(row.tokens), str(row.heads), row.cache_type, *us, ratio)
    console.print(table)
    if STAND_IN in names:
        print_line(f"{STAND_IN}: replaces vLLM's kernels, which cannot run here; it makes as many launches")
    for name, reason in dict.fromkeys(untimed for row in rows for untimed in row.untimed_reasons.items()):
        if name not in failed_kernels:
            print_line(f"{name}: not timed: {reason}")
    for name in dict.fromkeys(name for row in rows for name in row.excluded_kernels):
        print_line(f"{name}: it {OVERFLOW}; kernel=auto skips it, and the last column does not count it")
    for name, reason in failed_kernels.items():
        print_line(f"WRONG, not timed: {name}: {reason}")
    if record.stop_reason:
        print_line(f"STOPPED: {record.stop_reason}")
