"""Bugs planted in the assembly of a variant: name to a function from the text to the wrong text.

Each changes one thing on the way of a query tile (the launches below run one) or of a KV row.
"""

from __future__ import annotations

import re
from collections.abc import Callable


def nth(pattern: str, new: str | Callable[[re.Match[str]], str], which: int = 0) -> Callable[[str], str]:
    """Replace one match, counted from 0, or from the end where negative."""

    def plant(text: str) -> str:
        found = list(re.finditer(pattern, text, re.MULTILINE))
        chosen = found[which]
        return (
            text[: chosen.start()]
            + (chosen.expand(new) if isinstance(new, str) else new(chosen))
            + text[chosen.end() :]
        )

    return plant


BARRIER = r"^\ts_barrier\n"
WAIT = r"^\ts_waitcnt (?:vm|lgkm)cnt\(\d+\).*\n"
MFMA = r"(v_mfma\w+ \S+) (v\[\d+:\d+\]), (v\[\d+:\d+\]),"
PLANTED: dict[str, Callable[[str], str]] = {
    "dropped barrier, first": nth(BARRIER, ""),
    "dropped barrier, last": nth(BARRIER, "", -1),
    "LDS offset of a read": nth(
        r"(ds_read\S+ v\[\d+:\d+\], v\d+) offset(1?):(\d+)", lambda m: f"{m[1]} offset{m[2]}:{int(m[3]) + 8}"
    ),
    "LDS offset of a write": nth(r"^(\tds_write_b\d+ .*?\])(?: offset:\d+)?$", r"\1 offset:48"),
    "swapped MFMA operands": nth(MFMA, r"\1 \3, \2,"),
    "fp8 op_sel": nth(r"(v_cvt\S+fp8_f32 .*?) op_sel:\[[01,]+\]", r"\1"),
    "wrong bound of the rows": nth(r"v_cmp_gt_i32", "v_cmp_ge_i32"),
    "wrong bound of a descriptor": nth(r"0x7ffffffe", "0x40", -1),
    "wrong kernel argument": nth(r"(s_load_dword s\d+, s\[0:1\], )0x58", r"\g<1>0x5c"),
}
# gfx942 alone rounds to bfloat16 by integers, with the bit above the dropped ones: a tie then goes down, not to even.
SDWA = nth(r"src0_sel:WORD_1", "src0_sel:WORD_0", -1)


def waits(text: str) -> list[str]:
    """The text without one wait, for each wait."""
    return [nth(WAIT, "", k)(text) for k in range(len(re.findall(WAIT, text, re.MULTILINE)))]
