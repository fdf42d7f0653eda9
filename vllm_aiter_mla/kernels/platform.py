"""The card a kernel is chosen for: the one table of what each converts in hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Card:
    """One architecture.

    Attributes:
        sold_as: names of cards that have it.
        fp8: the e4m3 type that it converts to in hardware; any other is a software cast. AITER takes the same type
            from the card it finds: aiter/utility/dtypes.py, defaultDtypes.
    """

    sold_as: str
    fp8: torch.dtype


CARDS = {
    "gfx942": Card("MI300X, MI325X", torch.float8_e4m3fnuz),
    "gfx950": Card("MI350X, MI355X", torch.float8_e4m3fn),
    "sm89": Card("L4, L40S", torch.float8_e4m3fn),
    "sm90": Card("H100, H200", torch.float8_e4m3fn),
    "sm100": Card("B200", torch.float8_e4m3fn),
    "sm103": Card("B300", torch.float8_e4m3fn),
    "sm120": Card("RTX PRO 6000", torch.float8_e4m3fn),
}


@dataclass(frozen=True, slots=True)
class Platform:
    """The card and the ROCm release a kernel is chosen for.

    Attributes:
        arch: a name of ``CARDS``, another gfx or sm name, or "cpu".
        rocm: (major, minor) of the ROCm release torch was built for, or None outside ROCm.
    """

    arch: str
    rocm: tuple[int, int] | None = None

    @property
    def fp8(self) -> torch.dtype:
        """The e4m3 type that an fp8 tensor has here: e4m3fn where no hardware asks for another."""
        return hardware_fp8(self.arch) or torch.float8_e4m3fn


def hardware_fp8(arch: str) -> torch.dtype | None:
    """The e4m3 type that ``arch`` converts to in hardware, or None where it is not known to have one."""
    card = CARDS.get(arch)
    return None if card is None else card.fp8


def parse_rocm(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of ``torch.version.hip``, or None where it is absent or unreadable."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def detect_platform() -> Platform:
    """The machine as torch sees it: the current device, without AITER and without a kernel launch."""
    rocm = parse_rocm(torch.version.hip)
    if not torch.cuda.is_available():
        return Platform("cpu", rocm)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if rocm is not None:
        # "gfx942:sramecc+:xnack-" -> "gfx942"
        return Platform(properties.gcnArchName.split(":")[0], rocm)
    return Platform(f"sm{properties.major}{properties.minor}")
