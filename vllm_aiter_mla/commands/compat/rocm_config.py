# SPDX-License-Identifier: Apache-2.0
"""vLLM's ROCm platform, its finished config and its MLA layers, in a process that starts no engine: ``plan``, tests.

The model has no weights. Its layers are built on torch's ``meta`` device, with this made up on every machine:

1. no tokenizer is loaded, because a config may come alone; a model that asks it for a token's number gets a stub;
2. vLLM looks at a model class in this process: the one it starts for that would not have this platform;
3. one process group, which reports the size of the tensor-parallel group and holds all experts;
4. the compilation mode is NONE while layers are built: passes would import compiled kernels;
5. attention without MLA, which a draft may have, is an empty module;
6. what would move or read a weight does nothing: ``Module.to``, the truth of a tensor, the device and its cache;
7. a tensor that vLLM puts on the card by name is put on ``meta`` too.
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
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.compat.layer import layer_view, padded_heads

AITER_MLA = "vllm.v1.attention.backends.mla.rocm_aiter_mla"


def import_vllm() -> None:
    """Import vLLM with the platform of its build: 0.31 looks for it at once, and ends if it finds a card too."""
    import vllm  # noqa: F401


def take_rocm_platform(device_count: int) -> None:
    """Make vLLM's own ROCm platform the current one; what it asks of the machine has to be made up before."""
    import vllm.platforms
    from vllm.platforms import rocm

    rocm._rocm_device_count_stateless = lambda devices=None: device_count  # type: ignore[assignment]
    platform: Any = rocm.RocmPlatform
    platform.is_cumem_allocator_available = lambda self: True
    vllm.platforms._current_platform = rocm.RocmPlatform()  # type: ignore[assignment]
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


def card_of_driver() -> str:
    """Return the architecture of this machine's card, read by amdsmi, which leaves the card alone."""
    from vllm.platforms import rocm

    return str(rocm._GCN_ARCH).partition(":")[0]


def import_what_plans_need() -> None:
    """Import vLLM's parser, the models and the quantisation of most plans, and ray if it is here."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    offline.serve_options([])
    for name in ("vllm.model_executor.models.deepseek_v2", "vllm_aiter_mla.passes.pipeline", AITER_MLA,
                 release.FUSED_MODULE, "ray"):  # fmt: skip
        with suppress(ImportError):
            import_module(name)
    for name in QUANTIZATION_METHODS:
        with suppress(Exception):
            get_quantization_config(name)


def inspect_in_process() -> None:
    """Let vLLM look at model classes in this process, and raise what went wrong: it would only log it."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(  # type: ignore
        model.load_model_cls()
    )
    registry._try_inspect_model_cls = lambda _, model: model.inspect_model_cls()  # type: ignore[assignment]


class LayerKind(NamedTuple):
    """What vLLM built of one MLA layer. What only weights or a card's build can tell is taken as it should be."""

    view: LayerView
    format: str  # of its absorb weight, by the name of ``kernels.absorb``
    method: str  # class that quantises ``kv_b_proj``
    weight: str  # dtype of that weight; empty if it is packed
    has_rope: bool  # the layer, or the module around it, has a rotary embedding
    draft: bool  # it belongs to the draft model
    out_heads: int = 0  # that AITER's decode kernel takes, where vLLM pads; else 0
    why_not_module: Skip | None = None  # why the module integration leaves it out, but for the trial of its rotation


def has_layerwise_connector(config: Any) -> bool:
    """Return whether a KV connector works layer by layer, for which vLLM gives up full graphs."""
    if config.kv_transfer_config is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector, extra = KVConnectorFactory.get_connector_class(config.kv_transfer_config), config.kv_transfer_config
    return bool(connector.requires_piecewise_for_cudagraph(extra.kv_connector_extra_config))


