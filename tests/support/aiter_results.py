"""What AITER's own sources computed, as operands of ours beside the results: see kernels/data/README.md."""

import io
import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.sandbox.simulated_aiter.op import FP8
from tests.support.triton_cases import plain_bits
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs

DATA = Path(__file__).parents[1] / "kernels" / "data"
FUSED_CALLS = range(48)
FP8_VECTORS, FP4_VECTORS = np.load(DATA / "aiter_fp8_gemm.npz"), np.load(DATA / "aiter_fp4_gemm.npz")
FP8_CALLS, FP4_CALLS = (sorted({key.split("/")[0] for key in held}) for held in (FP8_VECTORS, FP4_VECTORS))
CACHE_FILL, QUERY_FILL = 0x35, 0x2A
LATENT = 512


@dataclass(frozen=True)
class GemmCall:
    """One call of a batched GEMM of AITER's: x [T, N, P] times the weight gave y [T, N, 16], divided by ``y_scale``."""

    x: torch.Tensor
    weight: AbsorbWeight
    y: torch.Tensor
    y_scale: torch.Tensor | None = None


def fp8_call(call: str) -> GemmCall:
    arch, act, _ = call.split("-")
    held = {name: torch.from_numpy(FP8_VECTORS[f"{call}/{name}"]) for name in ("x", "w", "scale", "y")}
    x, y = (held[name].view(getattr(torch, act)) for name in "xy")
    return GemmCall(x, AbsorbWeight("fp8", held["w"].view(FP8[arch]), held["scale"]), y)


def fp4_call(call: str) -> GemmCall:
    x, codes, scales, y = (torch.from_numpy(FP4_VECTORS[f"{call}/{name}"]) for name in ("x", "w", "w_scale", "y"))
    y_scale = torch.from_numpy(FP4_VECTORS[f"{call}/y_scale"]) if f"{call}/y_scale" in FP4_VECTORS else None
    return GemmCall(x.view(torch.bfloat16), AbsorbWeight("mxfp4", codes, scales), y.view(torch.bfloat16), y_scale)


@dataclass(frozen=True)
class FusedCall:
    """One call of AITER's fused op.

    Attributes:
        arch, kernel: the card, and which of its kernels ran.
        all_rows: whether rows without a slot were asked for.
        inputs: q [T, N, 512 + 64] with the absorbed query in front, beside an identity for W_UK.
        cache, query: what the call left; an element that it did not write holds ``CACHE_FILL`` or ``QUERY_FILL``.
    """

    arch: str
    kernel: str
    all_rows: bool
    inputs: DecodeInputs
    cache: torch.Tensor
    query: torch.Tensor

    @property
    def latent(self) -> torch.Tensor:
        """[T, N, 512], the absorbed query, with the strides that it had: heads first."""
        return self.inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)

    @property
    def rows(self) -> torch.Tensor:
        """The rows of the query that the call defines."""
        return torch.arange(self.inputs.num_tokens)[(self.inputs.slot_mapping >= 0) | self.all_rows]


def fused_call(index: int) -> FusedCall:
    """The call with that number, over a fresh cache."""
    facts, arrays = _fused()[0][index], _fused()[1]

    def given(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        array = torch.from_numpy(arrays[f"{index}/{name}"].copy())
        return array if dtype is None else array.view(dtype)

    bf16, stored, query = torch.bfloat16, *(getattr(torch, facts[n]) for n in ("kv_cache_dtype", "q_out_dtype"))
    kv, wanted, query_heads = given("kv", bf16), given("cache", stored), arrays[f"{index}/q_nope"].shape[0]
    inputs = DecodeInputs(
        q=torch.cat([given("q_nope", bf16).transpose(0, 1), given("q_pe", bf16)], -1), k_pe=kv[:, LATENT:],
        kv_c=kv[:, :LATENT],
        weight=AbsorbWeight("plain", torch.eye(LATENT, dtype=bf16).expand(query_heads, LATENT, LATENT)),
        kv_cache=torch.full_like(plain_bits(wanted), CACHE_FILL).view(stored), slot_mapping=given("slots"),
        positions=given("positions"), cos_sin_cache=torch.cat([given("cos", bf16), given("sin", bf16)], -1),
        k_scale=given("k_scale"), q_scale=given("q_scale"), is_neox=facts["is_neox"], out_dtype=query,
    )  # fmt: skip
    return FusedCall(facts["arch"], facts["kernel"], facts["compute_all_q_rope"], inputs, wanted, given("q_out", query))


@cache
def _fused() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    archive = np.load(io.BytesIO(lzma.decompress((DATA / "aiter_fused_op.npz.xz").read_bytes())))
    arrays = {name: archive[name] for name in archive.files}
    return json.loads(str(arrays.pop("cases"))), arrays
