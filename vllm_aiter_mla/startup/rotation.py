# SPDX-License-Identifier: Apache-2.0
"""Check that vLLM's rotary kernel rounds once, as code that Inductor generates, before it rotates prefill rows.

This project has read in vLLM's sources that the kernel does; here it is seen on the user's card.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels.backend import EXACT
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup.comparison import difference


class RotationError(RuntimeError):
    """vLLM's rotary kernel does not rotate as vLLM's compiled graph."""


def check(layer: Layer) -> None:
    """Check the kernel for layers of this shape, if it may rotate their prefill rows.

    Raises:
        RotationError: it rounds more than once, or rotates otherwise.
    """
    if compat_layer.rounds_once(layer.module):
        compare(partial(compat_layer.rotary_embedding, compat_layer.ROTARY_KERNEL), layer.shape())


def compare(kernel: Callable[..., None], shape: LayerShape) -> None:
    """Rotate synthetic rows in place with ``kernel``, under both pairings, and compare with the reference.

    Raises:
        RotationError: more than one value in a hundred differs from the rotation rounded once, or one by two steps.
    """
    for is_neox in (False, True):
        given = synthetic_inputs(replace(shape, is_neox=is_neox))
        rows = {"q": given.q[..., given.nope_dim :], "k": given.k_pe.unsqueeze(1)}
        cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(given.cos_sin_cache, given.positions))
        wanted = {name: rotate(x, cos, sin, is_neox).to(x.dtype) for name, x in rows.items()}
        kernel(given.positions, *rows.values(), given.cos_sin_cache, is_neox)
        for name, x in rows.items():
            found = difference(x, wanted[name])
            if found.steps > EXACT.rope_steps or found.share > EXACT.rope_share:
                raise RotationError(
                    f"vLLM's rotary kernel does not round once ({'NeoX' if is_neox else 'GPT-J'} pairs): "
                    f"{name} {found.steps} step(s) on {found.share:.2%}"
                )
