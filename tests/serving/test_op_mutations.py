"""Planted bugs: each check that guards an invariant at op level catches one."""

import pytest
import torch

from tests.passes.execute import assert_rewritten_right, clone, stubs_for
from tests.passes.graphs import Spelling, build
from tests.passes.stubs import PADDED
from tests.support import opcalls
from tests.support.opcalls import ATTENTION, FAKES, OPS, layer_of
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.serving import ops


@pytest.mark.mutation("I2")
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "what"),
    [
        (ops, "_check_capture", lambda step: None, "slot mapping"),
        (compat_layer, "has_prefill_rows", lambda metadata: False, "prefill"),
        (compat_layer, "is_piecewise", lambda: False, "splitting_ops"),
    ],
    ids=["the capture", "prefill rows", "the kind of graph"],
)
def test_mutation_i2_the_op_does_not_ask_for(monkeypatch, owner, name, wrong, what, op):
    opcalls.capturing(monkeypatch)
    opcalls.assert_raises_while_capturing(what, op, layer_of())
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match=f"captured: {what}"):
        opcalls.assert_raises_while_capturing(what, op, layer_of())


@pytest.mark.mutation("I7")
@pytest.mark.parametrize("op", OPS)
def test_mutation_i7_fake_reads_the_layer(op):
    at = next(i for i, arg in enumerate(OPS[op]._schema.arguments) if arg.name == "layer_name")
    with pytest.raises(AssertionError, match="the fake looked at"):
        opcalls.assert_fake_is_blind(lambda *args: (ops.layer_step(args[at]), FAKES[op](*args))[1], op)


@pytest.mark.mutation("I10")
@pytest.mark.parametrize("stop", ["q_prep_lift", None])
def test_mutation_i10_decode_attention_reads_the_padded_rows(monkeypatch, stop):
    def every_row(step, q_prepared, output):
        n = step.num_actual_tokens
        step.layer.v_up(step.layer.forward_mqa(q_prepared, step.kv_cache, step.metadata)[:n], output[:n])

    gm, layers = build(1, dtype=torch.bfloat16)
    stubs = stubs_for(layers, Spelling(dtype=torch.bfloat16))
    assert_rewritten_right(clone(gm), stubs, batches=(PADDED,), stops=(stop,))
    real = ops.prepared_query
    monkeypatch.setattr(ops, "decode", every_row)
    all_rows = lambda step, q, *rest: real(step._replace(num_actual_tokens=q.shape[0]), q, *rest)  # noqa: E731
    monkeypatch.setattr(ops, "prepared_query", all_rows)
    with pytest.raises(AssertionError, match=f"differs .*stop={stop}, padded decode"):
        assert_rewritten_right(gm, stubs, batches=(PADDED,), stops=(stop,))
