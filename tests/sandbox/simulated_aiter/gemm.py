"""AITER's batched GEMM over fp8 weights, written apart from the reference so that the two can contradict.

Source: batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant in aiter/ops/triton/gemm/batched/.
"""

from __future__ import annotations

import torch

from tests.sandbox.simulated_aiter.execute import FP8_MAX, encode

# What a test wants to know about the calls so far: heads and rows.
calls: list[tuple[int, int]] = []
# By how many units in the last place a reciprocal is off: what another compiler may make of a division.
RECIPROCAL_ULP = 0


def batched_gemm(
    X: torch.Tensor,  # noqa: N803
    WQ: torch.Tensor,  # noqa: N803
    w_scale: torch.Tensor,
    group_size: int = 128,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    splitK: int | None = None,  # noqa: N803
    YQ: torch.Tensor | None = None,  # noqa: N803
    transpose_bm: bool | None = False,
    transpose_bm_in: bool | None = False,
    config: dict | None = None,
) -> torch.Tensor:
    """X [B, M, K] times the transpose of WQ [B, N, K] fp8: [B, M, N], or [M, B, N] with ``transpose_bm``."""
    # AITER asserts these as well: exceptions, not aborts.
    assert X.shape[0] == WQ.shape[0], f"{X.shape[0]} and {WQ.shape[0]} batches"
    assert X.shape[2] == WQ.shape[2], f"K is {X.shape[2]} and {WQ.shape[2]}"
    assert dtype in (torch.bfloat16, torch.float16), f"no output in {dtype}"
    assert splitK is None, f"splitK is {splitK}"
    if bias is not None or transpose_bm_in or config is not None:
        raise NotImplementedError("only vLLM's call is simulated")
    calls.append((X.shape[0], X.shape[1]))
    product = torch.einsum("bgmn,bgm->bmn", *_by_group(X, WQ, group_size)) * w_scale.reshape(-1)[0].double()
    result = product.float().to(dtype)
    result = result.transpose(0, 1) if transpose_bm else result
    if YQ is None:
        return result.contiguous()
    assert YQ.shape == result.shape, f"YQ is {list(YQ.shape)}, not {list(result.shape)}"
    YQ.copy_(result)
    return YQ


def _by_group(x: torch.Tensor, weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group of K: the product of the codes [B, G, M, N] in double, exact, and the rows' scales [B, G, M]."""
    products, scales = [], []
    for part, codes in zip(x.float().split(size, -1), weight.double().split(size, -1), strict=True):
        # Triton's max is taken in float32, floor included, and passes a NaN over; its clamp makes one the lowest bound.
        largest = torch.fmax(part.abs(), torch.tensor(1e-10)).amax(-1)
        scale = largest * torch.tensor(1.0 / FP8_MAX[weight.dtype])
        top = FP8_MAX[weight.dtype]
        scaled = (part * _reciprocal(scale)[..., None]).clamp(-top, top).nan_to_num(nan=-top)
        stored = encode(scaled, weight.dtype)
        products.append(stored.double() @ codes.transpose(1, 2))
        scales.append(scale.double())
    return torch.stack(products, 1), torch.stack(scales, 1)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    return ((1.0 / scale).view(torch.int32) + RECIPROCAL_ULP).view(torch.float32)
