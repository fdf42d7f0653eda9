"""Who is measured: the one launch, the unfused sequence, plain PyTorch, and AITER where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.inputs import DecodeInputs

Prepare = Callable[[DecodeInputs], torch.Tensor]
OURS, UNFUSED, TORCH, AITER, STOCK = "one launch", "unfused", "torch", "aiter", "vllm"


@dataclass(frozen=True, slots=True)
class Path:
    """One way to run a call; ``reason`` says why it cannot be measured here, and then ``prepare`` is None."""

    name: str
    prepare: Prepare | None
    reason: str | None = None


def available(sample: DecodeInputs) -> list[Path]:
    """All five, in the order of the table; one that cannot take ``sample`` carries its reason."""
    from vllm_aiter_mla.kernels.triton import baselines
    from vllm_aiter_mla.kernels.triton.launcher import entry, launch

    return [
        # Past the back end's own cap: where it would step aside is what is to be measured.
        Path(OURS, lambda inputs: launch(inputs, entry(inputs).tile)),
        Path(UNFUSED, baselines.unfused),
        _vllm(sample),
        Path(TORCH, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
        _aiter(sample),
    ]


def _vllm(sample: DecodeInputs) -> Path:
    """vLLM's own fused RoPE + KV-write op in place of ours, where vLLM is importable."""
    try:
        from vllm import _custom_ops
    except Exception as error:
        return Path(STOCK, None, f"vllm is not importable: {_line(error)}")
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla_rope_fused"):
        return Path(STOCK, None, "this vllm has no concat_and_cache_mla_rope_fused")
    from vllm_aiter_mla.kernels.triton import baselines

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        absorbed = inputs.weight.product(inputs.q_nope)
        q_pe = inputs.q[..., inputs.nope_dim :]
        quantised = fp8.is_fp8(inputs.kv_cache.dtype)
        # The op rotates q_pe and k_pe in place: a replay rotates what the last one left, which costs the same.
        _custom_ops.concat_and_cache_mla_rope_fused(
            inputs.positions, q_pe, inputs.k_pe, inputs.kv_c, inputs.cos_sin_cache, inputs.is_neox,
            inputs.slot_mapping, inputs.kv_cache.view(torch.uint8) if quantised else inputs.kv_cache,
            "fp8" if quantised else "auto", inputs.k_scale,
        )  # fmt: skip
        return baselines.concat_quant(inputs, absorbed, q_pe)

    return Path(STOCK, prepare)


def _aiter(sample: DecodeInputs) -> Path:
    if torch.version.hip is None:
        return Path(AITER, None, "AITER needs ROCm")
    try:
        from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
        from vllm_aiter_mla.kernels.platform import detect_platform

        backend = AiterBackend(detect_platform())
        bound = backend.bind(sample)
    except Exception as error:
        return Path(AITER, None, _line(error))
    return Path(AITER, None, bound) if isinstance(bound, str) else Path(AITER, bound.run)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
