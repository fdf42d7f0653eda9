"""An argument that the matcher does not know refuses the layer by its name: the rewritten call would drop it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.passes import test_declined as declined
from tests.passes.graphs import Builder, Layer, Spelling, build
from tests.passes.rotary import ROPES
from tests.passes.test_declined import Case, Edit
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import surface
from vllm_aiter_mla.passes import kv_update, match, probe
from vllm_aiter_mla.passes.arguments import NoMatchError, arguments, refuse_unknown
from vllm_aiter_mla.passes.match import LayerMatch, match_layers


def give(node: Any, *args: Any, **kwargs: Any) -> None:
    """Call a node with more arguments than it was built with."""
    node.args, node.kwargs = (*node.args, *args), {**node.kwargs, **kwargs}


def rotary(edit: Edit) -> Any:
    return next(node for node in edit.b.graph.nodes if "head_size" in node.kwargs)


UNKNOWN = "unknown_argument"
CASES: dict[str, Case] = {
    "attn_sink of attention": (UNKNOWN, lambda e: e.attend(attn_sink=e.b.k_scale), {}),
    "window of attention": (UNKNOWN, lambda e: e.attend(window=128), {}),
    "window=0 of attention": (UNKNOWN, lambda e: e.attend(window=0), {}),
    "skip_scale of the KV update": (UNKNOWN, lambda e: give(e.layer.kv_update, skip_scale=True), {}),
    "argument number 6 of the KV update": (UNKNOWN, lambda e: give(e.layer.kv_update, True), {}),
    "slots of vLLM's own fused op": (UNKNOWN, lambda e: give(e.layer.kv_update, slots=e.b.k_scale), {"prefused": True}),
    "argument number 10 of vLLM's own fused op": (
        UNKNOWN,
        lambda e: setattr(e.layer.kv_update, "args", (*e.layer.kv_update.args, *range(10))),
        {"prefused": True},
    ),
    "mscale of the rotary op": (UNKNOWN, lambda e: give(rotary(e), mscale=0.5), {"rope": "op, flat"}),
    "mscale of AITER's rotary op": (UNKNOWN, lambda e: give(rotary(e), mscale=0.5), {"rope": "aiter"}),
}


def assert_named(name: str) -> None:
    declined.assert_declined(CASES[name])
    gm, _, _ = declined.spoiled(CASES[name])
    ((_, found),) = match_layers(gm.graph)
    assert isinstance(found, Skip)
    assert name.partition(" of ")[0].partition("=")[0] in found.message


@pytest.mark.parametrize("name", CASES)
def test_unknown_argument_refuses_the_layer_and_is_named(name: str) -> None:
    assert_named(name)


def matched(layer_changes: dict[str, Any], edit: Any) -> LayerMatch:
    builder = Builder(Spelling(**layer_changes))
    layer = builder.layer()
    edit(layer)
    ((_, found),) = match_layers(builder.finish().graph)
    assert isinstance(found, LayerMatch), found
    return found


@pytest.mark.parametrize(
    ("changes", "node"),
    [({}, "attention"), ({}, "kv_update"), ({"prefused": True}, "kv_update")],
)
def test_unknown_argument_that_is_none_is_let_through(changes: dict[str, Any], node: str) -> None:
    matched(changes, lambda layer: give(getattr(layer, node), of_tomorrow=None))


@pytest.mark.parametrize("positional", [0, 2, 5])
def test_unknown_argument_check_reads_positions_and_names_alike(positional: int) -> None:
    def respell(layer: Layer) -> None:
        args = layer.kv_update.args
        layer.kv_update.args = args[:positional]
        layer.kv_update.kwargs = dict(zip(kv_update.UPDATE_ARGS, args, strict=True))
        for name in kv_update.UPDATE_ARGS[:positional]:
            layer.kv_update.kwargs = {key: item for key, item in layer.kv_update.kwargs.items() if key != name}

    seen: list[Layer] = []
    found = matched({}, lambda layer: (respell(layer), seen.append(layer)))
    assert (found.kv_c, found.kv_cache_dtype) == (seen[0].kv_c, "auto")


def test_unknown_argument_that_is_left_to_its_default_is_seen() -> None:
    library = torch.library.Library("aiter_mla_unknown_argument", "DEF")
    library.define("turn(Tensor query, float mscale=0.5) -> Tensor")
    node = torch.fx.Graph().call_function(torch.ops.aiter_mla_unknown_argument.turn.default, (None,))
    assert arguments(node) == {"query": None, "mscale": 0.5}
    with pytest.raises(NoMatchError, match="mscale"):
        refuse_unknown(node, ("query",))


@pytest.mark.parametrize(
    ("op", "carried"),
    [
        (surface.ATTENTION, (*match.READ_ARGS, *match.NONE_ARGS)),
        (surface.KV_UPDATE, kv_update.UPDATE_ARGS),
        (surface.FUSED, kv_update.FUSED_ARGS),
    ],
)
def test_unknown_argument_lists_and_the_known_schemas_agree(op: str, carried: tuple[str, ...]) -> None:
    """An argument that is added to the schemas alone would be admitted at start and refused in every graph."""
    assert set(carried) == set(surface._parsed(surface.SCHEMAS[op])[0])


@pytest.mark.mutation("I11")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (match, "window of attention"),
        (kv_update, "argument number 6 of the KV update"),
        (kv_update, "skip_scale of the KV update"),
        (probe, "mscale of the rotary op"),
    ],
)
def test_mutation_unknown_argument_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    monkeypatch.setattr(module, "refuse_unknown", lambda node, known: arguments(node))
    with pytest.raises(AssertionError):
        assert_named(name)


@pytest.mark.mutation("I11")
def test_mutation_unknown_argument_is_called_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "READ_ARGS", (*match.READ_ARGS, "attn_sink"))
    with pytest.raises(AssertionError):
        assert_named("attn_sink of attention")


def test_known_rotary_spellings_are_still_matched() -> None:
    for rope in (name for name in ROPES if name.startswith("op") or name in ("aiter", "flashinfer")):
        gm, layers = build(1, rope=rope)
        assert isinstance(match_layers(gm.graph)[0][1], LayerMatch), rope
        assert len(layers) == 1
