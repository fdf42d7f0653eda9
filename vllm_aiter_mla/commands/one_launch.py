"""AITER's own single launch: a rival that ``measure`` times beside ours, and that never serves.

``fused_fp8_bmm_rope_cat_and_cache_mla`` and its mxfp4 twin do what our Triton launch does: absorb BMM, RoPE, concat, KV
write. They take no scale of the query, clamp no position, and with fewer slots than rows they read and write past the
slot mapping. Over a rotary table in 16 bits they round each product of the rotation, so they are given float32 halves.
Read from aiter/ops/triton/fusions/fused_bmm_rope_kv_cache.py; docs/aiter.md says what running it showed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.absorb import FP8_GROUP
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError
from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform

MODULE = "aiter.ops.triton.fusions.fused_bmm_rope_kv_cache"
FUNCTIONS = {"fp8": "fused_fp8_bmm_rope_cat_and_cache_mla", "mxfp4": "fused_fp4_bmm_rope_cat_and_cache_mla"}
"""By weight format."""
Ops = Mapping[str, Callable[..., Any]]


def load() -> Ops:
    """Import AITER's functions.

    Raises:
        AiterUnavailableError: this AITER does not have them.
    """
    try:
        module = importlib.import_module(MODULE)
        return {format: getattr(module, name) for format, name in FUNCTIONS.items()}
    except Exception as error:  # AITER's import runs rocminfo, compilers and a registry: anything may come out
        raise AiterUnavailableError(f"{MODULE}: {type(error).__name__}: {error}") from error


class OneLaunchBackend(KernelBackend):
    """``KernelBackend`` over AITER's single launch.

    Args:
        platform: the card.
        ops: AITER's functions by weight format; imported by default.
        unit_scale: whether the scale of every query is taken for 1, as it is where AITER's users call these functions.
            Otherwise a query in fp8 is declined.

    Raises:
        AiterUnavailableError: no ``ops`` were given and AITER has none.
    """

    name = "aiter-one-launch"
    bounds = OWN_BMM

    def __init__(self, platform: Platform, ops: Ops | None = None, unit_scale: bool = False) -> None:
        self._platform, self._unit_scale = platform, unit_scale
        self._ops = load() if ops is None else ops
        self._halves: dict[tuple[int, torch.Size], tuple[torch.Tensor, ...]] = {}

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. The run's first call with a rotary table must not come in a capture."""
        reason = contract_violation(inputs) or next(self._broken(inputs), None)
        return reason or Binding(partial(self._run, self._ops[inputs.weight.format]))

    def _broken(self, inputs: DecodeInputs) -> Iterator[str]:
        weight, cache = inputs.weight, inputs.kv_cache
        if weight.format not in self._ops:
            yield f"AITER's single launch multiplies fp8 and mxfp4 weights, not {weight.format} ones"
        if (reason := weight.refuse(self._platform)) is not None:
            yield reason
        if inputs.q.dtype not in (torch.bfloat16, torch.float16):
            yield f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
        if formats.is_fp8(inputs.out_dtype) and not self._unit_scale:
            yield "the query is to be fp8, and AITER's single launch does not scale it"
        if formats.is_fp8(cache.dtype) and cache.dtype != self._platform.fp8:
            yield f"kv_cache: {self._platform.fp8} expected on {self._platform.arch}, got {cache.dtype}"
        if inputs.num_tokens == 0 or len(inputs.slot_mapping) != inputs.num_tokens:
            yield f"slot_mapping: a slot for each row expected, got {len(inputs.slot_mapping)} for {inputs.num_tokens}"
        for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
            if width & (width - 1):
                yield f"{name} width: a power of two expected, got {width}"
        if not cache.is_contiguous():
            yield f"kv_cache: contiguous blocks expected, got strides {cache.stride()}"

    def _run(self, op: Callable[..., Any], inputs: DecodeInputs) -> torch.Tensor:
        table, width = inputs.cos_sin_cache, inputs.kv_cache.shape[-1]
        key = (table.data_ptr(), table.shape)
        if key not in self._halves:  # with the table, so that no other can come to lie there
            self._halves[key] = (*(half.float().contiguous() for half in table.chunk(2, dim=-1)), table)
        cos, sin, _ = self._halves[key]
        (_, values), (_, scale) = inputs.weight.tensors
        # A scale that is given beside a 16-bit cache would scale it.
        k_scale = inputs.k_scale if formats.is_fp8(inputs.kv_cache.dtype) else None
        group = {"group_size": FP8_GROUP} if inputs.weight.format == "fp8" else {}
        query: torch.Tensor = op(
            inputs.q_nope.transpose(0, 1), values, scale, inputs.q[..., inputs.nope_dim :], inputs.kv_c.unsqueeze(1),
            inputs.k_pe.unsqueeze(1), inputs.kv_cache.view(-1, 1, width), inputs.slot_mapping, inputs.positions, cos,
            sin, k_scale=k_scale, is_neox=inputs.is_neox, q_out_dtype=inputs.out_dtype, **group,
        )[0]  # fmt: skip
        return query
