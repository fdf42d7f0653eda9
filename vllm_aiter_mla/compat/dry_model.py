"""vLLM's own model, built without weights, memory or a card, to ask what its MLA layers are.

What: the checkpoint's model class on torch's ``meta`` device. ``MLAAttention.__init__`` notes what it is given. The
quantisation config calls every layer unquantised, so that no kernel is looked for, and is then asked about
``kv_b_proj`` alone, as ``LinearBase`` asks it.
Why: which layers have MLA, how wide they are and what is quantised in them is in the code of each model class: names,
packed modules, the mapping of a checkpoint's names.
Link: ``MLAAttention``, ``LinearBase``, ``resolve_quant_method`` and ``initialize_model`` (0.30 to 0.33).
Probe: whatever raises here is handed on, or kept with its layer; ``plan`` says that it is not known.
Remove when: vLLM tells a model's layers from its config.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class MlaLayer:
    """One MLA layer as vLLM would build it.

    Attributes:
        name: of vLLM's attention layer.
        heads, nope, rope, latent, v: N over all ranks, P, R, L and V.
        is_sparse: whether an indexer picks the KV rows.
        has_rope: whether the attention, or the module around it, holds a rotary embedding.
        method: class name of the method that vLLM gives ``kv_b_proj``; empty where vLLM did not answer.
        weight: dtype of ``kv_b_proj.weight`` as created, without ``torch.``; empty where there is no such weight.
        unknown: what vLLM raised when it was asked, else empty.
    """

    name: str
    heads: int
    nope: int
    rope: int
    latent: int
    v: int
    is_sparse: bool
    has_rope: bool
    method: str
    weight: str
    unknown: str = ""


def mla_layers(vllm_config: Any, model_config: Any = None) -> tuple[MlaLayer, ...]:
    """The MLA layers of the config's model, or of ``model_config``'s, a draft's, in the order in which they are built.

    Raises:
        Exception: whatever vLLM raises where the model cannot be built here.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    asked = model_config or vllm_config.model_config
    noted: dict[Any, dict[str, Any]] = {}
    dtype = set_default_torch_dtype(asked.dtype)
    with set_current_vllm_config(vllm_config), _one_rank(), dtype, torch.device("meta"):
        with _noting(noted), _unquantised(vllm_config.quant_config):
            model = initialize_model(vllm_config, model_config=asked)
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        return tuple(_layer(given, (module, parents[module])) for module, given in noted.items())


def _layer(given: dict[str, Any], around: tuple[Any, Any]) -> MlaLayer:
    projection, method, unknown = given["kv_b_proj"], "", ""
    try:
        method = _method(projection)
    except Exception as error:
        unknown = f"{type(error).__name__}: {error}"
    weight = getattr(projection, "weight", None)
    return MlaLayer(
        name=given["prefix"],
        heads=given["num_heads"],
        nope=given["qk_nope_head_dim"],
        rope=given["qk_rope_head_dim"],
        latent=given["kv_lora_rank"],
        v=given["v_head_dim"],
        is_sparse=bool(given.get("use_sparse")),
        has_rope=any(getattr(module, "rotary_emb", None) is not None for module in around),
        method=method,
        weight="" if weight is None else str(weight.dtype).removeprefix("torch."),
        unknown=unknown,
    )


def _method(projection: Any) -> str:
    """Ask which method the layer gets, and let that make the layer's weights anew; the method's class name."""
    if projection.quant_config is None:
        return type(projection.quant_method).__name__
    method = _resolve(projection.quant_config, projection)
    for name, _ in list(projection.named_parameters(recurse=False)):
        delattr(projection, name)
    try:
        method.create_weights(
            projection,
            projection.input_size_per_partition,
            projection.output_partition_sizes,
            projection.input_size,
            projection.output_size,
            projection.params_dtype,
            weight_loader=projection.weight_loader,
        )
    except Exception:
        # This machine has no kernel for it. Weights come before kernels: where one is there, its dtype is vLLM's.
        if next(projection.parameters(), None) is None:
            raise
    return type(method).__name__


def _resolve(quant_config: Any, layer: Any) -> Any:
    from vllm.model_executor.layers.quantization import base_config

    ask = getattr(base_config, "resolve_quant_method", None)  # since 0.32; before, no more than the config's own answer
    if ask is None:
        return quant_config.get_quant_method(layer, layer.prefix)
    return ask(quant_config, layer, layer.prefix)


@contextmanager
def _noting(noted: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Let MLA layers note what they are given, by module; nothing is moved to a device."""
    from vllm.model_executor.layers.attention import MLAAttention

    def note(module: Any, **given: Any) -> None:
        torch.nn.Module.__init__(module)
        # What model classes read of it while they are built.
        module.layer_name, module.kv_cache_dtype, module.use_pcp, module.impl = given["prefix"], "auto", False, None
        noted[module] = given

    with (
        mock.patch.object(MLAAttention, "__init__", note),
        mock.patch.object(torch.nn.Module, "to", lambda module, *to, **where: module),
    ):
        yield


@contextmanager
def _unquantised(quant_config: Any) -> Iterator[None]:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    if quant_config is None:
        yield
        return
    plain: dict[str, Any] = {
        "get_quant_method": lambda layer, prefix: UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None,
        "online_quantization_config": None,
    }
    with mock.patch.multiple(quant_config, create=True, **plain):
        yield


@contextmanager
def _one_rank() -> Iterator[None]:
    """vLLM's groups of one process, over a file; those that are there already are used and left."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{Path(folder) / 'rendezvous'}", 0, "gloo")
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
