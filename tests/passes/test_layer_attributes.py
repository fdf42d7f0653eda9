"""A layer that lacks an attribute or a method that serving uses is skipped by that name.

The engine tests show that the installed vLLM has them all: a layer that lacks one is not engaged.
"""

from __future__ import annotations

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
def test_a_layer_without_a_required_attribute_is_skipped_by_its_name(name: str) -> None:
    skip = admit_layer(compat_layer.layer_view(Without(layer(), name)))
    assert skip is not None
    assert (skip.code, skip.message.rpartition(" lacks ")[2]) == ("capability", name)


@pytest.mark.mutation
def test_mutation_a_layer_that_is_not_looked_at_is_not_taken_for_a_neutral_one(monkeypatch) -> None:
    monkeypatch.setattr(compat_layer, "ATTRIBUTES", ())
    with pytest.raises(AttributeError, match="use_pcp"):
        compat_layer.layer_view(Without(layer(), "use_pcp"))
