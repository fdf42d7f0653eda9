"""``verify`` runs the plugin's own op bodies: a bug planted in one of them is caught by a case."""

import inspect

import pytest
from verify_support import broken

from vllm_aiter_mla.ops import bodies

BUGS = [
    ("fused_prepare", "ctx.slots[: q.shape[0]]", "ctx.slots", "every-capture-size", "runs"),
    ("fused_prepare", "ctx.slots[: q.shape[0]]", "ctx.slots[: q.shape[0]] * 0 - 1", "fresh-data", "cache-rows"),
    ("fused_prepare", "k_scale=k_scale", "k_scale=ctx.layer.q_scale", "fresh-data", "cache-rows"),
    ("fused_prepare", "q_scale=ctx.layer.q_scale", "q_scale=k_scale", "fresh-data", "query-nope"),
    ("fused_prepare", "is_neox=is_neox", "is_neox=not is_neox", "fresh-data", "query-rope"),
    ("declared", "kv_c.shape[-1] + k_pe.shape[-1]", "kv_c.shape[-1]", "fresh-data", "shape-and-dtype"),
    ("attention", "and not is_rotated", "and is_rotated", "mixed-batch-piecewise", "attention-output"),
    ("attention", "if batch.decode_only", "if batch.metadata", "mixed-batch-piecewise", "attention-output"),
    ("attention", "if batch.decode_only", "if not batch.decode_only", "full-graph-decode", "attention-output"),
    ("decode", "q_prepared[:n]", "q_prepared", "piecewise-decode", "runs"),
    ("decode", "ctx.layer.v_up(attended, output[:n])", "pass", "full-graph-decode", "attention-output"),
    ("rotated_copies", ".contiguous()", "", "mixed-batch-piecewise", "inputs-unchanged"),
    ("rotated_copies", ".clone()", "", "mixed-batch-piecewise", "inputs-unchanged"),
    ("rotated_copies", "q_pe, k_rotated, positions", "q_pe, k_pe.clone(), positions", "mixed-batch-piecewise",
     "attention-output"),
    ("rotated_copies", "q_pe], dim=-1)", "q[..., -rope_dim:]], dim=-1)", "mixed-batch-piecewise", "attention-output"),
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
