"""Which kernel runs for a layer: joins the settings, the platform and the back ends of ``kernels``."""

from __future__ import annotations

from typing import Any

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.report import census


def prepare(layer_name: str, layer: Any, inputs: DecodeInputs) -> torch.Tensor:
    """Run the layer's back end."""
    census.engage(layer_name, "reference")
    return reference.prepare(inputs)
