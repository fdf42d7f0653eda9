# SPDX-License-Identifier: Apache-2.0
"""vLLM's ROCm platform, finished config and MLA layers, in a process without an engine: for ``plan`` and tests.

The model has no weights. Its layers are built on torch's ``meta`` device, and on every machine this is simulated:

1. No tokenizer is loaded, because a config may come without it. A model that needs a token's number gets a stub.
2. vLLM inspects a model class in this process. The process that it would start for that has another platform.
3. There is one process group, which reports the size of the tensor-parallel group and holds all experts.
4. The compilation mode is NONE while layers are built, because passes would import compiled kernels.
5. Attention without MLA, which a draft may have, is an empty module.
6. Calls that move or read a weight do nothing: ``Module.to``, the truth of a tensor, the device and its cache.
7. A tensor that vLLM puts on the card by name is on ``meta`` too.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

from vllm_aiter_mla.admission import LayerView, Skip
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.compat.layer import layer_view, padded_heads

AITER_MLA = "vllm.v1.attention.backends.mla.rocm_aiter_mla"


def import_vllm() -> None:
    """Import vLLM with the platform of its build. 0.31 detects it at import, and ends if it also finds a card."""
    import vllm  # noqa: F401


def use_rocm_platform(device_count: int) -> None:
    """Make vLLM's own ROCm platform the current one. Without a card ``simulated_card`` must have run before."""
    import vllm.platforms
    from vllm.platforms import rocm

    rocm._rocm_device_count_stateless = lambda devices=None: device_count  # type: ignore[assignment]
    platform: Any = rocm.RocmPlatform
    platform.is_cumem_allocator_available = lambda self: True
    vllm.platforms._current_platform = rocm.RocmPlatform()  # type: ignore[assignment]
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


def has_amd_card() -> bool:
    """Return whether vLLM would find an AMD card: it asks amdsmi, which a ROCm image has without a card too."""
    try:
        amdsmi = import_module("amdsmi")
        amdsmi.amdsmi_init()
        try:
            return bool(amdsmi.amdsmi_get_processor_handles())
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:  # there is no such package, or no driver
        return False


def driver_arch() -> str:
    """Return the architecture of this machine's card from amdsmi, which does not initialise the card."""
    from vllm.platforms import rocm

    return str(rocm._GCN_ARCH).partition(":")[0]


def preload_vllm() -> None:
    """Import vLLM's parser, the models and quantisation methods of most plans, and ray if it is installed."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    vllm_options.parse_serve_options([])
    for name in ("vllm.model_executor.models.deepseek_v2", "vllm_aiter_mla.passes.pipeline", AITER_MLA,
                 release.FUSED_MODULE, "ray"):  # fmt: skip
        with suppress(ImportError):
            import_module(name)
    for name in QUANTIZATION_METHODS:
        with suppress(Exception):
            get_quantization_config(name)


def inspect_models_in_process() -> None:
    """Let vLLM inspect model classes in this process, and raise errors that vLLM would only log."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(  # type: ignore
        model.load_model_cls()
    )
    registry._try_inspect_model_cls = lambda _, model: model.inspect_model_cls()  # type: ignore[assignment]


class LayerKind(NamedTuple):
    """An MLA layer as vLLM built it. Facts that depend on weights or on a card's build are assumed to be right."""

    view: LayerView
    weight_format: str  # of its absorb weight, named as in ``kernels.absorb``
    kv_b_proj_method: str  # the class that quantises ``kv_b_proj``
    kv_b_proj_dtype: str  # of the weight of ``kv_b_proj``; empty if that weight is packed
    has_rope: bool  # the layer, or the module around it, has a rotary embedding
    is_draft: bool  # it belongs to the draft model
    padded_heads: int = 0  # of AITER's decode kernel, if vLLM pads to it; else 0
    module_skip: Skip | None = None  # why the module integration skips it, without the trial of its rotation


def has_layerwise_connector(config: Any) -> bool:
    """Return whether a KV connector works layer by layer, with which vLLM captures no full graphs."""
    if config.kv_transfer_config is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer_config = config.kv_transfer_config
    connector_class = KVConnectorFactory.get_connector_class(transfer_config)
    return bool(connector_class.requires_piecewise_for_cudagraph(transfer_config.kv_connector_extra_config))


