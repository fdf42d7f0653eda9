"""The ``stock`` back end: vLLM's own kernels on private copies, what a failed self-check falls back to."""

from __future__ import annotations

import torch

from vllm_aiter_mla.compat import kernels
from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.runtime.absorb import absorb


class StockBackend:
    """RoPE + KV write, absorb BMM, concat and quantisation as three or four launches of vLLM's kernels."""

    name = "stock"

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Why the shared contract is broken, or None."""
        return contract_violation(inputs)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """See ``KernelBackend.prepare``; rounds RoPE to the activation dtype first, as vLLM does."""
        q_nope, q_pe = inputs.q.split([inputs.nope_dim, inputs.rope_dim], dim=-1)
        q_pe = q_pe.contiguous()
        if inputs.num_tokens:
            self._rotate_and_write(inputs, q_pe)
        query = torch.cat([absorb(q_nope, inputs.w_uk_t, inputs.w_uk_scale), q_pe], dim=-1)
        if not fp8.is_fp8(inputs.out_dtype):
            return query
        return kernels.quantise_fp8(query.flatten(1), inputs.q_scale).view(query.shape)

    def _rotate_and_write(self, inputs: DecodeInputs, q_pe: torch.Tensor) -> None:
        """Rotate the copy ``q_pe`` and a copy of k_pe in place, and write the KV rows."""
        is_quantised = fp8.is_fp8(inputs.kv_cache.dtype)
        kernels.rope_and_write(
            inputs.positions,
            q_pe,
            inputs.k_pe.clone(),
            inputs.kv_c,
            inputs.cos_sin_cache,
            inputs.is_neox,
            _padded(inputs),
            inputs.kv_cache.view(torch.uint8) if is_quantised else inputs.kv_cache,
            inputs.k_scale,
        )


def factory(platform: Platform) -> StockBackend | str:
    """The back end, or why this vLLM build has no such kernels."""
    if not kernels.has_rope_and_write():
        return "this build of vLLM has no concat_and_cache_mla_rope_fused"
    return StockBackend()


def _padded(inputs: DecodeInputs) -> torch.Tensor:
    """One slot per row, -1 beyond those that were given."""
    missing = inputs.num_tokens - inputs.slot_mapping.shape[0]
    return inputs.slot_mapping if missing == 0 else torch.nn.functional.pad(inputs.slot_mapping, (0, missing), value=-1)
