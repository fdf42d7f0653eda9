"""The ``vllm`` back end: the sequence that vLLM itself runs, its fusions on. Others are timed against it."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import TWO_ROUNDING


class VLLMKernels(Protocol):
    """vLLM's own kernels, given from above, because ``kernels`` does not import vLLM: see ``compat.layer``."""

    def has_rope_and_write(self) -> bool:
        """Whether this build of vLLM has the kernel below."""
        ...

    def rope_and_write(
        self,
        positions: torch.Tensor,
        q_pe: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        slots: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows."""
        ...

    def concat_quantise_fp8(self, absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """absorbed [T, N, L] and q_pe [T, N, R], side by side in the platform's fp8 type."""
        ...


class VLLMBackend(KernelBackend):
    """RoPE + KV write in place, absorb BMM, concat + quantisation: three launches, of vLLM's kernels, nothing copied.

    **It rotates q and k_pe of its inputs in place**, as vLLM does: who calls it twice, or compares its result with
    another back end's, gives it copies. For timing and comparisons; a step that vLLM is to serve goes to vLLM.

    Where vLLM's decode kernel may take the query in two parts there is no third launch: it is timed at its best, and
    returns the absorbed query alone.
    """

    name = "vllm"
    trusted = True

    def __init__(self, vllm: VLLMKernels, arch: str = "") -> None:
        self._vllm, self._arch = vllm, arch

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class; rounds RoPE to the activation dtype first, as vLLM does."""
        return contract_violation(inputs) or inputs.weight.missing() or Binding(self._run, numerics=TWO_ROUNDING)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        q_pe = inputs.q[..., inputs.nope_dim :]
        if inputs.num_tokens:
            self._rotate_and_write(inputs, q_pe)
        absorbed = inputs.weight.product(inputs.q_nope)
        if fp8.is_fp8(inputs.out_dtype):
            return self._vllm.concat_quantise_fp8(absorbed, q_pe, inputs.q_scale)
        if may_take_parts(self._arch, inputs.num_heads, fp8.is_fp8(inputs.kv_cache.dtype)):
            return absorbed
        return torch.cat([absorbed, q_pe], dim=-1)

    def _rotate_and_write(self, inputs: DecodeInputs, q_pe: torch.Tensor) -> None:
        is_quantised = fp8.is_fp8(inputs.kv_cache.dtype)
        self._vllm.rope_and_write(
            inputs.positions,
            q_pe,
            inputs.k_pe,
            inputs.kv_c,
            inputs.cos_sin_cache,
            inputs.is_neox,
            _padded(inputs),
            inputs.kv_cache.view(torch.uint8) if is_quantised else inputs.kv_cache,
            "fp8" if is_quantised else "auto",
            inputs.k_scale,
        )


def factory(platform: Platform, vllm: VLLMKernels) -> VLLMBackend | str:
    """The back end, or why this vLLM build has no such kernels."""
    if not vllm.has_rope_and_write():
        return "this build of vLLM has no concat_and_cache_mla_rope_fused"
    return VLLMBackend(vllm, platform.arch)


def may_take_parts(arch: str, heads: int, fp8_cache: bool) -> bool:
    """Whether vLLM's decode may take (q_nope, q_pe) as they are: Gluon's kernel, on gfx950, for fewer than 16 heads.

    Whether it does is decided per batch, by the size of the cache and a variable too: ``AiterMLAHelper`` in
    vllm/v1/attention/backends/mla/rocm_aiter_mla.py, ``use_gluon_decode`` and ``use_gluon_verify`` (vLLM 0.32).
    """
    return arch == "gfx950" and heads < 16 and not fp8_cache


def _padded(inputs: DecodeInputs) -> torch.Tensor:
    """One slot per row, -1 beyond those that were given."""
    missing = inputs.num_tokens - inputs.slot_mapping.shape[0]
    return inputs.slot_mapping if missing == 0 else torch.nn.functional.pad(inputs.slot_mapping, (0, missing), value=-1)
