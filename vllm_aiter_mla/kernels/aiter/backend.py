"""The AITER back end: the absorb BMM, then AITER's op, which rotates, quantises and writes in one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter import contract
from vllm_aiter_mla.kernels.aiter.dispatch import VIEW_POLICIES, Plan, ViewPolicy, apply_view, make_plan
from vllm_aiter_mla.kernels.aiter.module import Gemm, Op, load_fp8_gemm, load_op
from vllm_aiter_mla.kernels.aiter.tables import Halves, KernelCaptureError, TableHalves
from vllm_aiter_mla.kernels.capture import is_capturing
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError
from vllm_aiter_mla.kernels.platform import Platform

_KEEP = 4096  # call shapes remembered; a serving process sees its capture sizes, not thousands


@dataclass(frozen=True, slots=True)
class Decision:
    """What is known about a call shape: why it is refused, or the plan it runs by (None: there is nothing to run)."""

    reason: str | None
    plan: Plan | None = None


class AiterBackend:
    """``KernelBackend`` over ``fused_qk_rope_concat_and_cache_mla``.

    A row with slot -1 is defined: the op is asked for all rows (``compute_all_q_rope=True``), on kernels that honour
    it only. Rows beyond the slot mapping (S < T) are not written by AITER and stay uninitialised; see
    :meth:`defined_rows`.

    Args:
        platform: the card.
        op: AITER's op; imported and checked by default.
        fp8_gemm: gives AITER's batched GEMM over fp8 weights, or why there is none; asked when the first such layer
            comes.
        view: how the cache is handed over, hence which kernel runs; see ``make_plan``.
        capturing: whether a graph is being captured.

    Raises:
        ValueError: an unknown ``view``.
        AiterUnavailableError: no ``op`` was given and AITER cannot be used.
    """

    name = "aiter"

    def __init__(
        self,
        platform: Platform,
        op: Op | None = None,
        view: ViewPolicy = "auto",
        capturing: Callable[[], bool] = is_capturing,
        fp8_gemm: Callable[[], Gemm | str] = load_fp8_gemm,
    ) -> None:
        if view not in VIEW_POLICIES and not isinstance(view, int):
            raise ValueError(f"view: one of {', '.join(VIEW_POLICIES)} or a number of tokens expected, got {view!r}")
        self.platform = platform
        self.view = view
        self.tables = TableHalves(capturing)
        self._op = load_op() if op is None else op
        self._capturing = capturing
        self._load_fp8_gemm = fp8_gemm
        self._fp8_gemm: Gemm | str | None = None
        self._decisions: dict[tuple[Any, ...], Decision] = {}
        self._warm: set[tuple[Any, ...]] = set()

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Why AITER must not see this call, or None. Metadata only; remembered per call shape."""
        return self.decide(inputs).reason

    def decide(self, inputs: DecodeInputs) -> Decision:
        """The decision for this call shape, by the key that :meth:`prepare` uses too."""
        key = contract.call_key(inputs)
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= _KEEP:
                self._decisions.clear()
            decision = self._decisions[key] = self._examine(inputs)
        return decision

    def _examine(self, inputs: DecodeInputs) -> Decision:
        if has_no_rows(inputs):
            return Decision(None)
        reason = contract.violation(inputs, self.platform)
        if reason is not None:
            return Decision(reason)
        if inputs.w_uk_scale is not None and isinstance(gemm := self._gemm(), str):
            return Decision(f"fp8-absorb: {gemm}; set VLLM_ROCM_USE_AITER_FP8BMM=0")
        tokens = inputs.slot_mapping.shape[0]
        plan = make_plan(inputs.kv_cache, tokens, inputs.num_heads, inputs.rope_dim, self.platform, self.view)
        return Decision(contract.kernel_violation(plan, inputs.num_heads, tokens), plan)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Absorb, then launch AITER's op; writes ``inputs.kv_cache`` where slots are >= 0.

        Returns:
            q_prepared [T, N, 576] of ``inputs.out_dtype``, contiguous. Only the first :meth:`defined_rows` rows mean
            anything.

        Raises:
            KernelInputError: the call breaks AITER's contract (``refuse`` says so beforehand).
            KernelCaptureError: the first call of a layer shape, or of a rotary table, during a graph capture.
        """
        return self.bind(inputs)(inputs)

    def bind(self, inputs: DecodeInputs) -> Callable[[DecodeInputs], torch.Tensor]:
        """``prepare`` for calls of the shape of ``inputs``: the plan and the layer's key are looked up here, once.

        Raises:
            KernelInputError: the call breaks AITER's contract.
        """
        decision = self.decide(inputs)
        if decision.reason is not None:
            raise KernelInputError(decision.reason)
        key = () if decision.plan is None else contract.layer_key(inputs)
        return partial(self._run, decision.plan, key)

    def _run(self, plan: Plan | None, key: tuple[Any, ...], inputs: DecodeInputs) -> torch.Tensor:
        q_out = inputs.q.new_empty(
            (inputs.num_tokens, inputs.num_heads, inputs.latent_dim + inputs.rope_dim), dtype=inputs.out_dtype
        )
        if plan is None:
            return q_out
        self._guard_capture(key, inputs)
        halves = self.tables.halves(inputs.cos_sin_cache)
        q_nope, q_pe = inputs.q.split([inputs.nope_dim, inputs.rope_dim], dim=-1)
        launch(self._op, self.absorbed(inputs, q_nope), q_pe, inputs, q_out, halves, plan)
        self._warm.add(key)
        return q_out

    def absorbed(self, inputs: DecodeInputs, q_nope: torch.Tensor) -> torch.Tensor:
        """[T, N, 512] in the activation dtype: a bmm, or for an fp8 weight AITER's GEMM as vLLM calls it."""
        if inputs.w_uk_scale is None:
            return reference.absorb(q_nope, inputs.w_uk_t)
        return cast(Gemm, self._gemm())(  # without one, ``decide`` has refused
            q_nope.transpose(0, 1),
            inputs.w_uk_t.transpose(1, 2),
            inputs.w_uk_scale,
            group_size=reference.FP8_GROUP,
            dtype=q_nope.dtype,
            transpose_bm=True,
        )

    def _gemm(self) -> Gemm | str:
        if self._fp8_gemm is None:
            self._fp8_gemm = self._load_fp8_gemm()
        return self._fp8_gemm

    def defined_rows(self, inputs: DecodeInputs) -> int:
        """How many leading rows of the result are defined: one per slot, padded slots included."""
        return inputs.slot_mapping.shape[0]

    def numerics(self, inputs: DecodeInputs) -> reference.Numerics:
        """The roundings of the kernel this call runs on, for a comparison with the reference."""
        plan = self.decide(inputs).plan
        return reference.AITER if plan is None else plan.numerics

    def kernel_of(self, inputs: DecodeInputs) -> str | None:
        """The AITER kernel this call runs on ("per-head" or "opt"), or None where nothing is launched."""
        plan = self.decide(inputs).plan
        return None if plan is None else plan.kernel

    def _guard_capture(self, key: tuple[Any, ...], inputs: DecodeInputs) -> None:
        if key not in self._warm and self._capturing():
            raise KernelCaptureError(
                f"first AITER call of a layer shape ({inputs.num_heads} heads, {inputs.kv_cache.dtype} cache, "
                f"{inputs.out_dtype} query) during a graph capture: AITER would load or compile its module inside it; "
                "run the self-check or one eager step of the layer on every rank before capturing"
            )


