# SPDX-License-Identifier: Apache-2.0
"""The card a kernel is chosen for: the one table of the fp8 type that each converts to in hardware."""

import re
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels.device import card

CARDS = {
    "gfx942": torch.float8_e4m3fnuz,  # MI300X, MI325X
    "gfx950": torch.float8_e4m3fn,  # MI350X, MI355X
    "sm89": torch.float8_e4m3fn,  # L4, L40S
    "sm90": torch.float8_e4m3fn,  # H100, H200
    "sm100": torch.float8_e4m3fn,  # B200
    "sm103": torch.float8_e4m3fn,  # B300
    "sm120": torch.float8_e4m3fn,  # RTX PRO 6000
}
"""The e4m3 type that each architecture converts to in hardware; any other is a software cast. AITER takes the same type
from the card it finds: aiter/utility/dtypes.py, defaultDtypes."""


@dataclass(frozen=True, slots=True)
class Platform:
    """The card and the ROCm release a kernel is chosen for."""

    arch: str  # a name of ``CARDS``, another gfx or sm name, or "cpu"
    rocm: tuple[int, int] | None = None  # (major, minor) of the ROCm release torch was built for, or None outside ROCm

    @property
    def fp8(self) -> torch.dtype:
        """The e4m3 type that an fp8 tensor has here: e4m3fn where no hardware asks for another."""
        return CARDS.get(self.arch, torch.float8_e4m3fn)


def detect_platform() -> Platform:
    """Return what the installed device says, without AITER and without a kernel launch."""
    version = re.match(r"(\d+)\.(\d+)", card().rocm or "")
    return Platform(card().arch, (int(version[1]), int(version[2])) if version else None)
