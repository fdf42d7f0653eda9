"""I4: a layer is rewritten completely or not at all, and one layer's skip never touches another."""

import pytest
import torch

from tests.passes.execute import assert_rewritten_right, calls, clean, clone, rewrite, skipped_in_graphs, stubs_for
from tests.passes.graphs import Builder, Spelling
from tests.passes.stubs import DECODE, MIXED, StubLayer
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.passes import match, pipeline
from vllm_aiter_mla.passes.aiter_fusion import fuse_into_one_op

BF16 = torch.bfloat16
OURS = ("mla_attention_with_rope",)
VLLM = ("unified_mla_kv_cache_update", "unified_mla_attention_with_output")


def three_layers(spoil=lambda b: None, at=1):
    builder = Builder(Spelling(dtype=BF16))
    outputs = []
    for index in range(3):
        builder.layer()
        if index == at:
            outputs += spoil(builder) or []
    return builder.finish(*outputs), builder


def second_reader(b):
    """Something reads the rotated query of the layer that was just built."""
    return [b(torch.ops.aten.tanh.default, b.layers[-1].q)]


def lines_between(gm, first, last):
    nodes = list(gm.graph.nodes)
    names = [node.name for node in nodes]
    return [node.format_node() or "" for node in nodes[names.index(first) : names.index(last) + 1]]


def assert_layers_apart_from(at, gm, builder, stubs):
    """Check that the skipped layer keeps every node, and that the others lose theirs."""
    changed, skipped = clean(clone(gm)), builder.layers[at]
    span = (skipped.q_gemm.name, skipped.attention.name)
    before = lines_between(changed, *span)
    counts = rewrite(changed, stubs)
    assert lines_between(changed, *span) == before
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    for name in OURS:
        assert len(calls(changed, name)) == 2, name
    for name in VLLM:
        assert len(calls(changed, name)) == 1, name
    for name in ("mla_decode_q_prep", "fused_rope_unified_mla_kv_cache_update", "mla_attention_with_prepared_q"):
        assert not calls(changed, name), name
    assert list(skipped_in_graphs(stubs)) == [skipped.name]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_i4_skipped_layer_keeps_its_nodes_and_the_others_are_rewritten(at):
    """Something else reads that layer's query."""
    gm, builder = three_layers(second_reader, at)
    stubs = stubs_for(builder.layers, builder.spelling)
    assert_layers_apart_from(at, gm, builder, stubs)
    assert_rewritten_right(gm, stubs, batches=(DECODE, MIXED))


def test_i4_layer_that_breaks_the_matcher_costs_no_other_layer(monkeypatch):
    """A shape that no op accepts, as an upstream pass might leave it for a moment."""
    gm, builder = three_layers()
    view = builder.layers[1].q_view
    view.args = (view.args[0], [-1, 5, 7])
    stubs = stubs_for(builder.layers, builder.spelling)
    counts = rewrite(gm, stubs)
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    assert skipped_in_graphs(stubs)[builder.layers[1].name][0] == "not_evaluated"


def test_layer_outside_the_forward_context_is_skipped(said):
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    before = str(clean(gm).graph)
    counts = rewrite(gm, [])
    assert (counts["matched"], counts["skipped"]) == (0, 3)
    assert sum("layer_unknown" in text for _, text in said) == 3
    assert str(gm.graph) == before
    assert rewrite(gm, stubs[:2])["matched"] == 2


class Scaled(StubLayer):
    """Another project's layer: its decode rows would lose the scale, and its mixed batches keep it."""

    def forward_impl(self, *args, **kwargs):
        """Twice vLLM's output."""
        super().forward_impl(*args, **kwargs)
        args[5].mul_(2)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("sparse_mla", lambda layer: setattr(layer.impl, "is_sparse", True)),
        ("q_padding", lambda layer: setattr(layer, "q_pad_num_heads", 16)),
        ("unknown_forward", lambda layer: setattr(layer, "forward_impl", layer.forward_impl)),
        ("unknown_forward", lambda layer: setattr(layer, "__class__", Scaled)),
        ("capability", lambda layer: delattr(layer.impl, "supports_quant_query_input")),
        ("no_absorbed_weight", lambda layer: setattr(layer, "W_UK_T", None)),
        ("kv_cache_dtype", lambda layer: setattr(layer, "kv_cache_dtype", "fp8_ds_mla")),
        ("dcp", lambda layer: setattr(layer.impl, "dcp_world_size", 2)),
        ("hisparse", lambda layer: setattr(layer, "hisparse_cache", object())),
    ],
)
def test_layer_that_admission_declines_is_left_to_vllm_and_the_others_are_not(code, spoil):
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    spoil(stubs[1])
    counts = rewrite(gm, stubs)
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    assert {name: why[0] for name, why in skipped_in_graphs(stubs).items()} == {stubs[1].layer_name: code}


