# SPDX-License-Identifier: Apache-2.0
"""The AITER back end: the absorb product, then AITER's op, which rotates, quantises and writes in one launch."""

from functools import partial
from typing import Any

import torch

from vllm_aiter_mla.kernels.aiter import contract
from vllm_aiter_mla.kernels.aiter.op import Op, load_op
from vllm_aiter_mla.kernels.aiter.route import PER_HEAD_TOKENS, KernelName, Route, route_of
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend, KernelCaptureError
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import Platform

Halves = tuple[torch.Tensor, torch.Tensor]


class AiterBackend(KernelBackend):
    """``KernelBackend`` over ``fused_qk_rope_concat_and_cache_mla``.

    "aiter" runs the per-head kernel, and opt from 256 tokens on, where AITER has no other. "aiter-opt" runs opt at
    every size. A view of the cache steers AITER to the kernel. Nobody has measured which is faster: timing chooses.

    A row with slot -1 is defined: only kernels that honour ``compute_all_q_rope=True`` are used, and they are asked for
    all rows.

    Args:
        platform: the card.
        op: AITER's op; imported and checked by default.
        opt: whether this is "aiter-opt".

    Raises:
        AiterUnavailableError: no ``op`` was given and AITER cannot be used.
    """

    def __init__(self, platform: Platform, op: Op | None = None, opt: bool = False) -> None:
        self.name = "aiter-opt" if opt else "aiter"
        self.platform = platform
        self._op = load_op() if op is None else op
        self._tables: dict[tuple[Any, ...], tuple[int, torch.Tensor, Halves]] = {}

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class: finds the route, once per call shape.

        The result of the run is contiguous. The run raises KernelCaptureError if the first call with a rotary table
        comes during a graph capture.
        """
        tokens = inputs.num_tokens
        if tokens == 0:  # an empty grid, which HIP does not accept
            return Binding(DecodeInputs.new_query)
        reason = contract.violation(inputs, self.platform)
        if reason is not None:
            return reason
        wanted: KernelName = "opt" if self.name == "aiter-opt" or tokens >= PER_HEAD_TOKENS else "per-head"
        route = route_of(inputs.kv_cache, tokens, inputs.num_heads, inputs.rope_dim, self.platform, wanted)
        reason = contract.kernel_violation(route, wanted, inputs.num_heads, tokens)
        if reason is not None:
            return reason
        # Between rows of the query AITER takes any stride, between heads one only.
        room = inputs.num_heads if inputs.out_heads and inputs.head_step == 1 else 0
        run = partial(self._run, route, [inputs.nope_dim, inputs.rope_dim], room, self._options(inputs))
        return Binding(run, route.kernel, route.numerics)

    def _run(
        self, route: Route, widths: list[int], room: int, options: dict[str, Any], inputs: DecodeInputs
    ) -> torch.Tensor:
        # Fresh, as it must not overlap an operand.
        query, cache = inputs.new_query(padded=room > 0), inputs.kv_cache
        q_out = query[:, :room] if room else query
        cos, sin = self.halves(inputs.cos_sin_cache)
        # Tensor.split goes through Python and takes twice as long.
        q_nope, q_pe = torch.split_with_sizes(inputs.q, widths, -1)
        # The scales go over as they are: AITER takes the reciprocal itself. It leaves q_pe un-rotated.
        self._op(
            inputs.weight.product(q_nope, options), q_pe, inputs.kv_c, inputs.k_pe,
            cache if route.view is None else cache.view(route.view), q_out, inputs.slot_mapping, inputs.k_scale,
            inputs.q_scale, inputs.positions, cos, sin, inputs.is_neox, True, route.honours_all_rows,
        )  # fmt: skip
        return query

    def halves(self, table: torch.Tensor) -> Halves:
        """Return (cos, sin), each [max_position, R/2], contiguous, of a rotary table [max_position, R].

        vLLM keeps one table per rotary embedding for all layers. AITER takes two and reads their rows densely whatever
        their stride: ``table.chunk(2, -1)`` would be silent garbage, and a copy per call a launch per layer and step.
        So the halves are made once. They are kept by the table's address and layout, because a compiled graph hands
        over another alias of the same memory at every call. If torch's version counter says that the table was
        overwritten, it is copied again into the same halves, so that captured graphs see it. Inference tensors have no
        such counter, and a reload moves none: ``reloaded`` copies them all.

        Raises:
            KernelCaptureError: the halves must be made or refreshed while a graph is being captured.
        """
        key = (table.data_ptr(), table.shape, table.stride(), table.dtype)
        version = 0 if table.is_inference() else table._version
        kept = self._tables.get(key)
        if kept is not None and kept[0] >= version:
            return kept[2]
        if card().is_capturing():
            raise KernelCaptureError(
                "the cos/sin table is new or was changed, and a graph is being captured: run the layer once outside "
                "the capture (warm-up) after every change of the table"
            )
        cos, sin = table.chunk(2, dim=-1)
        halves = (cos.contiguous(), sin.contiguous()) if kept is None else _copied(table, kept[2])
        # With the table, so that no other table can come to lie there.
        self._tables[key] = (version, table, halves)
        return halves

    @torch.inference_mode()  # as the steps in which they were made, and vLLM's reload is not in it
    def reloaded(self) -> None:
        """See the base class."""
        for _, table, halves in self._tables.values():
            _copied(table, halves)

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """See the base class: where "aiter" changes kernels."""
        return (PER_HEAD_TOKENS,)

    def absorbed(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return [T, N, 512] in the activation dtype, by the product that vLLM calls for this weight format."""
        return inputs.weight.product(inputs.q_nope, self._options(inputs))

    def _options(self, inputs: DecodeInputs) -> dict[str, Any]:
        """Return further arguments of the product of such calls."""
        return {}


def _copied(table: torch.Tensor, halves: Halves) -> Halves:
    """Copy the halves of a table into those that were made of it."""
    for half, part in zip(halves, table.chunk(2, dim=-1), strict=True):
        half.copy_(part)
    return halves
