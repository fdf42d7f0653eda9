"""What admission reads of a layer: all of it is in the installed vLLM, and what is missing is refused by name."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.passes.stubs import Sizes, StubLayer
from vllm_aiter_mla.admission import admit_layer
from vllm_aiter_mla.compat import layer as compat_layer


class Without:
    """An object that lacks one attribute, given by its path."""

    def __init__(self, whole: Any, path: str) -> None:
        self._whole, (self._name, _, self._rest) = whole, path.partition(".")

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._whole, name)
        if not self._rest:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), self._rest)


def layer() -> StubLayer:
    return StubLayer("model.layers.0.attn", Sizes(), torch.bfloat16)


def test_a_whole_layer_is_admitted() -> None:
    assert admit_layer(compat_layer.layer_view(layer())) is None


@pytest.mark.parametrize("name", compat_layer.ATTRIBUTES)
def test_a_layer_without_a_required_attribute_is_refused_by_its_name(name: str) -> None:
    skip = admit_layer(compat_layer.layer_view(Without(layer(), name)))
    assert skip is not None
    assert (skip.code, skip.message.rpartition(" lacks ")[2]) == ("capability", name)


def assigned(path: str, owner: str) -> set[str]:
    """Names that a class of the installed vLLM assigns to its instances, or declares."""
    (root,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(root) / path).read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner)
    stored = (node for node in ast.walk(found) if isinstance(getattr(node, "ctx", None), ast.Store))
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in stored}


def test_the_installed_vllm_has_every_required_attribute() -> None:
    ours = {name for name in compat_layer.ATTRIBUTES if "." not in name}
    assert ours <= assigned("model_executor/layers/attention/mla_attention.py", "MLAAttention")
    impls = {name.removeprefix("impl.") for name in compat_layer.ATTRIBUTES if "." in name}
    assert impls <= assigned("v1/attention/backend.py", "AttentionImplBase")


@pytest.mark.mutation
def test_mutation_a_layer_that_is_not_looked_at_is_not_taken_for_a_neutral_one(monkeypatch) -> None:
    monkeypatch.setattr(compat_layer, "ATTRIBUTES", ())
    with pytest.raises(AttributeError, match="use_pcp"):
        compat_layer.layer_view(Without(layer(), "use_pcp"))
