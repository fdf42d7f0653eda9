"""The rotation of prefill rows: as Inductor compiles it with the layer, against a rotary kernel behind the layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tools.first_card import dry, small_kernels
from tools.first_card.asked import NOPE, ROPE, Asked, shape_of
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.distance import ordinals
from vllm_aiter_mla.kernels.inputs import synthetic_inputs

Q_LORA = 1536


def prefill(asked: Asked) -> dict[str, Any]:
    """Compare the rotation that Inductor compiles with the layer and vLLM's rotary kernel behind it; stand-ins both.

    ``native`` is written as vLLM's ``forward_native`` of DeepSeek's rotary class; vLLM's kernel is ``rotate_kernel``.
    """
    since, home, heads, act = time.monotonic(), card().torch_device, 2 if asked.dry else 16, torch.bfloat16
    sizes = (1, 8) if asked.dry else (1, 8, 64, 512, 2048, 8192)
    lora = 64 if asked.dry else Q_LORA
    norm = torch.randn((lora,), device=home).to(act)
    matrix = (torch.randn((heads * (NOPE + ROPE), lora), device=home) * lora**-0.5).to(act)
    table = synthetic_inputs(shape_of(heads, "bf16", "bf16"), 2048).cos_sin_cache
    whole, front = (torch.compile(one, dynamic=True) for one in (native, project))
    rows, runs = list[dict[str, Any]](), []
    for tokens in sizes:
        if not asked.left(since):
            break
        x, k_pe = (torch.randn((tokens, width), device=home).to(act) for width in (lora, ROPE))
        positions = torch.randint(0, table.shape[0], (tokens,), device=home)

        def separate(x: Any = x, k_pe: Any = k_pe, positions: Any = positions) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = front(x, norm, matrix, heads), k_pe.clone().unsqueeze(1)
            small_kernels.rotate_in_place(positions, q[..., NOPE:], k, table, False)
            return q, k

        def together(x: Any = x, k_pe: Any = k_pe, positions: Any = positions) -> tuple[torch.Tensor, torch.Tensor]:
            return whole(x, k_pe, norm, matrix, positions, table, heads)

        if asked.dry == dry.LAUNCHES:
            small_kernels.rotate_in_place(
                positions, project(x, norm, matrix, heads)[..., NOPE:], k_pe[:, None], table, False
            )
            continue
        wanted, got = together(), separate()
        thrice = rotated(front(x, norm, matrix, heads), k_pe.unsqueeze(1), positions, table)
        rows.append({"T": tokens, "eager_differs": compared(thrice, wanted)["bytes_differ"]} | compared(got, wanted))
        runs.append((together, separate))
    for row, (together, separate) in zip(rows, runs, strict=True):  # a rehearsal's recording ends all compiling
        row |= {"together_us": timed(together), "separate_us": timed(separate)}
    differ = sum(row["eager_differs"] for row in rows)
    planted = {} if asked.dry == dry.LAUNCHES else {"rounded after each operation": differ > 0}
    return {"rows": rows, "stand-in": "both sides", "planted": planted,
            "ok": all(row["largest_step"] <= 1 for row in rows)}  # fmt: skip


def project(x: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """RMS norm and projection: q [T, N, P+R]."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.nn.functional.linear(y.to(x.dtype) * norm, matrix).view(x.shape[0], heads, NOPE + ROPE)


def native(
    x: torch.Tensor, k_pe: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor, positions: torch.Tensor,
    table: torch.Tensor, heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same and the rotation: q [T, N, P+R] and k_pe [T, 1, R]."""
    return rotated(project(x, norm, matrix, heads), k_pe.unsqueeze(1), positions, table)


def rotated(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as vLLM's ``forward_native`` does, in torch's own ops: rounded once by Inductor, three times eagerly."""
    cos, sin = (half.repeat_interleave(2, dim=-1).unsqueeze(-2) for half in table[positions].chunk(2, dim=-1))

    def turned(rows: torch.Tensor) -> torch.Tensor:
        return rows * cos + torch.stack((-rows[..., 1::2], rows[..., ::2]), dim=-1).flatten(-2) * sin

    return torch.cat((q[..., :NOPE], turned(q[..., NOPE:])), dim=-1), turned(k)


def compared(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Return how many bytes differ and the largest distance in representable values."""
    steps = [(ordinals(one) - ordinals(right)).abs() for one, right in zip(got, wanted, strict=True)]
    raw = [
        one.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)
        for one, right in zip(got, wanted, strict=True)
    ]
    return {"bytes_differ": sum(int(one.sum()) for one in raw), "largest_step": max(int(one.max()) for one in steps)}


def timed(run: Callable[[], object], calls: int = 8) -> float:
    """Return the median microseconds of a call in a replayed graph."""
    replay = card().record(lambda: [run() for _ in range(calls)])
    replay()
    return statistics.median(card().time_us(replay) / calls for _ in range(9))
