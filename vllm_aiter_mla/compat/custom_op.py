# SPDX-License-Identifier: Apache-2.0
"""How vLLM's custom ops register, and the two decorators of its attention ops."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def define(
    library: torch.library.Library,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register ``function`` and its fake under its own name in ``library`` for the current platform.

    The schema is inferred from the annotations. The type of a layer name depends on the torch release (a string, or an
    opaque type from 2.11 on), so that annotation is filled in here.
    """
    from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

    # Of the function inside: the schema is inferred from that, and Python 3.14's functools.wraps shares no annotations.
    inspect.unwrap(function).__annotations__["layer_name"] = LayerNameType
    direct_register_custom_op(
        function.__name__, function, mutates_args=list(mutates), fake_impl=fake, target_lib=library, tags=tags
    )


@functools.cache
def attention_hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's two decorators of its attention ops: of breakable graphs and of KV connectors."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

    return eager_break_during_capture, maybe_transfer_kv_layer


def with_attention_hooks(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``function`` in the two decorators of vLLM's own attention ops, at the first call.

    Their modules take over half a second to import, which a run with the flag off must not pay for. The layer name
    stays positional: the KV connector's hook finds it by its index.
    """

    decorated: Callable[..., None] | None = None

    @functools.wraps(function)
    def attention(*args: Any) -> None:
        nonlocal decorated
        if decorated is None:
            eager_break, transfer_kv = attention_hooks()
            # Outermost: a KV connector's hooks must run in the eager segment of a breakable graph.
            decorated = eager_break(transfer_kv(function))
        decorated(*args)

    return attention