def test_kernel_that_does_not_take_a_layers_shape_leaves_the_layer_as_vllm_made_it(monkeypatch):
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    odd, bind = stubs[1], ReferenceBackend.bind
    odd._vllm_config.cache_config.block_size = 99
    why = "no kernel for blocks of 99"
    odd_is_refused = lambda self, one: why if one.kv_cache.shape[1] == 99 else bind(self, one)  # noqa: E731
    monkeypatch.setattr(ReferenceBackend, "bind", odd_is_refused)
    counts = assert_rewritten_right(gm, stubs, batches=(DECODE, MIXED))
    assert (counts["matched"], counts["skipped"], counts["aiter_fusion"]) == (2, 1, 2)
    assert skipped_in_graphs(stubs)[odd.layer_name] == ("kernel_shape", f"kernel=auto: {why}")
    assert_layers_apart_from(1, gm, builder, stubs)


def matching_ends_at_a_skip(graph):
    for outcome in match.match_layers(graph):
        yield outcome
        if isinstance(outcome[1], match.Skip):
            return


def skipped_layer_loses_a_node(graph):
    """A pass that begins with a layer before the layer is known to match."""
    outcomes = match.match_layers(graph)
    for node in graph.nodes:
        if node.target is torch.ops.vllm.unified_mla_kv_cache_update.default:
            node.update_arg(3, "touched")
    return outcomes


def pass_three_is_done_half(graph, layer):
    """Pass 3 puts its op in and leaves attention, with the ops of passes 1 and 2, to those who read it."""
    (reader,) = layer.attention.users
    users = dict(reader.users)
    fuse_into_one_op(graph, layer)
    for user in users:
        user.replace_input_with(reader.args[0].kwargs["output"], reader)


@pytest.mark.mutation("I4")
@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (matching_ends_at_a_skip, r"\(1, 1\) == \(2, 1\)"),
        (skipped_layer_loses_a_node, "touched"),
        (pass_three_is_done_half, r"not \[mla_decode_q_prep_default"),
    ],
)
def test_mutation_i4(plant, seen, monkeypatch):
    if plant is pass_three_is_done_half:
        monkeypatch.setitem(pipeline.PASSES, "aiter_fusion", plant)
    else:
        monkeypatch.setattr(pipeline, "match_layers", plant)
    with pytest.raises(AssertionError, match=seen):
        test_i4_skipped_layer_keeps_its_nodes_and_the_others_are_rewritten(1)


def with_rounded_casts(stubs):
    """The user's option that lets Inductor round after each operation, on one layer's config."""
    stubs[1]._vllm_config.compilation_config.inductor_compile_config = {"emulate_precision_casts": True}
    return stubs


def test_i5_a_layer_whose_graph_rounds_after_each_operation_is_left_to_vllm():
    """Flag off then rounds RoPE three times, where the rotary kernel of prefill rows rounds once."""
    gm, builder = three_layers()
    stubs = with_rounded_casts(stubs_for(builder.layers, builder.spelling))
    assert_layers_apart_from(1, gm, builder, stubs)
    ((code, _),) = skipped_in_graphs(stubs).values()
    assert code == "rope_other_operand"


@pytest.mark.mutation("I5")
def test_mutation_i5_casts_that_nobody_looks_at_are_caught(monkeypatch):
    monkeypatch.setattr(pipeline.compat_layer, "emulates_casts", lambda layer: False)
    with pytest.raises(ValueError, match="auto_functionalized"):  # the node of the layer's attention is gone
        test_i5_a_layer_whose_graph_rounds_after_each_operation_is_left_to_vllm()
