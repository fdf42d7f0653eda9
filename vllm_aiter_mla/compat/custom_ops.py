"""How an op is registered so that vLLM treats it as one of its own attention ops."""

from __future__ import annotations

import functools
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
    """Register ``function`` under its own name in ``library`` for the current platform; ``fake`` is its fake form.

    The schema is inferred from the annotations; how a layer is named in it depends on the torch release (a string, or
    an opaque type from 2.11 on), so that annotation is filled in here.
    """
    from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

    function.__annotations__["layer_name"] = LayerNameType
    direct_register_custom_op(
        function.__name__, function, mutates_args=list(mutates), fake_impl=fake, target_lib=library, tags=tags
    )


def with_attention_hooks(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` under the two decorators that vLLM's own attention ops carry, applied at the first call.

    Their modules take over half a second to import, which a run with the flag off must not pay for. The layer name
    stays positional: the KV connector's hook finds it by its index.
    """

    @functools.cache
    def decorated() -> Callable[..., None]:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

        # Outermost: a KV connector's hooks must run in the eager segment of a breakable graph.
        return eager_break_during_capture(maybe_transfer_kv_layer(function))

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> None:
        decorated()(*args, **kwargs)

    return attention
