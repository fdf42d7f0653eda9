"""Head counts that AITER's decode kernel does not take: the query is laid out as vLLM would copy it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.mla import rocm_aiter_mla

from tests.support.simulated_aiter import backend, inputs, same_bytes
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.serving.layer import Layer

HELPER = rocm_aiter_mla.AiterMLAHelper
PADDED = {5: 16, 8: 16, 10: 16, 12: 16, 20: 32}


def layer(heads, dcp=1):
    impl = object.__new__(rocm_aiter_mla.AiterMLAImpl)
    impl.num_heads, impl.dcp_world_size = heads, dcp
    return SimpleNamespace(impl=impl, num_heads=heads)


@pytest.mark.parametrize("heads", PADDED)
def test_heads_lie_where_vllm_looks_for_them_and_nothing_is_copied(heads):
    found = compat_layer.padded_heads(layer(heads))
    assert found is not None
    assert (found.heads, found.impl.num_heads) == (PADDED[heads], PADDED[heads])
    operands = replace(inputs(heads=heads), out_heads=found.heads)
    query = operands.new_query()
    ours, vllms = operands.real_heads(query), found.unpad(heads, query)
    assert (ours.shape, ours.stride(), ours.data_ptr()) == (vllms.shape, vllms.stride(), vllms.data_ptr())
    assert HELPER.get_mla_padded_q(found.heads, query) is query


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_heads_that_the_decode_kernel_takes_are_not_padded(heads):
    assert compat_layer.padded_heads(layer(heads)) is None


@pytest.mark.mutation("I11")
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("get_mla_unpadded_o", lambda heads, o: o[:, -heads:]),
        ("get_mla_padded_q", lambda heads, q, target=None: q.copy()),
        ("get_actual_mla_num_heads", lambda heads: heads),
    ],
)
def test_mutation_a_helper_that_pads_in_another_way_is_left_alone(monkeypatch, name, other):
    monkeypatch.setattr(HELPER, name, staticmethod(other))
    assert compat_layer.padded_heads(layer(10)) is None


def test_other_attention_and_context_parallelism_are_left_alone():
    assert compat_layer.padded_heads(SimpleNamespace(impl=SimpleNamespace(), num_heads=8)) is None
    assert compat_layer.padded_heads(layer(8, dcp=2)) is None


@pytest.mark.usefixtures("fake_gfx942")
@pytest.mark.parametrize(("heads", "shape"), [(10, 16), (20, 32), (8, 8)])
@pytest.mark.parametrize("tokens", [7, 256])
def test_aiters_op_leaves_room_behind_the_heads_but_not_between_them(heads, shape, tokens):
    operands = inputs(heads=heads, tokens=tokens)
    padded = replace(operands, out_heads=PADDED[heads], kv_cache=operands.kv_cache.clone())
    query, expected = backend().prepare(padded), backend().prepare(operands)
    assert query.shape[1] == shape
    assert same_bytes(padded.real_heads(query), expected)
    assert same_bytes(padded.kv_cache, operands.kv_cache)


def test_the_copy_that_vllm_makes_belongs_to_a_calls_time():
    operands, copied = replace(inputs(heads=10), out_heads=16), []

    class Dense(ReferenceBackend):
        def bind(self, given):
            return Binding(lambda one: one.new_query(padded=False))

    kernels = {"dense": Dense(), "padded": ReferenceBackend()}
    runs = stopwatch._loaded(kernels, [operands], lambda q: copied.append(q) or q)
    assert len(copied) == 1, "each has run once"
    runs["padded"](operands)
    assert len(copied) == 1


def test_gluon_gets_only_the_heads():
    seen, others, cache = [], [], object()

    def forward_mqa(query, *rest):
        seen.append(query)
        others.append(rest)
        return query[..., :512], None

    def attend(query, gluon):
        metadata = SimpleNamespace(decode=SimpleNamespace(use_gluon_decode=gluon))
        attended = Layer.forward_mqa(one, query, cache, metadata)
        assert others.pop() == (cache, metadata, module)
        return attended

    wide = compat_layer.PaddedHeads(16, SimpleNamespace(forward_mqa=forward_mqa), HELPER.get_mla_unpadded_o)
    module = SimpleNamespace(num_heads=8, impl=SimpleNamespace(forward_mqa=forward_mqa))
    one = SimpleNamespace(module=module, padded=wide)
    query = torch.randn(3, 16, 576)
    assert torch.equal(attend(query, gluon=True), attend(query, gluon=False))
    assert [(given.shape[1], given.is_contiguous()) for given in seen] == [(8, True), (16, True)]
