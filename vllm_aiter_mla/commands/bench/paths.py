"""What is compared: the one launch, the unfused sequence, plain PyTorch, and AITER where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import formats as fp8
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.inputs import DecodeInputs

Prepare = Callable[[DecodeInputs], torch.Tensor]
OURS, UNFUSED, TORCH, AITER, VLLM = "one launch", "unfused", "torch", "aiter", "vllm"


@dataclass(frozen=True, slots=True)
class Path:
    """One way to run a call; ``reason`` says why it cannot be measured here, and then ``prepare`` is None."""

    name: str
    prepare: Prepare | None
    reason: str | None = None


def available(sample: DecodeInputs) -> list[Path]:
    """All five, in the order of the table; one that cannot take ``sample`` carries its reason."""
    from vllm_aiter_mla.commands.bench import baselines
    from vllm_aiter_mla.kernels.triton.launcher import entry, launch

    without = sample.weight.missing()
    return [
        # Without the measured cap: this benchmark finds the size from which the kernel is slower.
        Path(OURS, lambda inputs: launch(inputs, entry(inputs).tile)),
        # Over fp8 weights both multiply by AITER's GEMM.
        Path(UNFUSED, None, without) if without else Path(UNFUSED, baselines.unfused),
        Path(VLLM, None, without) if without else _vllm(),
        Path(TORCH, lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING)),
        _aiter(sample),
    ]


def _vllm() -> Path:
    """vLLM's own fused RoPE + KV-write op in place of ours, where vLLM is importable."""
    from vllm_aiter_mla.commands.bench import baselines
    from vllm_aiter_mla.compat import offline

    op = offline.fused_rope_kv_write()
    if isinstance(op, str):
        return Path(VLLM, None, op)

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        absorbed = inputs.weight.product(inputs.q_nope)
        q_pe = inputs.q[..., inputs.nope_dim :]
        quantised = fp8.is_fp8(inputs.kv_cache.dtype)
        # The op rotates q_pe and k_pe in place: a replay rotates what the last one left, which costs the same.
        op(
            inputs.positions, q_pe, inputs.k_pe, inputs.kv_c, inputs.cos_sin_cache, inputs.is_neox,
            inputs.slot_mapping, inputs.kv_cache.view(torch.uint8) if quantised else inputs.kv_cache,
            "fp8" if quantised else "auto", inputs.k_scale,
        )  # fmt: skip
        return baselines.concat_quant(inputs, absorbed, q_pe)

    return Path(VLLM, prepare)


def _aiter(sample: DecodeInputs) -> Path:
    if torch.version.hip is None:
        return Path(AITER, None, "AITER needs ROCm")
    try:
        from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
        from vllm_aiter_mla.kernels.platform import detect_platform

        backend = AiterBackend(detect_platform())
        bound = backend.bind(sample)
    except Exception as error:
        return Path(AITER, None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    return Path(AITER, None, bound) if isinstance(bound, str) else Path(AITER, bound.run)
