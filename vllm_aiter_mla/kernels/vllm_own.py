# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` back end: the sequence that vLLM itself runs, with its fusions on. Others are timed against it."""

from typing import Any

import torch

from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.reference import VLLM_KERNEL


class VLLMBackend(KernelBackend):
    """RoPE + KV write in place, absorb BMM, concat + quantisation: three launches of vLLM's own kernels.

    **It rotates q and k_pe of its inputs in place**, as vLLM does. A caller that runs it twice, or compares its result
    with another back end's, passes copies. It is for timing: a step that vLLM should serve goes to vLLM itself.

    If vLLM's decode kernel may take the query in two parts, there is no third launch: vLLM is timed at its best, and
    only the absorbed query is returned.

    Args:
        vllm: vLLM's kernels, handed in because ``kernels`` does not import vLLM: the module ``compat.layer``.
        arch: the card.
    """

    name = "vllm"
    trusted = True

    def __init__(self, vllm: Any, arch: str = "") -> None:
        self._vllm, self._arch = vllm, arch

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. RoPE is computed in the activation dtype, as vLLM's kernel does."""
        if inputs.weight.format not in ("plain", *absorb.GEMMS):
            return f"AITER multiplies {inputs.weight.format} weights for vLLM, and it is not here"
        return contract_violation(inputs) or Binding(self._run, numerics=VLLM_KERNEL)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        q_pe = inputs.q[..., inputs.nope_dim :]
        if inputs.num_tokens:
            self._rotate_and_write(inputs, q_pe)
        absorbed = inputs.weight.product(inputs.q_nope)
        if is_fp8(inputs.out_dtype):
            return self._vllm.concat_quantise_fp8(absorbed, q_pe, inputs.q_scale)
        if may_take_parts(self._arch, inputs.num_heads, is_fp8(inputs.kv_cache.dtype)):
            return absorbed
        return torch.cat([absorbed, q_pe], dim=-1)

    def _rotate_and_write(self, inputs: DecodeInputs, q_pe: torch.Tensor) -> None:
        cache, is_quantised = inputs.kv_cache, is_fp8(inputs.kv_cache.dtype)
        stored, dtype = (cache.view(torch.uint8), "fp8") if is_quantised else (cache, "auto")
        self._vllm.rope_and_write(
            inputs.positions, q_pe, inputs.k_pe, inputs.kv_c, inputs.cos_sin_cache, inputs.is_neox, inputs.slot_mapping,
            stored, dtype, inputs.k_scale,
        )  # fmt: skip


def may_take_parts(arch: str, heads: int, fp8_cache: bool) -> bool:
    """Return whether vLLM's decode may take (q_nope, q_pe) as they are: Gluon's kernel, gfx950, fewer than 16 heads.

    vLLM decides per batch, also by the size of the cache and an environment variable: ``AiterMLAHelper`` in
    vllm/v1/attention/backends/mla/rocm_aiter_mla.py, ``use_gluon_decode`` and ``use_gluon_verify`` (vLLM 0.32).
    """
    return arch == "gfx950" and heads < 16 and not fp8_cache
