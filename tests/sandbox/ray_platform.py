"""vLLM's CPU platform with a key by which Ray counts devices: vLLM refuses Ray on a platform without one.

Ray can be told that a machine without GPUs has some. A platform plugin, because an actor asks for the key before vLLM
loads any other plugin there.
"""

from __future__ import annotations

import os

SWITCH = "AITER_MLA_SANDBOX_RAY"


def find() -> str | None:
    """Name of the platform's class, in the processes of an engine that the sandbox starts on Ray."""
    return f"{__name__}.RayCpuPlatform" if os.environ.get(SWITCH) == "1" else None


if os.environ.get(SWITCH) == "1":
    from vllm.platforms.cpu import CpuPlatform

    class RayCpuPlatform(CpuPlatform):
        """The CPU platform; its devices are counted as Ray counts GPUs."""

        ray_device_key = "GPU"
