"""A layer that only looks like one that the passes rewrite is skipped by name and left as it was."""

import operator

import pytest
import torch

from tests.passes.execute import clean
from tests.passes.graphs import Builder, Spelling
from tests.passes.near_misses import CASES, UNKNOWN, assert_declined, give
from vllm_aiter_mla.admission import KV_UPDATE_OP, MLA_ATTENTION_OP
from vllm_aiter_mla.passes import fx, match, rope_probe
from vllm_aiter_mla.passes.match import LayerMatch, match_layers

aten = torch.ops.aten


@pytest.mark.parametrize("name", [*CASES, *UNKNOWN])
def test_layer_is_declined_and_left_alone_with(name):
    assert_declined(name)


def matched(edit, **changes):
    """Build one layer, edit it, and return what the matcher makes of it."""
    builder = Builder(Spelling(**changes))
    layer = builder.layer()
    outputs = edit(builder, layer) or ()
    ((_, found),) = match_layers(clean(builder.finish(*outputs)).graph)
    assert isinstance(found, LayerMatch), found
    return found, layer


def test_dead_readers_and_readers_of_the_latent_columns_decline_nothing():
    """Tracing an in-place op leaves dead readers behind: chains of views that nobody reads."""

    def read(b, layer):
        for node in (layer.q, layer.q_gemm, layer.k_rotated, layer.kv_gemm):
            b(aten.slice.Tensor, b(aten.reshape.default, node, [b.t, -1]), 1, 0, 4)
        latent = b(operator.getitem, b(aten.split_with_sizes.default, layer.kv_gemm, [32, 16], -1), 0)
        return b(aten.tanh.default, latent), layer.kv_c

    matched(read)


@pytest.mark.parametrize(("changes", "node"), [({}, "attention"), ({}, "kv_update"), ({"prefused": True}, "kv_update")])
def test_unknown_argument_that_is_none_is_let_through(changes, node):
    matched(lambda b, layer: give(getattr(layer, node), of_tomorrow=None), **changes)


@pytest.mark.parametrize("positional", [0, 2, 5])
def test_known_arguments_are_read_by_position_and_by_name(positional):
    def respell(b, layer):
        args, names = layer.kv_update.args, match.KNOWN_ARGS[KV_UPDATE_OP]
        layer.kv_update.args = args[:positional]
        layer.kv_update.kwargs = dict(zip(names[positional:], args[positional:], strict=True))

    found, layer = matched(respell)
    assert (found.kv_c, found.kv_cache_dtype) == (layer.kv_c, "auto")


def test_unknown_argument_that_is_left_to_its_default_is_seen(monkeypatch):
    library = torch.library.Library("aiter_mla_unknown_argument", "DEF")
    library.define("turn(Tensor query, float mscale=0.5) -> Tensor")
    node = torch.fx.Graph().call_function(torch.ops.aiter_mla_unknown_argument.turn.default, (None,))
    assert fx.arguments(node) == {"query": None, "mscale": 0.5}
    monkeypatch.setitem(match.KNOWN_ARGS, "aiter_mla_unknown_argument::turn", ("query",))
    with pytest.raises(match.NoMatchError, match="mscale"):
        match.known_arguments(node)


def unchecked(*given):
    return None


# Another check skips these two layers, with its own code.
SEEN = {
    "a KV update with the raw key": "^key_read_elsewhere: ",
    "other positions for the key": "^not_evaluated: .* 'str'",
}


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("owner", "name", "plant", "case"),
    [
        (match._Matcher, "_check_readers", unchecked, "a second reader of the rotated q"),
        (match._Matcher, "_check_readers", unchecked, "a second reader of the raw q"),
        (match._Matcher, "_check_columns", unchecked, "a second reader of the raw k_pe"),
        (match._Matcher, "_check_kv_key", unchecked, "a KV update with the raw key"),
        (match._Matcher, "_check_attention", unchecked, "attention given output_scale"),
        (match, "_equal", lambda a, b: True, "cos and sin swapped"),
        (match, "_equal", lambda a, b: True, "the inverse rotation"),
        (match, "_equal", lambda a, b: True, "swapped halves of the key"),
        (match, "_equal", lambda a, b: True, "a query doubled after its RoPE"),
        (match, "_distinct", lambda nodes: list(nodes)[:1], "other positions for the key"),
        # The width of the heads, not of the table.
        (rope_probe, "width", lambda node: 32, "the custom op with heads of another width"),
        (match, "known_arguments", fx.arguments, "window of attention"),
        (match, "known_arguments", fx.arguments, "argument number 6 of the KV update"),
        (match, "known_arguments", fx.arguments, "skip_scale of the KV update"),
        (match, "known_arguments", fx.arguments, "mscale of the rotary op"),
    ],
)
def test_mutation_the_matcher_does_not_check(owner, name, plant, case, monkeypatch):
    monkeypatch.setattr(owner, name, plant)
    with pytest.raises(AssertionError, match=SEEN.get(case, "matched: LayerMatch")):
        assert_declined(case)


@pytest.mark.mutation("I11")
def test_mutation_unknown_argument_is_called_known(monkeypatch):
    known = (*match.KNOWN_ARGS[MLA_ATTENTION_OP], "attn_sink")
    monkeypatch.setitem(match.KNOWN_ARGS, MLA_ATTENTION_OP, known)
    with pytest.raises(AssertionError, match="matched: LayerMatch"):
        assert_declined("attn_sink of attention")
