"""``verify`` runs the plugin's own op bodies: a bug planted in one of them is caught by a case."""

import inspect

import pytest

from tests.verify.verify_support import broken
from vllm_aiter_mla.ops import bodies

MIXED, DECODE = "mixed-batch-piecewise", "piecewise-decode"
BUGS = [
    ("attention_with_rope", "if step.decode_only", "if step.metadata", MIXED, "shape-and-dtype"),
    ("attention_with_rope", "if step.decode_only", "if not step.decode_only", "full-graph-decode", "shape-and-dtype"),
    ("attention_with_rope", "if query is not None", "if query is None", DECODE, "runs"),
    ("attention_with_rope", "decode(step, query, output)", "pass", "full-graph-decode", "attention-output"),
    ("attention_with_rope", "if step.metadata is not None", "if step.decode_only", MIXED, "attention-output"),
    ("attention_with_rope", "rotate_and_write(step, q,", "rotate_and_write(step, q * 1,", MIXED, "attention-output"),
    ("attention_with_rope", "rotate_and_write(step, q, k_pe,", "rotate_and_write(step, q, k_pe.clone(),", MIXED,
     "attention-output"),
    ("attention_with_rope", "vllm_forward(q, ", "vllm_forward(q * 0, ", "eager-between-replays", "attention-output"),
    ("prepared_query", "if n != q.shape[0]", "if False", "rows-grow-and-shrink", "shape-and-dtype"),
    ("prepared_query", "positions[:n]", "positions", DECODE, "runs"),
    ("prepared_query", "positions[:n]", "positions[-n:]", DECODE, "query-rope"),
    ("prepared_query", "kv_c[:n]", "kv_c[-n:]", DECODE, "cache-rows"),
    ("prepared_query", "else slots[:n]", "else slots", "every-capture-size", "runs"),
    ("prepared_query", "else slots[:n]", "else slots[:n] * 0 - 1", "every-capture-size", "cache-rows"),
    ("prepared_query", "rope.k_scale, layer.q_scale", "layer.q_scale, layer.q_scale", "fresh-data", "cache-rows"),
    ("prepared_query", "rope.k_scale, layer.q_scale", "rope.k_scale, rope.k_scale", "fresh-data", "query-nope"),
    ("prepared_query", "rope.is_neox", "not rope.is_neox", "fresh-data", "query-rope"),
    ("prepared_query", "layer.query_dtype(q.dtype)", "q.dtype", "fresh-data", "shape-and-dtype"),
    ("prepared_query", "else run(inputs)", "else run(inputs)[:-1]", "fresh-data", "shape-and-dtype"),
    ("rotate_and_write", "q.shape[2] - width, width", "0, width", MIXED, "inputs-unchanged"),
    ("rotate_and_write", "k_pe[:n]", "k_pe", MIXED, "runs"),
    ("rotate_and_write", "positions[:n]", "positions[:1].expand(n)", MIXED, "cache-rows"),
    ("rotate_and_write", "slots = slots[:n]", "pass", MIXED, "runs"),
    ("rotate_and_write", "rope.k_scale", "step.layer.q_scale", MIXED, "cache-rows"),
    ("rotate_and_write", "rope.k_scale, rope.is_neox", "rope.k_scale, not rope.is_neox", MIXED, "attention-output"),
    ("decode", "step.layer.v_up(", "(lambda *given: None)(", "full-graph-decode", "attention-output"),
    ("decode", "output[:n]", "output", DECODE, "runs"),
]  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize(("name", "right", "wrong", "case", "oracle"), BUGS)
def test_mutation_a_bug_in_an_op_body_is_caught(monkeypatch, run, subject, name, right, wrong, case, oracle):
    source = inspect.getsource(getattr(bodies, name))
    assert source.count(right) == 1
    names = dict(vars(bodies))
    exec(source.replace(right, wrong), names)
    assert run(case, subject).status == "passed"
    monkeypatch.setattr(bodies, name, names[name])
    assert oracle in broken(run(case, subject))
