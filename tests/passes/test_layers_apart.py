"""I4: a layer is rewritten completely or not at all, and one layer's skip never touches another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.execute import assert_rewritten_right, calls, clone, rewrite, stubs_for
from tests.passes.graphs import Builder, Spelling, build
from tests.passes.stubs import DECODE, MIXED, StubLayer
from vllm_aiter_mla import backends as decided
from vllm_aiter_mla import status
from vllm_aiter_mla.kernels.reference_backend import ReferenceBackend

BF16 = torch.bfloat16
OURS = ("mla_attention_with_rope",)
VLLM = ("unified_mla_kv_cache_update", "unified_mla_attention_with_output")


def three_layers(spoil: Callable[[Builder], Any] = lambda b: None, at: int = 1) -> tuple[fx.GraphModule, Builder]:
    """Three layers; ``spoil`` acts right after layer ``at``."""
    builder = Builder(Spelling(dtype=BF16))
    outputs: list[fx.Node] = []
    for index in range(3):
        builder.layer()
        if index == at:
            outputs += spoil(builder) or []
    return builder.finish(*outputs), builder


def second_reader(b: Builder) -> list[fx.Node]:
    """Something reads the rotated query of the layer that was just built."""
    return [b(torch.ops.aten.tanh.default, b.layers[-1].q)]


def lines_between(gm: fx.GraphModule, first: str, last: str) -> list[str]:
    """The text of the nodes from ``first`` to ``last``."""
    nodes = [node for node in gm.graph.nodes]
    names = [node.name for node in nodes]
    return [node.format_node() or "" for node in nodes[names.index(first) : names.index(last) + 1]]


def assert_layers_apart(at: int) -> None:
    """The spoiled layer keeps every node, the others lose theirs, and the whole computes what it did."""
    gm, builder = three_layers(second_reader, at)
    changed = clone(gm)
    skipped = builder.layers[at]
    span = (skipped.q_gemm.name, skipped.attention.name)
    before = lines_between(changed, *span)
    counts = rewrite(changed, stubs_for(builder.layers, builder.spelling))
    assert lines_between(changed, *span) == before
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    for name in OURS:
        assert len(calls(changed, name)) == 2, name
    for name in VLLM:
        assert len(calls(changed, name)) == 1, name
    for name in ("mla_decode_q_prep", "fused_rope_unified_mla_kv_cache_update", "mla_attention_with_prepared_q"):
        assert not calls(changed, name), name
    assert list(status.current().skipped) == [skipped.name]
    assert_rewritten_right(gm, stubs_for(builder.layers, builder.spelling), batches=(DECODE, MIXED))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_i4_refused_layer_keeps_its_nodes_and_the_others_are_rewritten(at: int) -> None:
    assert_layers_apart(at)


def test_i4_layer_that_breaks_the_matcher_costs_no_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that no op accepts, as an upstream pass might leave it for a moment."""
    gm, builder = three_layers()
    view = builder.layers[1].q_view
    view.args = (view.args[0], [-1, 5, 7])
    counts = rewrite(gm, stubs_for(builder.layers, builder.spelling))
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    assert status.current().skipped[builder.layers[1].name][0] == "not_evaluated"


def test_layer_outside_the_forward_context_is_refused() -> None:
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    before = str(gm.graph)
    assert rewrite(gm, [])["matched"] == 0
    assert str(gm.graph) == before
    assert {code for code, _ in status.current().skipped.values()} == {"layer_unknown"}
    assert rewrite(gm, stubs[:2])["matched"] == 2


class Scaled(StubLayer):
    """Another project's layer: its decode rows would lose the scale, and its mixed batches keep it."""

    def forward_impl(self, *args: Any, **kwargs: Any) -> None:
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
def test_layer_that_admission_declines_is_left_to_vllm_beside_the_others(
    code: str, spoil: Callable[[StubLayer], None]
) -> None:
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    spoil(stubs[1])
    counts = rewrite(gm, stubs)
    assert (counts["matched"], counts["skipped"]) == (2, 1)
    assert {name: outcome[0] for name, outcome in status.current().skipped.items()} == {stubs[1].layer_name: code}


def test_unavailable_kernel_leaves_the_graph_alone() -> None:
    gm, layers = build(2, dtype=BF16)
    before = str(gm.graph)
    counts = rewrite(gm, stubs_for(layers, Spelling(dtype=BF16), kernel="triton"))
    assert counts["skipped"] == 2
    assert str(gm.graph) == before
    assert {code for code, _ in status.current().skipped.values()} == {"kernel_unavailable"}


def test_kernel_that_refuses_a_layers_shape_leaves_it_vllms_own_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """That layer ends after pass 1: after pass 2 alone, prefill rows would be prepared for nothing."""
    gm, builder = three_layers()
    stubs = stubs_for(builder.layers, builder.spelling)
    odd = stubs[1]
    # Another number of heads for the chooser; the graph and the layer keep theirs.
    bind = ReferenceBackend.bind
    odd._vllm_config.cache_config.block_size = 99
    monkeypatch.setattr(
        ReferenceBackend,
        "bind",
        lambda self, inputs: "no kernel for blocks of 99" if inputs.kv_cache.shape[1] == 99 else bind(self, inputs),
    )
    counts = assert_rewritten_right(gm, stubs, batches=(DECODE, MIXED), stops=(None,))
    assert counts == {
        "matched": 3,
        "skipped": 0,
        "rope_kv_cache": 3,
        "vllm_fused": 0,
        "q_prep_lift": 2,
        "aiter_fusion": 2,
    }
    assert status.current().partial == {odd.layer_name: ("kernel_shape", "no kernel for blocks of 99")}
    changed = clone(gm)
    rewrite(changed, stubs)
    assert not calls(changed, "mla_decode_q_prep")
    assert len(calls(changed, "fused_rope_unified_mla_kv_cache_update")) == 1
    assert len(calls(changed, "unified_mla_attention_with_output")) == 1


def test_record_of_a_layer_is_frozen() -> None:
    from vllm_aiter_mla.passes.match import LayerMatch, match_layers

    ((_, match),) = match_layers(build(1)[0].graph)
    assert isinstance(match, LayerMatch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        match.is_neox = False  # type: ignore[misc]


@pytest.mark.parametrize("stop", [None, "rope_kv_cache", "q_prep_lift"])
def test_a_layer_with_blocks_of_one_is_rewritten_whole_or_not_at_all(
    stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes 1 and 2 leave is vLLM's op, which squeezes such a cache to two dimensions and dies of it."""
    gm, layers = build(1, dtype=BF16)
    stubs = stubs_for(layers, Spelling(dtype=BF16))
    stubs[0]._vllm_config.cache_config.block_size = 1
    if stop is None:
        assert rewrite(clone(gm), stubs)["aiter_fusion"] == 1
        decided.forget()
        monkeypatch.setattr(ReferenceBackend, "bind", lambda self, inputs: "rejected")
    counts = rewrite(gm, stubs, stop)
    assert (counts["matched"], counts["skipped"]) == (0, 1)
    assert [code for code, _ in status.current().skipped.values()] == ["kernel_shape"]
    assert not calls(gm, "fused_rope_unified_mla_kv_cache_update")