def finished_config(args: Any) -> Any:
    """Build vLLM's finished config from its ``AsyncEngineArgs``."""
    from vllm.usage.usage_lib import UsageContext

    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def mla_layers(config: Any) -> list[tuple[LayerKind, int]]:
    """Build the model of one rank without weights, its draft too; return its MLA layers, equal ones counted."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    from vllm_aiter_mla.serving import module

    with module.installed(), _without_weights(config):
        models = [initialize_model(config), *_drafts(config)]
        current_platform.update_block_size_for_backend(config)
    kinds: Counter[LayerKind] = Counter()
    for number, model in enumerate(models):
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        layers = (layer for layer in model.modules() if isinstance(layer, MLAAttention))
        kinds.update(_kind(layer, parents[layer], draft=number > 0) for layer in layers)
    return kinds.most_common()


def _drafts(config: Any) -> list[Any]:
    """Build the draft model. Its modules tell whether it has MLA: vLLM's ``use_mla`` does not know every draft."""
    from vllm.model_executor.model_loader.utils import initialize_model

    spec = config.speculative_config
    draft = spec.draft_model_config if spec is not None else None
    if draft is None or draft is config.model_config:
        return []
    if spec.method != "draft_model":
        return [initialize_model(config, model_config=draft)]
    own = copy(config)  # a whole model of its own, as vLLM's proposer builds it
    own.model_config, own.quant_config = draft, type(config).get_quantization_config(draft, config.load_config)
    return [initialize_model(own, prefix="draft_model")]


def _kind(layer: Any, parent: Any, draft: bool) -> LayerKind:
    from vllm_aiter_mla.serving import module

    view = layer_view(layer)
    if not view.missing_names:
        dtype = str(layer._vllm_config.model_config.dtype).removeprefix("torch.")
        view = replace(view, has_absorbed_weight=True, has_rope_kernel=True, model_dtype=dtype)
    weight = getattr(layer.kv_b_proj, "weight", None)
    padded = padded_heads(layer)
    fp4, fp8 = layer.is_aiter_triton_fp4_bmm_enabled, layer.is_aiter_triton_fp8_bmm_enabled
    return LayerKind(
        view,
        "mxfp4" if fp4 else "fp8" if fp8 else "plain",
        type(layer.kv_b_proj.quant_method).__name__,
        "" if weight is None else str(weight.dtype).removeprefix("torch."),
        # The code of Transformers rotates q by itself.
        any(getattr(holder, "rotary_emb", None) is not None for holder in (layer, parent))
        or layer._vllm_config.model_config.using_transformers_backend(),
        draft,
        padded.heads if padded else 0,
        module.why_not_wrapped(layer) or module.why_rope_unknown(module.wrapper_of(layer)),
    )


@contextmanager
def _without_weights(config: Any) -> Iterator[None]:
    """Build models on the meta device for a block: numbers 1 and 3 to 7 of the list above."""
    import torch
    from vllm.config import CompilationMode, ParallelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.tokenizers import registry as tokenizers
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    platform = type(current_platform)
    with ExitStack() as stack:
        replaced: Callable[..., Any] = lambda *what, **how: stack.enter_context(mock.patch.object(*what, **how))  # noqa: E731
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        replaced(platform, "device_type", "meta")
        replaced(config.device_config, "device", torch.device("meta"))
        stack.enter_context(set_current_vllm_config(config))
        with mock.patch.object(config, "parallel_config", ParallelConfig()):
            groups.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            groups.initialize_model_parallel()
        groups.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
        init_workspace_manager(torch.device("meta"))
        replaced(config.compilation_config, "mode", CompilationMode.NONE)
        replaced(config.parallel_config, "enable_expert_parallel", False)
        replaced(Attention, "__init__", lambda layer, *_, **__: torch.nn.Module.__init__(layer))
        replaced(config.model_config, "skip_tokenizer_init", False)
        replaced(tokenizers, "cached_get_tokenizer", lambda *given, **named: mock.MagicMock())
        replaced(torch.nn.Module, "to", lambda module, *to, **where: module)
        replaced(torch.Tensor, "__bool__", lambda tensor: True)
        replaced(torch.accelerator, "empty_cache", lambda: None)
        replaced(platform, "current_device", lambda *_: 0, create=True)
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_instead_of_a_card())
        yield


def _instead_of_a_card() -> Any:
    """Return a mode in which ``device="cuda"`` of a call is ``meta``."""
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            if str(named.get("device")).startswith("cuda"):
                named = named | {"device": "meta"}
            return function(*args, **named)

    return OnMeta()
