"""What the choice of a kernel needs to know about the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

# AITER takes its fp8 type from the card it finds: aiter/utility/dtypes.py, defaultDtypes.
_FP8 = {
    "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
    "sm90": torch.float8_e4m3fn,
    "cpu": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Platform:
    """The card and the ROCm release a kernel is chosen for.

    Attributes:
        arch: "gfx942" (MI300X), "gfx950" (MI355X), another gfx name, "sm90" and the like, or "cpu".
        rocm: (major, minor) of the ROCm release torch was built for, or None outside ROCm.
    """

    arch: str
    rocm: tuple[int, int] | None = None

    @property
    def fp8(self) -> torch.dtype:
        """The e4m3 flavour of the card; e4m3fn where nothing else is known."""
        return _FP8.get(self.arch, torch.float8_e4m3fn)

    @property
    def is_rocm(self) -> bool:
        """Whether this is an AMD card."""
        return self.arch.startswith("gfx")


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


def detect_arch() -> str:
    """The architecture's name alone; see :func:`detect_platform`."""
    return detect_platform().arch
