"""The absorbed weight of a layer as vLLM keeps it.

Read from the layer per call: reloading replaces the tensors in place or as a whole.
"""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.compat import layer_view
from vllm_aiter_mla.kernels import absorb


def weight_of(layer: Any) -> absorb.AbsorbWeight:
    """The layer's W_UK in the form in which vLLM multiplies by it.

    Raises:
        UnknownWeightError: no form of ours is in the layer's tensors.
    """
    if layer_view.uses_fp8_bmm(layer):
        return absorb.read({"W_K": layer.W_K, "W_K_scale": layer.W_K_scale})
    return absorb.read({"W_UK_T": layer.W_UK_T})
