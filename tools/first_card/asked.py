"""What a section of ``tools/first_card`` is asked, and the layer that all of them take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.kernels.platform import detect_platform

NOPE, ROPE, LATENT, BLOCK = 128, 64, 512, 64


@dataclass(frozen=True)
class Asked:
    """What a section may use."""

    aiter: Path | None  # the folder of AITER's Triton files
    dry: str  # "", or a kind of ``dry.ENVIRONMENT``
    seconds: float  # after which it starts nothing more

    def left(self, since: float) -> bool:
        """Return whether there is time for one thing more."""
        return time.monotonic() - since < self.seconds


def shape_of(heads: int, kind: str, weights: str, act: torch.dtype = torch.bfloat16) -> LayerShape:
    """Return a layer of DeepSeek's widths: ``kind`` of query and cache and ``weights``, "bf16" or "fp8"."""
    fp8 = detect_platform().fp8
    stored, weight = fp8 if kind == "fp8" else act, ("fp8", fp8) if weights == "fp8" else ("plain",)
    return LayerShape(heads, NOPE, stored, stored, BLOCK, False, act, card().torch_device, LATENT, ROPE, weight)


def seen_as_nothing(found: dict[str, Any], caught: bool) -> dict[str, Any]:
    """Return the result of a section where nothing is computed: right is that the comparisons failed."""
    return found | {
        "failures": [],
        "caught": found.get("failures"),
        "planted": {"nothing is computed": caught},
        "ok": True,
    }
