"""Claims about the definition of an op: its schema has the type of the layer name, on every Python."""

# No "from __future__ import annotations": the schema is inferred from the annotations themselves.

import functools
from typing import Any

import pytest
import torch

from vllm_aiter_mla.compat import custom_op

WRAPS = functools.wraps
NOT_SHARED = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__annotations__"]
KNOWN = torch.ops.vllm.unified_mla_attention_with_output.default


@pytest.mark.parametrize("wraps", [WRAPS, functools.partial(WRAPS, assigned=NOT_SHARED)], ids=["this", "3.14"])
def test_a_wrapped_op_has_vllms_type_of_the_layer_name(monkeypatch: pytest.MonkeyPatch, wraps: Any) -> None:
    """From Python 3.14 on, a wrapper does not share the annotations of the function inside."""

    def wrapped(x: torch.Tensor, layer_name: Any) -> None:
        raise AssertionError("never called")

    monkeypatch.setattr(functools, "wraps", wraps)
    library = torch.library.Library("aiter_mla_test_define", "FRAGMENT")
    custom_op.define(library, custom_op.with_attention_hooks(wrapped), lambda x, layer_name: None)
    types = {
        str(argument.type)
        for op in (torch.ops.aiter_mla_test_define.wrapped.default, KNOWN)
        for argument in op._schema.arguments
        if argument.name == "layer_name"
    }
    assert len(types) == 1