def has_no_rows(inputs: DecodeInputs) -> bool:
    """No token or no slot: AITER's grid would be empty, which HIP refuses."""
    return inputs.num_tokens == 0 or inputs.slot_mapping.shape[0] == 0


def launch(
    op: Op,
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    inputs: DecodeInputs,
    q_out: torch.Tensor,
    halves: Halves,
    plan: Plan,
) -> None:
    """Hand one checked call over to AITER.

    Args:
        op: AITER's op.
        q_latent: [T, N, 512] absorbed query; any row and head stride below 4 GiB a row, else it is copied.
        q_pe: [T, N, 64] not rotated, a view of ``inputs.q``. AITER leaves it so.
        inputs: the other operands. The scales go over as they are: AITER takes the reciprocal itself.
        q_out: [T, N, 576], fresh: it must not overlap an input.
        halves: contiguous cos and sin, [max_position, 32] each.
        plan: the kernel meant to run, and the view of the cache that leads there.
    """
    if contract.span_violation(q_latent) is not None:
        q_latent = q_latent.contiguous()
    op(
        q_latent, q_pe, inputs.kv_c, inputs.k_pe, apply_view(inputs.kv_cache, plan.view), q_out, inputs.slot_mapping,
        inputs.k_scale, inputs.q_scale, inputs.positions, halves[0], halves[1], inputs.is_neox, True,
        plan.honours_all_rows,
    )  # fmt: skip