def create_engine_config(args: Any) -> Any:
    """Return vLLM's finished config for its ``AsyncEngineArgs``, as a server builds it."""
    from vllm.usage.usage_lib import UsageContext

    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def build_mla_layers(config: Any) -> list[tuple[LayerKind, int]]:
    """Build the model of one rank and its draft, without weights. Return the kinds of MLA layers with their counts."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    from vllm_aiter_mla.serving import module

    with module.installed(), _meta_device(config):
        models = [initialize_model(config), *_build_drafts(config)]
        current_platform.update_block_size_for_backend(config)
    layer_kinds: Counter[LayerKind] = Counter()
    for index, model in enumerate(models):
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        layers = (layer for layer in model.modules() if isinstance(layer, MLAAttention))
        layer_kinds.update(_layer_kind(layer, parents[layer], is_draft=index > 0) for layer in layers)
    return layer_kinds.most_common()


def _build_drafts(config: Any) -> list[Any]:
    """Build the draft model, if there is one. Its modules show whether it has MLA: ``use_mla`` may not."""
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative_config = config.speculative_config
    model_config = speculative_config.draft_model_config if speculative_config is not None else None
    if model_config is None or model_config is config.model_config:
        return []
    if speculative_config.method != "draft_model":
        return [initialize_model(config, model_config=model_config)]
    draft_config = copy(config)  # a separate model, as vLLM's proposer builds it
    draft_config.model_config = model_config
    draft_config.quant_config = type(config).get_quantization_config(model_config, config.load_config)
    return [initialize_model(draft_config, prefix="draft_model")]


def _layer_kind(layer: Any, parent: Any, is_draft: bool) -> LayerKind:
    """Return the facts about a layer. ``parent`` is the module around it."""
    from vllm_aiter_mla.serving import module

    view = layer_view(layer)
    if not view.missing_names:
        dtype = str(layer._vllm_config.model_config.dtype).removeprefix("torch.")
        view = replace(view, has_absorbed_weight=True, has_rope_kernel=True, model_dtype=dtype)
    kv_b_proj_weight = getattr(layer.kv_b_proj, "weight", None)
    padded = padded_heads(layer)
    has_fp4_bmm, has_fp8_bmm = layer.is_aiter_triton_fp4_bmm_enabled, layer.is_aiter_triton_fp8_bmm_enabled
    return LayerKind(
        view,
        "mxfp4" if has_fp4_bmm else "fp8" if has_fp8_bmm else "plain",
        type(layer.kv_b_proj.quant_method).__name__,
        "" if kv_b_proj_weight is None else str(kv_b_proj_weight.dtype).removeprefix("torch."),
        # The code of Transformers rotates q inside its own attention.
        any(getattr(holder, "rotary_emb", None) is not None for holder in (layer, parent))
        or layer._vllm_config.model_config.using_transformers_backend(),
        is_draft,
        padded.heads if padded else 0,
        module.why_not_wrapped(layer) or module.why_rope_unknown(module.wrapper_of(layer)),
    )


@contextmanager
def _meta_device(config: Any) -> Iterator[None]:
    """Build models on the meta device inside a block, with numbers 1 and 3 to 7 of the list above."""
    import torch
    from vllm.config import CompilationMode, ParallelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.tokenizers import registry as tokenizers
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    platform = type(current_platform)
    with ExitStack() as stack:
        patch: Callable[..., Any] = lambda *args, **kwargs: stack.enter_context(mock.patch.object(*args, **kwargs))  # noqa: E731
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        patch(platform, "device_type", "meta")
        patch(config.device_config, "device", torch.device("meta"))
        stack.enter_context(set_current_vllm_config(config))
        with mock.patch.object(config, "parallel_config", ParallelConfig()):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel()
        parallel_state.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
        init_workspace_manager(torch.device("meta"))
        patch(config.compilation_config, "mode", CompilationMode.NONE)
        patch(config.parallel_config, "enable_expert_parallel", False)
        patch(Attention, "__init__", lambda layer, *_, **__: torch.nn.Module.__init__(layer))
        patch(config.model_config, "skip_tokenizer_init", False)
        patch(tokenizers, "cached_get_tokenizer", lambda *args, **kwargs: mock.MagicMock())
        patch(torch.nn.Module, "to", lambda module, *to, **where: module)
        patch(torch.Tensor, "__bool__", lambda tensor: True)
        patch(torch.accelerator, "empty_cache", lambda: None)
        patch(platform, "current_device", lambda *_: 0, create=True)
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_cuda_as_meta())
        yield


def _cuda_as_meta() -> Any:
    """Return a torch function mode that replaces ``device="cuda"`` by ``meta``."""
    from torch.overrides import TorchFunctionMode

    class CudaAsMeta(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            if str(keywords.get("device")).startswith("cuda"):
                keywords = keywords | {"device": "meta"}
            return function(*args, **keywords)

    return CudaAsMeta()
