"""Planted bugs: each check that guards an invariant at op level catches one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passes.execute import assert_rewritten_right, clone, stubs_for
from passes.graphs import Spelling
from passes.stubs import PADDED
from passes.test_recognised import build

from ops import opcalls
from ops.opcalls import FAKES, OPS, batch_of, layer_of
from vllm_aiter_mla import layers
from vllm_aiter_mla.compat import context
from vllm_aiter_mla.ops import adapter, bodies

pytestmark = pytest.mark.mutation


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda q: q[:4], id="decode rows only"),
        pytest.param(lambda q: q.float(), id="another dtype"),
        pytest.param(lambda q: q.transpose(0, 1).contiguous().transpose(0, 1), id="heads first"),
        pytest.param(lambda q: torch.cat([q[:4], torch.full_like(q[4:], float("nan"))]), id="padded rows undefined"),
    ],
)
def test_mutation_i1_fused_op_returns_something_else_than_declared(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    real = layers.prepare
    monkeypatch.setattr(layers, "prepare", lambda *args: spoil(real(*args)))
    with pytest.raises((AssertionError, RuntimeError)):
        opcalls.assert_real_matches_fake("fused_qk_rope_kv_cache_q_prep", layer_of(), PADDED)


def test_mutation_i1_fake_declares_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "mla_decode_q_prep"
    monkeypatch.setitem(FAKES, op, lambda q, *rest: torch.empty_like(q))
    with pytest.raises(AssertionError):
        opcalls.assert_real_matches_fake(op, layer_of(), batch_of(2))


def test_mutation_i2_fused_op_does_not_ask_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    empty = bodies.declared
    monkeypatch.setitem(
        OPS, "fused_qk_rope_kv_cache_q_prep", lambda q, k_pe, kv_c, *rest: empty(q, k_pe, kv_c, rest[-2])
    )
    with pytest.raises(AssertionError, match="captured without slots"):
        opcalls.assert_raises_while_capturing_without_slots(layer_of())


def test_mutation_attention_does_not_ask_for_the_kind_of_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    monkeypatch.setattr(context, "is_piecewise", lambda: False)
    with pytest.raises(AssertionError, match="inside a piecewise graph"):
        opcalls.assert_refuses_a_piecewise_capture(layer_of())


@pytest.mark.parametrize("op", OPS)
def test_mutation_i7_fake_reads_the_layer(op: str) -> None:
    at = next(i for i, arg in enumerate(OPS[op]._schema.arguments) if arg.name == "layer_name")

    def nosy(*args: Any) -> Any:
        adapter.layer_context(args[at])
        return FAKES[op](*args)

    with pytest.raises(AssertionError):
        opcalls.assert_fake_is_blind(nosy, op)


def test_mutation_i10_decode_attention_reads_the_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_row(
        ctx: bodies.LayerContext, batch: bodies.Batch, q_prepared: torch.Tensor, output: torch.Tensor
    ) -> None:
        n = batch.num_actual_tokens
        ctx.layer.v_up(ctx.layer.forward_mqa(q_prepared, ctx.kv_cache, batch.metadata)[:n], output[:n])

    gm, layers = build(1, dtype=torch.bfloat16)
    stubs = stubs_for(layers, Spelling(dtype=torch.bfloat16))
    assert_rewritten_right(clone(gm), stubs, batches=(PADDED,), stops=(None,))
    monkeypatch.setattr(bodies, "decode", every_row)
    with pytest.raises(AssertionError):
        assert_rewritten_right(gm, stubs, batches=(PADDED,), stops=(None,))
